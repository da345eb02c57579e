"""The theorem on two small models: does Algorithm 1 follow natural-gradient descent as α → 0?

α is halved again and again while T doubles, so that Tγ stays the same. The theorem bounds the gap
``max_t ‖θ_t - θ̄_t‖`` by O(α log(1/α)). Two controls must **not** converge: plain gradient descent with the
step lengths of the natural-gradient descent, and natural-gradient descent with λ in place of λ̄.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

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
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-10, tolerance_change=1e-14
    )

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
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One α: measurements of Algorithm 1, its natural-gradient descent and two controls, and their paths [T + 1, P]."""
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
    return row, {"mean teacher": teacher, "natural": natural, "gradient": plain}


def slopes(gaps: Sequence[float]) -> list[float]:
    """Slope of log gap against log α between one α and its half: ``log2(gap_k / gap_{k+1})``."""
    return [math.log2(large / small) for large, small in itertools.pairwise(gaps)]


def forget_probability(problem: UnlearningProblem, theta: Tensor) -> float:
    """Mean probability of the labels to forget."""
    probs = problem.model.logits(theta, problem.forget_inputs).softmax(-1)
    return float(probs.gather(-1, problem.forget_labels[:, None]).mean())


def run_experiment(settings: TheoremSettings) -> dict[str, Any]:
    """All models, momenta and α: ``groups``, one of rows per model and momentum, and the ``paths`` of the last.

    The paths are flattened for the picture: ``natural``, ``gradient`` and one ``α = …`` for each mean-teacher path.
    """
    groups: list[dict[str, Any]] = []
    drawn: dict[str, Tensor] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are far too small to share
    for name in MODELS:
        problem, start = memorised_problem(name, seed=settings.seed, ridge=settings.ridge)
        for momentum in settings.momenta:
            rows, drawn = [], {}
            for halving in range(settings.halvings + 1):
                row, paths = compare(problem, start, settings, momentum=momentum, halving=halving)
                rows.append(row)
                drawn[f"α = {row['alpha']:.2g}"] = paths["mean teacher"]
            drawn |= {"natural": paths["natural"], "gradient": paths["gradient"]}
            ends = (start, paths["mean teacher"][-1])
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
    return {"groups": groups, "paths": _flattened(drawn)}


def _flattened(drawn: Mapping[str, Tensor], points: int = 200) -> dict[str, list[list[float]]]:
    """The paths in the plane of the natural-gradient path's two leading principal directions: evenly chosen points."""
    natural = drawn["natural"]
    _, _, directions = torch.linalg.svd(natural - natural[0], full_matrices=False)
    flat = {}
    for name, path in drawn.items():
        steps = torch.linspace(0, len(path) - 1, min(points, len(path))).round().long()
        places = (path[steps] - natural[0]) @ directions[:2].T
        flat[name] = [[float(f"{value:.4g}") for value in place] for place in places.tolist()]
    return flat


def table(contents: Sequence[Content]) -> str:
    """A table for each seed, model and momentum: a row for each α."""
    parts = []
    for seed, group in ((content["seed"], group) for content in contents for group in content["groups"]):
        before, after = group["forget_probability"]
        rows = []
        for row, slope in zip(group["rows"], ["", *(f"{slope:.3f}" for slope in group["slopes"])], strict=True):
            known = row | {"slope": slope, "lengths": row["path_length"] / row["gap"]}
            rows.append([text.format(**known) for text in COLUMNS.values()])
        parts += [
            f"Seed {seed}, {group['model']} ({group['parameters']} parameters), momentum "
            f"{group['momentum']}: effective damping {group['rows'][0]['effective_damping']:.4f}, probability of the "
            f"labels to forget {before:.2f} → {after:.2f}.",
            markdown_table(list(COLUMNS), rows),
        ]
    return "\n\n".join(parts)


BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#5F6B76", "#222222"  # colour-blind safe
STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E8EBEE",
    "axes.axisbelow": True, "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.edgecolor": GREY, "legend.frameon": False, "legend.fontsize": 8, "lines.linewidth": 1.5,
    "lines.markersize": 5, "svg.hashsalt": "unteach",
}  # fmt: skip


def _draw_convergence(axes: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Gap as a share of the path length against α, both models, one momentum."""
    alphas = [row["alpha"] for row in groups[0]["rows"]]
    for group, marker, filled in zip(groups, "os", (True, False), strict=True):
        for key, colour, text in (
            ("gap_of_plain_gradient", ORANGE, "gradient descent"),
            ("gap_with_plain_damping", GREEN, "λ instead of λ̄"),
            ("gap", BLUE, "mean teacher"),
        ):
            shares = [row[key] / row["path_length"] for row in group["rows"]]
            face = colour if filled else "white"
            axes.plot(alphas, shares, color=colour, marker=marker, mfc=face, label=f"{text}, {group['model']}")
    lowest = min(group["rows"][-1]["gap"] / group["rows"][-1]["path_length"] for group in groups)
    scale = 0.4 * lowest / (alphas[-1] * math.log(1 / alphas[-1]))
    axes.plot(alphas, [scale * a * math.log(1 / a) for a in alphas], color=GREY, ls="--", lw=1, label="∝ α log(1/α)")
    axes.set(xscale="log", yscale="log", ylim=(3e-6, 4), xlabel="loss weight α  (number of steps T ∝ 1/α)")
    axes.set_ylabel("largest gap to natural-gradient descent,\nas a share of its path length")
    axes.set_title(f"Momentum {groups[0]['momentum']:g}" if groups[0]["momentum"] else "No momentum")
    axes.legend(loc="lower right")


def _draw_paths(axes: Any, paths: Mapping[str, list[list[float]]]) -> None:
    """The flattened paths: those of the largest, a middle and the smallest α."""
    alphas = [name for name in paths if name.startswith("α")]
    axes.plot(*zip(*paths["natural"], strict=True), color=BLACK, lw=6, alpha=0.22, label="natural-gradient descent")
    axes.plot(*zip(*paths["gradient"], strict=True), color=ORANGE, label="gradient descent")
    for name, opacity in zip((alphas[0], alphas[2], alphas[-1]), (0.45, 0.7, 1.0), strict=True):
        axes.plot(*zip(*paths[name], strict=True), color=BLUE, alpha=opacity, label=f"mean teacher, {name}")
    axes.plot(0, 0, marker="o", ls="", color=BLACK, label="θ₀")
    axes.set(xlabel="first principal direction of the path  (network, momentum)", ylabel="second")
    axes.set_title("Paths of the mean teacher close in as α → 0")
    axes.legend()


def _draw_lemma(axes: Any) -> None:
    """The momentum lemma's error term: a constant error, as printed and corrected."""
    setting = {"damping": 1.0, "lr": 1e-3, "momentum": 0.9}
    num_steps, one = 600, torch.ones(1, dtype=torch.float64)
    path = theory.momentum_iteration(one[None] * 0, 0 * one, -one.expand(num_steps, 1), start=0 * one, **setting)
    holds, printed = theory.momentum_bounds(num_steps, start=0.0, error=1.0, **setting)
    for values, colour, text in (
        (holds, GREEN, "bound that holds"),
        (path[:, 0], BLUE, "the iteration"),
        (printed, ORANGE, "bound as printed"),
    ):
        axes.plot(values, color=colour, ls="-" if colour == BLUE else "--", label=text)
    axes.set(xlabel="step t  (μ 0.9, λ 1, η 0.001)", ylabel="‖uₜ − u*‖ in units of ‖ε‖/λ", ylim=(0, 1.2))
    axes.set_title("Momentum lemma under a constant error ε")
    axes.legend()


def figures(benchmark: str, contents: Sequence[Content]) -> list[Figure]:
    """Of the first seed: convergence without and with momentum, the paths, and the momentum lemma."""
    if not contents:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups, file = contents[0]["groups"], io.BytesIO()
    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(2, 2, figsize=(11.5, 8), layout="constrained", facecolor="white")
        for axes, momentum in zip(panels[0], sorted({group["momentum"] for group in groups}), strict=True):
            _draw_convergence(axes, [group for group in groups if group["momentum"] == momentum])
        _draw_paths(panels[1, 0], contents[0]["paths"])
        _draw_lemma(panels[1, 1])
        figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    title = "Does the mean teacher follow natural-gradient descent?"
    return [Figure("theorem", title, title, "", {".svg": file.getvalue()})]


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
