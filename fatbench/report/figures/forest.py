"""The forest plot: every method against the baseline of its suite, a dot and its 95 % interval, a panel an attack."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import whole_file
from fatbench.report.contrasts import LEVEL, Difference
from fatbench.report.figures.panel_kinds import wrap_to_width
from fatbench.report.figures.plots import FIXED, NARROW, SERIF, TEXT, metadata
from fatbench.report.figures.styles import COLOURS, GREY
from fatbench.suite.standard_attacks import attack_name, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ID = "forest"
MOST = 4  # panels
ROW = 0.19  # inches


@dataclass(frozen=True)
class Forest:
    """The differences of a forest plot, and how they are drawn."""

    differences: Sequence[Difference]
    metrics: Sequence[str]  # in the order of the suite
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    format: str
    width: float | None  # in inches, of a figure for a paper: label and caption are in a text file beside it
    origin: str = ""  # suite, preset, code and machine

    @property
    def caption(self) -> str:
        """The caption: the meaning of dots and bars, in a sentence or two."""
        differences = self.differences
        seeds = sorted({len(difference.seeds) for difference in differences})
        seed_counts = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
        random_effects = " and ".join(
            dict.fromkeys(difference.over for difference in differences if difference.test is not None)
        )
        interval = f"bar: 95 % interval over {random_effects}, not corrected for several comparisons"
        label = f"{self.label}. " if self.label else ""
        if not random_effects:
            return (
                f"{label}Differences in points, not tested; dot: {'one seed' if seeds == [1] else 'mean over seeds'}."
            )
        full = f"full if p < {LEVEL:g} after Holm's correction"
        return f"{label}Differences in points; dot: mean over {seed_counts} seeds, {full}; {interval}."


def draw(plot: Forest, name: str, folder: Path, serif: bool = False) -> Path:
    """Write the plot and return its file. serif: in the letters of a paper."""
    from matplotlib import rc_context, style

    with style.context("default"), rc_context(SERIF if serif else FIXED):
        figure, buffer = figure_of(plot), io.BytesIO()
        title = f"Differences from {', '.join(dict.fromkeys(difference.sides[1] for difference in plot.differences))}"
        description = f"{plot.origin}; {plot.caption}"
        figure.savefig(buffer, format=plot.format, metadata=metadata(title, description, plot.format))
    file = folder / f"{name}.{plot.format}"
    whole_file.write(file, buffer.getvalue(), f"-o {folder}", make_folder=True)
    if plot.width is not None:
        whole_file.write(file.with_suffix(".txt"), f"{plot.caption}\n", f"-o {folder}")
    return file


def figure_of(plot: Forest) -> Figure:
    """A panel for each metric, a row for each comparison."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(map(_name, plot.differences)))
    compared_metrics = {difference.metric for difference in plot.differences}
    shown_metrics = [metric for metric in plot.metrics if metric in compared_metrics]
    shown_metrics = shown_metrics if len(shown_metrics) <= MOST else [shown_metrics[0], *shown_metrics[1 - MOST :]]
    width = plot.width or TEXT
    axis_label = f"points from {', '.join(dict.fromkeys(difference.sides[1] for difference in plot.differences))}"
    figure = Figure(figsize=(width, 0.75 + ROW * len(names) + 0.35 * (plot.width is None)), layout="constrained")
    panels = figure.subplots(1, len(shown_metrics), squeeze=False, sharey=True)[0]
    for axes, metric in zip(panels, shown_metrics, strict=True):
        axes.axvline(0, color=GREY, linewidth=0.8)
        for difference in (difference for difference in plot.differences if difference.metric == metric):
            row, test = names.index(_name(difference)), difference.test
            if test is not None:
                axes.plot([100 * test.low, 100 * test.high], [row, row], color=COLOURS[0], linewidth=1.2)
            axes.plot(100 * (difference.difference or 0.0), row, "o", markersize=4, color=COLOURS[0],
                      markerfacecolor=COLOURS[0] if difference.significant else "white")  # fmt: skip
        axes.set_title(heading(metric) if width / len(shown_metrics) < 1 else attack_name(metric))
        _clip(axes, [difference for difference in plot.differences if difference.metric == metric], names)
        if width / len(shown_metrics) < NARROW:
            axes.xaxis.set_major_locator(MaxNLocator(2, integer=True))  # more would run into each other
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    if plot.width is None:
        axis_label += f"\n{wrap_to_width(plot.caption, width, 7)}"
    figure.supxlabel(axis_label, fontsize=8 if plot.width else 7)
    return figure


def _clip(axes: Axes, differences: Sequence[Difference], names: Sequence[str]) -> None:
    """Limit a panel to the tested intervals; a dot beyond becomes an arrow at the edge, with its number."""
    ends = [
        100 * end
        for difference in differences
        if (test := difference.test) is not None
        for end in (test.low, test.high)
    ]
    if not ends:
        return
    room = 0.08 * (max(*ends, 0) - min(*ends, 0))
    low, high = min(*ends, 0) - room, max(*ends, 0) + room
    axes.set_xlim(low, high)
    for difference in differences:
        value, row = 100 * (difference.difference or 0.0), names.index(_name(difference))
        if not low <= value <= high:
            edge, sign, side = (low, "<", "left") if value < low else (high, ">", "right")
            axes.plot(edge, row, sign, markersize=4, color=COLOURS[0], clip_on=False)
            axes.annotate(f"  {value:+.0f}  ", (edge, row), fontsize=6, color=GREY, va="center", ha=side)


def _name(difference: Difference) -> str:
    return ", ".join(filter(None, [difference.row, difference.sides[0]]))
