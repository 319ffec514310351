"""Styles of lines, bars and markers: colours that the colour-blind can distinguish, and styles that print in grey."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fatbench.report.figures.series import Line, Panel, Plot
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from matplotlib.artist import Artist

# Okabe and Ito's palette less yellow, which is too light on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Tol's muted palette less its sand, and black: for more lines than that has colours
MUTED = (
    "#332288", "#CC6677", "#117733", "#AA4499", "#999933", "#88CCEE", "#000000", "#882255", "#44AA99", "#777777"
)  # fmt: skip
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
GREY = "#666666"
MANY = 14  # lines that colours and styles distinguish; more are coloured in the order of their index


@dataclass(frozen=True)
class Style:
    """The style of a line or a bar."""

    colour: Any
    style: int  # which of STYLES, or of HATCHES
    marker: int | None = None
    width: float = 1.3


Names = Callable[[Line], str]
Part = Callable[[Line], str]


def styles_of(plot: Plot, panels: Sequence[Panel]) -> tuple[Names, dict[str, Style], dict[str, Style]]:
    """(line -> its name, name -> style, legend) of a page: a name holds the labels, heading and index that vary.

    Where one of these varies, or a few of their combinations are there, each has a colour and a style. Where more vary,
    the first is the colour, the second the style, the third the marker, and the legend explains each for itself.
    """
    lines = [line for panel in panels for line in panel.lines]
    lines = [line for line in lines if line.points or line.published or line.source.stage == "artifact"]
    labelled = [(part, list(dict.fromkeys(map(part, lines)))) for part in _varying_parts(plot, lines)]
    varying = [(part, labels) for part, labels in labelled if len(labels) > 1]

    def name(line: Line) -> str:
        return ", ".join(part(line) for part, _ in varying)

    names = list(dict.fromkeys(map(name, lines)))
    has_few_names = len(names) < min(8, math.prod(len(labels) for _, labels in varying))  # of all combinations
    if len(varying) == 1 or has_few_names:
        labels = varying[0][1] if len(varying) == 1 else names
        style_by_label = {label: _style_of(i, len(labels)) for i, label in enumerate(labels)}
        steps = [round(i * (len(labels) - 1) / (MANY - 1)) for i in range(MANY)]
        explained = labels if len(labels) <= 2 * MANY else [labels[step] for step in steps]
        return name, style_by_label, {label: style_by_label[label] for label in explained}
    palette = COLOURS if not varying or len(varying[0][1]) <= len(COLOURS) else MUTED
    style_by_name = {
        name(line): _style_at([labels.index(part(line)) for part, labels in varying] or [0], palette) for line in lines
    }
    looks = (
        lambda i: _style_at([i], palette),
        lambda i: Style(GREY, i % 7),
        lambda i: Style(GREY, 0, i % len(MARKERS)),
    )
    legend = {
        label: look(i) for look, (_, labels) in zip(looks, varying, strict=False) for i, label in enumerate(labels)
    }
    return name, style_by_name, legend


def _varying_parts(plot: Plot, lines: Sequence[Line]) -> list[Part]:
    """The parts of a line's name that may vary within a panel and do not stand beneath its bars."""
    bars = plot.figure.kind == "bars"
    beneath = bars and not any(line.index is not None for line in lines)
    axes = list(dict.fromkeys(axis for line in lines for axis in line.key))

    def of(axis: str) -> Part:
        return lambda line: axis_label(axis, line.key.get(axis, "")) + " (own)" * (line.own and axis == axes[-1])

    # the first axis stands beneath the bars; without axes the heading does
    parts = [of(axis) for axis in (axes[1:] if beneath else axes)]
    if SERIES not in plot.figure.panels and not (beneath and not axes):
        parts.append(lambda line: line.heading)
    if not bars:
        parts.append(lambda line: f"{line.source.index_noun} {line.place}" if line.place else "")
    return parts


def axis_label(axis: str, label: str) -> str:
    """A label, with the name of its axis before a number: "alpha 1/6"."""
    return f"{axis} {label}" if label[:1].isdigit() else label


def _style_of(position: int, label_count: int) -> Style:
    """The style of one of several labels: a colour and a line style; of very many labels, a colour in their order."""
    if label_count > MANY:
        from matplotlib import colormaps

        return Style(colormaps["viridis"](0.9 * (position / (label_count - 1))), 0, None, 0.9)
    if len(COLOURS) < label_count <= len(MUTED):
        return Style(MUTED[position], position % 7, position % 7)
    palette_round = position // len(COLOURS)  # the eighth has the colour of the first and another style
    return Style(COLOURS[position % 7], (position + palette_round) % 7, (position + palette_round) % 7)


def _style_at(positions: Sequence[int], palette: Sequence[str]) -> Style:
    """The style at these positions among the labels of each varying part; a colour comes again with another marker."""
    colour, *others = positions
    style, marker, *_ = (*others, *(0, colour + colour // len(palette))[len(others) :])
    return Style(palette[colour % len(palette)], style % 7, marker % 7)


def group(line: Line) -> str:
    """The name beneath a bar: its index, else the label of the first axis of `lines`, else its heading."""
    if line.index is not None:
        return line.place
    return next((f"{label} (own)" if line.own else label for label in line.key.values()), line.heading)


def wrap_to_width(text: str, width: float, size: float, weight: str = "normal") -> str:
    """Break text into lines that fit `width` inches as they are drawn; a longer word fills a line alone."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    face, room = FontProperties(size=size, weight=weight), (width - 0.2) * 72
    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_to_path.get_text_width_height_descent(longer, face, False)[0] <= room:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def handle(kind: str, style: Style) -> Artist:
    """The entry of a style in the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if kind == "bars":
        return Patch(facecolor=style.colour, hatch=HATCHES[style.style], edgecolor="white")
    return Line2D([], [], **{**line_settings(style), **({"marker": None} if kind == "boundaries" else {})})


def line_settings(style: Style) -> dict[str, Any]:
    """matplotlib's settings of a line."""
    marker = None if style.marker is None else MARKERS[style.marker]
    return {
        "color": style.colour, "linestyle": STYLES[style.style], "linewidth": style.width, "marker": marker,
        "markersize": 3, "markeredgewidth": 0,
    }  # fmt: skip
