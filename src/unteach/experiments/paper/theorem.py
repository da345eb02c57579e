"""The theorem on two small models: does Algorithm 1 follow natural-gradient descent as α → 0?

α is halved again and again while T doubles, so that Tγ stays the same. The theorem bounds the gap
``max_t ‖θ_t - θ̄_t‖`` by O(α log(1/α)). Two controls must **not** converge: plain gradient descent with the
step lengths of the natural-gradient descent, and natural-gradient descent with λ in place of λ̄.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unteach.experiments import paper
from unteach.experiments.cells import Cell, CellFolder, differing
from unteach.experiments.paper import Content, Experiment
from unteach.method import theory
from unteach.method.theory import Network, UnlearningProblem
from unteach.report.style import Figure
from unteach.writing import markdown_table

__all__ = ["EXPERIMENTS", "MODELS", "TheoremSettings", "compare", "memorised_problem", "run_experiment", "slopes"]

MODELS = {
    "softmax regression": Network(num_features=8, num_classes=4),
    "tanh network": Network(num_features=8, num_hidden=6, num_classes=4),
}
GAPS = {
    "gap_of_plain_gradient": "gradient descent", "gap_with_plain_damping": "λ instead of λ̄", "gap": "mean teacher",
}  # fmt: skip
COLUMNS = {
    "α": "{alpha:.6f}", "steps": "{steps}", "gap": "{gap:.5f}", "slope": "{slope}",
    "gap / (α log 1/α)": "{gap_over_alpha_log:.3f}", "path / gap": "{lengths:.1f}",
    "control: damping": "{gap_with_plain_damping:.4f}", "control: gradient": "{gap_of_plain_gradient:.4f}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TheoremSettings:
    """Everything the experiment depends on."""

    seed: int = 0
    """Draws the data, the labels and the first weights."""
    lr: float = 0.4
    """η; below one over the largest eigenvalue of H + λ."""
    teacher_rate: float = 0.5
    """κ."""
    damping: float = 0.1
    """λ."""
    momenta: tuple[float, ...] = (0.0, 0.9)
    """μ, one run each."""
    loss_weight: float = 0.1
    """The largest α."""
    num_steps: int = 40
    """T at the largest α."""
    halvings: int = 7
    """How often α is halved and T doubled."""
    ridge: float = 0.01
    """Weight decay while memorising; a smaller one memorises harder."""


def memorised_problem(name: str, *, seed: int, ridge: float) -> tuple[UnlearningProblem, Tensor]:
    """A model that has memorised a forget set of random labels beside a general set of learnable ones, and θ_0.

    Features have scales from 2 to 0.2, so that H is ill-conditioned and the natural gradient is not along ∇L. θ_0 is
    the minimum of the two sets' cross-entropies plus ``ridge`` times ``‖θ‖²``; ``seed`` draws all.
    """
    model, num_forget, num_general = MODELS[name], 6, 48
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0.3, -0.7, model.num_features, dtype=torch.float64)
    general_inputs = normal(num_general, model.num_features) * scales
    forget_inputs = normal(num_forget, model.num_features) * scales
    true_probs = (general_inputs @ normal(model.num_features, model.num_classes)).softmax(-1)
    general_labels = torch.multinomial(true_probs, 1, generator=generator)[:, 0]
    forget_labels = torch.randint(model.num_classes, (num_forget,), generator=generator)
    theta = (0.5 * normal(model.num_parameters)).requires_grad_()
    until: dict[str, Any] = {"max_iter": 500, "tolerance_grad": 1e-10, "tolerance_change": 1e-14}
    optimizer = torch.optim.LBFGS([theta], line_search_fn="strong_wolfe", **until)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model.logits(theta, forget_inputs), forget_labels)
        loss = loss + cross_entropy(model.logits(theta, general_inputs), general_labels) + ridge * theta.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return UnlearningProblem(model, forget_inputs, forget_labels, general_inputs), theta.detach()


def compare(
    problem: UnlearningProblem, start: Tensor, settings: TheoremSettings, *, momentum: float, halving: int
) -> tuple[dict[str, Any], Tensor]:
    """One α: measurements of Algorithm 1, its natural-gradient descent and two controls; and where Algorithm 1 ends."""
    loss_weight, num_steps = settings.loss_weight / 2**halving, settings.num_steps * 2**halving
    lr, teacher_rate, damping = settings.lr, settings.teacher_rate, settings.damping
    step_size = theory.natural_step_size(loss_weight, teacher_rate, lr)
    effective = theory.effective_damping(damping, teacher_rate, lr, momentum)
    teacher = theory.mean_teacher_path(
        problem, start, loss_weight=loss_weight, lr=lr, momentum=momentum, teacher_rate=teacher_rate,
        damping=damping, num_steps=num_steps,
    )  # fmt: skip
    natural, undamped = (
        theory.natural_gradient_path(problem, start, step_size=step_size, damping=chosen, num_steps=num_steps)
        for chosen in (effective, damping)
    )
    lengths = natural.diff(dim=0).norm(dim=1)
    plain = theory.gradient_path(problem, start, lengths)
    gap = theory.largest_gap(teacher, natural)
    row = {
        "momentum": momentum,
        "alpha": loss_weight,
        "steps": num_steps,
        "effective_damping": effective,
        "path_length": float(lengths.sum()),
        "gap": gap,
        "gap_over_alpha_log": gap / (loss_weight * math.log(1 / loss_weight)),
        "gap_with_plain_damping": theory.largest_gap(teacher, undamped),
        "gap_of_plain_gradient": theory.largest_gap(plain, natural),
    }
    return row, teacher[-1]


def slopes(gaps: Sequence[float]) -> list[float]:
    """Slope of log gap against log α between one α and its half: ``log2(gap_k / gap_{k+1})``."""
    return [math.log2(large / small) for large, small in itertools.pairwise(gaps)]


def forget_probability(problem: UnlearningProblem, theta: Tensor) -> float:
    """Mean probability of the labels to forget."""
    probs = problem.model.logits(theta, problem.forget_inputs).softmax(-1)
    return float(probs.gather(-1, problem.forget_labels[:, None]).mean())


def run_experiment(settings: TheoremSettings) -> dict[str, Any]:
    """All models, momenta and α: ``groups``, one of rows per model and momentum."""
    groups: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are far too small to share
    for name in MODELS:
        problem, start = memorised_problem(name, seed=settings.seed, ridge=settings.ridge)
        for momentum in settings.momenta:
            halved = range(settings.halvings + 1)
            found = [compare(problem, start, settings, momentum=momentum, halving=halving) for halving in halved]
            rows, ends = [row for row, _ in found], (start, found[-1][1])
            groups.append(
                {
                    "model": name,
                    "parameters": problem.model.num_parameters,
                    "momentum": momentum,
                    "forget_probability": [forget_probability(problem, theta) for theta in ends],
                    "slopes": slopes([row["gap"] for row in rows]),
                    "rows": rows,
                }
            )
    torch.set_num_threads(threads)
    return {"groups": groups}


def table(contents: Sequence[Content]) -> str:
    """A table for each seed, model and momentum: a row for each α."""
    parts = []
    for seed, group in ((content["seed"], group) for content in contents for group in content["groups"]):
        before, after = group["forget_probability"]
        rows = [
            [text.format(**row, slope=slope, lengths=row["path_length"] / row["gap"]) for text in COLUMNS.values()]
            for row, slope in zip(group["rows"], ["", *(f"{slope:.3f}" for slope in group["slopes"])], strict=True)
        ]
        parts += [
            f"Seed {seed}, {group['model']} ({group['parameters']} parameters), momentum "
            f"{group['momentum']}: effective damping {group['rows'][0]['effective_damping']:.4f}, probability of the "
            f"labels to forget {before:.2f} → {after:.2f}.",
            markdown_table(list(COLUMNS), rows),
        ]
    return "\n\n".join(parts)


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """Of the first seed: how the gaps change as α is halved, without and with momentum; and the momentum lemma."""
    if not contents:
        return []
    groups = {(group["model"], group["momentum"] > 0): group["rows"] for group in contents[0]["groups"]}
    lines = [
        {"name": f"{text}, {model}", "seed": contents[0]["seed"], "model": model, "key": key}
        for model in MODELS
        for key, text in GAPS.items()
    ]

    def shares(line: Content, momentum: str) -> list[tuple[float, float]]:
        rows = groups[line["model"], momentum == "momentum"]
        return [(halving, row[line["key"]] / row["path_length"]) for halving, row in enumerate(rows)]

    unit = "largest gap to natural-gradient descent / path length"
    titles = {"no-momentum": ("Theorem 1, no momentum", unit), "momentum": ("Theorem 1, with momentum", unit)}
    drawn = paper.curves("theorem", benchmark, lines, titles, shares, logarithmic=True, over="halvings of α")

    setting = {"damping": 1.0, "lr": 1e-3, "momentum": 0.9}
    num_steps, one = 600, torch.ones(1, dtype=torch.float64)
    path = theory.momentum_iteration(one[None] * 0, 0 * one, -one.expand(num_steps, 1), start=0 * one, **setting)
    holds, printed = theory.momentum_bounds(num_steps, start=0.0, error=1.0, **setting)
    bounds = {"bound that holds": holds, "the iteration": path[:, 0], "bound as printed": printed}
    lines = [{"name": name, "seed": None, "values": values.tolist()} for name, values in bounds.items()]
    titles = {"lemma": ("Momentum lemma under a constant error ε", "‖uₜ − u*‖ in units of ‖ε‖/λ")}
    over = "step t  (μ 0.9, λ 1, η 0.001)"
    return drawn + paper.curves(
        "theorem", benchmark, lines, titles, lambda c, _: list(enumerate(c["values"])), over=over
    )


def cells(setup: Any, seeds: Sequence[int], folder: CellFolder) -> list[Cell]:
    """One of each seed, with the settings above; the models are its own, whatever the benchmark."""
    found = []
    for settings in (TheoremSettings(seed=seed) for seed in seeds):
        fixed = {name: value for name, value in differing(settings).items() if name != "seed"}
        run = functools.partial(run_experiment, settings)
        found.append(Cell(name="theorem", seed=settings.seed, settings=fixed, run=run))
    return found


EXPERIMENTS = {
    "theorem": Experiment(
        title="Theorem 1: the mean teacher beside natural-gradient descent",
        see="If the theorem holds, the gap falls with α (slope about 1) so that gap / (α log 1/α) does not grow, while "
        "the gaps of the two controls stay where they are.",
        cells=cells,
        shows=lambda name: name == "theorem",
        table=table,
        figures=figures,
    )
}
