"""The field's methods on one bench: every published loss with AdamW, some under the mean teacher, equally tuned.

All are given the same: the documents, documents like them to be kept, general text, and never-seen ones to end by. A
run ends where the documents are neither recited nor known nor detectable any more (goals: the retrained model's), or
after ``max_steps`` with the model that came nearest. Every method may try six settings with seed 0, three weights α
times two values of a knob of its own, or those of them that the settings name; the best of them by ``left``, what it
leaves undone, is run with all seeds.

A method is one entry of ``rows``; its loss lies in ``method/field``.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unteach.config import ForgetConfig, Method, Precision
from unteach.corpora import micro
from unteach.errors import InputError
from unteach.evaluation.formulas import Metric
from unteach.evaluation.metrics import RAW_AUC
from unteach.evaluation.verdict import TITLES, judge
from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder
from unteach.experiments.paper import Content, Experiment
from unteach.experiments.setups import Groups, Setup
from unteach.method.losses import LOSSES
from unteach.models import load_tokenizer
from unteach.report.style import Figure

__all__ = ["EXPERIMENTS", "FieldSettings", "Row", "configured", "left", "rows"]

PREFIX, TRY = "field-", "-try-"
MODELS = ("target", "retrained")
ADAMW = Method(optimizer="adamw", lr=3e-4, warmup=5, token_share=1.0, loops_every=0)
MEAN_TEACHER = Method(optimizer="mean_teacher", token_share=1.0, loops_every=0)
"""Its step sizes are measured."""
WEIGHTS = {"adamw": (0.2, 2.0, 20.0), "mean_teacher": (0.05, 0.5, 5.0)}
"""α of the tries."""
SLOWER: Sequence[dict[str, Any]] = ({"lr": 3e-4}, {"lr": 1e-4})
"""The knob of a method that has none of its own."""
COLUMNS = (
    "verbmem_f", "knowmem_f", "privleak", "nll_retain", "knowmem_r", "nll_general", "degenerate", "knowmem_pretraining",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FieldSettings:
    """What this experiment adds to the benchmark's settings."""

    max_steps: int = 120
    """Longest run."""
    tries: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Which of its six tries a method is given, by its name, counted from one; a method that is not named has all."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method of the field: where its tries start, and its knob."""

    method: Method
    knob: Sequence[Mapping[str, Any]] = SLOWER
    """Two settings of it, fields of ``Method``."""
    base: bool = False
    """Whether it is also given the model before it learned the documents."""

    def tries(self) -> list[Method]:
        """The methods of its tries: three weights times two settings of the knob."""
        weights = WEIGHTS[self.method.optimizer]
        return [
            dataclasses.replace(self.method, **knob, alpha=alpha)
            for knob, alpha in itertools.product(self.knob, weights)
        ]


def rows(setup: Setup) -> dict[str, Row]:
    """Every method by its name."""

    def options(*given: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"loss_options": each} for each in given]

    def row(start: Method, loss: str, *given: dict[str, Any], knob: Sequence[dict[str, Any]] = SLOWER) -> Row:
        """With the knob that ``given`` options of the loss are, if there are any."""
        first = dict(given[0]) if given else {}
        return Row(
            method=dataclasses.replace(start, loss=loss, loss_options=first), knob=options(*given) if given else knob
        )

    def adamw(loss: str, *given: dict[str, Any], **changes: Any) -> Row:
        return row(dataclasses.replace(ADAMW, **changes), loss, *given)

    def mean_teacher(loss: str, *given: dict[str, Any]) -> Row:
        return row(MEAN_TEACHER, loss, *given, knob=[{"anchor": 0.0}, {"anchor": 1.0}])

    fixed = load_tokenizer(setup.config.model)("#", add_special_tokens=False)["input_ids"][-1]
    betas = {"simnpo": (4.5, 0.5), "wga": (1.0, 0.25), "undial": (10.0, 30.0), "npo": (0.1, 1.0)}
    own: dict[str, list[dict[str, Any]]] = {loss: [{"beta": beta} for beta in values] for loss, values in betas.items()}
    own["npo"] = [option | {"ratio": "mean"} for option in own["npo"]]
    towards = dataclasses.replace(ADAMW, loss="jensun", loss_options={"token": fixed})
    found = {
        "gradient-difference": adamw("ll", divergence="nll"),
        "gradient-difference-gru": adamw("ll", divergence="nll", project_conflicts=True),
        "npo": adamw("npo", *own["npo"]),
        "simnpo": adamw("simnpo", *own["simnpo"]),
        "wga": adamw("wga", *own["wga"]),
        "satimp": adamw("satimp", {"beta1": 5.0, "beta2": 1.0}, {"beta1": 1.0, "beta2": 0.1}),
        "undial": adamw("undial", *own["undial"]),
        "ce-u": adamw("ce_u"),
        "nlul": adamw("nlul"),
        "clamped-entropy": adamw("clamped_entropy", {"threshold": 0.3}, {"threshold": 0.5}),
        "jensun": Row(method=towards, knob=[{"divergence": "js"}, {"divergence": "kl"}]),
        "rmu": adamw("rmu", {"layer": 1}, {"layer": 2}),
        "mt-nlul": mean_teacher("nlul"),
        "mt-npo": mean_teacher("npo", *own["npo"]),
        "mt-simnpo": mean_teacher("simnpo", *own["simnpo"]),
        "mt-undial": mean_teacher("undial", *own["undial"]),
    }
    if setup.alternates:
        found["dpo"] = adamw("dpo", {"beta": 0.1}, {"beta": 0.02})
    if setup.base:
        start = dataclasses.replace(ADAMW, loss="match", loss_options={"pull": "gate"}, warmup=0)
        found["match"] = Row(method=start, base=True)
    return found


def _settings(setup: Setup) -> FieldSettings:
    found: FieldSettings = setup.own_settings("field", FieldSettings)
    return found


def given_tries(setup: Setup, name: str, row: Row) -> dict[int, Method]:
    """The tries that a method is given, by their numbers."""
    found = dict(enumerate(row.tries(), start=1))
    given = _settings(setup).tries.get(name, list(found))
    if not given or any(number not in found for number in given):
        raise InputError([f"field.tries.{name} is {given}, must be some of {', '.join(map(str, found))}"])
    return {number: found[number] for number in given}


def configured(setup: Setup, row: Row, method: Method, seed: int) -> ForgetConfig:
    """The settings of a run."""
    given: dict[str, Any] = {part: getattr(setup, part) for part in ("keep", "holdout", "questions", "keep_questions")}
    given["base"] = setup.base if row.base else None
    given["alternates"] = setup.alternates if LOSSES[method.loss].reads == "pairs" else None
    most = _settings(setup).max_steps
    if setup.embedded:  # the same on a CPU and on a GPU
        given["precision"] = Precision(forget="fp32", divergence="fp32")
    return setup.configured(method, seed, max_steps=most, **given)


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """The two models to compare with, the tries of every method, and the method with every seed."""
    missing = [name for name in ("keep", "reference") if not (setup.keep if name == "keep" else setup.config.reference)]
    if missing:
        raise InputError([f"{name} is missing: the field's methods need it; give --{name}" for name in missing])
    groups: Groups = {"knowmem_pretraining": micro.questions("pretraining")} if setup.embedded else {}
    models = [setup.model_cell(name, groups, PREFIX) for name in MODELS]
    found = list(models)
    known = rows(setup)
    if unknown := _settings(setup).tries.keys() - known.keys():
        raise InputError([f"field.tries has {', '.join(sorted(unknown))}, must be some of {', '.join(known)}"])
    for name, row in known.items():
        methods = given_tries(setup, name, row)
        tries = [_try(setup, name, row, number, method, groups) for number, method in methods.items()]
        found += tries + [_chosen(setup, name, row, seed, groups, [*models, *tries], folder) for seed in seeds]
    return found


def _try(setup: Setup, name: str, row: Row, number: int, method: Method, groups: Groups) -> Cell:
    config = configured(setup, row, method, 0)
    fixed = setup.fixed(config) | {"asked": sorted(groups)}
    return Cell(name=f"{PREFIX}{name}{TRY}{number}", seed=0, settings=fixed, run=lambda: _run(setup, config, groups))


def _run(setup: Setup, config: ForgetConfig, groups: Groups) -> Content:
    model, content = setup.forget(config)
    content["metrics"] |= setup.asked(model, config.seed, groups)
    return content


def _chosen(
    setup: Setup, name: str, row: Row, seed: int, groups: Groups, needs: Sequence[Cell], folder: CellFolder
) -> Cell:
    """The method with the best of its tries; with seed 0 that is the try itself."""
    before, goal, *tries = needs
    fixed = {"tries": [cell.settings for cell in tries], "chosen": "least left undone with seed 0"}

    def run() -> Content:
        target, retrained = (folder.get(cell)["metrics"] for cell in (before, goal))
        undone = [sum(left(folder.get(cell)["metrics"], target, retrained)) for cell in tries]
        best = undone.index(min(undone))
        found = folder.get(tries[best]) if seed == 0 else {}
        number, method = list(given_tries(setup, name, row).items())[best]
        kept = {"method", "phases", "stop", "steps", "forget_seconds", "metrics", "notes", "examples", "curve"}
        content = {key: value for key, value in found.items() if key in kept | {"stop_scores", "stop_reference"}}
        content = content or _run(setup, configured(setup, row, method, seed), groups)
        return content | {"tried": [round(share, 4) for share in undone], "try": number}

    return Cell(name=f"{PREFIX}{name}", seed=seed, settings=fixed, run=run, needs=needs)


def left(metrics: Content, before: Content, goal: Content) -> tuple[float, float, float, float]:
    """What a run leaves undone of the four questions, each between 0 (as the retrained model) and 1 (as before, or all
    lost): recital, knowledge, membership (on either side of the goal), and of what is kept the part that suffered most.

    Of answers about kept documents the share lost, of their likelihood the share of the way to that of never-seen text,
    of general text the share of half a nat, and the share of output that loops.
    """

    def at(scores: Content, name: str) -> float | None:
        return (scores.get(name) or {}).get("value")

    def way(name: str, start: float | None, end: float | None) -> float:
        value = at(metrics, name)
        if value is None or start is None or end is None or start == end:
            return 0.0
        return min(1.0, max(0.0, (value - start) / (end - start)))

    seen, unseen, now = at(before, RAW_AUC), at(goal, RAW_AUC), at(metrics, RAW_AUC)
    detectable = 0.0
    if seen is not None and unseen is not None and now is not None and seen != unseen:
        detectable = min(1.0, abs(now - unseen) / abs(seen - unseen))
    general = at(before, "nll_general")
    lost = (
        way("knowmem_r", at(before, "knowmem_r"), 0.0),
        way("nll_retain", at(before, "nll_retain"), at(before, "nll_holdout")),
        way("nll_general", general, None if general is None else general + 0.5),
        way("degenerate", at(before, "degenerate"), 100.0),
    )
    recited, known = (way(name, at(goal, name), at(before, name)) for name in ("verbmem_f", "knowmem_f"))
    return recited, known, detectable, max(lost)


def table(contents: Sequence[Content]) -> str:
    """Methods in the order of what they get done: the four answers, mean (std) over seeds, and the best try."""
    groups = paper.by_name(c for c in paper.renamed(contents, PREFIX) if TRY not in c["name"])
    models = {name: groups[name][0]["metrics"] for name in MODELS if name in groups}
    answers = {name: _answers(group, models) for name, group in groups.items()}
    undone = {name: _left(group, models) for name, group in groups.items()}
    order = sorted(groups, key=lambda name: (name not in MODELS, -answers[name].count("✓"), undone[name] or 0.0, name))
    shown = {
        "recited, known, detectable, rest": lambda group: answers[group[0]["name"]],
        "left": lambda group: "–" if (found := undone[group[0]["name"]]) is None else f"{found:.2f}",
    }
    settings = {"α": lambda group: _alpha(group), "try": lambda group: str(group[0].get("try", "–"))}
    ordered = [content for name in order for content in groups[name]]
    return paper.result_table(ordered, COLUMNS, shown | settings | paper.RUN_COLUMNS)


def _alpha(group: Sequence[Content]) -> str:
    alpha = group[0].get("method", {}).get("alpha")
    return "–" if alpha is None else f"{alpha:g}"


def _means(group: Sequence[Content]) -> dict[str, Metric]:
    """The metrics of a row, their values and bounds as means over its seeds."""
    found = {}
    for name in group[0]["metrics"]:
        each = [content["metrics"][name] for content in group if content["metrics"].get(name)]
        parts = [[value[part] for value in each if value[part] is not None] for part in ("value", "low", "high")]
        value, low, high = (statistics.fmean(part) if part else None for part in parts)
        if value is not None:
            found[name] = Metric(value, low, high, 0, None, "")
    return found


def _answers(group: Sequence[Content], models: Mapping[str, Content]) -> str:
    """The four answers as marks, each as it should be (✓), not (✗), or open (?)."""
    if len(models) < len(MODELS) or group[0]["name"] in MODELS:
        return "–"
    before, goal = (_means([{"metrics": models[name]}]) for name in MODELS)
    return " ".join(finding.mark for finding in judge(_means(group), before, goal)[: len(TITLES)])


def _left(group: Sequence[Content], models: Mapping[str, Content]) -> float | None:
    if len(models) < len(MODELS) or group[0]["name"] in MODELS:
        return None
    return statistics.fmean(sum(left(content["metrics"], *models.values())) for content in group)


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """What is kept against what is still known and still detectable, without the tries."""
    shown = [content for content in paper.renamed(contents, PREFIX) if TRY not in content["name"]]
    return paper.panels("field", benchmark, shown, ("knowmem_f", "privleak"))


EXPERIMENTS = {
    "field": Experiment(
        title="the field's methods, equally tuned, by what each gets done",
        see="A method gets done what it should where all four marks are ✓: no longer recited, known or detectable, and "
        "the rest kept. left adds up what is undone of the four, each from 0 (as the retrained model) to 1 (as before, "
        "or all of the rest lost). Each method had as many tries with seed 0 (on the embedded benchmark three weights "
        "α times two values of one knob); the one with the least left was run with all seeds.",
        cells=cells,
        shows=lambda name: name.startswith(PREFIX),
        table=table,
        figures=figures,
    )
}
