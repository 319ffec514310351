"""A table as a heat map: a square for each number, rows down, headings across; darker is the larger number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fatbench.report.figures.panel_kinds import wrap_to_width
from fatbench.report.tables.sheet import Sheet, varying, with_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SQUARE = 0.3  # inches
LETTER = 0.075  # inches, of the labels
LEAST = 3.0  # inches, of a figure


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
    image = axes.imshow(means, cmap="cividis_r", aspect="auto")
    low, high = image.get_clim()
    for i, row in enumerate(entries):
        for j, one in enumerate(row):
            if one.mean is not None:
                dark = means[i][j] > (low + high) / 2
                colour = ("#bbbbbb" if dark else "#777777") if one.doubts else "white" if dark else "black"
                axes.text(j, i, f"{means[i][j]:.1f}", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(heads)), heads, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    if paper_width is None:
        said = ", ".join([sheet.name, *constant, *filter(None, [sheet.label])])
        figure.supxlabel(wrap_to_width(said, width, 7), fontsize=7)
    return figure
