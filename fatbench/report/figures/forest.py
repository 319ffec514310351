"""The forest plot: every method against the baseline of its suite, a dot and its 95 % interval, a panel an attack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fatbench.report.contrasts import LEVEL, Difference
from fatbench.report.figures.plots import NARROW, TEXT
from fatbench.report.figures.styles import COLOURS, GREY, wrap_to_width
from fatbench.suite.standard_attacks import attack_name, heading

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ID = "forest"
MOST = 4  # panels
ROW = 0.19  # inches


def title(differences: Sequence[Difference], what: str = "Differences") -> str:
    """ "Differences from FAT"."""
    return f"{what} from {', '.join(dict.fromkeys(one.sides[1] for one in differences))}"


def caption(differences: Sequence[Difference], label: str = "") -> str:
    """The meaning of dots and bars, in a sentence or two. label: the warning of a reduced preset."""
    seeds = sorted({len(one.seeds) for one in differences})
    count = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[0]}"
    over = " and ".join(dict.fromkeys(one.over for one in differences if one.test is not None))
    begin = f"{label}. " if label else ""
    if not over:
        return f"{begin}Differences in points, not tested; dot: {'one seed' if seeds == [1] else 'mean over seeds'}."
    full = f"full if p < {LEVEL:g} after Holm's correction"
    interval = f"bar: 95 % interval over {over}, not corrected for several comparisons"
    return f"{begin}Differences in points; dot: mean over {count} seeds, {full}; {interval}."


def figure_of(
    differences: Sequence[Difference], metrics: Sequence[str], label: str = "", paper_width: float | None = None
) -> Figure:
    """A panel for each metric, in the order of `metrics`, a row for each comparison.

    label: as of `caption`. paper_width: inches, of a figure for a paper, whose caption is in a text file beside it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(map(_name, differences)))
    shown = [metric for metric in metrics if any(one.metric == metric for one in differences)]
    shown = shown if len(shown) <= MOST else [shown[0], *shown[1 - MOST :]]
    width = paper_width or TEXT
    size = (width, 0.75 + ROW * len(names) + 0.35 * (paper_width is None))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
    for axes, metric in zip(panels, shown, strict=True):
        of_metric = [one for one in differences if one.metric == metric]
        axes.axvline(0, color=GREY, linewidth=0.8)
        for one in of_metric:
            if one.test is not None:
                ends = [100 * one.test.low, 100 * one.test.high]
                axes.plot(ends, [names.index(_name(one))] * 2, color=COLOURS[0], linewidth=1.2)
            face = COLOURS[0] if one.significant else "white"
            place = 100 * (one.difference or 0.0), names.index(_name(one))
            axes.plot(*place, "o", markersize=4, color=COLOURS[0], markerfacecolor=face)
        axes.set_title(heading(metric) if width / len(shown) < 1 else attack_name(metric))
        tested = [100 * end for one in of_metric if one.test is not None for end in (one.test.low, one.test.high)]
        if tested:  # a dot beyond the tested intervals becomes an arrow at the edge, with its number
            room = 0.08 * (max(*tested, 0) - min(*tested, 0))
            low, high = min(*tested, 0) - room, max(*tested, 0) + room
            axes.set_xlim(low, high)
            for one in of_metric:
                value, row = 100 * (one.difference or 0.0), names.index(_name(one))
                edge, sign, side = (low, "<", "left") if value < low else (high, ">", "right")
                if not low <= value <= high:
                    axes.plot(edge, row, sign, markersize=4, color=COLOURS[0], clip_on=False)
                    axes.annotate(f"  {value:+.0f}  ", (edge, row), fontsize=6, color=GREY, va="center", ha=side)
        if width / len(shown) < NARROW:
            axes.xaxis.set_major_locator(MaxNLocator(2, integer=True))  # more would run into each other
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    said = "" if paper_width else f"\n{wrap_to_width(caption(differences, label), width, 7)}"
    figure.supxlabel(title(differences, "points") + said, fontsize=8 if paper_width else 7)
    return figure


def _name(difference: Difference) -> str:
    return ", ".join(filter(None, [difference.row, difference.sides[0]]))
