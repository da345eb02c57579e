"""The methods of the paper beside each other: Tables 1 and 2, Figures 1 to 3, and what baselines are held on.

``methods`` runs every method until the stop rule, with all metrics and outputs; ``tradeoff`` draws its cells and
measures nothing. ``retain-or-general`` asks whether baselines improve with pretraining data. ``losses`` is the mean
teacher with each forget loss, and LL and NPO again after two epochs of AdamW: all runs take the same number of steps,
whatever they reach. The divergence is QKL there, as in the authors' runs, and AdamW takes a tenth of its usual learning
rate: it is to leave the starting point, not to do the whole work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unteach.config import Method
from unteach.data import ForgetBatches, read_documents, tokenise
from unteach.errors import InputError
from unteach.evaluation.metrics import columns
from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder
from unteach.experiments.paper import Content, Experiment
from unteach.experiments.setups import Setup
from unteach.models import load_tokenizer, read_context_length
from unteach.report.load import published_points
from unteach.report.plots import tradeoff_figure
from unteach.report.style import Figure

__all__ = ["EXPERIMENTS", "STAR", "LossesSettings", "cell", "rows"]

QKL, STAR = "mt-nlul-qkl", "-star"
"""The paper's method; the ending of its row that is run until ``knowmem_f`` is as the retrained model's."""
COLUMNS = (
    *columns("main"), "verbmem_f_tables", *columns("beside"), "nll_forget", "nll_holdout",
    "tofu_forget_quality", "tofu_model_utility", "tofu_forget_rouge", "tofu_retain_rouge",
)  # fmt: skip
OTHERS = (
    "audit-", "deep", "field-", "loss-", "recovery-", "relearn-", "sequential-", "theorem", "trajectory-",
)  # fmt: skip
"""Beginnings of the names of other experiments' cells."""
AGAINST = ("verbmem_f", "knowmem_f", "privleak")
BASELINES, ON_RETAIN = ("adamw-npo-kl", "adamw-ll-kl"), "-on-retain"
LOSSES, ESCAPED = ("nlul", "ll", "npo", "it"), ("ll", "npo")
"""Of the mean teacher, and those that are run again after AdamW."""


def cell(setup: Setup, name: str, seed: int) -> Cell:
    """One method with one seed; the names ``target`` and ``retrained`` are models that are only measured."""
    if name in ("target", "retrained"):
        return setup.model_cell(name)
    if not name.endswith(STAR):
        return setup.cell(name, setup.configured(name, seed))
    config = setup.configured(name.removesuffix(STAR), seed, questions=setup.questions)
    fixed = setup.fixed(config) | {"stop": "knowmem_f <= the retrained model's"}
    return Cell(name=name, seed=seed, settings=fixed, run=lambda: setup.forget_star(config))


def rows(setup: Setup) -> list[str]:
    """The names of all rows: the two references, then the methods, the star row behind its method."""
    names = ["target", "retrained"] if setup.config.reference else ["target"]
    for name, method in setup.methods.items():
        if method.loss != "it" or setup.incompetent:
            names.append(name)
        if name == QKL and setup.config.reference and (setup.embedded or setup.questions):
            names.append(name + STAR)
    return names


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """All cells; target and retrained, where no seed matters, once."""
    given = ("target", "retrained")
    return [cell(setup, name, seed) for name in rows(setup) for seed in ([0] if name in given else seeds)]


def shows(name: str) -> bool:
    """Whatever is no other experiment's."""
    return not name.startswith(OTHERS) and not name.endswith(ON_RETAIN)


table = functools.partial(paper.result_table, metrics=COLUMNS, extra=paper.RUN_COLUMNS)
"""All metrics, steps needed, and how the runs ended."""


def tradeoff_figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """A panel for each metric; with others' panels where ours have none of their points.

    Others' published points are shown in panels of their own unless the benchmark is theirs: they are from other
    harnesses and other models, and even on the same benchmark they are marked so.
    """
    points = published_points(benchmark)
    drawn = paper.panels("tradeoff", benchmark, contents, AGAINST, points)
    if not points:
        theirs = published_points("muse-news")
        drawn += [tradeoff_figure("MUSE-News", m, (), theirs, f"tradeoff-{m}-published") for m in AGAINST]
    return drawn


def retain_or_general_cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Each baseline on general text (the cell of ``methods``) and on the retain split."""
    if setup.retain is None:
        raise InputError("data has no retain split: this experiment needs one")
    found = []
    for name in BASELINES:
        held = [setup.configured(name, seed, general=setup.retain) for seed in seeds]
        found += [cell(setup, name, seed) for seed in seeds]
        found += [setup.cell(f"{name}{ON_RETAIN}", config) for config in held]
    return found


@dataclass(frozen=True, kw_only=True)
class LossesSettings:
    """What ``losses`` adds to the benchmark's settings."""

    steps: int = 60
    """Of every run, those of AdamW included."""
    escape_epochs: int = 2
    """Passes of AdamW over the forget documents."""
    escape_lr: float = 0.1
    """AdamW's learning rate there, as a share of the baseline's."""


def losses_cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Every loss with every seed, then the losses after AdamW."""
    settings = setup.own_settings("losses", LossesSettings)
    runs = [(loss, False) for loss in LOSSES if loss != "it" or setup.incompetent] + [(loss, True) for loss in ESCAPED]
    return [_losses_cell(setup, settings, loss, seed, escaped) for loss, escaped in runs for seed in seeds]


def _losses_cell(setup: Setup, settings: LossesSettings, loss: str, seed: int, escaped: bool) -> Cell:
    baseline = setup.methods[f"adamw-{loss}-kl"]
    options = baseline.loss_options if loss == "npo" else {}
    method = dataclasses.replace(setup.methods[QKL], loss=loss, loss_options=options)
    # alpha and the step sizes are measured with NLUL whatever the loss: equal for all
    phases = (_escape(setup, settings, baseline),) if escaped else ()
    name = f"loss-mt-{loss}" + ("-after-adamw" if escaped else "")
    return setup.cell(name, setup.configured_for_steps(method, seed, settings.steps, phases=phases))


def _escape(setup: Setup, settings: LossesSettings, baseline: Method) -> Method:
    """AdamW for some passes over the documents, held by the same divergence as the rest of the run."""
    config = setup.config
    documents, tokenizer = read_documents(config.documents), load_tokenizer(config.model)
    chunk = config.lengths(read_context_length(config.model))[0]
    tokens = tokenise(documents, tokenizer, mode=config.document_mode, max_tokens=chunk)
    epoch = ForgetBatches(tokens, 0).steps_per_epoch(config.batch)
    lr = settings.escape_lr * (baseline.lr or 1e-5)
    return dataclasses.replace(baseline, lr=lr, divergence="qkl_frozen", steps=settings.escape_epochs * epoch)


def losses_table(contents: Sequence[Content]) -> str:
    """NLL and gradient norm at the mean teacher's first step, after AdamW's if there are such, and at the last."""

    def at(field: str, *, last: bool) -> paper.Column:
        def value(curve: dict[str, list[Any]]) -> Any:
            return curve[field][-1 if last else curve["phase"].index(curve["phase"][-1])]

        return lambda group: paper.mean_and_std((value(content["curve"]) for content in group), 3)

    extra = {
        "NLL at MT's first step": at("nll_forget", last=False),
        "NLL at the end": at("nll_forget", last=True),
        "gradient norm at MT's first step": at("grad_norm", last=False),
        "at the end": at("grad_norm", last=True),
    }
    return paper.result_table(contents, ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general", "degenerate"), extra)


def losses_figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """NLL on the forget batches and gradient norm, per step."""
    titles = {
        "nll_forget": ("Loss on the forget batches", "negative log-likelihood, nats per token"),
        "grad_norm": ("Gradient norm", "before clipping"),
    }

    def points(content: Content, field: str) -> list[tuple[float, float]]:
        pairs = zip(content["curve"]["step"], content["curve"][field], strict=True)
        return [(step, value) for step, value in pairs if value is not None]

    return paper.curves("losses", benchmark, paper.renamed(contents, "loss-"), titles, points, logarithmic=True)


EXPERIMENTS = {
    "methods": Experiment(
        title="Table 1, the table of epochs and Table 2: every method, all metrics",
        see="A method has forgotten what it was asked to where verbmem_f and knowmem_f are no higher than the "
        "retrained model's, and has kept the rest where knowmem_r and nll_general are as the target's. The last "
        "column says whether the stop rule was met (stop), the steps ran out (max_steps), or general text became too "
        "dear (utility_floor).",
        cells=cells,
        shows=shows,
        table=table,
    ),
    "tradeoff": Experiment(
        title="Figure 3: utility against recital, knowledge and leak, from the cells of methods",
        see="The better of two methods is the one that keeps more (knowmem_r higher, nll_general lower) where as much "
        "is forgotten.",
        cells=cells,
        shows=shows,
        table=lambda contents: paper.result_table(contents, ("knowmem_r", *AGAINST, "nll_general")),
        figures=tradeoff_figures,
        measures=False,
    ),
    "retain-or-general": Experiment(
        title="baselines held on a retain split, and on general text",
        see="Of two rows of one baseline, the better text is the one whose knowmem_r and nll_general are nearer to the "
        "target's where verbmem_f is as low; a row that ended by max_steps or utility_floor has not forgotten enough.",
        cells=retain_or_general_cells,
        shows=lambda name: name.removesuffix(ON_RETAIN) in BASELINES,
        table=table,
        figures=lambda benchmark, contents: paper.panels("retain-or-general", benchmark, contents, ("verbmem_f",)),
    ),
    "losses": Experiment(
        title="Figures 1 and 2: the mean teacher with each forget loss",
        see="All runs take the same number of steps. A loss that stalls begins and ends with about the same NLL on "
        "what is to be forgotten; one that explodes ends with a gradient norm far above the first.",
        cells=losses_cells,
        shows=lambda name: name.startswith("loss-"),
        table=losses_table,
        figures=losses_figures,
    ),
}
