"""Draw one panel of a figure, a function for each kind: curves, bars, rasters, matrices, heat maps, images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench.report.figures import artifacts, heat_map
from fatbench.report.figures.series import BANDS, Line, Panel, Plot
from fatbench.report.figures.styles import (
    HATCHES,
    STYLES,
    Names,
    Style,
    axis_label,
    group,
    line_settings,
    wrap_to_width,
)
from fatbench.suite.model import Key
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Styles = Mapping[str, Style]
WIDE, HIGH = 2.6, 2.1  # inches of a panel
LETTERS = 20  # of an inch of tick labels
FEW = 4  # points of a line: fewer have whiskers in place of a band
FAR = 0.75  # of the range of all other lines: a line that is farther below would flatten them
INK = "#222222"  # of seeds, whiskers and published numbers
CLASSES = ("x", "o")  # marks of points of class 0 and of class 1
# of a figure of boundaries: the clients' points, and what an attack makes of them
POINTS: dict[str, dict[str, Any]] = {
    "points": {"s": 6, "alpha": 0.45, "linewidths": 0.6},
    "adversarial": {"s": 2, "alpha": 0.6, "linewidths": 0.4, "color": INK},
}


def _display_value(line: Line, value: float) -> float:
    return 100 * value if line.source.fraction else value


def _last_number(line: Line, name: Names) -> str:
    """The label of a line or a bar: its name, then its name again and its last number, for a page to show."""
    last = line.points[-1]
    spread = "" if last.std is None else f" ±{_display_value(line, last.std):.3g}"
    round = f", round {last.round:g}" * (last.round >= 1)
    said = name(line) or ", ".join(line.key.values()) or line.heading
    return f"{name(line)}\n{said}: {_display_value(line, last.mean):.4g}{spread}{round}"


def curves(panel: Panel, axes: Axes, name: Names, styles: Styles) -> None:
    """Draw means over rounds or radii of an attack; a few lines get a band of one standard deviation over seeds."""
    banded = len(panel.lines) <= BANDS
    for line in panel.lines:
        if not line.points:
            continue
        style = styles[name(line)]
        rounds = [point.round for point in line.points]
        means = [_display_value(line, point.mean) for point in line.points]
        spreads = [_display_value(line, point.std or 0.0) for point in line.points]
        label = _last_number(line, name)
        if len(rounds) < FEW:
            marked = {**line_settings(style), "marker": line_settings(style)["marker"] or "o"}
            whiskers = spreads if any(spreads) else None
            axes.errorbar(rounds, means, yerr=whiskers, elinewidth=0.8, **marked)[0].set_label(label)
            continue
        axes.plot(rounds, means, markevery=max(1, len(rounds) // 8), label=label, **line_settings(style))
        if any(spreads) and banded:
            low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            axes.fill_between(rounds, low, high, color=style.colour, alpha=0.18, linewidth=0, label=label)
    radii = {point.round: point.radius for line in panel.lines for point in line.points if point.radius}
    swept = {point.swept for line in panel.lines for point in line.points}
    drawn_rounds = {point.round for line in panel.lines for point in line.points}
    if radii:
        axes.set_xlabel("radius of the attack" if swept == {"eps"} else ", ".join(sorted(swept)))
        axes.set_xticks(sorted(radii), [radii[radius] for radius in sorted(radii)])
        return
    axes.set_xlabel("round")
    if len(drawn_rounds) == 1:
        axes.set_xticks([*drawn_rounds])
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def leave_out_below(panel: Panel, axes: Axes, name: Names, styles: Styles) -> None:
    """End the axis above a line that alone lies far below all others, and write its last number at the edge."""
    means = [(line, [_display_value(line, point.mean) for point in line.points]) for line in panel.lines if line.points]
    lowest, *others = sorted(means, key=lambda each: max(each[1]))
    if len(others) < FEW:
        return
    low, high = min(min(values) for _, values in others), max(max(values) for _, values in others)
    if low - max(lowest[1]) < FAR * (high - low):
        return
    axes.set_ylim(bottom=low - 0.3 * (high - low))
    text = f"{name(lowest[0])}: {lowest[1][-1]:.3g} \N{DOWNWARDS ARROW}"
    colour = styles[name(lowest[0])].colour
    axes.annotate(text, (0.99, 0.02), xycoords="axes fraction", ha="right", va="bottom", fontsize=6, color=colour)


def bars(panel: Panel, axes: Axes, name: Names, styles: Styles) -> None:
    """Draw groups of bars at the last round with a number, a dot for each seed, and the paper's number in black.

    A group is an index, else a label of the first axis of `lines`, else a heading. Where the names of groups are too
    long to stand side by side, the bars lie.
    """
    lines = sorted((line for line in panel.lines if line.points or line.published), key=lambda line: line.index or 0)
    groups = list(dict.fromkeys(group(line) for line in lines))
    names = list(dict.fromkeys(name(line) for line in lines))
    width, is_flat = 0.8 / max(1, len(names)), is_horizontal(panel)
    bar_of, error = (axes.barh, "xerr") if is_flat else (axes.bar, "yerr")
    for line in lines:
        style, position = styles[name(line)], groups.index(group(line)) - 0.4 + (names.index(name(line)) + 0.5) * width
        if line.points:
            last_point = line.points[-1]
            whisker: dict[str, Any] = {} if last_point.std is None else {error: _display_value(line, last_point.std)}
            if last_point.interval is not None:
                low, high = last_point.interval
                sides = (last_point.mean - low, high - last_point.mean)
                whisker = {error: [[max(0.0, _display_value(line, side))] for side in sides]}
            (bar,) = bar_of(
                position, _display_value(line, last_point.mean), width * 0.94, color=style.colour,
                hatch=HATCHES[style.style], edgecolor="white", linewidth=0,
                error_kw={"elinewidth": 0.7, "ecolor": INK}, **whisker,
            )  # fmt: skip
            bar.set_label(_last_number(line, name))
            seeds = [_display_value(line, value) for value in last_point.values]
            if len(seeds) > 1:  # a dot for each, side by side in their order
                beside = [position + (i - (len(seeds) - 1) / 2) * 0.5 * width / len(seeds) for i in range(len(seeds))]
                dots = (seeds, beside) if is_flat else (beside, seeds)
                axes.scatter(*dots, s=5, facecolors="white", edgecolors=INK, linewidths=0.5, zorder=3)
        if line.published is not None:
            low, high = (_display_value(line, value) for value in line.published)
            ends = ([low, high], [position, position]) if is_flat else ([position, position], [low, high])
            axes.plot(*ends, color="black", linewidth=2.2, marker="|" if is_flat else "_", markersize=6, zorder=4)
    if is_flat:
        axes.set_yticks(range(len(groups)), groups)
        axes.set_ylim(len(groups) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        return
    axes.set_xticks(range(len(groups)), groups)
    room = LETTERS * axes.get_window_extent().width / axes.figure.dpi  # letters beside each other
    if max(map(len, groups), default=0) * len(groups) > room:  # side by side they would run into each other
        axes.tick_params(axis="x", rotation=90 if 4 * len(groups) > room else 30)
        for label in axes.get_xticklabels():
            label.set(ha="right", va="center" if 4 * len(groups) > room else "top", rotation_mode="anchor")
    if any(line.index is not None for line in lines):
        axes.set_xlabel(lines[0].source.index_noun)
    elif lines and lines[0].key:
        axes.set_xlabel(next(iter(lines[0].key)))
    axes.grid(axis="x", visible=False)


def is_horizontal(panel: Panel) -> bool:
    """Whether the bars of a panel are horizontal, since the names of their groups do not fit side by side."""
    groups = {group(line) for line in panel.lines if line.points or line.published}
    return max(map(len, groups), default=0) * len(groups) > LETTERS * WIDE


def raster(panel: Panel, axes: Axes, name: Names, styles: Styles) -> None:
    """Draw a row for each client or class and a column for each round, darker for more; the sum stands at the right.

    Of the first seed; the sum is the mean over seeds. name and styles are not needed: the rows say their index.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    lines = sorted((line for line in panel.lines if line.points), key=lambda line: line.index or 0)
    if not lines:
        return
    rounds = sorted({point.round for line in lines for point in line.points})
    seed = min(seed for line in lines for point in line.points for seed in point.seeds)
    matrix = np.full((len(lines), len(rounds)), np.nan)
    for row, line in enumerate(lines):
        for point in line.points:
            if seed in point.seeds:
                matrix[row, rounds.index(point.round)] = point.values[point.seeds.index(seed)]
    image = axes.imshow(
        matrix, aspect="auto", interpolation="nearest", cmap=colormaps["Blues"].with_extremes(bad="#EEEEEE"), vmin=0,
        extent=(rounds[0] - 0.5, rounds[-1] + 0.5, len(lines) - 0.5, -0.5),
    )  # fmt: skip
    image.set_clim(0, max(float(np.nanmax(matrix)), 1e-12))  # a range of no width has no colours
    axes.set_yticks(range(len(lines)), [line.place for line in lines])
    axes.hlines(np.arange(len(lines) - 1) + 0.5, rounds[0] - 0.5, rounds[-1] + 0.5, color="white", linewidth=1)
    axes.grid(visible=False)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for row, line in enumerate(lines):
        total, at = f"{math.fsum(point.mean for point in line.points):.3g}", ("axes fraction", "data")
        axes.annotate(total, (1.02, row), xycoords=at, va="center", fontsize=7, color=INK)


def matrix(panel: Panel, axes: Axes, name: Names, styles: Styles) -> None:
    """Draw a number for each line (or client) and heading: lines downward, headings or attacked models across."""
    names = [", ".join([*line.key.values(), *([f"client {line.place}"] if line.place else [])]) for line in panel.lines]
    rows = list(dict.fromkeys(names))
    columns = list(dict.fromkeys(line.heading for line in panel.lines))
    values = np.full((len(rows), len(columns)), np.nan)
    for row_name, line in zip(names, panel.lines, strict=True):
        if line.points:
            values[rows.index(row_name), columns.index(line.heading)] = _display_value(line, line.points[-1].mean)
    if np.isnan(values).all():
        axes.set_axis_off()
        return
    low, high = (0, 100) if panel.lines[0].source.fraction else (np.nanmin(values), np.nanmax(values))
    heat_map.squares(axes, values, rows, columns, ".1f" if values.size <= 100 else "", (low, high))
    axes.figure.colorbar(axes.images[0], ax=axes, shrink=0.8).set_label("per cent" if high == 100 else "")
    for label in axes.get_xticklabels():
        label.set(rotation=30, ha="right", rotation_mode="anchor")


def tensor(plot: Plot, panel: Panel, line: Line, names: Key, axes: Axes, files: Path | None) -> list[AxesImage]:
    """Draw a tensor of the last round that kept one, of the first seed that has it; return its heat map, if any."""
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    named_axes = {*names, SERIES, *plot.figure.conditions.get(line.heading, ())}  # a heading of one point says which
    key = [(axis, label) for axis, label in panel.key.items() if axis not in named_axes]
    title = ", ".join([*(axis_label(*one) for one in [*key, *line.key.items()]), line.heading])
    metric = line.source.metric
    latest = None if files is None else artifacts.latest([files / cell for cell in line.cells], metric)
    if latest is None:
        axes.set_title(wrap_to_width(title, WIDE, 8))
        _draw_message(axes, "no file on this machine")
        return []
    round, tensors = latest
    tensor, rows = tensors[metric], artifacts.clients(metric, tensors)
    axes.set_title(wrap_to_width(f"{title}, round {round}", WIDE, 8))
    if plot.figure.kind == "images" and artifacts.is_images(tensor):
        image_sheet(axes, tensor, rows)
    elif plot.figure.kind == "heatmap" and artifacts.is_matrix(tensor):
        matrix = artifacts.flat(tensor)
        columns = rows if len(rows) == matrix.shape[1] else list(map(str, range(matrix.shape[1])))
        image = heat_map.squares(axes, matrix, rows, columns)
        axes.figure.colorbar(image, ax=axes, shrink=0.8)
        return [image]
    else:
        _draw_message(axes, f"{tensor.dtype} {tensor.shape}: not for {plot.figure.kind}")
    return []


def boundaries(panel: Panel, panel_title: str, axes: Axes, name: Names, styles: Styles, files: Path | None) -> None:
    """Draw the zero contour of margins (a, a) over the unit square, and the points NAME_points (n, 3) behind them.

    Small dark marks are NAME_adversarial (n, 3), where an attack moves these points. Of the last round that kept a
    margin and the first seed that has it; x along, y upwards, the first row at y = 1.
    """
    axes.grid(visible=False)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="x", ylabel="y")
    rounds = set()
    for line in panel.lines:
        metric, style = line.source.metric, styles[name(line)]
        latest = None if files is None else artifacts.latest([files / cell for cell in line.cells], metric)
        if latest is None or latest[1][metric].ndim != 2:
            continue
        round, tensors = latest
        rounds.add(round)
        for label, marker in enumerate(CLASSES):
            for kind, mark_settings in POINTS.items():
                if (points := tensors.get(f"{metric}_{kind}")) is not None:
                    x, y, _ = points[points[:, 2] == label].T
                    axes.scatter(x, y, marker=marker, **{"color": style.colour, **mark_settings})
        if tensors[metric].min() < 0 < tensors[metric].max():  # else there is no boundary in the square
            axes.contour(
                tensors[metric], [0], origin="upper", extent=(0, 1, 0, 1), colors=[style.colour], linewidths=1.6,
                linestyles=[STYLES[style.style]], zorder=3,
            )  # fmt: skip
    if not rounds:
        _draw_message(axes, "no file on this machine")
    said = [panel_title, *(f"round {round}" for round in sorted(rounds))]
    axes.set_title(wrap_to_width(", ".join(filter(None, said)), WIDE, 8))


def _draw_message(axes: Axes, message: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", color="#888888")


def image_sheet(axes: Axes, tensor: Any, rows: Sequence[str]) -> None:
    """Images (a, b, ch, H, W), or (n, ch, H, W) in rows of ten, with their indices."""
    sheet, (row_count, column_count), (tile_height, tile_width) = artifacts.tiled(tensor)
    axes.imshow(sheet, interpolation="nearest")
    labels = rows if tensor.ndim == 5 else [str(row * column_count) for row in range(row_count)]
    middle = artifacts.GAP / 2 + 0.5  # of an image, less the gap behind it; a pixel's own middle is a whole number
    axes.set_yticks([(row + 0.5) * tile_height - middle for row in range(row_count)], labels)
    across = range(column_count)
    axes.set_xticks([(column + 0.5) * tile_width - middle for column in across], map(str, across))
    axes.set_ylabel("client" if tensor.ndim == 5 else "")
    axes.tick_params(length=0)
