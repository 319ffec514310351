"""Heat maps: a square for each number, rows down, columns across; of a table darker is the larger number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench.report.figures.styles import wrap_to_width
from fatbench.report.tables.sheet import Sheet, varying, with_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

SQUARE = 0.3  # inches
LETTER = 0.075  # inches, of the labels
LEAST = 3.0  # inches, of a figure
NAMED = 20  # rows and columns that have a label each


def squares(
    axes: Axes, values: Any, rows: Sequence[str], columns: Sequence[str], digits: str = "",
    limits: tuple[float, float] | None = None, colours: str = "cividis",
) -> AxesImage:  # fmt: skip
    """Draw a matrix, grey where there is no number. digits: format of the numbers in the squares; empty: none."""
    from matplotlib import colormaps

    values, colour_map = np.asarray(values, float), colormaps[colours].with_extremes(bad="#D9DCE1")
    image = axes.imshow(values, cmap=colour_map, interpolation="nearest", clim=limits)
    axes.grid(visible=False)
    if digits or max(values.shape) <= NAMED:
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks(range(len(columns)), columns)
    for (row, column), value in np.ndenumerate(values):
        if digits and np.isfinite(value):
            ink = "white" if sum(image.to_rgba(value)[:3]) < 1.5 else "black"
            axes.text(column, row, f"{value:{digits}}", ha="center", va="center", color=ink, fontsize=6)
    return image


def figure_of(sheet: Sheet, paper_width: float | None = None) -> Figure:
    """The measured means of a table, printed in their squares; one scale for all.

    Blank where nothing is measured; grey letters where the number is in doubt. paper_width: inches.
    """
    from matplotlib.figure import Figure

    sheet, constant = varying(with_numbers(sheet)[0])
    places = [
        (g, c) for g in range(len(sheet.groups)) for c in range(len(sheet.columns))
        if any(row.values[g][c].mean is not None for row in sheet.rows)
    ]  # fmt: skip
    wide = len(sheet.columns) > 1 or not sheet.across
    labels = ([sheet.groups[g].label, sheet.columns[c].label * wide] for g, c in places)
    heads = [": ".join(filter(None, label)) for label in labels]
    names = [", ".join(filter(None, row.labels(sheet.axes))) for row in sheet.rows]
    entries = [[row.values[g][c] for g, c in places] for row in sheet.rows]
    factors = [100 if sheet.columns[c].unit == "percent" else 1 for _, c in places]
    means = [
        [float("nan") if one.mean is None else one.mean * by for one, by in zip(row, factors, strict=True)]
        for row in entries
    ]
    width = paper_width or max(LEAST, LETTER * max(map(len, names)) + 1.5 * SQUARE * len(heads))
    height = SQUARE * len(names) + 0.75 * LETTER * max(map(len, heads)) + 0.5
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    squares(axes, means, names, heads, ".1f", colours="cividis_r").axes.set_aspect("auto")
    axes.tick_params(length=0)
    for label in axes.get_xticklabels():
        label.set(rotation=35, ha="right", rotation_mode="anchor")
    doubts = [one.doubts for row in entries for one in row if one.mean is not None]
    for text in [text for text, doubted in zip(axes.texts, doubts, strict=True) if doubted]:
        text.set_color("#bbbbbb" if text.get_color() == "white" else "#777777")
    if paper_width is None:
        said = ", ".join([sheet.name, *constant, *filter(None, [sheet.label])])
        figure.supxlabel(wrap_to_width(said, width, 7), fontsize=7)
    return figure
