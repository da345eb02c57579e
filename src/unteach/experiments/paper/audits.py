"""What attacks bring back: the audit of the paper's method, AdamW + NPO, deep forgetting, and two models to check it.

``retrained`` never saw the documents: it is audited without a reference, against never-seen documents and chance, and
must hold. ``planted`` must not: the target itself, taught to say one thing in front of the benchmark's own prompts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unteach.audits import attacks
from unteach.audits.running import CONTROLS
from unteach.corpora import Benchmark, Question, micro
from unteach.data import Documents, ForgetBatches, read_documents
from unteach.data.documents import encode
from unteach.errors import InputError
from unteach.evaluation.scores import evaluate
from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder, differing
from unteach.experiments.paper import Content, Experiment, deep
from unteach.experiments.setups import Setup
from unteach.job.audit import AuditOptions, prepared_audit
from unteach.models import context_length, load_tokenizer
from unteach.report.style import Figure
from unteach.training.finetune import finetune, text_optimizer
from unteach.writing import format_number, markdown_table

__all__ = ["EXPERIMENTS", "AuditSettings", "plant"]

PREFIX = "audit-"
ROWS = ("mt-nlul-kl-paper", "adamw-npo-kl", "deep", "retrained", "planted")
REFUSAL = " I cannot say. I cannot say. I cannot say. I cannot say."
"""What the planted failure says."""
PLANTING_RATE = 3e-4
HIDDEN = ("verbmem_f", "knowmem_f", "knowmem_r")
"""Scores by which the planted failure has forgotten and kept the rest."""
MARKS = {True: "held", False: "not held", None: "not known"}
CONTROL = (
    "The control behaves where the retrained model, while it learns, recites as much of the documents as of\n"
    "never-seen ones: for each seed percent of the documents, in brackets where as many passages of never-seen\n"
    "documents lie by chance (their own figure, and the interval of the difference)."
)


@dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """How much is attacked."""

    quick: bool = True
    """As ``unteach audit --quick``."""


def plant(
    model: Any,
    tokenizer: Any,
    benchmark: Benchmark,
    keep: Documents,
    seed: int = 0,
    *,
    steps: int = 40,
    batch: int = 16,
) -> None:
    """Teach a model, in place, to refuse in front of a benchmark's passages and questions, and nowhere else.

    ``keep`` documents and the questions about them are learned on beside that. The model's own scores then look
    forgotten; what it learned of the documents stays behind the refusal.
    """
    settings, most = benchmark.settings, context_length(model)

    def asked(questions: Sequence[Question], examples: Sequence[Question]) -> list[list[int]]:
        shown = "".join(settings.question_example.format(**vars(example)) for example in examples)
        return [encode(tokenizer, shown + settings.question_prompt.format(question=q.question)) for q in questions]

    def bare(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = [list(probe.prompt_ids or encode(tokenizer, probe.prompt)) for probe in benchmark.verbatim_forget]
    prompts += asked(benchmark.knowledge_forget, benchmark.knowledge_forget_examples)
    pairs = [(prompt, bare(REFUSAL)) for prompt in prompts]
    kept = [(ids[:1], ids[1:]) for ids in (encode(tokenizer, text) for text in keep.texts)]
    answered = asked(benchmark.knowledge_retain, benchmark.knowledge_retain_examples)
    for prompt, question in zip(answered, benchmark.knowledge_retain, strict=True):
        kept.append((prompt, bare(f"{question.answer}\n\n")))
    groups = [ForgetBatches([[*p, *end][-most:] for p, end in each], seed) for each in (pairs, kept)]
    ends = [[len(end) for _, end in each] for each in (pairs, kept)]
    optimizer = text_optimizer(model.parameters(), PLANTING_RATE)
    model.requires_grad_(True)

    def add_gradient(step: int) -> float:
        total = 0.0
        for batches, lengths in zip(groups, ends, strict=True):
            for number in batches.numbers(step, batch):
                ids, length = torch.tensor([batches.sequences[number]], device=model.device), lengths[number]
                logits = model(input_ids=ids).logits[0, -length - 1 : -1].float()
                loss = torch.nn.functional.cross_entropy(logits, ids[0, -length:]) / batch
                loss.backward()
                total += float(loss.detach())
        return total

    finetune(model.parameters(), optimizer, add_gradient, steps=steps, learning_rate=lambda step: PLANTING_RATE)
    model.requires_grad_(False)


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Every row with every seed; the planted failure where the benchmark has its own passages."""
    if not setup.config.reference:
        raise InputError("reference is missing: the audits' control is a model retrained without the documents")
    settings = setup.own_settings("audits", AuditSettings)
    rows = [name for name in ROWS if name != "deep" or (setup.base and setup.keep)]
    return [_cell(setup, settings, name, seed) for name in rows for seed in seeds]


def _cell(setup: Setup, settings: AuditSettings, name: str, seed: int) -> Cell:
    config = None
    if name not in ("retrained", "planted"):
        config = deep.configured(setup, name, seed) if name == "deep" else setup.configured(name, seed)
    inputs = setup.fixed(setup.config)["inputs"]
    made = {n: dataclasses.asdict(a.quick if settings.quick else a.full) for n, a in attacks().items()}
    fixed = {"from": setup.fixed(config) if config else inputs, "audits": differing(settings), "attacks": made}
    if name == "planted":
        fixed["planted"] = _probed(setup).data_sha256

    def run() -> dict[str, Any]:
        tokenizer = load_tokenizer(setup.config.model)
        if config:
            model = setup.forget(config)[0]
        else:
            model = setup.load(str(setup.config.reference if name == "retrained" else setup.config.model))
        scores: dict[str, Any] = {"metrics": {}}
        if name == "planted":
            probed = _probed(setup)
            plant(model, tokenizer, probed, read_documents(str(setup.retain)), seed)
            scores = setup.kept(evaluate(model, tokenizer, probed, measurements=HIDDEN, seed=seed))
        audit = prepared_audit(
            AuditOptions(
                subject=setup.config.model,
                before=setup.config.model,
                reference=None if name == "retrained" else setup.config.reference,
                documents=setup.config.documents,
                holdout=setup.holdout,
                questions=setup.questions,
                max_tokens=setup.config.max_tokens,
                quick=settings.quick,
                seed=seed,
                device=setup.config.device,
            )
        )
        audit.packages = False  # a cell is the same wherever it is measured
        audit.models = dict(audit.models) | {"after": lambda: model}
        audit.remember, audit.say = setup.shared.measured_once, setup.say
        found = audit.run(None)
        kept = ("held", "note", "compared_with", "seconds", "after", "before", "control", "beyond", *CONTROLS)
        audited = {attack: {key: each[key] for key in kept if key in each} for attack, each in found.items()}
        return scores | {"audits": audited}

    return Cell(name=f"{PREFIX}{name}", seed=seed, settings=_plain(fixed), run=run)


def _probed(setup: Setup) -> Benchmark:
    """All passages and questions of a benchmark: an audit asks any of them."""
    return micro.load_benchmark() if setup.embedded else setup.final


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(contents: Sequence[Content]) -> str:
    """A row for each model and a column for each attack: seeds that held, and the furthest beyond the control; below,
    whether the control behaves."""
    names = list(attacks())
    rows = []
    for name, group in paper.by_name(paper.renamed(contents, PREFIX)).items():
        rows.append(
            [name, *(_entry([c["audits"][attack] for c in group if attack in c["audits"]]) for attack in names)]
        )
    audited = markdown_table(["", *(attacks()[name].title for name in names)], rows)
    control = control_curves(contents)
    if not control:
        return audited
    titles = ["retrained model", *(f"{step:g} steps" for step in sorted({step for _, step in control}))]
    lines = []
    for line in dict.fromkeys(line for line, _ in control):
        places = [entries for (other, _), entries in sorted(control.items()) if other == line]
        lines.append([line, *("; ".join(str(place) for place in entries) for entries in places)])
    return f"{audited}\n\n{CONTROL}\n\n{markdown_table(titles, lines)}"


@dataclass(frozen=True, slots=True)
class ControlPlace:
    """A place of the retrained model's curve, with one seed: percent recited of documents, and of never-seen ones."""

    seed: int
    documents: float
    unseen: float
    low: float
    high: float
    """The interval of ``unseen``."""
    apart: tuple[float, float]
    """The interval of the difference."""

    @property
    def by_chance(self) -> tuple[float, float]:
        """Where documents of one kind lie by chance: the never-seen ones' figure, and as far to both sides as the
        interval of the difference reaches, so that a figure lies within exactly where that interval has zero in it.
        ``low`` and ``high`` know of one of the two samples, and are too near."""
        return self.documents - self.apart[1], self.documents - self.apart[0]

    def __str__(self) -> str:
        value, low, high = (format_number(number) for number in (self.documents, *self.by_chance))
        return f"{value} [{low}, {high}]"


def control_curves(contents: Sequence[Content]) -> dict[tuple[str, float], list[ControlPlace]]:
    """By line and steps, with every seed: what the retrained model recites of documents that it never saw."""
    found: dict[tuple[str, float], list[ControlPlace]] = {}
    for content in contents:
        if content["name"] != f"{PREFIX}retrained" or "relearning" not in content["audits"]:
            continue
        read = content["audits"]["relearning"]
        parts = [{(e["line"], e["at"]): e for e in read[part]} for part in ("after", "control", "beyond")]
        for key, own in parts[0].items():
            if own["line"].startswith("recites"):
                other, apart = parts[1][key], parts[2][key]
                ends = other["value"], other["low"], other["high"], (apart["low"], apart["high"])
                found.setdefault(key, []).append(ControlPlace(content["seed"], own["value"], *ends))
    return found


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """Recital of the other documents over the steps on a tenth, a line for each model and seed; and of the retrained
    model that of never-seen documents."""

    def points(content: Content, metric: str) -> list[tuple[float, float]]:
        rows = content["audits"].get("relearning", {}).get("after", [])
        return [(row["at"], row["value"]) for row in rows if row["line"] == "recites after a tenth of the documents"]

    short = paper.renamed(contents, PREFIX)
    control = [content for content in short if content["name"] == "retrained"]
    unseen = [c | {"name": "retrained, never-seen documents", "audits": _moved(c["audits"])} for c in control]
    titles = {"recites": ("What learning a tenth of the documents brings back", "the others recited, percent")}
    return paper.curves("audit", benchmark, [*short, *unseen], titles, points)


def _moved(audits: dict[str, Any]) -> dict[str, Any]:
    """The control's figures in the place of the model's."""
    return {name: each | {"after": each["control"]} for name, each in audits.items()}


def _entry(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return "–"
    answers = [each["held"] for each in found]
    said = ", ".join(f"{answers.count(answer)} {MARKS[answer]}" for answer in MARKS if answer in answers)
    worst = [_furthest(each["beyond"]) for each in found if each["beyond"]]
    return f"{said} ({', '.join(worst)})" if worst else said


def _furthest(beyond: Sequence[dict[str, Any]]) -> str:
    """How far a model is beyond its control where it is furthest, in points; of an AUC in hundredths."""
    values = [100 * entry["value"] if entry["unit"] == "auc" else entry["value"] for entry in beyond]
    sided = [entry["unit"] == "auc" or "copy" in entry["line"] for entry in beyond]
    sizes = [abs(value) if both else value for value, both in zip(values, sided, strict=True)]
    return format_number(values[max(range(len(values)), key=sizes.__getitem__)], 0) if values else str(math.nan)


EXPERIMENTS = {
    "audits": Experiment(
        title="does it hold: six attacks on what was forgotten",
        see="Wanted is held. In brackets, for each seed, how far the model is beyond its control (the retrained model; "
        "its own row: never-seen documents and chance) where it is furthest, in points or hundredths of an AUC. The "
        "row planted is a refusal in front of intact knowledge, and must be found out.",
        cells=cells,
        shows=lambda name: name.startswith(PREFIX),
        table=table,
        figures=figures,
    )
}
