r"""LaTeX: one `table` a grid in booktabs style, with the notes under it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

A heading has the sub-columns ours, paper and difference where they fit the page; where they do not, paper and
difference stand in small type under our number, and what is still too wide is broken into several tabulars.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from fatbench.report import text
from fatbench.report.grid import Column, Grid, Value

PREAMBLE = "% needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"

# A wider tabular is not shrunk to the page but laid out differently; 430pt is about the text width of an A4 article,
# and type shrunk to less than three quarters of \small is not read.
WIDEST = 430 / 0.75
DIGIT = 4.7  # pt, of \small
GAP = 8.0  # pt between two columns

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': "''", "`": r"\textasciigrave{}", "±": r"$\pm$", "×": r"$\times$", "·": r"$\cdot$", "−": r"$-$",
    "≤": r"$\leq$", "≥": r"$\geq$", "≠": r"$\neq$", "≈": r"$\approx$", "→": r"$\rightarrow$", "∞": r"$\infty$",
    "∈": r"$\in$", "∑": r"$\sum$", "…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "‘": "`", "“": "``", "”": "''",
    "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "¶": r"\P{}", "°": r"$^\circ$", "₂": "$_2$",
    "Δ": r"$\Delta$", "ε": r"$\varepsilon$", "ϵ": r"$\epsilon$", "π": r"$\pi$",
}  # fmt: skip
_GREEK = ("alpha beta gamma delta zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega"
          " Gamma Theta Lambda Xi Pi Sigma Phi Psi Omega").split()  # fmt: skip
for _name in _GREEK:
    _kind = "CAPITAL" if _name[0].isupper() else "SMALL"
    _SPECIAL[unicodedata.lookup(f"GREEK {_kind} LETTER {'LAMDA' if _name.lower() == 'lambda' else _name.upper()}")] = (
        f"$\\{_name}$"
    )
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
    return PREAMBLE + "\n".join(_grid(grid) for grid in grids)


def _grid(grid: Grid) -> str:
    title = escape(f"{grid.name}.") if not grid.name.endswith(".") else escape(grid.name)
    if grid.label:
        title += rf" \textbf{{{escape(grid.label)}.}}"
    layout, parts = _layout(grid)
    tabulars = "\n\n\\medskip\n\n".join(_tabular(grid, layout, part) for part in parts)
    notes = [rf"\textit{{{escape(what)}}}: {escape(note)}" for what, note in grid.notes]
    notes += [rf"\textsuperscript{{{escape(mark)}}}\,{escape(note)}" for mark, note in grid.footnotes]
    if layout == "under":
        notes.insert(0, r"\textit{small}: the paper's number and our difference from it")
    lines = [
        f"% suite {grid.suite}, preset {grid.preset}, table {grid.id}" + (f": {grid.label}" if grid.label else ""),
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{title}}}",
        rf"\label{{tab:{re.sub('[^A-Za-z0-9.:-]', '-', f'{grid.suite}-{grid.id}')}}}",
        r"\small",
        r"\setlength{\tabcolsep}{4pt}",
        tabulars,
        "",
        r"\medskip",
        r"\begin{minipage}{\linewidth}",
        r"\scriptsize\raggedright",
        *(f"{note}\\par" for note in notes),
        r"\end{minipage}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


# One heading of one group, as a pair of indices into grid.groups and grid.columns.
Place = tuple[int, int]


def _layout(grid: Grid) -> tuple[str, list[list[Place]]]:
    """(beside, under or bare; the columns of each tabular): the first arrangement that is not too wide."""
    places = [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns))]
    layouts = ("beside", "under") if grid.has_published else ("bare",)
    for layout in layouts:
        if _width(grid, layout, places) <= WIDEST:
            return layout, [places]
    layout = layouts[-1]
    by_group = [[place for place in places if place[0] == g] for g in range(len(grid.groups))]
    parts: list[list[Place]] = []
    for group in by_group:
        if parts and _width(grid, layout, parts[-1] + group) <= WIDEST:
            parts[-1] += group
        elif _width(grid, layout, group) <= WIDEST:
            parts.append(group)
        else:
            parts += _cut(grid, layout, group)
    return layout, parts


def _cut(grid: Grid, layout: str, group: list[Place]) -> list[list[Place]]:
    """One group in the fewest parts of about the same number of columns that fit; at least one column a part."""
    for count in range(2, len(group) + 1):
        size = -(-len(group) // count)
        parts = [group[i : i + size] for i in range(0, len(group), size)]
        if all(_width(grid, layout, part) <= WIDEST for part in parts):
            return parts
    return [[place] for place in group]


def _width(grid: Grid, layout: str, places: Sequence[Place]) -> float:
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
        if layout == "beside" and paper:
            width += max(DIGIT * (max(ours, 4) + max(paper, 5) + max(delta, 1)) + 3 * GAP, DIGIT * len(column.heading))
        else:
            under = 0.75 * (paper + delta + 1) if layout == "under" else 0
            width += DIGIT * max(ours, under, len(column.heading)) + GAP
    return width


def _tabular(grid: Grid, layout: str, places: Sequence[Place]) -> str:
    beside = {place: layout == "beside" and _published_in(grid, place) for place in places}
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
    new_block = text.blocks(grid)
    for index, (row, labels) in enumerate(zip(grid.rows, text.row_labels(grid), strict=True)):
        stubs = [escape(label) for label in labels]
        values = [(row.values[g][c], grid.columns[c], beside[g, c]) for g, c in places]
        if new_block[index]:
            lines.append(r"\addlinespace")
        lines.append(" & ".join([*stubs, *(_cell(value, column, wide) for value, column, wide in values)]) + r" \\")
        if layout == "under" and any(value.published is not None for value, _, _ in values):
            lines.append(" & ".join([*empty, *(_under(value, column) for value, column, _ in values)]) + r" \\")
            if index + 1 < len(grid.rows) and not new_block[index + 1]:
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
        ours = rf"\multicolumn{{2}}{{c}}{{---{marks}}}"
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
