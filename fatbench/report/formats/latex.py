r"""LaTeX: a float a grid in booktabs style, with the notes under it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

A heading has the sub-columns ours, paper and, if any, difference where they fit the line; where they do not, paper and
difference stand in small type under our number (`latex_layout`). The caption says what the numbers are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from fatbench.report.formats import latex_layout
from fatbench.report.formats.latex_layout import GroupColumn, Layout
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid, PairedComparison
from fatbench.report.tables.notes import IN_CAPTION, p_value
from fatbench.report.tables.number_format import Entry

PREAMBLE = "% needs \\usepackage{booktabs}\n"
MOST_FLOATS = 12  # without a \clearpage: LaTeX stops at 18 (52 since 2015) that have not found a page

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


def render(grids: Sequence[Grid], width: str = "text", published: str | None = None, spread: str | None = None) -> str:
    """A fragment with floats for each grid; the first line says which package it needs.

    width: "column" or "text" of a two-column page, or points; published, spread: see `latex_layout.arrange`.
    """
    points = latex_layout.width_of(width)
    floats = [float for grid in grids for float in _floats(grid, points, published, spread)]
    pages = ["\n".join(floats[i : i + MOST_FLOATS]) for i in range(0, len(floats), MOST_FLOATS)]
    return PREAMBLE + "\n\\clearpage\n\n".join(pages)


def _floats(grid: Grid, width: float, published: str | None, spread: str | None) -> list[str]:
    layout = latex_layout.arrange(grid, width, published, spread)
    caption = _caption(grid, layout)
    paired = len(grid.paired) and any(what == "paired" for what, _ in grid.notes)
    tests = paired and sum(what == "paired" for what, _ in grid.notes) > 1  # all of them, not the count alone
    notes = [(what, note) for what, note in grid.notes if what not in IN_CAPTION and not (tests and what == "paired")]
    pieces = [
        (
            latex_layout.height(grid, layout.style, layout.size, layout.stubs, rows),
            "tabular",
            _tabular(grid, layout, places, rows),
        )
        for places, rows in layout.tabulars
    ]
    said = [(f"{what}: {note}", _note(what, note)) for what, note in notes]
    if tests:
        said.append(next((note, _note(what, note)) for what, note in grid.notes if what == "paired"))
    said += [
        (f"{mark} {note}", rf"\textsuperscript{{{escape(mark)}}}\,{escape(note)}") for mark, note in grid.footnotes
    ]
    pieces += [
        (latex_layout.lines_of(plain, width) * latex_layout.SMALL * latex_layout.LINE, "note", words)
        for plain, words in said
    ]
    if tests:
        pieces += _tests(grid)
    about = f"% suite {grid.suite}, preset {grid.preset}, table {grid.id}" + (f": {grid.label}" if grid.label else "")
    first = 1.22 * 10 * latex_layout.lines_of(caption, width, 10.0) + 20
    wide = "*" * (width > latex_layout.WIDE)
    floats = []
    for number, here in enumerate(latex_layout.packed(pieces, first)):
        body = [
            r"\centering",
            *([r"\addtocounter{table}{-1}"] if number else []),
            rf"\caption{{{caption if number == 0 else f'{_title(grid)} (continued)'}}}",
            *([rf"\label{{tab:{_slug(grid)}}}"] if number == 0 else []),
            rf"\smallskip\{layout.size}",
            r"\setlength{\tabcolsep}{3pt}",
            *_body(here),
        ]
        floats.append("\n".join([about, rf"\begin{{table{wide}}}[htbp]", *body, rf"\end{{table{wide}}}"]) + "\n")
    return floats


def _body(pieces: Sequence[tuple[str, str]]) -> list[str]:
    """Tabulars one under another; notes that follow each other in one small paragraph each."""
    lines: list[str] = []
    before = ""
    for kind, words in pieces:
        if before == "note" and kind != "note":
            lines.append(r"\end{minipage}")
        if before and not before == kind == "note":
            lines += ["", r"\medskip"]
        if kind == "note" and before != "note":
            lines += [r"\begin{minipage}{\linewidth}", r"\scriptsize\raggedright"]
        lines.append(rf"{words}\par" if kind == "note" else words)
        before = kind
    return [*lines, r"\end{minipage}"] if before == "note" else lines


def _title(grid: Grid) -> str:
    title = escape(grid.name if grid.name.endswith(".") else f"{grid.name}.")
    return title + (rf" \textbf{{{escape(grid.label)}.}}" if grid.label else "")


def _caption(grid: Grid, layout: Layout) -> str:
    """What the numbers are: over how many seeds and images, of which model, what the marks and the small type mean."""
    values = list(grid.all())
    said = [_over(grid, layout.style.spread)]
    if grid.perturbation:
        said.append(f"Perturbation: {grid.perturbation}.")
    if grid.checkpoint:
        trained = grid.checkpoint.startswith("training")
        said.append(f"{grid.checkpoint.capitalize() if trained else f'Checkpoint: {grid.checkpoint}'}.")
    if any(value.rank == "best" for value in values):
        said.append("Bold: significantly better than all others.")
    if any(value.planned and value.mean is None and not value.never for value in values):
        said.append("--: not measured.")
    if any(value.never for value in values):
        said.append(f"{number_format.NEVER}: neither evaluated nor logged.")
    at = f" ({grid.published_at})" * bool(grid.published_at)
    if layout.style.paper == "under":
        said.append(f"Small type: the {grid.by}'s number{at}{', and our difference from it' * grid.has_differences}.")
    elif layout.style.paper == "beside":
        word = "Paper: as published" if grid.by == "paper" else "Formula: computed, not published"
        said.append(f"{word}{at}." + f" Δ: ours minus the {grid.by}'s." * grid.has_differences)
    return " ".join([_title(grid), *(escape(sentence) for sentence in said if sentence)])


def _over(grid: Grid, spread: str) -> str:
    """ "Mean ± sample standard deviation over seeds 6, 7 and 8, on 10,000 test images." """
    sizes = {n for value in grid.all() for n in value.n if n}
    images = f" on {next(iter(sizes)):,} test images" if len(sizes) == 1 else ""
    if len(grid.seeds) == 1:
        return f"One seed ({grid.seeds[0]}), no spread{',' * bool(images)}{images}."
    what = "Mean" if spread == "none" else "Mean ± sample standard deviation"
    return f"{what} over {len(grid.seeds)} seeds ({_seeds(grid.seeds)}){images}."


def _seeds(seeds: Sequence[int]) -> str:
    run = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))) if seeds else False
    return f"{seeds[0]} to {seeds[-1]}" if run and len(seeds) > 3 else ", ".join(map(str, seeds))


def _note(what: str, note: str) -> str:
    style = "textbf" if what == "MIXED" else "textit"
    return rf"\{style}{{{escape(what)}}}: {escape(note)}"


def _slug(grid: Grid) -> str:
    return re.sub("[^A-Za-z0-9.:-]", "-", f"{grid.suite}-{grid.id}")


MOST_TESTS = 40  # of a tabular: more begin another


def _tests(grid: Grid) -> list[tuple[float, str, str]]:
    """The paired tests as tabulars, a line each: labels, heading, difference, p of the t test and of Wilcoxon's."""
    pieces = []
    for start in range(0, len(grid.paired), MOST_TESTS):
        here = grid.paired[start : start + MOST_TESTS]
        axes = list(here[0].key)
        heads = [*(escape(axis) for axis in axes), "", "difference", r"\multicolumn{2}{c}{$p$ ($t$, Wilcoxon)}"]
        lines = [
            r"{\scriptsize",
            rf"\begin{{tabular}}{{@{{}}{'l' * (len(axes) + 1)}rrr@{{}}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *(_test(one) for one in here),
            r"\bottomrule",
            r"\end{tabular}}",
        ]
        pieces.append(((len(here) + 1) * latex_layout.SMALL * latex_layout.LINE + 20, "tabular", "\n".join(lines)))
    return pieces


def _test(one: PairedComparison) -> str:
    test = one.test
    labels = [*one.key.values(), f"{one.label} − {one.against}, {one.column.heading}"]
    difference = (
        rf"{_signs(number_format.signed(test.mean, one.column))} $\pm$ {number_format.number(test.std, one.column)}"
    )
    return " & ".join([*map(escape, labels), difference, p_value(test.t_p), p_value(test.wilcoxon_p)]) + r" \\"


def _tabular(grid: Grid, layout: Layout, places: Sequence[GroupColumn], rows: range) -> str:
    style = layout.style
    beside = {place: style.paper == "beside" and _published_in(grid, place) for place in places}
    wide = 5 if grid.has_differences else 4  # TeX columns: number@spread paper@mark [difference]
    spans = {place: wide if beside[place] else 2 for place in places}
    spec = "".join({2: "r@{}l", 4: "r@{}l r@{}l", 5: "r@{}l r@{}l r"}[spans[place]] for place in places)
    lines = [rf"\begin{{tabular}}{{@{{}}{'l' * len(layout.stubs)}{spec}@{{}}}}", r"\toprule"]
    stub = len(layout.stubs)
    axes = [escape(axis) for axis in latex_layout.axes(grid, style)]
    empty = [""] * stub
    heads: list[list[str]] = []
    levels: list[list[str]] = []
    if any(group.label for group in grid.groups):
        cells, rules, at = [], [], stub + 1
        for g in dict.fromkeys(g for g, _ in places):
            width = sum(spans[place] for place in places if place[0] == g)
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(grid.groups[g].label)}}}")
            rules.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
            at += width
        heads.append(cells)
        levels.append(rules)
    cells, rules, at = [], [], stub + 1
    for place in places:
        words = r"\\".join(escape(line) for line in latex_layout.heading_lines(grid, place, layout.size, style))
        words = rf"\shortstack{{{words}}}" if r"\\" in words else words
        cells.append(rf"\multicolumn{{{spans[place]}}}{{c}}{{{words}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + spans[place] - 1}}}")
        at += spans[place]
    heads.append(cells)
    if any(beside.values()):
        levels.append(rules)
        below = [
            r"\multicolumn{2}{c}{ours}"
            + rf" & \multicolumn{{2}}{{c}}{{{grid.by}}}" * beside[place]
            + r" & \multicolumn{1}{c}{$\Delta$}" * (spans[place] == 5)
            for place in places
        ]
        heads.append(below)
    for level, cells in enumerate(heads):
        last = level == len(heads) - 1
        lines.append(" & ".join([*(axes if last else empty), *cells]) + r" \\")
        if not last:
            lines.append(" ".join(levels[level]))
    lines.append(r"\midrule")
    new_block, labels = number_format.blocks(grid), number_format.row_labels(grid)
    for index in rows:
        row = grid.rows[index]
        first = index == rows[0]
        own = latex_layout.labels(grid, row, style)
        shown = own if first else [own[i] if label else "" for i, label in enumerate(labels[index][-stub:])]
        stubs = [_stub(label, cap, layout.size) for label, cap in zip(shown, layout.stubs, strict=True)]
        entries = {place: latex_layout.entry(grid, row, place) for place in places}
        if new_block[index] and not first:
            lines.append(r"\addlinespace")
        if style.block and (first or new_block[index]):
            said = escape(row.key.get(grid.axes[0], ""))
            lines.append(rf"\multicolumn{{{stub + sum(spans.values())}}}{{@{{}}l}}{{\textit{{{said}}}}} \\")
        shown_here = (_cell(entry, spans[place], style.spread) for place, entry in entries.items())
        lines.append(" & ".join([*stubs, *shown_here]) + r" \\")
        small: list[list[str]] = []  # lines in small type below
        if style.spread == "below" and any(entry.spread for entry in entries.values()):
            small.append([_spread_below(entry, spans[place]) for place, entry in entries.items()])
        if style.paper == "under" and any(entry.published for entry in entries.values()):
            small.append([_under(entry, style.spread != "none") for entry in entries.values()])
        lines += [" & ".join([*empty, *here]) + r" \\" for here in small]
        if small and index != rows[-1] and not new_block[index + 1]:
            lines.append(r"\addlinespace[2pt]")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines)


def _stub(label: str, cap: float, size: str) -> str:
    """A row's label; one that is wider than its column goes on below."""
    if latex_layout.span(label, latex_layout.points_of(size)) <= cap + 0.01:
        return escape(label)
    return rf"\parbox[t]{{{cap:.0f}pt}}{{\raggedright\hangindent=1em {escape(label)}\strut}}"


def _published_in(grid: Grid, place: GroupColumn) -> bool:
    g, c = place
    return any(row.values[g][c].published is not None for row in grid.rows)


def _cell(entry: Entry, columns: int, spread: str) -> str:
    """Our number with its spread (two TeX columns), in four also the paper's (two), in five the difference (one)."""
    said = entry.spread if spread == "beside" else ""
    value = entry.value
    if not value.planned:
        return " & ".join([""] * columns)
    marks = "".join(map(_mark, value.marks))
    if value.mean is None:
        ours = rf"\multicolumn{{2}}{{c}}{{{entry.number}{marks}}}"
    else:
        number = _signs(entry.number)
        number = rf"\textbf{{{number}}}" if value.rank == "best" else number
        seeds = rf"\,{entry.seeds}" if entry.seeds else ""
        ours = f"{number} & {_small(_signs(said) + seeds)}{marks}"
    if columns == 2 or not entry.published:
        return ours + " &" * (columns - 2)
    theirs = _small(_signs(entry.published_spread if spread == "beside" else "")) + _mark(value.published_mark)
    return f"{ours} & {_signs(entry.published)} & {theirs}" + f" & {_signs(entry.difference)}" * (columns == 5)


def _spread_below(entry: Entry, columns: int) -> str:
    """The spreads of our number and, in four TeX columns or five, the paper's, for the line below them."""
    shown = [entry.spread, entry.published_spread][: columns // 2]
    cells = [rf"\multicolumn{{2}}{{c}}{{\scriptsize {_signs(one)}}}" if one else " & " for one in shown]
    return " & ".join([*cells, *[""] * (columns == 5)])


def _under(entry: Entry, with_spread: bool) -> str:
    """The paper's number and the difference, for the line under ours."""
    if not entry.published:
        return " & "
    both = _signs(entry.published + entry.published_spread * with_spread) + _mark(entry.value.published_mark)
    if entry.difference:
        both += rf"\enspace {_signs(entry.difference)}"
    return rf"\multicolumn{{2}}{{c}}{{\scriptsize {both}}}"


def _mark(mark: str) -> str:
    return rf"\textsuperscript{{{escape(mark)}}}" if mark else ""


def _small(words: str) -> str:
    return rf"{{\scriptsize\,{words}}}" if words else ""


def _signs(number: str) -> str:
    return number.replace("-", "$-$").replace("+", "$+$").replace("±", r"$\pm$")
