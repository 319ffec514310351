"""Charts of a page as Vega-Lite, made with Altair: what they show, without their rows, which the page holds once."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Container, Mapping, Sequence
from importlib import resources
from typing import Any

from fatbench.report.figures.styles import COLOURS as OKABE_ITO

# Told apart by the colour-blind, on white and on black
COLOURS = (*OKABE_ITO[:6], "#808080")  # as on paper; grey for black, which a dark page hides
DASHES = ([1, 0], [5, 3], [2, 2], [8, 3, 2, 3])
HEIGHT = 190  # pixels of a panel
FIELDS = ("name", "x", "mean", "low", "high")
CORNERS = ((1, -6), (1, 9), (-1, -6), (-1, 9))  # of a dot, where its name may stand: right or left, pixels down
BARS = (*FIELDS, "least", "most")  # of what is published, if anything

Styles = Mapping[str, tuple[int, int]]  # name of a line -> which colour, which dashes
Domain = tuple[float, float] | None  # of the vertical axis, the same for all panels


@functools.cache
def vega() -> str:
    """Vega, Vega-Lite and vega-embed as one script (licences: vega.LICENSE), which `make vega` writes."""
    return resources.files("fatbench.report.figures").joinpath("vega.js").read_bytes().decode()


def hashed(script: str) -> str:
    """What a Content-Security-Policy calls a script that stands in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _done(chart: Any, height: int = HEIGHT) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(height=height).to_dict()
    del spec["config"]  # the page's own
    return spec


def lines(
    x: str, y: str, styles: Styles | None = None, log: bool = False, whole: bool = True, domain: Domain = None
) -> dict[str, Any]:
    """Curves of (name, x, mean) with a band from low to high. whole: x counts; else it is a radius.

    styles: of a figure, whose legend stands in the page; None: of a cell, whose chart has its own.
    """
    import altair as alt

    limits = alt.Undefined if domain is None else list(domain)
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False, domain=limits)
    axis = alt.Axis(tickCount=5, format="~s") if log else alt.Axis(tickCount=5)
    across = alt.Axis(format="d" if whole else "~g", grid=False, tickCount=6)  # of a few rounds the page names each
    colour = alt.Color("name:N", sort=None, legend=alt.Legend(orient="top", title=None))  # seeds in their order
    dash: Any = alt.value([1, 0])
    if styles is not None:
        colour = alt.Color(
            "name:N", legend=None, scale=_scale(styles, {n: colour_of(h) for n, (h, _) in styles.items()})
        )
        dash = alt.StrokeDash(
            "name:N", legend=None, scale=_scale(styles, {n: DASHES[d] for n, (_, d) in styles.items()})
        )
    base = alt.Chart(alt.NamedData("rows")).encode(
        x=alt.X("x:Q", title=x, axis=across, scale=alt.Scale(zero=False, nice=False)), color=colour
    )
    up = alt.Y("mean:Q", title=y, scale=scale, axis=axis)
    said = [alt.Tooltip("name:N", title=" "), alt.Tooltip("x:Q", title=x)]
    for field, title in (("mean", "mean"), ("low", "mean - std"), ("high", "mean + std")):
        said.append(alt.Tooltip(f"{field}:Q", title=title, format=".5~g"))
    curve = base.mark_line(strokeWidth=1.6).encode(y=up, strokeDash=dash)
    dots = base.mark_circle(size=26, opacity=0.9).encode(y=up, tooltip=said if styles is not None else said[:3])
    band = base.mark_area(opacity=0.16).encode(y=alt.Y("low:Q", title=y, scale=scale, axis=axis), y2="high:Q")
    return _done(alt.layer(curve, dots) if styles is None else alt.layer(band, curve, dots))


def bars(x: str, y: str, styles: Styles, domain: Domain = None, mark: str = "published") -> dict[str, Any]:
    """Bars of (name, x, mean) in groups of one x, with a whisker from low to high; a thick mark is what `mark` says."""
    import altair as alt

    limits = alt.Undefined if domain is None else list(domain)
    base = alt.Chart(alt.NamedData("rows")).encode(
        x=alt.X("x:N", title=x or None, sort=None, axis=alt.Axis(labelAngle=0 if x else -30, labelLimit=140)),
        xOffset=alt.XOffset("name:N", sort=list(styles)),
    )
    up = alt.Y("mean:Q", title=y, axis=alt.Axis(tickCount=5), scale=alt.Scale(domain=limits))
    said = [alt.Tooltip("x:N", title=x or " "), alt.Tooltip("name:N", title=" "), alt.Tooltip("mean:Q", format=".5~g")]
    colour = alt.Color("name:N", legend=None, scale=_scale(styles, {n: colour_of(h) for n, (h, _) in styles.items()}))
    bar = base.mark_bar(clip=True).encode(y=up, color=colour, tooltip=said)
    whisker = base.mark_rule(color="currentColor", opacity=0.6, clip=True).encode(
        y=alt.Y("low:Q", title=y), y2="high:Q"
    )
    said_there = base.transform_filter("isValid(datum.least)").encode(
        tooltip=[said[0], said[1], alt.Tooltip("least:Q", title=f"{mark}, from", format=".5~g"),
                 alt.Tooltip("most:Q", title="to", format=".5~g")],
    )  # fmt: skip
    span = said_there.mark_rule(color="currentColor", strokeWidth=3).encode(y=alt.Y("least:Q", title=y), y2="most:Q")
    ends = [
        said_there.mark_tick(color="currentColor", thickness=2.5, size=9).encode(y=alt.Y(f"{end}:Q", title=y))
        for end in ("least", "most")
    ]
    return _done(alt.layer(bar, whisker, span, *ends))


def heat(x: str, y: str, size: tuple[int, int], most: float, least: float | None = None) -> dict[str, Any]:
    """A rectangle for each (name, x): names down, x along. size: how many of both; most: of the numbers.

    least: of the numbers, which are then written into the rectangles, on cividis. None: x counts, and a rectangle is
    the fainter the nearer its number is to 0.
    """
    import altair as alt

    across = alt.Axis(labelAngle=0, labelOverlap=True, ticks=False)
    base = alt.Chart(alt.NamedData("rows")).encode(
        x=alt.X("x:O", title=x or None, sort="ascending" if least is None else None, axis=across),
        y=alt.Y("name:N", title=y or None, sort=None, axis=alt.Axis(labelLimit=200, ticks=False)),
        tooltip=[
            alt.Tooltip("name:N", title=y or " "), alt.Tooltip("x:O", title=x or " "),
            alt.Tooltip("mean:Q", title="value", format=".5~g"),
        ],
    )  # fmt: skip
    tall = max(90, min(700, 22 * size[0]))
    if least is None:
        faint = alt.Opacity("mean:Q", legend=None, scale=alt.Scale(domain=[0, most], range=[0.07, 1]))
        return _done(alt.layer(base.mark_rect(color=COLOURS[0]).encode(opacity=faint)), tall)
    scale = alt.Scale(scheme="cividis", domain=[least, most])
    layers = [base.mark_rect().encode(color=alt.Color("mean:Q", legend=None, scale=scale))]
    if size[0] * size[1] <= 100:
        ink = alt.condition(f"datum.mean > {(least + most) / 2}", alt.value("black"), alt.value("white"))
        layers.append(base.mark_text(fontSize=11).encode(text=alt.Text("mean:Q", format=".1f"), color=ink))
    return _done(alt.layer(*layers), tall)


def colour_of(hue: int) -> str:
    """A colour; they begin again after the last."""
    return COLOURS[hue % len(COLOURS)]


def _scale(styles: Styles, values: Mapping[str, Any]) -> Any:
    import altair as alt

    return alt.Scale(domain=list(styles), range=[values[name] for name in styles])


def forest(x: str, count: int) -> dict[str, Any]:
    """Differences (name, mean) with an interval from low to high, a row each; a line at zero. A dot opens its cell."""
    import altair as alt

    base = alt.Chart(alt.NamedData("rows")).encode(
        y=alt.Y("name:N", title=None, sort=None, axis=alt.Axis(labelLimit=170, ticks=False))
    )
    said = [
        alt.Tooltip("name:N", title=" "), alt.Tooltip("mean:Q", title="points", format="+.2f"),
        alt.Tooltip("low:Q", title="from", format="+.2f"), alt.Tooltip("high:Q", title="to", format="+.2f"),
    ]  # fmt: skip
    span = base.mark_rule(strokeWidth=2, opacity=0.6).encode(
        x=alt.X("low:Q", title=x, axis=alt.Axis(tickCount=5), scale=alt.Scale(padding=8)),
        x2="high:Q",
        color=alt.value(COLOURS[0]),
    )
    dots = base.mark_circle(size=72, opacity=1, cursor="pointer").encode(
        x=alt.X("mean:Q", title=x), color=alt.value(COLOURS[0]), tooltip=said
    )
    zero = alt.Chart(alt.NamedData("rows")).mark_rule(strokeDash=[3, 3], color="currentColor", opacity=0.6)
    return _done(alt.layer(zero.encode(x=alt.X("x:Q", title=x)), span, dots), max(90, 24 * count))


def corners(dots: Sequence[tuple[str, float, float]], across: Domain, up: Domain) -> list[int]:
    """Where the name of each dot (name, x, y) covers least: which of CORNERS. across, up: what the axes show."""
    width, letter, line = 330, 5.4, 11  # pixels of a narrow panel, of a letter, of a line

    def scaled(at: float, domain: Domain, size: int) -> float:
        low, high = domain or (0.0, 1.0)
        return size * (at - low) / (high - low or 1.0)

    centres = [(scaled(x, across, width), HEIGHT - scaled(y, up, HEIGHT)) for _, x, y in dots]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in centres]
    found = []
    for (name, *_), (x, y) in zip(dots, centres, strict=True):
        boxes = []
        for right, dy in CORNERS:
            near, far = x + 7 * right, x + right * (7 + letter * len(name))
            boxes.append((min(near, far), y + dy - line / 2, max(near, far), y + dy + line / 2))

        def covered(box: tuple[float, ...]) -> float:
            overlaps = (
                max(0, min(box[2], o[2]) - max(box[0], o[0])) * max(0, min(box[3], o[3]) - max(box[1], o[1]))
                for o in taken
            )
            return sum(overlaps) + max(0, -box[0], box[2] - width) * line  # what is outside is cut off

        corner = min(range(len(CORNERS)), key=lambda one: covered(boxes[one]))
        found.append(corner)
        taken.append(boxes[corner])
    return found


def against(x: str, y: str, kinds: Container[str], named: Container[int] = ()) -> dict[str, Any]:
    """Points (name, x, mean) with a cross of spreads; a ring is the published number. A point opens its cell.

    kinds: which of "measured" and "published" there is a row of.
    named: at which of CORNERS measured points have their name; none: no point has.
    """
    import altair as alt

    rows = alt.Chart(alt.NamedData("rows"))
    across = alt.X("x:Q", title=x, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(tickCount=5))
    up = alt.Y("mean:Q", title=y, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(tickCount=5))
    said = [
        alt.Tooltip("name:N", title=" "), alt.Tooltip("kind:N", title="number"),
        alt.Tooltip("x:Q", title=x, format=".2f"), alt.Tooltip("mean:Q", title=y, format=".2f"),
    ]  # fmt: skip
    measured = rows.transform_filter("datum.kind == 'measured'")
    tall = measured.mark_rule(opacity=0.45).encode(
        x=across, y=alt.Y("low:Q", title=y), y2="high:Q", color=alt.value(COLOURS[0])
    )
    wide = measured.mark_rule(opacity=0.45).encode(
        x=alt.X("left:Q", title=x), x2="right:Q", y=up, color=alt.value(COLOURS[0])
    )
    points = measured.mark_circle(size=72, opacity=0.9, cursor="pointer").encode(
        x=across, y=up, color=alt.value(COLOURS[0]), tooltip=said
    )
    rings = (
        rows.transform_filter("datum.kind == 'published'")
        .mark_point(size=56, strokeWidth=1.4, filled=False)
        .encode(x=across, y=up, color=alt.value(COLOURS[1]), tooltip=said)
    )
    layers = [tall, wide, points] * ("measured" in kinds) + [rings] * ("published" in kinds)
    if "measured" in kinds:
        layers += [
            measured.transform_filter(f"datum.corner == {corner}")
            .mark_text(align="left" if right > 0 else "right", dx=7 * right, dy=dy, fontSize=10, color="currentColor")
            .encode(x=across, y=up, text="name:N")
            for corner, (right, dy) in enumerate(CORNERS)
            if corner in named
        ]
    return _done(alt.layer(*layers))
