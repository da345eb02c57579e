"""The section "Does it hold?": what each attack found (`RUN/audits/*.json`), in a line and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unteach.report.load import Run, number
from unteach.report.style import RETRAINED, TARGET, Canvas, Figure, Key, Look, look, make_figure
from unteach.report.tables import MethodRow
from unteach.writing import format_number

DECIMALS = {"percent": 1, "auc": 2}
AXES = {"percent": "percent", "auc": "membership AUC (about 0.5: never seen)"}
Place = float | str


@dataclass(frozen=True)
class AuditView:
    """What the page shows of one attack."""

    title: str
    held: bool | None
    note: str
    protocol: str
    figure: Figure | None

    @property
    def mark(self) -> str:
        """As in the verdict."""
        return {True: "✓", False: "✗", None: "–"}[self.held]


@dataclass(frozen=True)
class AuditedRun:
    """A run that was audited."""

    method: MethodRow
    run: Run
    views: tuple[AuditView, ...]
    keys: tuple[Key, ...]


def audited_runs(methods: Sequence[MethodRow]) -> list[AuditedRun]:
    """All runs with audits, in the order of the report."""
    found = list[AuditedRun]()
    for method in methods:
        for run in method.runs:
            if not run.audits:
                continue
            place = len(found)
            style = look(method.role, method.index)
            views = tuple(_view(content, style, f"audit-{place}-{n}") for n, content in enumerate(run.audits))
            control = next((str(content.get("compared_with") or "") for content in run.audits), "")
            keys = (("before", TARGET), ("this model", style), (control or "control", RETRAINED))
            found.append(AuditedRun(method, run, views, keys))
    return found


def _view(content: Mapping[str, Any], style: Look, name: str) -> AuditView:
    held = content.get("held")
    return AuditView(
        title=str(content.get("title") or content.get("attack") or "attack"),
        held=held if isinstance(held, bool) else None,
        note=str(content.get("note") or ""),
        protocol=str(content.get("protocol") or ""),
        figure=_picture(content, style, name),
    )


def _entries(content: Mapping[str, Any], part: str) -> list[Mapping[str, Any]]:
    """The figures of a model, those that can be drawn."""
    given = content.get(part)
    rows = [row for row in given if isinstance(row, Mapping)] if isinstance(given, list) else []
    return [row for row in rows if number(row.get("value")) is not None and row.get("at") is not None]


def _picture(content: Mapping[str, Any], style: Look, name: str) -> Figure | None:
    """Before, this model and the control at each place of one line, see `_shown_line`."""
    after = _entries(content, "after")
    if not after:
        return None
    known = {str(row.get("line")) for row in after}
    beyond = [row for row in _entries(content, "beyond") if str(row.get("line")) in known]
    deciding = {row.get("line") for row in beyond if row.get("held") is content.get("held")}
    line = _shown_line([row for row in beyond if row.get("line") in deciding] or after)
    parts = {"before": TARGET, "after": style, "control": RETRAINED}
    rows = {part: [row for row in _entries(content, part) if str(row.get("line")) == line] for part in parts}
    places = list(dict.fromkeys(_label(row["at"]) for row in rows["after"]))
    named = any(isinstance(row["at"], str) for row in rows["after"])
    unit = str(rows["after"][0].get("unit") or "percent")

    def draw(canvas: Canvas) -> None:
        for order, (part, drawn) in enumerate(parts.items()):
            _dots(
                canvas,
                rows[part],
                places,
                drawn,
                part,
                unit,
                named=named,
                shift=(0.12 if named else 0.05) * (order - 1),
            )
        axes, low, high = canvas.axes, 0.0, 1.0 if unit == "auc" else 100.0
        if named:  # names stand above their dots: they may be long
            for place, label in enumerate(places):
                axes.text(low, place - 0.28, label, fontsize=7, va="bottom")
            axes.set_yticks([])
            axes.set_ylim(len(places) - 0.4, -0.75)
            axes.set_xlim(low - 0.03 * high, 1.03 * high)
            axes.set_xlabel(AXES.get(unit, unit))
            axes.set_title(line)
        else:
            axes.set_xticks(range(len(places)), places)
            axes.set_xlim(-0.4, len(places) - 0.6)
            axes.set_ylim(low - 0.04 * high, 1.04 * high)
            axes.set_xlabel(str(content.get("over") or ""))
            axes.set_title(f"{line}, {unit}")

    keys = [("before", TARGET), ("this model", style), (str(content.get("compared_with") or "control"), RETRAINED)]
    title = str(content.get("title") or content.get("attack") or "attack")
    return make_figure(name, title, f"{title}: {content.get('note') or line}", draw, keys, lines=not named)


def _shown_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The line along which most changes, as what is learned again does with steps; else that of the largest value."""
    margins = {"auc": 0.1}
    sizes: dict[str, list[float]] = {}
    for row in rows:
        value = (number(row["value"]) or 0.0) / margins.get(str(row.get("unit")), 10.0)
        sizes.setdefault(str(row.get("line")), []).append(value)
    moved = {line: max(values) - min(values) for line, values in sizes.items()}
    most = max(moved, key=moved.__getitem__)
    return most if moved[most] > 1 else max(sizes, key=lambda line: max(map(abs, sizes[line])))


def _dots(
    canvas: Canvas, rows: Sequence[Mapping[str, Any]], places: Sequence[str], style: Look, part: str, unit: str, *,
    named: bool, shift: float,
) -> None:  # fmt: skip
    """The figures of one model with their intervals, joined where the places are in order."""
    known = [row for row in rows if _label(row["at"]) in places]
    where = [places.index(_label(row["at"])) + shift for row in known]
    values = [number(row["value"]) or 0.0 for row in known]
    for place, value, row in zip(where, values, known, strict=True):
        low, high = number(row.get("low")), number(row.get("high"))
        if low is not None and high is not None:
            line = ([low, high], [place, place]) if named else ([place, place], [low, high])
            canvas.axes.plot(*line, color=style.colour, lw=1, alpha=0.6)
        (dot,) = canvas.axes.plot(
            *((value, place) if named else (place, value)), style.marker, color=style.colour, ms=5
        )
        canvas.tip(dot, f"{part}, {_label(row['at'])}: {format_number(value, DECIMALS.get(unit, 1))}")
    if not named and len(known) > 1:
        canvas.axes.plot(where, values, color=style.colour, ls=style.dash, lw=1.2)


def _label(place: Any) -> str:
    return f"{place:g}" if isinstance(place, int | float) else str(place)
