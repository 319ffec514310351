"""Draw the plots of `series` into files with matplotlib; the same numbers give the same bytes.

A figure of many panels becomes several pages, a file each: the leading axes of `panels` choose the page until a page
holds no more than MOST panels. `styles` says how a line is drawn, `panel_kinds` draws the content of a panel.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import whole_file
from fatbench.report.figures import panel_kinds
from fatbench.report.figures.series import Line, Panel, Plot
from fatbench.report.figures.styles import GREY, Names, Style, axis_label, handle, styles_of
from fatbench.report.numbers.sources import RANGE
from fatbench.suite.model import Key
from fatbench.suite.tables import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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


SERIF = {**FIXED, "font.family": "STIXGeneral", "mathtext.fontset": "stix"}  # as Times, of most papers


COLUMN, TEXT = 234 / 72.27, 487 / 72.27  # inches of one and of two columns of a paper, whose points are TeX's
NARROW = 1.5  # inches that a panel of a paper needs


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
    from matplotlib import rc_context, style

    image_files = []
    for plot in plots:
        for names, panels in paged(plot):
            file = folder / f"{_file_name(plot, names)}.{format}"
            with style.context("default"), rc_context(SERIF if serif else FIXED):
                figure, buffer = page_of(plot, names, panels, files, width), io.BytesIO()
                figure.savefig(buffer, format=format, metadata=_metadata(plot, names, format))
            whole_file.write(file, buffer.getvalue(), f"-o {folder}", make_folder=True)
            if width is not None:
                whole_file.write(
                    file.with_suffix(".txt"), _caption(plot, names | common_labels(panels)), f"-o {folder}"
                )
            image_files.append(file)
    return image_files


def pages_of(plots: Sequence[Plot], files: Path | None = None) -> list[Figure]:
    """The pages of plots as figures, which a notebook shows by themselves; files: as of `draw`."""
    from matplotlib import rc_context, style

    figures = []
    for plot in plots:
        for names, panels in paged(plot):
            with style.context("default"), rc_context(FIXED):
                figure = page_of(plot, names, panels, files)
            figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]
            figures.append(figure)
    return figures


def _png(figure: Figure) -> bytes:
    from matplotlib import rc_context, style

    buffer = io.BytesIO()
    with style.context("default"), rc_context(FIXED):
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


CAPTION_NOTES = (
    "data",
    "checkpoint",
    "seeds",
    "differences",
    "published",
    "incomplete",
    "missing",
    "note",
    "perturbation",
)  # notes that a caption has


def _caption(plot: Plot, names: Key) -> str:
    """A caption for a paper: content and seeds, without commits and machine."""
    page_labels = ", ".join(f"{axis} {label}" for axis, label in names.items())
    prefixes = {"seeds": "Seeds ", "perturbation": "Perturbation: "}
    notes = [f"{prefixes.get(note_name, '')}{note}" for note_name, note in plot.notes if note_name in CAPTION_NOTES]
    return (
        ". ".join(sentence.rstrip(".") for sentence in (plot.figure.title, page_labels, plot.label, *notes) if sentence)
        + ".\n"
    )


def paged(plot: Plot) -> list[tuple[Key, list[Panel]]]:
    """The pages of a plot: (labels of the leading axes that choose the page, its panels)."""
    axes = plot.figure.panels
    for leading in range(len(axes) + 1):
        pages: dict[tuple[tuple[str, str], ...], list[Panel]] = {}
        for panel in plot.panels:
            pages.setdefault(tuple((axis, panel.key[axis]) for axis in axes[:leading]), []).append(panel)
        if max(len(panels) for panels in pages.values()) <= MOST:
            break
    return [(dict(names), panels) for names, panels in pages.items()]


def names(plot: Plot) -> list[str]:
    """The names of the files that `draw` writes for a plot, without their suffix."""
    return [_file_name(plot, page_labels) for page_labels, _ in paged(plot)]


def _file_name(plot: Plot, names: Key) -> str:
    preset = [] if plot.preset == "paper" else [plot.preset]
    return "-".join([plot.suite, plot.figure.id, *map(_slug, names.values()), *preset])


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9.+]+", "-", text.lower()).strip("-") or "none"


def _metadata(plot: Plot, names: Key, format: str) -> dict[str, Any]:
    title = " ".join(filter(None, [plot.figure.title, ", ".join(names.values()), f"[{plot.label}]" * bool(plot.label)]))
    return metadata(title, "; ".join(f"{note_name}: {note}" for note_name, note in plot.notes), format)


def metadata(title: str, description: str, format: str) -> dict[str, Any]:
    """The metadata of an image file; without a date, so that a rerun gives the same bytes."""
    if format == "pdf":
        return {
            "Title": title,
            "Subject": description,
            "CreationDate": None,
            "Creator": "fatbench",
            "Producer": "matplotlib",
        }
    if format == "svg":
        return {"Title": title, "Description": description, "Date": None, "Creator": "fatbench"}
    return {"Title": title, "Description": description, "Software": "fatbench"}


KINDS = {
    "lines": panel_kinds.curves,
    "bars": panel_kinds.bars,
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
    from matplotlib.lines import Line2D

    kind = plot.figure.kind
    tiles: list[tuple[Panel, Line | None]]
    if kind in TILED:
        tiles = [(panel, line) for panel in panels for line in panel.lines]
        rows, columns = _arranged(len(tiles), [])
    else:
        tiles = [(panel, None) for panel in panels]
        free_axes = [axis for axis in plot.figure.panels if axis not in names]
        rows, columns = _arranged(
            len(panels), [list(dict.fromkeys(panel.key[axis] for panel in panels)) for axis in free_axes]
        )
    width = max(5.2, columns * panel_kinds.WIDE * (1.4 if kind == "images" else 1))
    if paper_width is not None:
        width, columns = paper_width, min(columns, max(1, int(paper_width / NARROW)))
        rows = -(-len(tiles) // columns)
    shared_labels = names | common_labels(panels)
    page_labels = ", ".join(f"{axis} {label}" for axis, label in shared_labels.items())
    title = panel_kinds.wrap_to_width(page_labels, width, 9)  # the figure's own title is in the file's metadata
    caption = panel_kinds.wrap_to_width(
        ". ".join(f"{reference_name}: {note}" for reference_name, note in plot.notes), width, 5.5
    )
    name, style_by_name, legend_styles = styles_of(plot, panels)
    legend_entries = {
        text: handle(kind, legend_style)
        for text, legend_style in legend_styles.items()
        if len(legend_styles) > 1 and kind not in ROWS + TILED
    }
    if any(line.published for panel in panels for line in panel.lines):
        reference_name = "published" if plot.figure.published else "formula"
        legend_entries[reference_name] = Line2D([], [], color="black", linewidth=2.2, marker="_", markersize=6)
    if kind == "boundaries":
        legend_entries |= {
            f"class {c}": Line2D([], [], color=GREY, linestyle="", marker=m) for c, m in enumerate(panel_kinds.CLASSES)
        } | {"adversarial": Line2D([], [], color=panel_kinds.INK, linestyle="", marker="o", markersize=2)}
    if paper_width is not None:
        title = caption = ""
    footer_height = 0.1 + 0.085 * (caption.count("\n") + 1) * bool(caption)
    per_row = max(1, int(width / (0.5 + 0.062 * max(map(len, legend_entries), default=1))))
    legend_height = 0.155 * -(-len(legend_entries) // per_row) + 0.1 if legend_entries else 0
    panel_height = panel_kinds.HIGH if paper_width is None else min(panel_kinds.HIGH, 0.4 + 0.75 * width / columns)
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
    heat_maps: list[AxesImage] = []
    horizontal_axes: list[Axes] = []
    for (panel, line), axes in zip(tiles, grid.flat, strict=False):
        if line is not None:
            heat_maps += panel_kinds.tensor(plot, panel, line, shared_labels, axes, files)
            continue
        panel_title = ", ".join(
            axis_label(axis, label) for axis, label in panel.key.items() if axis not in shared_labels
        )
        if kind == "boundaries":
            panel_kinds.boundaries(panel, panel_title, axes, name, style_by_name, files)
            continue
        fill(plot, panel, axes, name, style_by_name, shared_labels)
        axes.set_title(panel_kinds.wrap_to_width(panel_title, panel_kinds.WIDE, 8))
        if kind in ROWS:
            continue
        if kind == "bars" and panel_kinds.is_horizontal(panel):
            horizontal_axes.append(axes)
            continue
        unit = _unit(plot, panel)
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
    share_across(horizontal_axes)
    ranges: list[Any] = [heat_map.get_clim() for heat_map in heat_maps]
    for heat_map in heat_maps:  # one scale, so that maps can be compared
        heat_map.set_clim(min(low for low, _ in ranges), max(high for _, high in ranges))
    if legend_entries:
        figure.legend(
            list(legend_entries.values()), list(legend_entries), loc="lower center", ncols=per_row, frameon=False,
            handlelength=3.2, borderaxespad=0.2, bbox_to_anchor=(0, footer_height / height, 1, legend_height / height),
        )  # fmt: skip
    return figure


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
        axes.set_xlabel(plot.figure.xlabel)
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
        for axes in same_unit:
            axes.set_xlim(
                min(panel_axes.get_xlim()[0] for panel_axes in same_unit),
                max(panel_axes.get_xlim()[1] for panel_axes in same_unit),
            )


def bounded(limits: tuple[float, float], unit: str) -> tuple[float, float]:
    """The limits of a vertical axis: an accuracy is from 0 to 100, whatever its spread."""
    low, high = limits
    return (max(low, -2), min(high, 102)) if unit.endswith("(%)") or unit == "per cent" else (low, high)


def common_labels(panels: Sequence[Panel]) -> Key:
    """The labels that all of several panels have: they stand above the page."""
    if len(panels) < 2:
        return {}
    return {
        axis: label for axis, label in panels[0].key.items() if all(panel.key.get(axis) == label for panel in panels)
    }


def _arranged(count: int, labels: Sequence[Sequence[str]]) -> tuple[int, int]:
    """(rows, columns): the last of several axes goes along, once or more, where that makes a full grid."""
    if len(labels) > 1:
        last_axis_size = len(labels[-1])
        full_widths = [
            columns for columns in range(last_axis_size, 5, last_axis_size) if columns > 1 and count % columns == 0
        ]
        if full_widths:
            columns = next((columns for columns in full_widths if count // columns <= 3), full_widths[-1])
            return count // columns, columns
    columns = count if count <= 3 else {4: 2, 8: 4}.get(count, 3)
    return -(-count // columns), columns


def _unit(plot: Plot, panel: Panel, titled: bool = False) -> str:
    """The label of the vertical axis: its only heading, unless the title has it; else the label of the figure."""
    points = plot.figure.minus or any(line.source.client == RANGE for line in panel.lines)
    headings = list(dict.fromkeys(line.heading for line in panel.lines))
    fraction = any(line.source.fraction for line in panel.lines)
    if len(headings) == 1 and not titled:
        return f"{headings[0]} ({'points' if points else '%'})" if fraction else headings[0]
    return ("points" if points else "per cent") if fraction else plot.figure.ylabel
