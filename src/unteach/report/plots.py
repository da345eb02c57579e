"""The figures of a report: trade-offs, scores over steps, and the training curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unteach.evaluation.metrics import METRICS, RAW_AUC, describe
from unteach.report.load import Published, Run, number
from unteach.report.style import FOREIGN, INK, MUTED, OTHERS, SURFACE, Canvas, Figure, Key, Look, look, make_figure
from unteach.report.tables import MethodRow, Section
from unteach.writing import format_number

POINTS = 150
"""Most points of one training curve; longer ones are averaged over equal stretches of steps."""
SMOOTH = 15
"""Points the running mean of a training curve looks at (fewer for short curves)."""
CURVES = (
    ("nll_forget", "Loss on the forget batches", "negative log-likelihood, nats per token", False),
    ("grad_norm", "Gradient norm", "before clipping", True),
    ("divergence", "Divergence on general text", "between student and teacher", True),
)


def keys_of(methods: Sequence[MethodRow]) -> list[Key]:
    """Legend entries of the given rows."""
    return [(method.label, look(method.role, method.index)) for method in methods]


def tradeoff_figures(section: Section, published: Sequence[Published], suffix: str = "") -> list[Figure]:
    """Utility (knowmem_r) against recital, knowledge and membership leak, as the paper's Figure 3.

    Without PrivLeak the third panel shows the raw AUC. A panel needs something to compare with: a third point.
    """
    if len(section.methods) < 3 and not published:
        return []
    third = RAW_AUC if section.privleak_missing else "privleak"
    figures = []
    for metric in ("verbmem_f", "knowmem_f", third):
        shown = [m for m in section.methods if m.cell(metric).mean is not None and m.cell("knowmem_r").mean is not None]
        if shown:
            figures.append(tradeoff_figure(section.title, metric, shown, published, f"tradeoff-{metric}{suffix}"))
    return figures


def tradeoff_figure(
    benchmark: str,
    metric: str,
    methods: Sequence[MethodRow],
    published: Sequence[Published],
    name: str,
    utility: str = "knowmem_r",
) -> Figure:
    """One trade-off panel: our rows in colour, published points hollow and grey, the paper's single runs small dots."""
    label = {"privleak": "|PrivLeak|", RAW_AUC: "membership AUC"}.get(metric, metric)
    outside = [point for point in published if metric in point.metrics and utility in point.metrics]

    def position(scores: Mapping[str, float]) -> tuple[float, float]:
        return abs(scores[metric]) if metric == "privleak" else scores[metric], scores[utility]

    def values(method: MethodRow) -> list[str]:
        return [format_number(method.cell(key).mean, METRICS[key].decimals) for key in (metric, utility)]

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes
        for point in outside:
            small = {"mfc": FOREIGN, "ms": 2.2} if point.number is None else {"mfc": "none", "ms": 5}
            (dot,) = axes.plot(*position(point.metrics), "o", mec=FOREIGN, alpha=0.7, zorder=2, **small)
            figures = f"{metric} {point.metrics[metric]:g}, {utility} {point.metrics[utility]:g}"
            canvas.tip(dot, f"{point.name} ({point.source}): {figures}")
        for method in methods:
            style, y = look(method.role, method.index), method.cell(utility)
            means = {key: mean for key in (metric, utility) if (mean := method.cell(key).mean) is not None}
            if y.low is not None and y.high is not None and utility != "nll_general":
                bounds = [[abs(means[utility] - y.low)], [abs(y.high - means[utility])]]
                axes.errorbar(*position(means), bounds, color=style.colour, elinewidth=0.9, alpha=0.6, zorder=4)
            for seed in method.results if len(method.members) > 1 else ():
                if metric in seed and utility in seed:
                    axes.plot(*position(seed), style.marker, color=style.colour, ms=3, alpha=0.5, zorder=5)
            size = {"*": 11, "D": 6.5}.get(style.marker, 8)
            (dot,) = axes.plot(
                *position(means), style.marker, color=style.colour, ms=size, mec=SURFACE, mew=0.8, zorder=6
            )
            x_text, y_text = values(method)
            canvas.tip(dot, f"{method.title}: {metric} {x_text}, {utility} {y_text}")
        axes.margins(0.12, 0.16)
        axes.autoscale_view()
        axes.set_xlim(left=-0.04 * axes.get_xlim()[1])  # no metric here is negative, and a small difference looks small
        _spread(axes, utility)
        _indexpoints(axes, {point.number: position(point.metrics) for point in outside if point.number})
        axes.set_title(f"{utility} {METRICS[utility].arrow}  {METRICS[utility].title}")
        axes.set_xlabel("membership AUC (about 0.5: never seen)" if metric == RAW_AUC else f"{label} ← lower is better")
        if metric == RAW_AUC:
            axes.axvline(0.5, color=MUTED, lw=0.8, ls=(0, (2, 2)), zorder=1)

    names = "; ".join(f"{method.label} {' / '.join(values(method))}" for method in methods)
    title = f"Utility against {label}"
    about = f"{title} on {benchmark} ({metric} / {utility}): {names or 'published points only'}"
    foreign = [("published, other harness", OTHERS)] if outside else []
    notes = [f"{point.number}  {point.name}, {point.source}" for point in outside if point.number]
    return make_figure(name, title, about, draw, [*keys_of(methods), *foreign], lines=False, footnotes=notes)


def _indexpoints(axes: Any, places: Mapping[int, tuple[float, float]]) -> None:
    """Write each point's number near it, where it crowds other points and numbers least."""
    scale = 72 / axes.figure.dpi
    around = [(r * math.cos(k * math.pi / 8), r * math.sin(k * math.pi / 8)) for r in (8, 13, 19) for k in range(16)]
    taken = [tuple(scale * axes.transData.transform(place)) for place in places.values()]
    for (index, place), (x, y) in zip(places.items(), list(taken), strict=True):

        def crowding(offset: tuple[float, float], x: float = x, y: float = y) -> float:
            gaps = [math.hypot((x + offset[0] - a) / 1.4, y + offset[1] - b) for a, b in taken]
            return sum(max(0.0, 7 - gap) for gap in gaps) + math.hypot(*offset) / 10

        best = min(around, key=crowding)
        taken.append((x + best[0], y + best[1]))
        far = math.hypot(*best) > 9
        axes.annotate(
            str(index),
            place,
            best,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=6.5,
            color=FOREIGN,
            zorder=3,
            arrowprops={"arrowstyle": "-", "color": FOREIGN, "lw": 0.4, "shrinkA": 3, "shrinkB": 2} if far else None,
        )


def _spread(axes: Any, metric: str) -> None:
    """No upward range so small that noise looks like a difference."""
    least = {"percent": 10.0, "nats per token": 0.2}.get(describe(metric).unit, 0.1)
    low, high = axes.get_ylim()
    if high - low < least:
        bottom = (low + high - least) / 2
        bottom = max(bottom, -0.05 * least) if axes.dataLim.y0 >= 0 else bottom
        axes.set_ylim(bottom, bottom + least)


def evaluation_figures(section: Section, suffix: str = "") -> list[Figure]:
    """Each score over training steps, all runs overlaid; a ring marks the model that was kept.

    Scores that were measured before and after alone are no curve, except where the run was to stop on them.
    """
    runs = [(method, run) for method in section.trained for run in method.runs]
    figures = []
    for metric in METRICS:
        lines = [(method, run, points) for method, run in runs if len(points := run.over_steps(metric)) > 1]
        if any(len(points) > 2 or metric in run.goals for _, run, points in lines):
            figures.append(_over_steps(section, metric, lines, f"steps-{metric}{suffix}"))
    return figures


def _over_steps(
    section: Section, metric: str, lines: Sequence[tuple[MethodRow, Run, list[tuple[int, float]]]], name: str
) -> Figure:
    info, retrained = section.info(metric), section.first("retrained")
    levels = {"retrained": retrained.cell(metric).mean if retrained else None, "chance": info.chance}
    goals = {run.goals[metric] for _, run, _ in lines if metric in run.goals}
    levels["stop rule"] = goals.pop() if len(goals) == 1 else None

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes
        for method, run, points in lines:
            style = look(method.role, method.index)
            (line,) = axes.plot(
                *zip(*points, strict=True), color=style.colour, ls=style.dash, marker=style.marker, ms=4
            )
            canvas.tip(line, f"{method.title}, seed {run.seed}")
            if run.last_step in dict(points):
                axes.plot(run.last_step, dict(points)[run.last_step], "o", mfc="none", mec=style.colour, ms=9, mew=1.1)
        for place, (whose, level) in enumerate(levels.items()):
            if level is not None:
                axes.axhline(level, color=INK, lw=0.9, ls=((0, (2, 2)), (0, (1, 3)), (0, (6, 2)))[place], zorder=1)
                small = {"ha": "left" if place == 2 else "center", "va": "bottom", "fontsize": 7, "color": INK}
                where = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
                axes.annotate(whose, ((0.7, 0.4, 0.0)[place], level), (0, 1), **where, **small)
        axes.margins(y=0.12)
        axes.autoscale_view()
        _spread(axes, metric)
        axes.set_title(f"{metric} {info.arrow}")
        axes.set_xlabel("step")

    places, methods = info.decimals, list({method.label: method for method, _, _ in lines}.values())
    ends = "; ".join(
        f"{m.label} from {format_number(p[0][1], places)} to {format_number(p[-1][1], places)}" for m, _, p in lines
    )
    title = info.title[:1].upper() + info.title[1:]
    return make_figure(name, title, f"{metric} over training steps: {ends}", draw, keys_of(methods))


def training_figures(methods: Sequence[MethodRow]) -> list[Figure]:
    """Loss on the forget batches, gradient norm and divergence over steps, all runs overlaid."""
    figures = []
    for field, title, unit, logarithmic in CURVES:
        runs = [(method.label, look(method.role, method.index), run) for method in methods for run in method.runs]
        curves = [(label, style, run.seed, curve(run.steps, field, positive=logarithmic)) for label, style, run in runs]
        lines = [line for line in curves if line[3]]
        if lines:
            shown = {label: style for label, style, _, _ in lines}
            figures.append(curve_figure(f"training-{field}", title, unit, lines, list(shown.items()), logarithmic))
    return figures


def curve(rows: Sequence[Mapping[str, Any]], field: str, *, positive: bool = False) -> list[tuple[float, float]]:
    """(step, value) pairs of one field without gaps (None, NaN), at most `POINTS` by averaging neighbours."""
    pairs = [(float(row["step"]), value) for row in rows if (value := number(row.get(field))) is not None]
    pairs = [pair for pair in pairs if pair[1] > 0 or not positive]
    stretch = max(1, -(-len(pairs) // POINTS))
    chunks = [pairs[i : i + stretch] for i in range(0, len(pairs), stretch)]
    return [(sum(p[0] for p in chunk) / len(chunk), sum(p[1] for p in chunk) / len(chunk)) for chunk in chunks]


def running_mean(values: Sequence[float]) -> list[float]:
    """The mean over a window around each point: a tenth of the curve, `SMOOTH` at most, cut at the ends."""
    half = min(SMOOTH, len(values) // 10) // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def curve_figure(
    name: str,
    title: str,
    unit: str,
    lines: Sequence[tuple[str, Look, int | None, list[tuple[float, float]]]],
    keys: Sequence[Key],
    logarithmic: bool,
    over: str = "step",
) -> Figure:
    """Curves over steps, or over what ``over`` says, one per run, those of a method in one look."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = [value for _, _, _, points in lines for _, value in points]
    log = logarithmic and min(values) > 0 and max(values) / min(values) > 5

    def draw(canvas: Canvas) -> None:
        axes = canvas.axes
        for index, (label, style, seed, points) in enumerate(lines):
            every = max(len(points) // 6, 1)
            steps = [step for step, _ in points]
            if len(points) > SMOOTH:
                axes.plot(steps, [value for _, value in points], color=style.colour, lw=0.6, alpha=0.3)
            marks = {"marker": style.marker, "ms": 4, "markevery": (index * every // 4 % every, every)}
            means = running_mean([value for _, value in points])
            (line,) = axes.plot(steps, means, color=style.colour, ls=style.dash, lw=1.4, **marks)
            canvas.tip(line, f"{label}, seed {seed}" if seed is not None else label)
        if log:  # with plain numbers; on a narrow axis the steps between are labelled too
            narrow = math.log10(max(values) / min(values)) < 2.2
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=9))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        axes.margins(y=0.08)
        axes.set_title(unit)
        axes.set_xlabel(over)

    ends = "; ".join(f"{label} from {p[0][1]:.3g} to {p[-1][1]:.3g}" for label, _, _, p in lines)
    return make_figure(name, title, f"{title} over {'training steps' if over == 'step' else over}: {ends}", draw, keys)
