"""Deep forgetting and what it rests on: not recited, not known, not detectable, and the neighbours untouched.

``deep`` is what ``unteach forget`` does where a base model, keep documents and holdout documents are given,
``deep-to-base`` the same with the base model's own log-odds as its goal, not never-seen documents',
``deep-general-mixed`` that with news and questions of the pretraining in the general text. All other rows but those of
a settings file have this goal, too, change one thing of ``deep-matched`` and run until a membership test finds as
little as in the retrained model (PrivLeak 0 on the stop rule's texts), so that they can be compared: one that forgets
more also loses more.

``deep-other-people`` keeps no neighbour, but ten times as many reports about people of the pretraining text: of the
same kind, and known to target and base model from there. ``knowmem_r`` then says what becomes of neighbours of whom
nothing is held, ``knowmem_pretraining`` of those who are (kept) or who resemble them (others).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unteach.config import ForgetConfig, Method, Stop
from unteach.corpora import Question, micro
from unteach.errors import InputError
from unteach.evaluation.metrics import METRICS, RAW_AUC
from unteach.experiments import DEEP, paper
from unteach.experiments.cells import Cell, CellFolder
from unteach.experiments.paper import Content, Experiment
from unteach.experiments.setups import Setup
from unteach.method.losses import LOSSES
from unteach.report.style import Figure
from unteach.settings import from_values

__all__ = ["EXPERIMENTS", "DeepSettings", "configured"]

PREFIX = "deep-"
MIXED = "micro:general_mixed"
"""General text with news and questions about people of the pretraining text."""
ALPHAS = {"deep-alpha-0.4": 0.4, "deep-alpha-2.5": 2.5}
"""Times the α of ``deep``."""
COLUMNS = (
    "verbmem_f", "knowmem_f", "knowmem_r", "knowmem_r_kept", "knowmem_r_others", "knowmem_pretraining",
    "knowmem_pretraining_kept", "knowmem_pretraining_others", "privleak", "auc_forget_holdout_min_5",
    "auc_forget_holdout_ppl", "nll_general", "degenerate",
    "tofu_forget_quality", "tofu_model_utility",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepSettings:
    """What this experiment adds to the benchmark's settings."""

    max_steps: int = 200
    """Longest run."""
    method: dict[str, Any] = field(default_factory=dict)
    """Fields of the method to be given by hand, where the program's choice is not enough."""
    rows: dict[str, Any] = field(default_factory=dict)
    """More rows: by name, the fields of the run that each changes of ``deep``, those of the method under ``method``."""
    rows_until_parity: bool = False
    """These rows end as ``deep-matched`` does, so that they can be compared, not by the run's own rule."""


def _settings(setup: Setup) -> DeepSettings:
    found: DeepSettings = setup.own_settings("deep", DeepSettings)
    return found


def _methods(setup: Setup) -> tuple[Method, Method, Method]:
    """Deep forgetting as the program chooses it; with the base model's log-odds as its goal; and that by name, so that
    one thing can be changed."""
    by_hand = _settings(setup).method
    own = from_values(Method, by_hand, "deep.method.") if by_hand else DEEP
    to_base = dataclasses.replace(own, goal="base")
    return own, to_base, to_base.chosen(keep=True, base=True)


def rows(setup: Setup) -> dict[str, dict[str, Any]]:
    """How each row differs from ``deep-matched``, by the names of their cells: fields of ``ForgetConfig``."""
    own, to_base, match = _methods(setup)
    measured = own.chosen(keep=True, base=True, holdout=bool(setup.holdout)).goal == "never_seen"
    mean_teacher = dataclasses.replace(match, optimizer="mean_teacher", optimizer_options={}, lr=None)
    own_rule = {"stop": setup.config.stop, "reference": None}
    embedded: dict[str, dict[str, Any]] = {
        "deep-half-kept": {"keep": setup.keep_half},
        "deep-other-people": {"keep": setup.keep_others},
        "deep-small-base": {"base": "micro:small"},
        "deep-general-mixed": own_rule | {"general": MIXED},
    }
    built: dict[str, dict[str, Any]] = {
        "deep": own_rule | {"method": own},
        **({"deep-to-base": own_rule} if measured else {}),
        "deep-matched": {},
        "deep-softplus": {"method": dataclasses.replace(match, loss_options=match.loss_options | {"pull": "softplus"})},
        "deep-without-keep": {"method": match, "keep": None},
        "deep-without-base": {"base": None} | _without_base(to_base),
        **(embedded if setup.embedded else {}),
        "deep-mean-teacher-anchor": {"method": dataclasses.replace(mean_teacher, anchor=1.0)},
        "deep-mean-teacher": {"method": mean_teacher},
        **{name: {} for name in ALPHAS},
        "deep-alpha-grows": {"method": dataclasses.replace(to_base, alpha_growth=0.05)},
        "deep-paper": {"method": Method(optimizer="mean_teacher", loss="nlul"), "keep": None, "base": None},
    }
    settings = _settings(setup)
    more, rule = settings.rows, {} if settings.rows_until_parity else own_rule
    if taken := more.keys() & built.keys():
        raise InputError(f"deep.rows has {', '.join(sorted(taken))}: rows of that name are there already")
    return built | {name: rule | {"method": own} | _changed(setup, own, name, row) for name, row in more.items()}


def _without_base(own: Method) -> dict[str, Any]:
    """A method by hand whose loss needs a base model is run with NLUL where there is none; the program's chooses."""
    if own.loss == "auto" or LOSSES[own.loss].base != "given":
        return {}
    return {"method": dataclasses.replace(own, loss="nlul", loss_options={})}


def _changed(setup: Setup, own: Method, name: str, row: Any) -> dict[str, Any]:
    """What a row of a settings file changes, as fields of ``ForgetConfig``."""
    where = f"deep.rows.{name}"
    if not name.startswith(PREFIX) or not isinstance(row, dict) or "seed" in row:
        wanted = f"give a name that begins with {PREFIX} and the fields that it changes, but for the seed"
        raise InputError(f"{where} is {row!r}: {wanted}")
    inputs = {part: getattr(setup, part) for part in ("base", "keep", "holdout")}
    given = {"model": setup.config.model, "method": dataclasses.asdict(own)} | inputs | row
    if isinstance(row.get("method"), dict):
        given["method"] = dataclasses.asdict(own) | row["method"]
    config = from_values(ForgetConfig, given, f"{where}.")
    return {name: getattr(config, name) for name in row}


def configured(setup: Setup, name: str, seed: int) -> ForgetConfig:
    """The settings of a row's run."""
    inputs = ("keep", "base", "holdout", "questions", "keep_questions")
    given: dict[str, Any] = {"method": _methods(setup)[1], "stop": _until_parity(setup)} | {
        part: getattr(setup, part) for part in inputs
    }
    given["max_steps"] = _settings(setup).max_steps
    return setup.configured(seed=seed, **(given | rows(setup)[name]))


def _until_parity(setup: Setup) -> Stop:
    """Until the membership test finds as little as in the retrained model; questions are asked along the way.

    Without holdout documents there is nothing to match on, and the run has a rule of its own.
    """
    if not setup.holdout:
        return setup.config.stop
    return setup.watching(f"{RAW_AUC} >= {'reference' if setup.config.reference else 0.5}")


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """The two models to compare with, once, and every row with every seed."""
    missing = [option for option in ("base", "keep") if not getattr(setup, option)]
    if missing:
        raise InputError([f"{option} is missing: deep forgetting needs it; give --{option}" for option in missing])
    models = ["target", "retrained"] if setup.config.reference else ["target"]
    found = [setup.model_cell(name, _groups(setup)) for name in models]
    return found + [_cell(setup, name, seed, folder) for name in rows(setup) for seed in seeds]


def _cell(setup: Setup, name: str, seed: int, folder: CellFolder) -> Cell:
    config, times = configured(setup, name, seed), ALPHAS.get(name)
    half, others = (config.keep is not None and config.keep == kept for kept in (setup.keep_half, setup.keep_others))
    groups = _groups(setup, half=half, mixed=others or config.general == MIXED)
    fixed = setup.fixed(config) | ({"asked": sorted(groups)} if groups else {})
    needs = []
    if times:
        fixed["alpha"] = f"{times} times that of deep"
        needs = [_cell(setup, "deep", seed, folder)]

    def run() -> dict[str, Any]:
        method = config.method
        if times:
            method = dataclasses.replace(method, alpha=times * folder.get(needs[0])["method"]["alpha"])
        model, content = setup.forget(dataclasses.replace(config, method=method))
        content["metrics"] |= setup.asked(model, seed, groups)
        return content

    return Cell(name=name, seed=seed, settings=fixed, run=run, needs=needs)


def _groups(setup: Setup, *, half: bool = False, mixed: bool = False) -> dict[str, tuple[Question, ...]]:
    """Further questions, by the name of the metric: about people of the pretraining text, also apart for those who
    are held with news or the mixed text; where half of the neighbours are kept, about these and about the others."""
    if not setup.embedded:
        return {}
    parts = ("pretraining", *(("pretraining_kept", "pretraining_others") if mixed else ()))
    found = {f"knowmem_{part}": micro.questions(part) for part in parts}
    if half:
        stories = micro.stories("retain")
        for name, chosen in (("knowmem_r_kept", stories[::2]), ("knowmem_r_others", stories[1::2])):
            found[name] = tuple(question for story in chosen for question in story.questions)
    return found


def table(contents: Sequence[Content]) -> str:
    """Mean (std) over seeds, with the α that was used, the last one where it moved, and how the runs ended."""
    alphas = {"alpha": lambda group: paper.mean_and_std(map(_alpha, group), 3)}
    return paper.result_table(paper.renamed(contents, PREFIX), COLUMNS, alphas | paper.RUN_COLUMNS)


def _alpha(content: Content) -> float | None:
    return content.get("curve", {}).get("alpha", [content.get("method", {}).get("alpha")])[-1]


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """What is known of kept and of forgotten documents along each run, over PrivLeak on the stop rule's texts."""
    runs = [content for content in paper.renamed(contents, PREFIX) if "stop_reference" in content]
    known = {metric: METRICS[metric] for metric in ("knowmem_r", "knowmem_f")}
    titles = {m: (info.title[:1].upper() + info.title[1:], f"{m} {info.arrow}") for m, info in known.items()}
    return paper.curves("deep", benchmark, runs, titles, _points, over="PrivLeak")


def _points(content: Content, metric: str) -> list[tuple[float, float]]:
    """(PrivLeak, metric) at each evaluation of the stop rule that has both."""
    return [(look["privleak"], look[metric]) for look in paper.looks(content) if {"privleak", metric} <= look.keys()]


EXPERIMENTS = {
    "deep": Experiment(
        title="deep forgetting and what it rests on, matched on PrivLeak 0",
        see="Wanted are the retrained model's verbmem_f and knowmem_f with the target's knowmem_r and nll_general. The "
        "row deep ends by its own rule (and general-mixed, whose general text has news, too), as do rows of a settings "
        "file that does not say otherwise; every other row changes one thing of it and ends (stop) where a membership "
        "test finds as little as in the retrained model on the rule's own texts. One that ended by max_steps or "
        "utility_floor did not get there. The people of other-people, who are kept instead of the neighbours, are of "
        "the pretraining text: the model knew them from there. The AUCs are by the least likely 5 % of the words and "
        "by the loss; alpha is the last one where it moved.",
        cells=cells,
        shows=lambda name: name == "deep" or name.startswith(PREFIX),
        table=table,
        figures=figures,
    )
}
