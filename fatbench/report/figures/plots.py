"""Draw the plots of `series` into files with matplotlib; the same numbers give the same bytes.

A figure of many panels becomes several pages, a file each: the leading axes of `panels` choose the page until a page
holds no more than MOST panels. `styles` says how a line is drawn, `panel_kinds` draws the content of a panel.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fatbench import whole_file
from fatbench.report.figures import artifacts, heat_map, panel_kinds
from fatbench.report.figures.panel_kinds import HIGH, INK, WIDE
from fatbench.report.figures.series import Line, Panel, Plot
from fatbench.report.figures.styles import GREY, Names, Style, axis_label, handle, styles_of, wrap_to_width
from fatbench.store.rows import grouped
from fatbench.suite.model import Key
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")
MOST = 12  # panels of a page
FIXED: dict[Any, Any] = {  # whatever the reader's own matplotlibrc says
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "axes.linewidth": 0.6, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#DDDDDD", "grid.linewidth": 0.5,
    "axes.axisbelow": True, "lines.linewidth": 1.3, "hatch.linewidth": 0.5, "pdf.fonttype": 42, "svg.fonttype": "path",
    "svg.hashsalt": "fatbench", "figure.dpi": 100, "savefig.dpi": 300, "savefig.bbox": None, "text.usetex": False,
    "axes.formatter.useoffset": False,
}  # fmt: skip
SERIF = {"font.family": "STIXGeneral", "mathtext.fontset": "stix"}  # as Times, of most papers
COLUMN, TEXT = 234 / 72.27, 487 / 72.27  # inches of one and of two columns of a paper, whose points are TeX's
NARROW = 1.5  # inches that a panel of a paper needs
CAPTION_NOTES = (
    "data", "checkpoint", "seeds", "differences", "published", "incomplete", "missing", "changed", "note",
    "perturbation",
)  # fmt: skip


@contextlib.contextmanager
def settings(**more: Any) -> Iterator[None]:
    """matplotlib's settings of every figure, whatever the reader's own are."""
    from matplotlib import rc_context, style

    every: dict[Any, Any] = {**FIXED, **more}
    with style.context("default"), rc_context(every):
        yield


def save(figure: Figure, file: Path, title: str, description: str, caption: str | None = None) -> Path:
    """Write a figure and, of one for a paper, its caption in a text file beside it. Its metadata has no date, so that
    a rerun gives the same bytes.
    """
    said = {
        "pdf": {
            "Title": title, "Subject": description, "CreationDate": None, "Creator": "fatbench",
            "Producer": "matplotlib",
        },
        "svg": {"Title": title, "Description": description, "Date": None, "Creator": "fatbench"},
        "png": {"Title": title, "Description": description, "Software": "fatbench"},
    }  # fmt: skip
    buffer, format = io.BytesIO(), file.suffix[1:]
    figure.savefig(buffer, format=format, metadata=said[format])
    whole_file.write(file, buffer.getvalue(), f"-o {file.parent}", make_folder=True)
    if caption is not None:
        whole_file.write(file.with_suffix(".txt"), caption, f"-o {file.parent}")
    return file


def draw(
    plots: Sequence[Plot],
    folder: Path,
    format: str,
    files: Path | None = None,
    width: float | None = None,
    serif: bool = False,
) -> list[Path]:
    """Write the plots into a folder and return the files, in order. files: where the cells' folders of artifacts are.

    width: in inches, of a figure for a paper: no title and no notes, and a text file beside it has its caption.
    serif: in the letters of a paper.
    MachineError: the disk is full; SpecError: the folder cannot be written.
    """
    written = []
    for plot, (names, panels) in [(one, page) for one in plots for page in paged(one)]:
        warning = f"[{plot.label}]" * bool(plot.label)
        title = " ".join(filter(None, [plot.figure.title, ", ".join(names.values()), warning]))
        description = "; ".join(f"{what}: {text}" for what, text in plot.notes)
        caption = None if width is None else _caption(plot, names | common_labels(panels))
        with settings(**SERIF if serif else {}):
            figure = page_of(plot, names, panels, files, width)
            written.append(save(figure, folder / f"{_name(plot, names)}.{format}", title, description, caption))
    return written


def pages_of(plots: Sequence[Plot], files: Path | None = None) -> list[Figure]:
    """The pages of plots as figures, which a notebook shows by themselves; files: as of `draw`."""
    figures = []
    for plot, (names, panels) in [(one, page) for one in plots for page in paged(one)]:
        with settings():
            figure = page_of(plot, names, panels, files)

        def png(figure: Figure = figure) -> bytes:
            buffer = io.BytesIO()
            with settings():
                figure.savefig(buffer, format="png")
            return buffer.getvalue()

        figure._repr_png_ = png  # type: ignore[attr-defined]
        figures.append(figure)
    return figures


def pictures(tensors: artifacts.Tensors, tile: int = 64, brief: bool = False) -> list[tuple[str, bytes]]:
    """(name, PNG) of all tensors of a round that can be drawn: sheets of images, and heat maps on one scale each.

    tile: about the side of an image, in pixels; brief: of a tensor (a, b, c) only the mean over c.
    """
    from matplotlib.figure import Figure

    drawn: list[tuple[str, bytes]] = []
    stacks: dict[object, artifacts.Tensors] = {}
    for name, tensor in tensors.items():
        if artifacts.is_images(tensor):
            stacks.setdefault(tensor.shape if tensor.ndim == 4 else name, {})[name] = tensor
        elif artifacts.is_matrix(tensor):
            whole = tensor.ndim == 3 and tensor.shape[2] > 1 and not brief
            maps = [artifacts.flat(tensor), *(np.moveaxis(tensor, 2, 0) if whole else ())]
            finite = np.concatenate([one[np.isfinite(one)] for one in maps])
            limits = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
            rows, columns = maps[0].shape
            labels, few = artifacts.clients(name, tensors), max(rows, columns) <= MOST
            side = 0.34 if few else max(0.02, min(0.34, tile / 20 / max(rows, columns)))  # inches of a square
            across = math.ceil(math.sqrt(len(maps)))
            down = -(-len(maps) // across)
            with settings():
                size = max(2.4, across * (columns * side + 0.4)), down * (rows * side + 0.4) + 0.3
                figure = Figure(figsize=size, layout="constrained")
                figure.suptitle(f"{name}: {limits[0]:.4g} (dark) to {limits[1]:.4g} (light)", fontsize=7)
                for c, one in enumerate(maps):
                    axes = figure.add_subplot(down, across, c + 1, title=f"[{c - 1}]" if c else "mean" * whole)
                    heads = labels if rows == columns else [*map(str, range(columns))]
                    heat_map.squares(axes, one, labels, heads, ".2g" if few else "", limits)
                buffer = io.BytesIO()
                figure.savefig(buffer, format="png", dpi=100)
            drawn.append((name, buffer.getvalue()))
    for stack in stacks.values():
        drawn.append(("-".join(stack), artifacts.sheet(stack, tile, artifacts.clients(next(iter(stack)), tensors))))
    return sorted(drawn)


def _caption(plot: Plot, names: Key) -> str:
    """A caption for a paper: content and seeds, without commits and machine."""
    prefixes = {"seeds": "Seeds ", "perturbation": "Perturbation: "}
    notes = [f"{prefixes.get(what, '')}{text}" for what, text in plot.notes if what in CAPTION_NOTES]
    sentences = (plot.figure.title, _in_words(names), plot.label, *notes)
    return ". ".join(sentence.rstrip(".") for sentence in sentences if sentence) + ".\n"


def _in_words(names: Key) -> str:
    return ", ".join(f"{axis} {label}" for axis, label in names.items())


def paged(plot: Plot) -> list[tuple[Key, list[Panel]]]:
    """The pages of a plot: (labels of the leading axes that choose the page, its panels)."""
    axes = plot.figure.panels
    for leading in range(len(axes) + 1):
        pages = grouped((tuple((axis, panel.key[axis]) for axis in axes[:leading]), panel) for panel in plot.panels)
        if max(len(panels) for panels in pages.values()) <= MOST:
            break
    return [(dict(names), panels) for names, panels in pages.items()]


def names(plot: Plot) -> list[str]:
    """The names of the files that `draw` writes for a plot, without their suffix."""
    return [_name(plot, page_labels) for page_labels, _ in paged(plot)]


def _name(plot: Plot, names: Key) -> str:
    slugs = [re.sub("[^a-z0-9.+]+", "-", label.lower()).strip("-") or "none" for label in names.values()]
    return "-".join([plot.suite, plot.figure.id, *slugs, *([plot.preset] if plot.preset != "paper" else [])])


KINDS = {
    "lines": panel_kinds.curves,
    "bars": panel_kinds.bars,
    "clients": panel_kinds.curves,
    "raster": panel_kinds.raster,
    "matrix": panel_kinds.matrix,
}
ROWS = ("raster", "matrix")  # kinds that name their rows themselves
TILED = ("heatmap", "images")  # kinds that show one line in a panel

# --- a page ------------------------------------------------------------------------------------------------------


def page_of(
    plot: Plot, names: Key, panels: Sequence[Panel], files: Path | None, paper_width: float | None = None
) -> Figure:
    """Draw one page of `paged`. paper_width: inches, for a figure in a paper."""
    from matplotlib.figure import Figure

    kind, shared_labels = plot.figure.kind, names | common_labels(panels)
    tiles: list[tuple[Panel, Line | None]] = [(panel, None) for panel in panels]
    labels = [[*dict.fromkeys(panel.key[axis] for panel in panels)] for axis in plot.figure.panels if axis not in names]
    if kind in TILED:
        tiles, labels = [(panel, line) for panel in panels for line in panel.lines], []
    rows, columns = _arranged(len(tiles), labels)
    width, panel_height = max(5.2, columns * WIDE * (1.4 if kind == "images" else 1)), HIGH
    if paper_width is not None:
        width, columns = paper_width, min(columns, max(1, int(paper_width / NARROW)))
        rows, panel_height = -(-len(tiles) // columns), min(HIGH, 0.4 + 0.75 * width / columns)
    name, style_by_name, legend_styles = styles_of(plot, panels)
    legend = _legend(plot, panels, legend_styles)
    entry_width = 0.5 + 0.062 * max(map(len, legend), default=1)
    # beside the lines where a page has room, and below them in a column of a paper
    beside = bool(legend) and paper_width is None and kind in ("lines", "clients") and 0.155 * len(legend) < rows * HIGH
    per_row = 1 if beside else max(1, int(width / entry_width))
    width += entry_width * beside
    title = caption = ""
    if paper_width is None:
        title = wrap_to_width(_in_words(shared_labels), width, 9)  # the figure's own title is in the file's metadata
        caption = wrap_to_width(". ".join(f"{what}: {text}" for what, text in plot.notes), width, 5.5)
    footer_height = 0.1 + 0.085 * (caption.count("\n") + 1) * bool(caption)
    legend_height = 0.155 * -(-len(legend) // per_row) + 0.1 if legend and not beside else 0
    height = rows * panel_height + footer_height + legend_height + 0.16 * (title.count("\n") + 1) * bool(title)
    bottom = (footer_height + legend_height) / height
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(rect=(0, bottom, 1, 1 - bottom))  # type: ignore[union-attr, call-arg]
    figure.suptitle(title, fontsize=9)
    figure.text(0.06 / width, 0.05 / height, caption, fontsize=5.5, color="#555555", va="bottom", ha="left")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(tiles) :]:
        axes.set_axis_off()
    axes_by_unit: dict[str, Axes] = {}
    maps_drawn: list[Any] = []
    for (panel, line), axes in zip(tiles, grid.flat, strict=False):
        if line is not None:
            maps_drawn += panel_kinds.tensor(plot, panel, line, shared_labels, axes, files)
            continue
        panel_title = ", ".join(axis_label(*one) for one in panel.key.items() if one[0] not in shared_labels)
        if kind == "boundaries":
            panel_kinds.boundaries(panel, panel_title, axes, name, style_by_name, files)
            continue
        fill(plot, panel, axes, name, style_by_name, shared_labels)
        axes.set_title(wrap_to_width(panel_title, WIDE, 8))
        unit = _unit(plot, panel)
        if kind in ROWS or (kind == "bars" and panel_kinds.is_horizontal(panel)):
            continue
        if unit in axes_by_unit:
            axes.sharey(axes_by_unit[unit])  # panels of the same numbers are compared
        elif any(line.points for line in panel.lines):
            axes_by_unit[unit] = axes
    if paper_width is not None and len(axes_by_unit) == 1:  # one vertical axis for all, labelled on the left
        for position, axes in enumerate(grid.flat[: len(tiles)]):
            if position % columns:
                axes.tick_params(labelleft=False)
                axes.set_ylabel("")
    for unit, axes in axes_by_unit.items():
        axes.autoscale_view(scalex=False)  # what one panel shows, all that share its axis have room for
        axes.set_ylim(bounded(axes.get_ylim(), unit))
        if kind == "lines" and len(tiles) == 1:
            panel_kinds.leave_out_below(tiles[0][0], axes, name, style_by_name)
    if kind == "bars":
        share_across([axes for axes in grid.flat if axes.yaxis_inverted()])
    limits = [one.get_clim() for one in maps_drawn]
    for one in maps_drawn:  # one scale, so that maps can be compared
        one.set_clim(min(low for low, _ in limits), max(high for _, high in limits))
    if legend:
        below: dict[str, Any] = {
            "loc": "lower center", "borderaxespad": 0.2,
            "bbox_to_anchor": (0, footer_height / height, 1, legend_height / height),
        }  # fmt: skip
        figure.legend(
            [*legend.values()], [*legend], ncols=per_row, frameon=False, handlelength=3.2,
            **({"loc": "outside right upper"} if beside else below),
        )  # fmt: skip
    return figure


def _legend(plot: Plot, panels: Sequence[Panel], styles: Mapping[str, Style]) -> dict[str, Any]:
    """Name -> entry of the legend of a page."""
    from matplotlib.lines import Line2D

    kind, entries = plot.figure.kind, {}
    if len(styles) > 1 and kind not in ROWS + TILED:
        entries = {text: handle(kind, style) for text, style in styles.items()}
    if any(line.published for panel in panels for line in panel.lines):
        mark = Line2D([], [], color="black", linewidth=2.2, marker="_", markersize=6)
        entries["published" if plot.figure.published else "formula"] = mark
    if kind == "boundaries":
        for label, marker in enumerate(panel_kinds.CLASSES):
            entries[f"class {label}"] = Line2D([], [], color=GREY, linestyle="", marker=marker)
        entries["adversarial"] = Line2D([], [], color=INK, linestyle="", marker="o", markersize=2)
    return entries


def fill(
    plot: Plot, panel: Panel, axes: Axes, name: Names, style_by_name: Mapping[str, Style], shared_labels: Key
) -> None:
    """Draw a panel that needs no files, and the labels of its axes.

    shared_labels: the labels that stand above the page.
    """
    kind = plot.figure.kind
    KINDS[kind](panel, axes, name, style_by_name)
    if not any(line.points for line in panel.lines):
        axes.text(0.5, 0.5, "no measurements yet", transform=axes.transAxes, ha="center", color="#888888")
    if kind in ROWS:
        axes.set_ylabel(panel.lines[0].source.index_noun if panel.lines and kind == "raster" else "")
        return
    if axes.get_xlabel() == "round":
        axes.set_xlabel("client, from the least accurate" if kind == "clients" else plot.figure.xlabel)
    unit = _unit(plot, panel, titled=SERIES in panel.key and SERIES not in shared_labels)
    if kind == "bars" and panel_kinds.is_horizontal(panel):
        axes.set_xlabel(unit)
        axes.set_xscale(plot.figure.scale)
        axes.set_xlim(bounded(axes.get_xlim(), unit))
        return
    axes.set_yscale(plot.figure.scale)
    axes.set_ylabel(unit)


def share_across(horizontal_axes: Sequence[Axes]) -> None:
    """Give panels of horizontal bars with the same numbers one horizontal axis, so that they can be compared."""
    for unit in dict.fromkeys(axes.get_xlabel() for axes in horizontal_axes):
        same_unit = [axes for axes in horizontal_axes if axes.get_xlabel() == unit]
        limits = [axes.get_xlim() for axes in same_unit]
        for axes in same_unit:
            axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))


def bounded(limits: tuple[float, float], unit: str) -> tuple[float, float]:
    """The limits of a vertical axis: an accuracy is from 0 to 100, whatever its spread."""
    low, high = limits
    return (max(low, -2), min(high, 102)) if unit.endswith("(%)") or unit == "per cent" else (low, high)


def common_labels(panels: Sequence[Panel]) -> Key:
    """The labels that all of several panels have: they stand above the page."""
    keys = [panel.key for panel in panels]
    return {axis: label for axis, label in keys[0].items() if all(key.get(axis) == label for key in keys) and keys[1:]}


def _arranged(count: int, labels: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(rows, columns): the last of several axes goes along, once or more, where that makes a full grid."""
    if len(labels) > 1:
        widths = [width for width in range(len(labels[-1]), 5, len(labels[-1])) if width > 1 and count % width == 0]
        if widths:
            columns = next((width for width in widths if count // width <= 3), widths[-1])
            return count // columns, columns
    columns = count if count <= 3 else {4: 2, 8: 4}.get(count, 3)
    return -(-count // columns), columns


def _unit(plot: Plot, panel: Panel, titled: bool = False) -> str:
    """The label of the vertical axis: its only heading, unless the title has it; else the label of the figure."""
    points = plot.figure.minus
    headings = list(dict.fromkeys(line.heading for line in panel.lines))
    fraction = any(line.source.fraction for line in panel.lines)
    if len(headings) == 1 and not titled:
        return f"{headings[0]} ({'points' if points else '%'})" if fraction else headings[0]
    return ("points" if points else "per cent") if fraction else plot.figure.ylabel
