"""Figures inside a page: an SVG for each panel as `plots` draws it, with the last number of each line.

They need no script. Black is `currentColor`, so that a dark page shows it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fatbench.report.figures import plots
from fatbench.report.figures.series import Plot
from fatbench.report.figures.styles import MARKERS, Style, axis_label, styles_of

SIZE = (3.5, 2.4)  # inches of a panel
ON_A_PAGE: dict[Any, Any] = {
    "svg.fonttype": "none", "grid.color": "black", "grid.alpha": 0.15, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "svg.image_inline": True,
}  # fmt: skip
MOST = 30  # entries of a legend
SIGNS = dict(zip(MARKERS, "●■▲◆▼✚✖", strict=True))
BORDERS = ("solid", "dashed", "dashed", "dotted", "dashed", "dotted", "dotted")  # CSS of `styles.STYLES`


@dataclass(frozen=True)
class Entry:
    """A line of a legend."""

    name: str
    colour: str
    border: str  # CSS
    sign: str  # of its marker


@dataclass(frozen=True)
class InlineFigure:
    """A figure, ready for a page."""

    legend: list[Entry]
    panels: list[tuple[str, str]]  # title, SVG


def draw(plot: Plot, prefix: str) -> InlineFigure:
    """Draw the panels of a plot that have a number. prefix: of the ids inside them."""
    from matplotlib import rc_context, style
    from matplotlib.figure import Figure

    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    name, style_by_name, _ = styles_of(plot, panels)
    common_labels = plots.common_labels(panels)
    images = []
    with style.context("default"), rc_context({**plots.FIXED, **ON_A_PAGE}):
        figures = [Figure(figsize=SIZE, layout="constrained") for _ in panels]
        axes = [figure.subplots() for figure in figures]
        for panel, panel_axes in zip(panels, axes, strict=True):
            plots.fill(plot, panel, panel_axes, name, style_by_name, common_labels)
            panel_axes.set_title("")
        plots.share_across(
            [panel_axes for panel_axes in axes if panel_axes.yaxis_inverted() and plot.figure.kind == "bars"]
        )
        upright = (
            []
            if plot.figure.kind in plots.ROWS
            else [panel_axes for panel_axes in axes if not panel_axes.yaxis_inverted()]
        )
        for unit in dict.fromkeys(panel_axes.get_ylabel() for panel_axes in upright):
            _share([panel_axes for panel_axes in upright if panel_axes.get_ylabel() == unit], unit)
        for position, figure in enumerate(figures):
            images.append(_svg(figure, f"{prefix}-{position}", list(style_by_name)))
    titles = [", ".join(axis_label(axis, label) for axis, label in panel.key.items() if label) for panel in panels]
    legend = (
        [] if plot.figure.kind in plots.ROWS or not 1 < len(style_by_name) <= MOST else _legend(plot, style_by_name)
    )
    return InlineFigure(legend, list(zip(titles, images, strict=True)))


def _share(axes: Sequence[Any], unit: str) -> None:
    """Give panels of the same numbers one vertical axis, so that they can be compared."""
    limits = [plots.bounded(panel_axes.get_ylim(), unit) for panel_axes in axes]
    for panel_axes in axes:
        panel_axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _legend(plot: Plot, style_by_name: dict[str, Style]) -> list[Entry]:
    from matplotlib.colors import to_hex

    bars = plot.figure.kind == "bars"
    return [
        Entry(
            name,
            _ink(to_hex(look.colour)),
            "solid" if bars else BORDERS[look.style],
            "" if bars or look.marker is None else SIGNS[MARKERS[look.marker]],
        )
        for name, look in style_by_name.items()
    ]


def _ink(text: str) -> str:
    return re.sub(r"(?i)#(000000|222222)\b", "currentColor", text)


def _svg(figure: Any, prefix: str, names: Sequence[str]) -> str:
    """The SVG of a panel, without global styles, a fixed size, and ids that others on the page may have."""
    titles: list[str] = []
    axes = figure.axes[0]
    containers = [artist for container in axes.containers for artist in container.get_children()]
    for artist in dict.fromkeys([*axes.get_children(), *containers]):
        name, _, words = str(artist.get_label()).partition("\n")
        if words:
            artist.set_gid(f"said-{len(titles)}")
            titles.append(f'<g data-line="{names.index(name)}"><title>{escape(words)}</title>')
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r'^<svg .*?viewBox="([^"]*)".*?>', r'<svg viewBox="\1" aria-hidden="true">', svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="said-(\d+)">', lambda found: titles[int(found[1])], svg)
    used_ids = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used_ids else "", svg)
    svg = re.sub(r'(url\(#|href="#)(?=[\w-]+)', rf"\g<1>{prefix}-", svg)
    return _ink(re.sub(r"\s*\n\s*", "\n", svg))
