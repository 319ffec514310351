r"""LaTeX: one `table` a grid in booktabs style, with the notes under it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

A heading has the sub-columns ours, paper and difference where they fit the page; where they do not, paper and
difference stand in small type under our number; what is still too wide is broken into blocks of columns, turned by 90
degrees, or spread over several floats.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from fatbench.report import text
from fatbench.report.grid import Column, Grid, Value

PREAMBLE = "% needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"

# About the text block of an A4 article, in pt. A tabular that is wider is shrunk to it, but never to less than three
# quarters of \small, which is not read: it is laid out differently instead.
PAGE, TURNED = (430.0, 620.0), (620.0, 430.0)  # width and height, upright and turned
SHRUNK = 0.75
DIGIT = 4.7  # width of a digit in \small
GAP = 8.0  # between two columns
LINE = 12.0  # height of a row in \small
NOTE = 8.5  # of a line of notes in \scriptsize, which holds about 4 characters per 15 pt

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''", "`": r"\textasciigrave{}", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "−": r"$-$",
    "≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$", "≈": r"$\approx$", "→": r"$\rightarrow$", "∞": r"$\infty$",
    "∈": r"$\in$", "∑": r"$\sum$", "…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "‘": "`", "“": "``", "”": "''",
    "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "¶": r"\P{}", "°": r"$^\circ$", "₂": "$_2$",
    "Δ": r"$\Delta$", "ε": r"$\varepsilon$", "ϵ": r"$\epsilon$", "π": r"$\pi$",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ζ": "zeta", "η": "eta", "θ": "theta", "ι": "iota",
    "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon",
    "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi",
    "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_SPECIAL |= {letter: f"$\\{name}$" for letter, name in _GREEK.items()}
_COMBINING = {"\u0302": r"\hat", "\u0303": r"\tilde", "\u0304": r"\bar", "\u0305": r"\bar", "\u0307": r"\dot"}


def escape(words: str) -> str:
    """Text that LaTeX prints as it is; a character that pdfLaTeX has no glyph for becomes its nearest ASCII, or "?"."""
    words = unicodedata.normalize("NFC", " ".join(words.split()))
    done: list[str] = []
    for character in words:
        if character in _COMBINING and done:
            done[-1] = f"${_COMBINING[character]}{{{done[-1].strip('$')}}}$"
        elif character in _SPECIAL:
            done.append(_SPECIAL[character])
        elif character.isascii() or "\u00c0" <= character <= "\u017e":
            done.append(character)
        else:
            plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            done.append("".join(_SPECIAL.get(c, c) for c in plain) or "?")
    return "".join(done)


def render(grids: Sequence[Grid]) -> str:
    """A fragment with a float for each grid; the first line says which packages it needs."""
    return PREAMBLE + "\n".join(_grid(grid) for grid in grids)


def _grid(grid: Grid) -> str:
    layout = _layout(grid)
    title = escape(grid.name if grid.name.endswith(".") else f"{grid.name}.")
    if grid.label:
        title += rf" \textbf{{{escape(grid.label)}.}}"
    notes = [_note(what, note) for what, note in grid.notes]
    notes += [rf"\textsuperscript{{{escape(mark)}}}\,{escape(note)}" for mark, note in grid.footnotes]
    if layout.style == "under":
        notes.insert(
            0, _note("small type", f"the paper's number{' and our difference from it' * grid.has_differences}")
        )
    about = f"% suite {grid.suite}, preset {grid.preset}, table {grid.id}" + (f": {grid.label}" if grid.label else "")
    floats = []
    for number, tabulars in enumerate(layout.floats):
        caption, rest = (title, notes) if number == 0 else (f"{title} (continued)", [])
        body = [
            r"\centering",
            rf"\caption{{{caption}}}",
            *([rf"\label{{tab:{_slug(grid)}}}"] if number == 0 else []),
            r"\smallskip\small",
            r"\setlength{\tabcolsep}{4pt}",
            "\n\n\\medskip\n\n".join(_tabular(grid, layout.style, *tabular) for tabular in tabulars),
            "",
            r"\medskip",
            r"\begin{minipage}{\linewidth}",
            r"\scriptsize\raggedright",
            *(f"{note}\\par" for note in rest),
            r"\end{minipage}",
        ]
        if not rest:
            body = body[:-5]
        if layout.turned:
            body = [r"\rotatebox{90}{\begin{minipage}{\textheight}", *body, r"\end{minipage}}"]
        place = "p" if layout.turned else "htbp"
        floats.append("\n".join([about, rf"\begin{{table}}[{place}]", *body, r"\end{table}"]) + "\n")
    return "\n".join(floats)


def _note(what: str, note: str) -> str:
    style = "textbf" if what == "MIXED" else "textit"
    return rf"\{style}{{{escape(what)}}}: {escape(note)}"


def _slug(grid: Grid) -> str:
    return re.sub("[^A-Za-z0-9.:-]", "-", f"{grid.suite}-{grid.id}")


Place = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns
Tabular = tuple[Sequence[Place], range]  # its columns, its rows


@dataclass(frozen=True)
class Layout:
    """How a grid is laid out on pages."""

    style: str  # the paper's numbers "beside" ours or "under" them; "bare" where there are none
    turned: bool  # by 90 degrees
    floats: list[list[Tabular]]


def _layout(grid: Grid) -> Layout:
    """The first arrangement that fits a page: in one piece, in blocks of columns, turned, on several pages."""
    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    rows = range(len(grid.rows))
    styles = ("beside", "under") if grid.has_published else ("bare",)
    for turned, page in ((False, PAGE), (True, TURNED)):
        for style in styles:
            if _width(grid, style, places) <= page[0] / SHRUNK and _height(grid, style, 1, page) <= page[1]:
                return Layout(style, turned, [[(places, rows)]])
        parts = _parts(grid, styles[-1], places, page)
        if _height(grid, styles[-1], len(parts), page) <= page[1]:
            return Layout(styles[-1], turned, [[(part, rows) for part in parts]])
    style = styles[-1]
    parts = _parts(grid, style, places, PAGE)
    left = PAGE[1] - _height(grid, style, 0, PAGE) - 4 * LINE
    most = max(8, int(left / _row_height(style)))
    slices = [rows[i : i + most] for i in range(0, len(rows), most)]
    return Layout(style, False, [[(part, each)] for part in parts for each in slices])


def _parts(grid: Grid, style: str, places: list[Place], page: tuple[float, float]) -> list[list[Place]]:
    """The columns in blocks that are not too wide: groups together where they fit, else each cut evenly."""
    widest = page[0] / SHRUNK
    parts: list[list[Place]] = []
    for g in range(len(grid.groups)):
        group = [place for place in places if place[0] == g]
        if parts and _width(grid, style, parts[-1] + group) <= widest:
            parts[-1] += group
            continue
        for count in range(1, len(group) + 1):
            size = -(-len(group) // count)
            cut = [group[i : i + size] for i in range(0, len(group), size)]
            if size == 1 or all(_width(grid, style, part) <= widest for part in cut):
                break
        parts += cut
    return parts


def _row_height(style: str) -> float:
    return 1.75 * LINE if style == "under" else LINE


def _height(grid: Grid, style: str, tabulars: int, page: tuple[float, float]) -> float:
    """About how high a float with so many tabulars of all rows is, in pt."""
    letters = 15 / 4  # pt a letter of \scriptsize
    notes = sum(1 + len(f"{what}: {note}") * letters // page[0] for what, note in (*grid.notes, *grid.footnotes))
    blocks = 0.5 * LINE * sum(text.blocks(grid))
    head = LINE * (4 if any(group.label for group in grid.groups) else 3)
    return 3 * LINE + NOTE * notes + tabulars * (head + blocks + _row_height(style) * len(grid.rows))


def _width(grid: Grid, style: str, places: Sequence[Place]) -> float:
    """About how wide a tabular is, in pt."""
    width = sum(
        DIGIT * max(len(text) for text in (axis, *(row.key.get(axis, "") for row in grid.rows))) + GAP
        for axis in grid.axes
    )
    for g, c in places:
        column = grid.columns[c]
        ours = paper = delta = 0.0
        for row in grid.rows:
            value = row.values[g][c]
            measured = text.MISSING if value.mean is None else text.number(value.mean, column)
            small = text.spread(value, column) + text.share(value) + "".join(value.marks)
            ours = max(ours, len(measured) + 0.75 * len(small))
            paper = max(paper, len(text.published(value, column)) + 0.7 * len(value.published_mark))
            delta = max(delta, len(text.difference(value, column)))
        if style == "beside" and paper:
            width += max(DIGIT * (max(ours, 4) + max(paper, 5) + max(delta, 1)) + 3 * GAP, DIGIT * len(column.heading))
        else:
            under = 0.75 * (paper + delta + 1) if style == "under" else 0
            width += DIGIT * max(ours, under, len(column.heading)) + GAP
    return width


def _tabular(grid: Grid, style: str, places: Sequence[Place], rows: range) -> str:
    beside = {place: style == "beside" and _published_in(grid, place) for place in places}
    spans = {place: 5 if beside[place] else 2 for place in places}  # TeX columns: number@spread [paper@mark difference]
    spec = "".join("r@{}l r@{}l r" if beside[place] else "r@{}l" for place in places)
    lines = [
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{@{{}}{'l' * len(grid.axes)}{spec}@{{}}}}",
        r"\toprule",
    ]
    stub = len(grid.axes)
    axes = [escape(axis) for axis in grid.axes]
    empty = [""] * stub
    heads: list[list[str]] = []
    rules: list[list[str]] = []
    if any(group.label for group in grid.groups):
        cells, rule, at = [], [], stub + 1
        for g in dict.fromkeys(g for g, _ in places):
            width = sum(spans[place] for place in places if place[0] == g)
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(grid.groups[g].label)}}}")
            rule.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
            at += width
        heads.append(cells)
        rules.append(rule)
    cells, rule, at = [], [], stub + 1
    for place in places:
        cells.append(rf"\multicolumn{{{spans[place]}}}{{c}}{{{escape(grid.columns[place[1]].heading)}}}")
        rule.append(rf"\cmidrule(lr){{{at}-{at + spans[place] - 1}}}")
        at += spans[place]
    heads.append(cells)
    if any(beside.values()):
        rules.append(rule)
        below = [
            r"\multicolumn{2}{c}{ours} & \multicolumn{2}{c}{paper} & \multicolumn{1}{c}{$\Delta$}"
            if beside[place]
            else r"\multicolumn{2}{c}{ours}"
            for place in places
        ]
        heads.append(below)
    for level, cells in enumerate(heads):
        last = level == len(heads) - 1
        lines.append(" & ".join([*(axes if last else empty), *cells]) + r" \\")
        if not last:
            lines.append(" ".join(rules[level]))
    lines.append(r"\midrule")
    new_block, labels = text.blocks(grid), text.row_labels(grid)
    for index in rows:
        row = grid.rows[index]
        first = index == rows[0]
        stubs = [escape(label) for label in ([row.key.get(axis, "") for axis in grid.axes] if first else labels[index])]
        values = [(row.values[g][c], grid.columns[c], beside[g, c]) for g, c in places]
        if new_block[index] and not first:
            lines.append(r"\addlinespace")
        lines.append(" & ".join([*stubs, *(_cell(value, column, wide) for value, column, wide in values)]) + r" \\")
        if style == "under" and any(value.published is not None for value, _, _ in values):
            lines.append(" & ".join([*empty, *(_under(value, column) for value, column, _ in values)]) + r" \\")
            if index != rows[-1] and not new_block[index + 1]:
                lines.append(r"\addlinespace[2pt]")
    lines += [r"\bottomrule", r"\end{tabular}}"]
    return "\n".join(lines)


def _published_in(grid: Grid, place: Place) -> bool:
    g, c = place
    return any(row.values[g][c].published is not None for row in grid.rows)


def _cell(value: Value, column: Column, wide: bool) -> str:
    """Our number with its spread (two TeX columns), and where `wide` the paper's (two) and the difference (one)."""
    if not value.planned:
        return " & ".join([""] * (5 if wide else 2))
    marks = "".join(rf"\textsuperscript{{{escape(mark)}}}" for mark in value.marks)
    if value.mean is None:
        ours = rf"\multicolumn{{2}}{{c}}{{--{marks}}}"
    else:
        number = _minus(text.number(value.mean, column))
        number = {"best": rf"\textbf{{{number}}}", "second": rf"\underline{{{number}}}"}.get(value.rank, number)
        small = text.spread(value, column).replace("±", r"$\pm$")
        if value.partial:
            small += rf"\,{text.share(value)}"
        ours = f"{number} & {_small(small)}{marks}"
    if not wide:
        return ours
    if value.published is None:
        return f"{ours} & & &"
    mark = rf"\textsuperscript{{{escape(value.published_mark)}}}" if value.published_mark else ""
    paper = _minus(text.number(value.published, column))
    spread = "" if value.published_std is None else rf"$\pm${text.number(value.published_std, column)}"
    return f"{ours} & {paper} & {_small(spread)}{mark} & {_minus(text.difference(value, column))}"


def _under(value: Value, column: Column) -> str:
    """The paper's number and the difference, for the line under ours."""
    if value.published is None:
        return " & "
    mark = rf"\textsuperscript{{{escape(value.published_mark)}}}" if value.published_mark else ""
    spread = "" if value.published_std is None else rf"$\pm${text.number(value.published_std, column)}"
    paper = f"{_minus(text.number(value.published, column))}{spread}{mark}"
    difference = _minus(text.difference(value, column))
    both = rf"{paper}\enspace {difference}" if difference else paper
    return rf"\multicolumn{{2}}{{c}}{{\scriptsize {both}}}"


def _small(words: str) -> str:
    return rf"{{\scriptsize\,{words}}}" if words else ""


def _minus(number: str) -> str:
    return number.replace("-", "$-$").replace("+", "$+$")
