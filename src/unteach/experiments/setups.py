"""What an experiment runs on: the models, texts, methods and measurements of a benchmark, behind one interface."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unteach.config import ForgetConfig, Method, Stop
from unteach.corpora import Benchmark, Probe, Question
from unteach.corpora.own import read_questions, take_examples
from unteach.data import read_documents
from unteach.evaluation.command import hash_weights
from unteach.evaluation.scores import Scores, evaluate, write_json
from unteach.experiments.cells import Cell, differing, thinned
from unteach.job import run_forget
from unteach.job.run_folder import STOP_SCORES, MeasuredOnce, SharedScores
from unteach.models import find_folder, load_model, load_tokenizer
from unteach.settings import from_values
from unteach.writing import file_sha256, json_sha256

__all__ = ["NEVER", "Groups", "Setup"]

NEVER = "verbmem_f <= -1"
"""A stop rule that is never met: the run takes all its steps."""
_INPUTS = (
    "model", "documents", "general", "keep", "holdout", "reference", "questions", "keep_questions", "base",
    "alternates",
)  # fmt: skip
KEPT = "kept.json"
"""In a folder of ``Setup.runs``: what a cell keeps of the run."""
_WITHOUT_EFFECT = ("out", "device", "track", "micro_batch", "checkpoint_every", "keep_checkpoints", "save_dtype")

Groups = Mapping[str, tuple[Question, ...]]


@dataclass
class Setup:
    """A benchmark ready to run on."""

    benchmark: str
    config: ForgetConfig
    """What all cells share; method, seed and the like are replaced."""
    methods: dict[str, Method]
    final: Benchmark
    """What every model is measured on."""
    folds: tuple[str, ...]
    """Disjoint parts of the documents, as sources."""
    retain: str | None
    """Documents to be kept, as a source."""
    instruct: tuple[str, ...] | None
    """Instructions with responses."""
    incompetent: str | None = None
    """For the loss ``it``: a model that never learned the documents, smaller or the base model."""
    base: str | None = None
    """For deep forgetting: the model before it learned the documents."""
    keep: str | None = None
    """Documents like the forgotten ones that are to be kept, as a source."""
    keep_half: str | None = None
    """Those about every second person, where that is known."""
    keep_others: str | None = None
    """Instead of them, documents of their kind about other people, whom the model knows from its pretraining."""
    holdout: str | None = None
    """Documents like the forgotten ones that no model has seen, as a source."""
    alternates: str | None = None
    """For the loss ``dpo``: what to say instead of each document, as a source."""
    questions: str | None = None
    keep_questions: str | None = None
    limit: int | None = None
    """Items of every kind that are measured, at most."""
    table_probes: tuple[Probe, ...] = ()
    """The benchmark's own verbatim probes, where ``final`` has others."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of single experiments, by their names."""
    say: Callable[[str], None] = print
    shared: SharedScores = field(default_factory=SharedScores)
    """What several cells need to measure once only."""
    runs: Path | None = None
    """Where the models of runs are kept, as they are saved, for other cells that need the same run."""

    @property
    def embedded(self) -> bool:
        """Whether this is the embedded benchmark, whose texts may be kept and whose probes have halves of their own."""
        return self.benchmark == "micro"

    def own_settings(self, experiment: str, kind: type, **start: Any) -> Any:
        """The settings of an experiment: those of the settings file on top of ``start``."""
        return from_values(kind, start | dict(self.settings.get(experiment) or {}), f"{experiment}.")

    def fixed(self, config: ForgetConfig) -> dict[str, Any]:
        """All that a run depends on besides its seed: settings that differ from ``KEY_DEFAULTS``, hashes of inputs."""
        elsewhere = (*_INPUTS, *_WITHOUT_EFFECT, "seed")
        settings = {name: value for name, value in differing(config).items() if name not in elsewhere}
        return settings | {"inputs": _inputs(config), "measured": self.final.data_sha256}

    def configured(self, method: str | Method, seed: int, **changes: Any) -> ForgetConfig:
        """The settings of a run with a method, or the name of one; ``changes`` are other fields of ``ForgetConfig``."""
        chosen = self.methods[method] if isinstance(method, str) else method
        if "it" in {chosen.loss, *(phase.loss for phase in changes.get("phases", ()))}:
            changes["base"] = self.incompetent
        return dataclasses.replace(self.config, method=chosen, seed=seed, **changes)

    def configured_for_steps(self, method: str | Method, seed: int, steps: int, **changes: Any) -> ForgetConfig:
        """The same for a run that takes so many steps, whatever it reaches."""
        never = dataclasses.replace(self.config.stop, metric=NEVER, utility_floor=1e9)
        return self.configured(method, seed, stop=never, max_steps=steps, evaluate_every=steps, **changes)

    def watching(self, *conditions: str) -> Stop:
        """A stop rule of these conditions that has answers looked at along the way, where there are questions."""
        always = {"knowmem_f <= 100": self.questions, "knowmem_r >= 0": self.keep_questions}
        has_its_own = self.embedded and not self.limit
        asked = [condition for condition, questions in always.items() if questions or has_its_own]
        return dataclasses.replace(self.config.stop, metric=" and ".join([*conditions, *asked]))

    def cell(self, name: str, config: ForgetConfig) -> Cell:
        """A cell that is a run of the forget job with these settings."""
        return Cell(name=name, seed=config.seed, settings=self.fixed(config), run=lambda: self.forget(config)[1])

    def model_cell(self, name: str, groups: Groups | None = None, prefix: str = "deep-") -> Cell:
        """A cell that is a given model, ``target`` or ``retrained``; asked ``groups`` of questions, ``prefix``ed."""
        part = "model" if name == "target" else "reference"
        inputs = {p: found for p, found in _inputs(self.config).items() if p in (part, "reference")}
        fixed: dict[str, Any] = {"inputs": inputs, "measured": self.final.data_sha256}

        def run() -> dict[str, Any]:
            model = self.load(getattr(self.config, part))
            content = self.kept(self.measure(model, 0))
            content["metrics"] |= self.asked(model, 0, groups or {})
            return content

        if groups is None:
            return Cell(name=name, seed=0, settings=fixed, run=run)
        return Cell(name=f"{prefix}{name}", seed=0, settings=fixed | {"asked": sorted(groups)}, run=run)

    def forget(self, config: ForgetConfig) -> tuple[Any, dict[str, Any]]:
        """Run the forget job, its folder kept where ``out`` names one; returns the model and what a cell keeps.

        A run that is in ``runs`` already is not made again.
        """
        if config.out:
            return self._forget(config)
        kept = self.runs and self.runs / json_sha256({"seed": config.seed, **self.fixed(config)})[:16]
        if kept and (kept / KEPT).exists():
            return self.load(str(kept / "model")), json.loads((kept / KEPT).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            model, content = self._forget(dataclasses.replace(config, out=str(out)))
            if kept:
                shutil.copytree(out / "model", kept / "model", dirs_exist_ok=True)
                write_json(kept / KEPT, content)  # last: a folder that has it is whole
        return model, content

    def _forget(self, config: ForgetConfig) -> tuple[Any, dict[str, Any]]:
        """Run the forget job in the folder that ``out`` names."""
        own = _has_own_passages(config) and config.reference is not None  # without it there is no PrivLeak
        needed = None if own else ["verbmem_f"]  # the rest of the job's own scores nobody would read
        config = dataclasses.replace(config, stop=dataclasses.replace(config.stop, plateau=0))  # α stays the method's
        result = run_forget(config, say=self.say, shared=self._measured_once(config), measurements=needed)
        out = Path(config.out)
        if own:
            file = out / "evaluations" / f"step_{result.steps:06d}.json"
            scores = Scores.from_dict(json.loads(file.read_text(encoding="utf-8")))
        else:
            scores = self.measure(result.model, config.seed)
        content = {
            "method": dataclasses.asdict(result.config.method),
            "phases": [dataclasses.asdict(phase) for phase in result.config.phases],
            "stop": result.stop,
            "steps": result.steps,
            "forget_seconds": round(result.seconds, 1),
            "seconds_of": {part: round(seconds, 1) for part, seconds in result.seconds_of.items()},
            **self.kept(scores),
            "curve": thinned(_read_lines(out / "metrics.jsonl")),
        }
        looks = {look["step"]: look for look in _read_lines(out / STOP_SCORES)}  # the run may have come to a step twice
        content["stop_scores"] = [_rounded(looks[step]) for step in sorted(looks)]
        if (file := out / "checkpoints" / "reference.json").exists():
            content["stop_reference"] = _rounded(json.loads(file.read_text(encoding="utf-8")))
        return result.model, content

    def _measured_once(self, config: ForgetConfig) -> MeasuredOnce:
        """What keeps the scores of runs that have the same models and rule, and measure the same passages."""
        seed = None if _has_own_passages(config) else config.seed
        same = f"{_inputs(config)} {config.probes} {seed} {config.stop}"
        return lambda name, compute: self.shared.measured_once(f"{name} {same}", compute)

    def load(self, model: str) -> Any:
        """A model by its name or folder."""
        return load_model(model, device=self.config.resolved_device())[0]

    def measure(self, model: Any, seed: int) -> Scores:
        """Everything that can be measured of a model."""
        tokenizer, reference = load_tokenizer(self.config.model), None
        if self.config.reference:  # its membership and TOFU scores are what others are compared with
            reference = self.shared.measured_once(
                "reference", lambda: self._of_reference(self.final, ["privleak", "tofu"])
            )
        scores = evaluate(model, tokenizer, self.final, reference_scores=reference, seed=seed)
        if self.table_probes:
            own = Benchmark(self.benchmark, verbatim_forget=self.table_probes)
            found = evaluate(model, tokenizer, own, measurements=["verbmem_f"], seed=seed)
            scores.metrics["verbmem_f_tables"] = found.metrics["verbmem_f"]
        return scores

    def asked(self, model: Any, seed: int, groups: Groups, like: str = "retain") -> dict[str, Any]:
        """Scores of groups of questions, by their names, put after the worked examples of those they are like."""
        tokenizer, examples = load_tokenizer(self.config.model), f"knowledge_{like}_examples"
        metric, found = f"knowmem_{like[0]}", {}
        for name, questions in groups.items():
            parts = {f"knowledge_{like}": questions[: self.limit], examples: getattr(self.final, examples)}
            benchmark = dataclasses.replace(Benchmark(name, settings=self.final.settings), **parts)
            scores = evaluate(model, tokenizer, benchmark, measurements=[metric], seed=seed)
            found[name] = self.kept(scores)["metrics"][metric]
        return found

    def _of_reference(self, benchmark: Benchmark, measurements: list[str]) -> Scores:
        model = self.load(str(self.config.reference))
        return evaluate(model, load_tokenizer(str(self.config.reference)), benchmark, measurements=measurements)

    def kept(self, scores: Scores) -> dict[str, Any]:
        """What a cell keeps of scores: values with intervals, notes, and a few outputs where the texts may be shown."""
        metrics = {
            name: _rounded({"value": m.value, "low": m.low, "high": m.high}) for name, m in scores.metrics.items()
        }
        content: dict[str, Any] = {"metrics": metrics, "notes": list(scores.notes)}
        if self.embedded:
            content["examples"] = {
                name: [
                    {key: item[key] for key in ("prompt", "question", "expected", "answer", "output") if key in item}
                    for item in scores.items_of(name)[:2]
                ]
                for name in ("verbmem_f", "knowmem_f")
                if name in scores.records
            }
        return content

    def forget_star(self, config: ForgetConfig) -> dict[str, Any]:
        """The paper's star row: until ``knowmem_f`` is as the retrained model's, on the questions of the rule."""
        asked = self.final
        if not self.embedded:
            questions, examples = take_examples(read_questions(Path(str(self.questions))), 5, config.seed)
            asked = Benchmark("stop", knowledge_forget=questions, knowledge_forget_examples=examples)
        value = self._of_reference(asked, ["knowmem_f"])["knowmem_f"]
        stop = dataclasses.replace(config.stop, metric=f"knowmem_f <= {value:.6g}")
        return self.forget(dataclasses.replace(config, stop=stop))[1]


def _has_own_passages(config: ForgetConfig) -> bool:
    """Whether the forget job itself measures what ``Setup.final`` does: passages that are the same for every seed."""
    return config.model.startswith("micro:") and config.documents == "micro:forget"


def _inputs(config: ForgetConfig) -> dict[str, str]:
    """Hashes of the models and texts that a config names."""
    return {name: _hash(name, getattr(config, name)) for name in _INPUTS if getattr(config, name)}


@functools.cache
def _hash(kind: str, source: str) -> str:
    """A hash of a model's weights or of a source's texts, equal wherever they are."""
    if kind in ("model", "reference", "base"):
        return hash_weights(find_folder(source, kind))[:16]
    if kind in ("questions", "keep_questions"):
        return file_sha256(Path(source))[:16]
    return read_documents(source, option=kind).sha256[:16]


def _read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _rounded(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 4) for name, value in scores.items()}
