"""Figures 1 and 2: the mean teacher with each forget loss, and LL and NPO again after two epochs of AdamW.

All runs take the same number of steps, whatever they reach. The divergence is QKL, as in the authors' runs. AdamW takes
a tenth of its usual learning rate, as there: it is to leave the starting point, not to do the whole work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unteach.config import Method
from unteach.experiments.cells import Cell, CellFolder, by_name, mean_and_std, result_table
from unteach.experiments.paper import Experiment
from unteach.experiments.setups import Setup
from unteach.report.plots import curve_figure
from unteach.report.style import Figure, look

__all__ = ["EXPERIMENT", "LossesSettings"]

LOSSES = ("nlul", "ll", "npo", "it")
ESCAPED = ("ll", "npo")
"""Losses that are run again after AdamW."""


@dataclass(frozen=True, kw_only=True)
class LossesSettings:
    """What this experiment adds to the benchmark's settings."""

    steps: int = 60
    """Of every run, those of AdamW included."""
    escape_epochs: int = 2
    """Passes of AdamW over the forget documents."""
    escape_lr: float = 0.1
    """AdamW's learning rate there, as a share of the baseline's."""


def cells(setup: Setup, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """Every loss with every seed, then the losses after AdamW."""
    settings = setup.own_settings("losses", LossesSettings)
    names = [loss for loss in LOSSES if loss != "it" or setup.incompetent]
    found = [_cell(setup, settings, loss, seed, escaped=False) for loss in names for seed in seeds]
    return found + [_cell(setup, settings, loss, seed, escaped=True) for loss in ESCAPED for seed in seeds]


def _cell(setup: Setup, settings: LossesSettings, loss: str, seed: int, *, escaped: bool) -> Cell:
    baseline = setup.methods[f"adamw-{loss}-kl"]
    method = dataclasses.replace(
        setup.methods["mt-nlul-qkl"], loss=loss, loss_options=baseline.loss_options if loss == "npo" else {}
    )  # alpha and the step sizes are measured with NLUL whatever the loss: equal for all
    phases = (_escape(setup, settings, baseline),) if escaped else ()
    name = f"loss-mt-{loss}" + ("-after-adamw" if escaped else "")
    return setup.cell(name, setup.configured_for_steps(method, seed, settings.steps, phases=phases))


def _escape(setup: Setup, settings: LossesSettings, baseline: Method) -> Method:
    """AdamW for some passes over the documents, held by the same divergence as the rest of the run."""
    from unteach.data import ForgetBatches, read_documents, tokenise
    from unteach.models import load_tokenizer, read_context_length

    config = setup.config
    tokens = tokenise(
        read_documents(config.documents),
        load_tokenizer(config.model),
        mode=config.document_mode,
        max_tokens=config.lengths(read_context_length(config.model))[0],
    )
    epoch = ForgetBatches(tokens, 0).steps_per_epoch(config.batch)
    lr = settings.escape_lr * (baseline.lr or 1e-5)
    return dataclasses.replace(baseline, lr=lr, divergence="qkl_frozen", steps=settings.escape_epochs * epoch)


def table(contents: Sequence[dict[str, Any]]) -> str:
    """NLL and gradient norm at the mean teacher's first and last step."""
    groups = by_name(contents)
    metrics = {name: [content["metrics"] for content in group] for name, group in groups.items()}
    curves = [[_last_phase(content["curve"]) for content in group] for group in groups.values()]

    def column(field: str, place: int) -> list[str]:
        return [mean_and_std([curve[field][place] for curve in group], 3) for group in curves]

    extra = {
        "NLL at MT's first step": column("nll_forget", 0),
        "NLL at the end": column("nll_forget", -1),
        "gradient norm at MT's first step": column("grad_norm", 0),
        "at the end": column("grad_norm", -1),
    }
    return result_table(metrics, ("verbmem_f", "knowmem_f", "knowmem_r", "nll_general", "degenerate"), extra)


def _last_phase(curve: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A curve from the mean teacher's first step on: all of it, or what comes after AdamW."""
    begin = curve["phase"].index(curve["phase"][-1])
    return {field: values[begin:] for field, values in curve.items()}


def figures(benchmark: str, contents: Sequence[dict[str, Any]]) -> list[Figure]:
    """NLL on the forget batches and gradient norm, per step."""
    groups = by_name(contents)
    styles = {name: look("method", index) for index, name in enumerate(groups)}
    drawn = []
    for field, title, unit in (
        ("nll_forget", "Loss on the forget batches", "negative log-likelihood, nats per token"),
        ("grad_norm", "Gradient norm", "before clipping"),
    ):
        lines = [
            (name.removeprefix("loss-"), styles[name], content["seed"], _points(content["curve"], field))
            for name, group in groups.items()
            for content in group
        ]
        keys = [(name.removeprefix("loss-"), style) for name, style in styles.items()]
        if lines:
            drawn.append(curve_figure(f"losses-{field}-{benchmark}", title, unit, lines, keys, True))
    return drawn


def _points(curve: dict[str, list[Any]], field: str) -> list[tuple[float, float]]:
    return [(step, value) for step, value in zip(curve["step"], curve[field], strict=True) if value is not None]


EXPERIMENT = Experiment(
    title="Figures 1 and 2: the mean teacher with each forget loss",
    see="All runs take the same number of steps. A loss that stalls begins and ends with about the same NLL on what is "
    "to be forgotten; one that explodes ends with a gradient norm far above the first.",
    cells=cells,
    shows=lambda name: name.startswith("loss-"),
    table=table,
    figures=figures,
)
