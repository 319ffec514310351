"""The forest plot: every method against the baseline of its suite, a dot and its 95 % interval, a panel an attack."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fatbench import whole_file
from fatbench.report.figures.panel_kinds import wrapped
from fatbench.report.figures.plots import FIXED, NARROW, SERIF, TEXT, metadata
from fatbench.report.figures.styles import COLOURS, GREY
from fatbench.report.numbers.baseline import Difference
from fatbench.report.numbers.compare import attack_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ID = "forest"
MOST = 4  # panels
ROW = 0.19  # inches


@dataclass(frozen=True)
class Forest:
    """What is drawn, and how."""

    differences: Sequence[Difference]
    metrics: Sequence[str]  # in the order of the suite
    label: str  # "SMOKE PRESET - not comparable with published numbers"; empty for the preset `paper`
    format: str
    width: float | None  # in inches, of a figure for a paper: label and caption are in a text file beside it
    origin: str = ""  # suite, preset, code and machine

    @property
    def caption(self) -> str:
        """What the plot shows, in a sentence or two."""
        found = self.differences
        seeds = sorted({len(one.comparison.seeds) for one in found})
        several = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
        over = " and ".join(dict.fromkeys(one.comparison.over for one in found if one.comparison.test is not None))
        interval = f"bar: 95 % interval over {over}, not corrected for several comparisons"
        label = f"{self.label}. " if self.label else ""
        if not over:
            return (
                f"{label}Differences in points, not tested; dot: {'one seed' if seeds == [1] else 'mean over seeds'}."
            )
        return f"{label}Differences in points; dot: mean over {several} seeds, full if 0 is excluded; {interval}."


def draw(what: Forest, name: str, folder: Path, serif: bool = False) -> Path:
    """Write the plot, in the letters of a paper if `serif`; returns its file."""
    from matplotlib import rc_context, style

    with style.context("default"), rc_context(SERIF if serif else FIXED):
        figure, drawn = figure_of(what), io.BytesIO()
        title = f"Differences from {', '.join(dict.fromkeys(one.baseline for one in what.differences))}"
        about = f"{what.origin}; {what.caption}"
        figure.savefig(drawn, format=what.format, metadata=metadata(title, about, what.format))
    file = folder / f"{name}.{what.format}"
    whole_file.write(file, drawn.getvalue(), f"-o {folder}", make_folder=True)
    if what.width is not None:
        whole_file.write(file.with_suffix(".txt"), f"{what.caption}\n", f"-o {folder}")
    return file


def figure_of(what: Forest) -> Figure:
    """A panel for each metric, a row for each comparison."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(map(_name, what.differences)))
    there = {one.comparison.metric for one in what.differences}
    shown = [metric for metric in what.metrics if metric in there]
    shown = shown if len(shown) <= MOST else [shown[0], *shown[1 - MOST :]]
    width = what.width or TEXT
    below = f"points from {', '.join(dict.fromkeys(one.baseline for one in what.differences))}"
    figure = Figure(figsize=(width, 0.75 + ROW * len(names) + 0.35 * (what.width is None)), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, metric in zip(panels, shown, strict=True):
        axes.axvline(0, color=GREY, linewidth=0.8)
        for one in (one for one in what.differences if one.comparison.metric == metric):
            at, test = names.index(_name(one)), one.comparison.test
            clear = test is not None and not test.low <= 0 <= test.high
            if test is not None:
                axes.plot([100 * test.low, 100 * test.high], [at, at], color=COLOURS[0], linewidth=1.2)
            axes.plot(100 * one.comparison.difference, at, "o", markersize=4, color=COLOURS[0],
                      markerfacecolor=COLOURS[0] if clear else "white")  # fmt: skip
        axes.set_title("AA" if attack_name(metric) == "AutoAttack" and width / len(shown) < 1 else attack_name(metric))
        _clip(axes, [one for one in what.differences if one.comparison.metric == metric], names)
        if width / len(shown) < NARROW:
            axes.xaxis.set_major_locator(MaxNLocator(2, integer=True))  # more would run into each other
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    if what.width is None:
        below += f"\n{wrapped(what.caption, width, 7)}"
    figure.supxlabel(below, fontsize=8 if what.width else 7)
    return figure


def _clip(axes: Axes, found: Sequence[Difference], names: Sequence[str]) -> None:
    """The panel shows what was tested; a dot beyond is an arrow at the edge, with its number."""
    ends = [100 * end for one in found if (test := one.comparison.test) is not None for end in (test.low, test.high)]
    if not ends:
        return
    room = 0.08 * (max(*ends, 0) - min(*ends, 0))
    low, high = min(*ends, 0) - room, max(*ends, 0) + room
    axes.set_xlim(low, high)
    for one in found:
        value, at = 100 * one.comparison.difference, names.index(_name(one))
        if not low <= value <= high:
            edge, sign, side = (low, "<", "left") if value < low else (high, ">", "right")
            axes.plot(edge, at, sign, markersize=4, color=COLOURS[0], clip_on=False)
            axes.annotate(f"  {value:+.0f}  ", (edge, at), fontsize=6, color=GREY, va="center", ha=side)


def _name(one: Difference) -> str:
    return ", ".join(filter(None, [one.row, one.label]))
