"""Figures as files: what `series` found, drawn with matplotlib. The same numbers give the same bytes.

A figure of many panels becomes several pages, a file each: the leading axes of `panels` choose the page until a page
holds no more than MOST panels. Lines differ in colour and in style, in colours that the colour-blind tell apart.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import MachineError, SpecError
from fatbench.report.series import Line, Panel, Plot, index_of
from fatbench.suite.model import Key
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FORMATS = ("pdf", "svg", "png")
MOST = 12  # panels of a page
WIDE, HIGH = 2.6, 2.1  # inches of a panel
# Okabe and Ito's palette less yellow, which is too light on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")
MANY = 14  # lines that colours and styles tell apart; more are coloured in the order of their index
FIXED: dict[Any, Any] = {  # whatever the reader's own matplotlibrc says
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.5,
    "axes.axisbelow": True, "lines.linewidth": 1.3, "hatch.linewidth": 0.5, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "fatbench", "figure.dpi": 100, "savefig.dpi": 200, "savefig.bbox": None, "text.usetex": False,
}  # fmt: skip


def draw(plots: Sequence[Plot], folder: Path, format: str, files: Path | None = None) -> list[Path]:
    """Write the plots into a folder: the files, in order. files: where the cells' own folders with artifacts are.

    MachineError: matplotlib is not installed; SpecError: the folder cannot be written.
    """
    try:
        from matplotlib import rc_context, style
    except ImportError:
        raise MachineError("plots need matplotlib: pip install 'fatbench[plots]'") from None
    written = []
    for plot in plots:
        for names, panels in _pages(plot):
            file = folder / f"{_file_name(plot, names)}.{format}"
            with style.context("default"), rc_context(FIXED):
                figure = _page(plot, names, panels, files)
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    figure.savefig(file, format=format, metadata=_metadata(plot, names, format))
                except OSError as error:
                    raise SpecError(f"-o {folder}: {error.strerror}") from None
            written.append(file)
    return written


def _pages(plot: Plot) -> list[tuple[Key, list[Panel]]]:
    """(labels that all panels of the page share by the cut, its panels)."""
    axes = plot.figure.panels
    for leading in range(len(axes) + 1):
        pages: dict[tuple[tuple[str, str], ...], list[Panel]] = {}
        for panel in plot.panels:
            pages.setdefault(tuple((axis, panel.key[axis]) for axis in axes[:leading]), []).append(panel)
        if max(len(panels) for panels in pages.values()) <= MOST:
            break
    return [(dict(names), panels) for names, panels in pages.items()]


def _file_name(plot: Plot, names: Key) -> str:
    preset = [] if plot.preset == "paper" else [plot.preset]
    return "-".join([plot.suite, plot.figure.id, *map(_slug, names.values()), *preset])


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9.+]+", "-", text.lower()).strip("-") or "none"


def _metadata(plot: Plot, names: Key, format: str) -> dict[str, Any]:
    """Where the picture comes from, in the file itself; no date, for a rerun gives the same bytes."""
    title = " ".join(filter(None, [plot.figure.title, ", ".join(names.values()), f"[{plot.label}]" * bool(plot.label)]))
    about = "; ".join(f"{what}: {note}" for what, note in plot.notes)
    if format == "pdf":
        return {"Title": title, "Subject": about, "CreationDate": None, "Creator": "fatbench", "Producer": "matplotlib"}
    if format == "svg":
        return {"Title": title, "Description": about, "Date": None, "Creator": "fatbench"}
    return {"Title": title, "Description": about, "Software": "fatbench"}


# --- a page ------------------------------------------------------------------------------------------------------


def _page(plot: Plot, names: Key, panels: Sequence[Panel], files: Path | None) -> Figure:
    from matplotlib.figure import Figure

    kind = plot.figure.kind
    tiles: list[tuple[Panel, Line | None]]
    if kind in ("heatmap", "images"):
        tiles = [(panel, line) for panel in panels for line in panel.lines]
        rows, columns = _arranged(len(tiles), [])
    else:
        tiles = [(panel, None) for panel in panels]
        free = [axis for axis in plot.figure.panels if axis not in names]
        rows, columns = _arranged(
            len(panels), [list(dict.fromkeys(panel.key[axis] for panel in panels)) for axis in free]
        )
    width = max(5.2, columns * WIDE * (1.4 if kind == "images" else 1))
    size = 10.5 if plot.label else 9  # bold letters are wider
    cut = ", ".join(f"{axis} {label}" for axis, label in names.items())
    title = "\n".join(_wrapped(text, width, size) for text in (plot.figure.title, cut, plot.label) if text)
    caption = _wrapped(". ".join(f"{what}: {note}" for what, note in plot.notes), width, 5.5)
    name, looks, entries = _looks(plot, panels)
    below = 0.1 + 0.085 * (caption.count("\n") + 1)
    per_row = max(1, int(width / (0.5 + 0.062 * max(map(len, entries), default=1))))
    legend = 0.155 * -(-len(entries) // per_row) + 0.1 if len(entries) > 1 else 0
    height = rows * HIGH + below + legend + 0.16 * (title.count("\n") + 1)
    bottom = (below + legend) / height
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[union-attr, call-arg]
    figure.suptitle(title, fontsize=9, **({"color": "#8A1C00", "fontweight": "bold"} if plot.label else {}))
    figure.text(0.06 / width, 0.05 / height, caption, fontsize=5.5, color="#555555", va="bottom", ha="left")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(tiles) :]:
        axes.set_axis_off()
    first: dict[str, Axes] = {}
    maps: list[AxesImage] = []
    for (panel, line), axes in zip(tiles, grid.flat, strict=False):
        if line is not None:
            maps += _tensor(plot, panel, line, names, axes, files)
            continue
        {"lines": _curves, "bars": _bars}[kind](panel, axes, name, looks)
        axes.set_title(_wrapped(", ".join(label for axis, label in panel.key.items() if axis not in names), WIDE, 8))
        axes.set_yscale(plot.figure.scale)
        axes.set_ylabel(_unit(panel))
        same = panel.key.get(SERIES, "")
        if same in first:
            axes.sharey(first[same])  # panels of the same numbers are compared
        elif any(line.points for line in panel.lines):
            first[same] = axes
        if not any(line.points for line in panel.lines):
            axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", color="#888888")
    ranges: list[Any] = [heat.get_clim() for heat in maps]
    for heat in maps:  # one scale, so that maps can be compared
        heat.set_clim(min(low for low, _ in ranges), max(high for _, high in ranges))
    if len(entries) > 1:
        figure.legend(
            [_handle(kind, look) for look in entries.values()], list(entries), loc="lower center", ncols=per_row,
            frameon=False, handlelength=3.2, borderaxespad=0.2, bbox_to_anchor=(0, below / height, 1, legend / height),
        )  # fmt: skip
    return figure


def _arranged(count: int, labels: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(rows, columns): the last of several axes goes along, once or more, where that makes a full grid."""
    if len(labels) > 1:
        along = len(labels[-1])
        full = [columns for columns in range(along, 5, along) if columns > 1 and count % columns == 0]
        if full:
            columns = next((columns for columns in full if count // columns <= 3), full[-1])
            return count // columns, columns
    columns = count if count <= 3 else 2 if count == 4 else 3
    return -(-count // columns), columns


def _wrapped(text: str, width: float, size: float) -> str:
    """Text in lines that fit so many inches, a letter being about half its size wide, and a little."""
    return "\n".join(textwrap.wrap(text, max(20, int((width - 0.2) * 72 / (0.53 * size)))))


def _unit(panel: Panel) -> str:
    """What stands beside the vertical axis: the heading if it has one, per cent for fractions."""
    headings = list(dict.fromkeys(line.heading for line in panel.lines))
    fraction = any(line.source.fraction for line in panel.lines)
    if len(headings) == 1:
        return f"{headings[0]} (%)" if fraction else headings[0]
    return "per cent" if fraction else ""


# --- what a line looks like --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How a line or a bar is drawn."""

    colour: Any
    style: int  # which of STYLES, or of HATCHES
    marker: int | None = None
    width: float = 1.3


Names = Callable[[Line], str]


def _looks(plot: Plot, panels: Sequence[Panel]) -> tuple[Names, dict[str, Look], dict[str, Look]]:
    """(line -> its name, name -> look, legend) of a page: a name holds what varies of labels, heading and index.

    Where one of these varies, it is colour and style; where two do, the first is the colour, the second the style.
    """
    lines = [line for panel in panels for line in panel.lines if line.points]
    parts: list[Names] = []
    if plot.figure.kind == "lines" or any(
        line.index is not None for line in lines
    ):  # else a bar stands over its labels
        parts.append(lambda line: ", ".join(line.key.values()))
    if SERIES not in plot.figure.panels:
        parts.append(lambda line: line.heading)
    if plot.figure.kind == "lines":
        parts.append(lambda line: "" if line.index is None else f"{index_of(line.source)} {line.index}")
    seen = [(part, list(dict.fromkeys(part(line) for line in lines))) for part in parts]
    varying = [(part, labels) for part, labels in seen if len(labels) > 1]

    def name(line: Line) -> str:
        return ", ".join(part(line) for part, _ in varying)

    looks = {}
    for line in lines:
        places = [labels.index(part(line)) for part, labels in varying] or [0]
        looks[name(line)] = _look(places, len(varying[0][1]) if len(varying) == 1 else 0)
    if len(varying) == 1:
        labels = varying[0][1]
        steps = [round(i * (len(labels) - 1) / (MANY - 1)) for i in range(MANY)]
        shown = labels if len(labels) <= 2 * MANY else [labels[step] for step in steps]
        return name, looks, {label: looks[label] for label in shown}
    legend = {}
    for place, (_, labels) in enumerate(varying[:2]):
        for i, label in enumerate(labels):
            one = _look([i, 0]) if place == 0 else Look("#666666", i % len(STYLES))
            legend[label] = one
    return name, looks, legend


def _look(places: Sequence[int], many: int = 0) -> Look:
    """Of a line at these places among the labels that vary; many: how many there are where one alone varies."""
    colour, style = places[0], places[min(1, len(places) - 1)]
    if many > MANY:
        return Look(_scale(colour / (many - 1)), 0, None, 0.9)
    width = 1.3 if len(places) < 3 else 0.8
    return Look(COLOURS[colour % len(COLOURS)], style % len(STYLES), colour % len(MARKERS), width)


def _scale(share: float) -> Any:
    """A colour of many, in the order of an index."""
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * share)


def _handle(kind: str, look: Look) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if kind == "bars":
        return Patch(facecolor=look.colour, hatch=HATCHES[look.style], edgecolor="white")
    return Line2D([], [], **_drawn(look))


def _drawn(look: Look) -> dict[str, Any]:
    marker = None if look.marker is None else MARKERS[look.marker]
    return {
        "color": look.colour, "linestyle": STYLES[look.style], "linewidth": look.width, "marker": marker,
        "markersize": 3, "markeredgewidth": 0,
    }  # fmt: skip


def _scaled(line: Line, value: float) -> float:
    return 100 * value if line.source.fraction else value


def _curves(panel: Panel, axes: Axes, name: Names, looks: dict[str, Look]) -> None:
    for line in panel.lines:
        if not line.points:
            continue
        look = looks[name(line)]
        rounds = [point.round for point in line.points]
        means = [_scaled(line, point.mean) for point in line.points]
        axes.plot(rounds, means, markevery=max(1, len(rounds) // 8), **_drawn(look))
        if any(point.std for point in line.points):
            spreads = [_scaled(line, point.std or 0.0) for point in line.points]
            low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
            axes.fill_between(rounds, low, high, color=look.colour, alpha=0.18, linewidth=0)
    radii = {point.round: point.radius for line in panel.lines for point in line.points if point.radius}
    if radii:
        axes.set_xlabel("radius of the attack")
        axes.set_xticks(sorted(radii), [radii[at] for at in sorted(radii)])
        return
    axes.set_xlabel("round")
    if len({point.round for line in panel.lines for point in line.points}) == 1:
        axes.set_xticks([point.round for line in panel.lines for point in line.points][:1])
        return
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _bars(panel: Panel, axes: Axes, name: Names, looks: dict[str, Look]) -> None:
    """Groups of bars at the last round that has the number: over an index, or over the labels of the lines."""
    lines = sorted((line for line in panel.lines if line.points), key=lambda line: line.index or 0)
    over_index = any(line.index is not None for line in lines)
    groups = list(dict.fromkeys(_group(line) for line in lines))
    # the group says the labels where there is no index: what is left for the bars are the headings
    beside = [name(line) if over_index else line.heading for line in lines]
    bars = list(dict.fromkeys(beside))
    width = 0.8 / max(1, len(bars))
    for line, bar in zip(lines, beside, strict=True):
        look = looks[name(line)]
        last = line.points[-1]
        axes.bar(
            groups.index(_group(line)) - 0.4 + (bars.index(bar) + 0.5) * width, _scaled(line, last.mean), width * 0.94,
            yerr=None if last.std is None else _scaled(line, last.std), color=look.colour, hatch=HATCHES[look.style],
            edgecolor="white", linewidth=0, error_kw={"elinewidth": 0.7, "ecolor": "#333333"},
        )  # fmt: skip
    axes.set_xticks(range(len(groups)), groups)
    if max(map(len, groups), default=0) * len(groups) > 40:  # side by side they would run into each other
        axes.tick_params(axis="x", rotation=30)
        for label in axes.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")
    if over_index:
        axes.set_xlabel(index_of(lines[0].source))
    axes.grid(axis="x", visible=False)


def _group(line: Line) -> str:
    return ", ".join(line.key.values()) if line.index is None else str(line.index)


def _tensor(plot: Plot, panel: Panel, line: Line, names: Key, axes: Axes, files: Path | None) -> list[AxesImage]:
    """Draw a tensor of the last round that kept one, of the first seed that has it; a heat map is returned too."""
    from fatbench.report import artifacts

    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    key = {axis: label for axis, label in panel.key.items() if axis not in names and axis != SERIES}
    said, metric = ", ".join([*key.values(), *line.key.values(), line.heading]), line.source.metric
    found = None if files is None else artifacts.latest([files / cell for cell in line.cells], metric)
    if found is None:
        axes.set_title(_wrapped(said, WIDE, 8))
        _nothing(axes, "no file of it here")
        return []
    round, tensors = found
    tensor, rows = tensors[metric], artifacts.clients(metric, tensors)
    axes.set_title(_wrapped(f"{said}, round {round}", WIDE, 8))
    if plot.figure.kind == "images" and artifacts.is_images(tensor):
        _sheet(axes, tensor, rows)
    elif plot.figure.kind == "heatmap" and artifacts.is_matrix(tensor):
        return [_heat(axes, artifacts.flat(tensor), rows)]
    else:
        _nothing(axes, f"{tensor.dtype} {tensor.shape}: not for {plot.figure.kind}")
    return []


def _nothing(axes: Axes, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="#888888")


def _heat(axes: Axes, matrix: Any, rows: Sequence[str]) -> AxesImage:
    from matplotlib import colormaps

    image = axes.imshow(matrix, cmap=colormaps["cividis"].with_extremes(bad="#D9DCE1"), interpolation="nearest")
    if max(matrix.shape) <= 20:
        axes.set_yticks(range(matrix.shape[0]), rows)
        along = rows if matrix.shape[0] == matrix.shape[1] else list(map(str, range(matrix.shape[1])))
        axes.set_xticks(range(matrix.shape[1]), along)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    return image


def _sheet(axes: Axes, tensor: Any, rows: Sequence[str]) -> None:
    """Images (a, b, ch, H, W), or (n, ch, H, W) in rows of ten, with their indices."""
    from fatbench.report import artifacts

    sheet, (down, along), (high, wide) = artifacts.tiled(tensor)
    axes.imshow(sheet, interpolation="nearest")
    labels = rows if tensor.ndim == 5 else [str(row * along) for row in range(down)]
    axes.set_yticks([(row + 0.5) * high for row in range(down)], labels)
    axes.set_xticks([(column + 0.5) * wide for column in range(along)], [str(column) for column in range(along)])
    axes.tick_params(length=0)
