"""Figures inside a page: an SVG for each panel as `plots` draws it, with the last number of each line.

They need no script. Black is `currentColor`, so that a dark page shows it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from fatbench.report.figures import plots
from fatbench.report.figures.series import Plot
from fatbench.report.figures.styles import MARKERS, axis_label, styles_of

SIZE = (3.5, 2.4)  # inches of a panel
ON_A_PAGE: dict[Any, Any] = {
    "svg.fonttype": "none", "grid.color": "black", "grid.alpha": 0.15, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "svg.image_inline": True,
}  # fmt: skip
MOST = 30  # entries of a legend
SIGNS = dict(zip(MARKERS, "●■▲◆▼✚✖", strict=True))
BORDERS = ("solid", "dashed", "dashed", "dotted", "dashed", "dotted", "dotted")  # CSS of `styles.STYLES`


Legend = list[tuple[str, str, str, str]]  # of each entry its name, colour, border as CSS, and the sign of its marker


def draw(plot: Plot, prefix: str) -> tuple[Legend, list[tuple[str, str]]]:
    """(legend, (title, SVG) of each panel that has a number). prefix: of the ids inside them."""
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    panels = [panel for panel in plot.panels if any(line.points for line in panel.lines)]
    name, style_by_name, _ = styles_of(plot, panels)
    common_labels = plots.common_labels(panels)
    with plots.settings(**ON_A_PAGE):
        figures = [Figure(figsize=SIZE, layout="constrained") for _ in panels]
        axes = [figure.subplots() for figure in figures]
        for panel, panel_axes in zip(panels, axes, strict=True):
            plots.fill(plot, panel, panel_axes, name, style_by_name, common_labels)
            panel_axes.set_title("")
        if plot.figure.kind not in plots.ROWS:
            plots.share_across([one for one in axes if one.yaxis_inverted()])
            upright = [one for one in axes if not one.yaxis_inverted()]
            for unit in dict.fromkeys(one.get_ylabel() for one in upright):  # so that they can be compared
                same = [one for one in upright if one.get_ylabel() == unit]
                lows, highs = zip(*(plots.bounded(one.get_ylim(), unit) for one in same), strict=True)
                for one in same:
                    one.set_ylim(min(lows), max(highs))
        images = [_svg(figure, f"{prefix}-{i}", [*style_by_name]) for i, figure in enumerate(figures)]
    titles = [", ".join(axis_label(axis, label) for axis, label in panel.key.items() if label) for panel in panels]
    legend = [] if plot.figure.kind in plots.ROWS or not 1 < len(style_by_name) <= MOST else [*style_by_name.items()]
    bars = plot.figure.kind == "bars"
    entries = [
        (
            name, _ink(to_hex(look.colour)), "solid" if bars else BORDERS[look.style],
            "" if bars or look.marker is None else SIGNS[MARKERS[look.marker]],
        )
        for name, look in legend
    ]  # fmt: skip
    return entries, [*zip(titles, images, strict=True)]


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
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'^<svg .*?viewBox="([^"]*)".*?>', r'<svg viewBox="\1" aria-hidden="true">', svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="said-(\d+)">', lambda found: titles[int(found[1])], svg)
    used_ids = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used_ids else "", svg)
    svg = re.sub(r'(url\(#|href="#)(?=[\w-]+)', rf"\g<1>{prefix}-", svg)
    return _ink(re.sub(r"\s*\n\s*", "\n", svg))
