"""Colours, markers and the two forms of a figure: inline SVG in the page's theme, and files on white.

Colours are those of Okabe and Ito, which people with any common colour blindness can tell apart; marker and
dash tell the same without colour.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

INK, MUTED, GRID, SURFACE, FOREIGN = "#1b1f24", "#5a636d", "#e1e5e9", "#ffffff", "#646e78"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), (0, (4, 1, 1, 1, 1, 1)))
THEME = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface", FOREIGN: "--foreign"} | {
    colour: f"--series-{index}" for index, colour in enumerate(PALETTE)
}
SHAPES = {
    "o": "M12 2a4 4 0 1 0 .01 0z",
    "s": "M8.5 2.5h7v7h-7z",
    "^": "M12 1.5l4.5 8.5h-9z",
    "D": "M12 1l5 5-5 5-5-5z",
    "v": "M12 10.5l4.5-8.5h-9z",
    "P": "M10.5 1.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z",
    "X": "M8 4l2-2 2 2 2-2 2 2-2 2 2 2-2 2-2-2-2 2-2-2 2-2z",
    "*": "M12 .5l1.6 3.6 3.9.4-2.9 2.6.8 3.9-3.4-2-3.4 2 .8-3.9-2.9-2.6 3.9-.4z",
}
"""Markers as paths in a box of 24 × 12, for the page's legends."""


@dataclass(frozen=True)
class Look:
    """How one method is drawn everywhere."""

    colour: str
    marker: str
    dash: Any

    @property
    def variable(self) -> str:
        """The page's name for the colour."""
        return f"var({THEME[self.colour]})"

    @property
    def shape(self) -> str:
        """The marker as an SVG path."""
        return SHAPES[self.marker]

    @property
    def dash_array(self) -> str:
        """The dash as SVG writes it."""
        return "" if self.dash == "solid" else " ".join(str(part) for part in self.dash[1])


SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "text.color": INK,
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), MUTED),
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}
"""What all figures share; names are never read as formulas (`$`)."""

OTHERS = Look(FOREIGN, "o", "none")
TARGET, RETRAINED = Look(INK, "*", "solid"), Look(INK, "D", (0, (2, 1.5)))


def look(role: str, index: int) -> Look:
    """The look of a row: ink for references, else colour, marker and dash by number; the first 30 differ in two."""
    if role == "method":
        return Look(PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])
    return TARGET if role == "target" else RETRAINED


@dataclass
class Canvas:
    """What a drawing function gets: axes to draw on, and `tip` to attach a hover text to an artist."""

    axes: Any
    tips: dict[str, str] = field(default_factory=dict)

    def tip(self, artist: Any, text: str) -> None:
        """Show `text` when the pointer rests on `artist` (in the page)."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text


@dataclass(frozen=True)
class Figure:
    """A finished figure: `svg` for the page, `files` (suffix → bytes) to stand alone."""

    name: str
    title: str
    description: str
    svg: str
    files: Mapping[str, bytes]


Key = tuple[str, Look]
"""A legend entry: label and look."""
WIDTH, HEIGHT = 4.0, 2.85
"""Size of a figure in the page, in inches of 72 units."""
TITLE, LEGEND_ROW, FOOTNOTE_ROW = 0.32, 0.18, 0.115
"""What the title and each row of legend and footnotes add to the height of a file."""


def make_figure(
    name: str,
    title: str,
    description: str,
    draw: Callable[[Canvas], None],
    keys: Sequence[Key] = (),
    *,
    lines: bool = True,
    footnotes: Sequence[str] = (),
) -> Figure:
    """Draw once, with title and legend for the files; the page, which has its own, shows the middle.

    Args:
        name: file name and start of all ids; letters, digits, dashes and underscores.
        title: what the figure shows, in a few words.
        description: the figures in words, for those who cannot see it.
        draw: draws on the canvas it is given.
        keys: the legend of the files.
        lines: whether its entries are lines with markers, or markers alone.
        footnotes: small print under it.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Sheet

    with matplotlib.rc_context(SETTINGS | {"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # names in scripts the PNG's font lacks
        small = FOOTNOTE_ROW * -(-len(footnotes) // 2)
        columns = 1 if any(len(label) > 24 for label, _ in keys) else 2
        legend = LEGEND_ROW * -(-len(keys) // columns) + (0.1 if keys else 0) + small + (0.08 if footnotes else 0)
        height = HEIGHT + TITLE + legend
        sheet = Sheet(figsize=(WIDTH, height), facecolor=SURFACE)
        sheet.patch.set_gid("background")
        box = (0.5 / WIDTH, (0.45 + legend) / height, (WIDTH - 0.62) / WIDTH, (HEIGHT - 0.68) / height)
        canvas = Canvas(sheet.add_axes(box, axisbelow=True))
        draw(canvas)
        sheet.text(0.08 / WIDTH, 1 - 0.12 / height, title, fontsize=10, va="top", gid="heading")
        if keys:
            _legend(sheet, keys, lines, columns, bottom=(small + 0.02) / height)
        for index, note in enumerate(footnotes):
            row, column = index // 2, index % 2
            place = ((0.12 + 1.95 * column) / WIDTH, (small + 0.04 - FOOTNOTE_ROW * (row + 1)) / height)
            sheet.text(*place, note, fontsize=5.5, color=MUTED, gid=f"footnote{index}")
        svg, png = io.StringIO(), io.BytesIO()
        FigureCanvasSVG(sheet).print_svg(svg, metadata={"Date": None, "Creator": None})
        sheet.set_dpi(160)
        FigureCanvasAgg(sheet).print_png(png, metadata={"Software": None})
    # coordinates (inside tags, not in text) with two decimals: half the bytes, no visible change
    alone = re.sub(r"<[^<>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag[0]), svg.getvalue())
    view = f"0 {72 * TITLE:g} {72 * WIDTH:g} {72 * HEIGHT:g}"
    files = {".svg": alone.encode(), ".png": png.getvalue()}
    return Figure(name, title, description, inline(alone, name, view, description, canvas.tips), files)


def _legend(sheet: Any, keys: Sequence[Key], lines: bool, columns: int, bottom: float) -> None:
    from matplotlib.lines import Line2D

    handles, labels = [], []
    for label, look in keys:
        face = "none" if look.colour == FOREIGN else look.colour
        dash = look.dash if lines else "none"
        handles.append(Line2D([], [], color=look.colour, marker=look.marker, ls=dash, markersize=5, mfc=face))
        label = label if len(label) <= 44 else label[:43] + "…"
        labels.append(f" {label}" if label.startswith("_") else label)  # matplotlib hides those with an underscore
    sheet.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0.0, bottom),
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=3 if lines else 1,
        labelspacing=0.35,
    ).set_gid("legend")


AROUND = ("heading", "legend", "footnote", "background")
"""Parts of a file's SVG that the page leaves out."""


def inline(svg: str, name: str, view: str, description: str, tips: Mapping[str, str]) -> str:
    """Make matplotlib's SVG part of a page.

    Title, legend and background go (`view` is what remains), colours follow the page's theme, text its font,
    ids become unique in the page, hover texts and a description are added.
    """
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            unwanted = child.tag.endswith(("}metadata", "}style")) or child.get("id", "").startswith(AROUND)
            if unwanted or (child.tag.endswith("}g") and not len(child)):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.split("}")[-1]
        element.text, element.tail = (text if text and text.strip() else None for text in (element.text, element.tail))
        if element.get("id") in tips:
            title = ElementTree.Element("title")
            title.text = tips[element.attrib["id"]]
            element.insert(0, title)
        element.attrib = {
            key.split("}")[-1]: _in_page(value, key.split("}")[-1], name)
            for key, value in element.attrib.items()
            if not (key == "id" and element.tag == "g") and not value.startswith("rotate(-0")
        }
    root.attrib = {"viewBox": view, "role": "img", "aria-label": description}
    return ElementTree.tostring(root, encoding="unicode")


def _in_page(value: str, attribute: str, name: str) -> str:
    """One attribute with theme colours, no font of its own and ids that start with the figure's name."""
    if attribute == "id":
        return f"{name}-{value}"
    if attribute == "href":
        return f"#{name}-{value[1:]}"
    value = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", value)
    value = re.sub(r"font-family:[^;]*;\s*|;?\s*font-family:[^;]*$", "", value)
    for colour, variable in THEME.items():
        value = value.replace(colour, f"var({variable})")
    return value
