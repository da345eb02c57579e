"""What an experiment runs on: the models, texts, methods and measurements of a benchmark, behind one interface."""

from __future__ import annotations

import dataclasses
import functools
import gc
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unteach.config import ForgetConfig, Method, Stop
from unteach.corpora import Benchmark, Probe
from unteach.data import read_documents
from unteach.errors import InputError
from unteach.experiments.cells import Cell, differing, thinned
from unteach.job.run_folder import STOP_SCORES, MeasuredOnce, SharedScores
from unteach.settings import from_values

if TYPE_CHECKING:
    from unteach.evaluation.scores import Scores
    from unteach.job import ForgetResult

__all__ = ["Setup"]

NEVER = "verbmem_f <= -1"
"""A stop rule that is never met: the run takes all its steps."""
EXAMPLES = 2
"""Outputs of each kind that a cell keeps."""
T = TypeVar("T")
_INPUTS = (
    "model", "documents", "general", "keep", "holdout", "reference", "questions", "keep_questions", "base",
)  # fmt: skip
_WITHOUT_EFFECT = ("out", "device", "track", "micro_batch", "checkpoint_every", "keep_checkpoints", "save_dtype")


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
    holdout: str | None = None
    """Documents like the forgotten ones that no model has seen, as a source."""
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
    _hashes: dict[tuple[str, str], str] = field(default_factory=dict)

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
        inputs = {name: self._hash(name, getattr(config, name)) for name in _INPUTS if getattr(config, name)}
        return settings | {"inputs": inputs, "measured": self.final.data_sha256}

    def cell(self, name: str, config: ForgetConfig) -> Cell:
        """A cell that is a run of the forget job with these settings."""
        run = functools.partial(self.forget_in_passing, config)
        return Cell(name=name, seed=config.seed, settings=self.fixed(config), run=run)

    def _hash(self, kind: str, source: str | None) -> str | None:
        """A hash of a model's weights or of a source's texts, equal wherever they are."""
        if not source:
            return None
        if (kind, source) not in self._hashes:
            from unteach.evaluation.command import hash_weights
            from unteach.models import find_folder

            if kind in ("model", "reference", "base"):
                found = hash_weights(find_folder(source, kind))
            elif kind in ("questions", "keep_questions"):
                found = hashlib.sha256(Path(source).read_bytes()).hexdigest()
            else:
                found = read_documents(source, option=kind).sha256
            self._hashes[kind, source] = found[:16]
        return self._hashes[kind, source]

    def configured(self, method: str | Method, seed: int, **changes: Any) -> ForgetConfig:
        """The settings of a run with a method, or the name of one; ``changes`` are other fields of ``ForgetConfig``."""
        chosen = self.methods[method] if isinstance(method, str) else method
        losses = {chosen.loss, *(phase.loss for phase in changes.get("phases", ()))}
        if "it" in losses:
            changes["base"] = self.incompetent
        return dataclasses.replace(self.config, method=chosen, seed=seed, **changes)

    def configured_for_steps(self, method: str | Method, seed: int, steps: int, **changes: Any) -> ForgetConfig:
        """The same for a run that takes so many steps, whatever it reaches."""
        never = dataclasses.replace(self.config.stop, metric=NEVER, utility_floor=1e9)
        return self.configured(method, seed, stop=never, max_steps=steps, evaluate_every=steps, **changes)

    def forget(self, config: ForgetConfig) -> tuple[ForgetResult, dict[str, Any]]:
        """Run the forget job and measure the model it ends with; returns the result and what a cell keeps of it."""
        from unteach.evaluation.scores import Scores
        from unteach.job import run_forget

        own = config.model.startswith("micro:") and config.documents == "micro:forget" and self.embedded
        own = own and config.reference is not None  # without it there is no PrivLeak
        needed = None if own else ["verbmem_f"]  # the rest of the job's own scores nobody would read
        result = run_forget(config, say=self.say, shared=self._measured_once(config), measurements=needed)
        out = Path(config.out)
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
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
            **({} if own else {"own_passages": _own_passages(result, out)}),
            **self.kept(scores),
            "curve": thinned([json.loads(line) for line in lines]),
            **_stop_scores(out),
        }
        return result, content

    def forget_in_passing(self, config: ForgetConfig) -> dict[str, Any]:
        """The same with a run folder that is not kept; returns what a cell keeps."""
        with tempfile.TemporaryDirectory() as folder:
            return self.forget(dataclasses.replace(config, out=str(Path(folder) / "run")))[1]

    def _measured_once(self, config: ForgetConfig) -> MeasuredOnce:
        """What keeps the scores of runs that start from the same model and measure the same passages."""
        own = config.model.startswith("micro:") and config.documents == "micro:forget"
        seed = None if own else config.seed  # those passages are the same for every seed
        inputs = [self._hash(name, getattr(config, name)) for name in _INPUTS if name not in ("base", "keep")]
        needs = [config.stop.metric, config.stop.parity, config.keep is not None]  # of a stop rule, not of the report

        def measured_once(name: str, compute: Callable[[], T]) -> T:
            rule = None
            if name.startswith("stop"):
                rule = [*needs, self._hash("base", config.base) if name == "stop base" else None]
            return self.shared.measured_once(f"{name} {inputs} {config.probes} {seed} {rule}", compute)

        return measured_once

    def measure(self, model: Any, seed: int) -> Scores:
        """Everything that can be measured of a model."""
        from unteach.evaluation import evaluate
        from unteach.models import load_tokenizer

        tokenizer = load_tokenizer(self.config.model)
        scores = evaluate(model, tokenizer, self.final, reference_scores=self.reference_scores(), seed=seed)
        if self.table_probes:
            own = Benchmark(self.benchmark, verbatim_forget=self.table_probes)
            found = evaluate(model, tokenizer, own, measurements=["verbmem_f"], seed=seed)
            scores.metrics["verbmem_f_tables"] = found.metrics["verbmem_f"]
        return scores

    def measure_named(self, name: str, seed: int) -> Scores:
        """The same for a model by its name or folder."""
        from unteach.models import load_model

        model = load_model(name, device=self.config.resolved_device())[0]
        try:
            return self.measure(model, seed)
        finally:
            del model
            gc.collect()

    def reference_scores(self) -> Scores | None:
        """The retrained model's membership and TOFU scores, which others are compared with; None without one."""
        if not self.config.reference:
            return None

        return self.shared.measured_once("reference", lambda: self._of_reference(self.final, ["privleak", "tofu"]))

    def _of_reference(self, benchmark: Benchmark, measurements: list[str]) -> Scores:
        from unteach.evaluation import evaluate
        from unteach.models import load_model

        model, tokenizer = load_model(str(self.config.reference), device=self.config.resolved_device())
        return evaluate(model, tokenizer, benchmark, measurements=measurements)

    def kept(self, scores: Scores) -> dict[str, Any]:
        """What a cell keeps of scores: values with intervals, notes, and a few outputs where the texts may be shown."""
        metrics = {
            name: {"value": round(m.value, 4), "low": _round(m.low), "high": _round(m.high)}
            for name, m in scores.metrics.items()
        }
        content: dict[str, Any] = {"metrics": metrics, "notes": list(scores.notes)}
        if self.embedded:
            content["examples"] = {
                name: [
                    {key: item[key] for key in ("prompt", "question", "expected", "answer", "output") if key in item}
                    for item in scores.items_of(name)[:EXAMPLES]
                ]
                for name in ("verbmem_f", "knowmem_f")
                if name in scores.records
            }
        return content

    def star_stop(self, seed: int) -> Stop:
        """The rule of the paper's star row: ``knowmem_f`` no higher than the retrained model's, on the questions that
        the rule of that seed asks.
        """
        from unteach.corpora.own import read_questions, take_examples

        if not self.config.reference:
            raise InputError("reference is missing: the stop at the retrained model's knowmem_f needs that model")
        asked = self.final
        if not self.embedded:
            if not self.questions:
                raise InputError("data has no questions on the forget documents: leave the cells with -star out")
            questions, examples = take_examples(read_questions(Path(self.questions)), 5, seed)
            asked = Benchmark("stop", knowledge_forget=questions, knowledge_forget_examples=examples)
        value = self._of_reference(asked, ["knowmem_f"])["knowmem_f"]
        return dataclasses.replace(self.config.stop, metric=f"knowmem_f <= {value:.6g}")


def _own_passages(result: ForgetResult, out: Path) -> dict[str, float]:
    """``verbmem_f`` on the passages that the forget job keeps for its report, usually more than a benchmark has."""
    found = {"before": result.before["verbmem_f"], "after": result.after["verbmem_f"]}
    file = out / "evaluations" / "reference.json"
    if file.exists():
        found["reference"] = json.loads(file.read_text(encoding="utf-8"))["metrics"]["verbmem_f"]["value"]
    return {name: round(value, 4) for name, value in found.items()}


def _stop_scores(out: Path) -> dict[str, Any]:
    """What the stop rule measured along the run, in the order of the steps, and of the reference model."""
    lines = (out / STOP_SCORES).read_text(encoding="utf-8").splitlines()
    looks = {look["step"]: look for look in map(json.loads, lines)}  # the run may have come to a step twice
    found: dict[str, Any] = {"stop_scores": [_rounded(looks[step]) for step in sorted(looks)]}
    file = out / "checkpoints" / "reference.json"
    if file.exists():
        found["stop_reference"] = _rounded(json.loads(file.read_text(encoding="utf-8")))
    return found


def _rounded(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in scores.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
