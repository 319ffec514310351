r"""LaTeX: a float a table in booktabs style, with its notes in it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

LaTeX itself scales a tabular that is wider than its line, and never below 6 pt: of many columns the spreads go under
their numbers, of more the groups one below the other, and of still more a comment names the options that help.
Labels that all rows share stand in the caption, and so do the names of rows and headings without numbers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.formats.latex_text import caption_title, escape, printable, prose, signs, small_type, superscript
from fatbench.report.tables import number_format
from fatbench.report.tables.notes import IN_CAPTION
from fatbench.report.tables.sheet import LABEL, Entry, Row, Sheet, varying, with_numbers


@dataclass(frozen=True)
class Width:
    """What a line and a page hold at 6 pt, and the environment that floats."""

    columns: int  # of labels and of numbers with their spread beside; nearly a third more with it below
    environment: str = "table"
    wide: bool = False  # has table*, twice as wide, for what is too wide for a column
    points: float | None = None  # the largest width of a tabular; None: that of the line
    lines: int = 38  # of a tabular on a page

    @property
    def max_width(self) -> str:
        return r"\linewidth" if self.points is None else f"{self.points:g}pt"


WIDTHS = {
    "article": Width(7), "llncs": Width(7), "neurips": Width(8), "beamer": Width(6, "frame", lines=14),
    "ieee": Width(4, wide=True), "acm": Width(4, wide=True), "column": Width(4), "text": Width(9, "table*"),
}  # fmt: skip
DEFAULT = "article"
POINTS = 49  # of a column at 6 pt
BELOW = 1.3  # so many more columns where spreads stand below
SIZES = r"\fontsize{8}{9.6}\selectfont\renewcommand{\scriptsize}{\fontsize{7}{8.4}\selectfont}"  # in every class
SCALE = ".86"  # 6 pt of 7
TOO_MANY = "may be too many for this width at 6 pt: see --width, --metric, --table and -k"
LOST = '% no glyph in pdfLaTeX, printed as "?":'
BROKEN, STUB = 11, 24  # letters of a heading and of a row's label in one line
IN_FLOAT = 3  # notes; what is doubted comes first
MOST_FLOATS = 12  # without a \clearpage: LaTeX stops at 18 (52 since 2015) that have not found a page

Place = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns


def width_of(width: str) -> Width:
    """Parse --width: a name of WIDTHS or a number of points. SpecError: neither."""
    if width in WIDTHS:
        return WIDTHS[width]
    try:
        points = float(width)
    except ValueError:
        points = 0.0
    if not 100 <= points <= 1000:
        choices = f"{', '.join(WIDTHS)} or points from 100 to 1000"
        raise SpecError(f"expected {choices}, got '{width}'{did_you_mean(width, WIDTHS)}", option="width")
    return Width(int(points / POINTS), points=points)


def render(grids: Sequence[Sheet], width: str = DEFAULT) -> str:
    """A fragment with a float for each grid; the first lines say what it needs, how wide it is and what it loses.

    width: one of WIDTHS, or points.
    """
    fits = width_of(width)
    width_text = f"{width} pt" if fits.points else width
    floats = [float_text for grid in grids for float_text in _floats(grid, width, fits)]
    most = len(floats) if fits.environment == "frame" else MOST_FLOATS
    pages = ["\n".join(floats[i : i + most]) for i in range(0, len(floats), most or 1)]
    text, lost = printable("\n\\clearpage\n\n".join(pages))
    head = rf"% width: {width_text}; needs \usepackage{{booktabs,graphicx}}" + "\n"
    return head + (f"{LOST} {' '.join(lost)}\n" if lost else "") + text


# --- what a float shows ------------------------------------------------------------------------------------------


def _floats(grid: Sheet, width: str, fits: Width) -> Iterator[str]:
    grid, left_out = with_numbers(grid)
    command = f"% {_command(grid, width)}" + (f"  ({grid.label})" if grid.label else "") + "\n"
    grid, shared_labels = varying(grid)
    too_wide = _columns(grid) > (1 + fits.wide) * fits.columns * BELOW
    if too_wide and 1 < len(grid.groups) <= fits.lines / len(grid.rows):
        grid = _stack_groups(grid)
    if fits.wide and _columns(grid) > fits.columns:  # over both columns of the page
        fits = replace(fits, environment="table*", columns=2 * fits.columns, wide=False)
    below = _columns(grid) > fits.columns
    if _columns(grid) > fits.columns * BELOW:
        command += f"% {_columns(grid)} columns of labels and numbers {TOO_MANY}\n"
    most = fits.lines // (1 + max((len(_small_lines(grid, row, below)) for row in grid.rows), default=0))
    count = -(-len(grid.rows) // most)
    for part in range(count):  # as few as a page holds, of about equal height
        rows = grid.rows[round(part * len(grid.rows) / count) : round((part + 1) * len(grid.rows) / count)]
        labels = [*shared_labels, *([f"part {part + 1} of {count}"] if count > 1 else [])]
        shown = grid.only(rows, range(len(grid.columns)))
        label = "tab:" + re.sub("[^A-Za-z0-9.:-]", "-", f"{grid.suite}-{grid.id}") + f"-{part + 1}" * (part > 0)
        notes = grid.notes if part == count - 1 else []
        yield command + _float(shown, fits, below, labels, label, left_out if part == 0 else [], notes)


def _places(grid: Sheet) -> list[Place]:
    planned = {(entry.group, entry.column) for entry in grid.all() if entry.planned}
    return [(g, c) for g in range(len(grid.groups)) for c in range(len(grid.columns)) if (g, c) in planned]


def _small_lines(grid: Sheet, row: Row, below: bool) -> list[tuple[str, list[str]]]:
    """The lines in small type below a row, (label, text of each place): spread, the paper's number, the difference."""
    entries = [row.values[g][c] for g, c in _places(grid)]
    marks = [superscript(entry.published_mark * bool(entry.paper)) for entry in entries]
    papers = [signs(entry.paper_number if below else entry.paper) for entry in entries]
    lines = [
        ("", [signs(entry.spread * below) for entry in entries]),
        (grid.by, [number + mark for number, mark in zip(papers, marks, strict=True)]),
        ("", [signs(entry.paper_spread * below) for entry in entries]),
        ("Δ", [signs(entry.delta) for entry in entries]),
    ]
    return [(label, texts) for label, texts in lines if any(texts)]


def _columns(grid: Sheet) -> int:
    """Columns of labels and of numbers; one of intervals is as wide as two."""
    wide = {(entry.group, entry.column) for entry in grid.all() if entry.interval is not None}
    return len(grid.axes) + len(_places(grid)) + len(wide)


def _command(grid: Sheet, width: str) -> str:
    table = f"--by {','.join(grid.axes)}" if grid.id == "combined" else f"--table {grid.id}"
    if grid.id.startswith("differences-"):
        table = f"--differences --metric {grid.id.removeprefix('differences-')}"
    select = "" if grid.select == "last" else f" --select {grid.select}"
    suites = grid.suite.replace(" + ", " ")
    return f"fatbench report {suites} --preset {grid.preset} {table}{select} --format latex --width {width}"


def _stack_groups(grid: Sheet) -> Sheet:
    """Put the groups of columns one below the other; their labels become those of a first axis."""
    axis = ", ".join(dict.fromkeys(axis for group in grid.groups for axis in group.key))
    names = {g: group.label for g, group in enumerate(grid.groups)}
    entries = grid.entries.assign(**{LABEL + axis: grid.entries["group"].map(names)})
    entries = entries[entries.groupby(["row", "group"])["planned"].transform("any")]
    entries = entries.sort_values(["group", "row", "column"], kind="stable", ignore_index=True)
    rows = entries.groupby(["group", "row"], sort=False).ngroup()
    return replace(grid, axes=[axis, *grid.axes], across=[], entries=entries.assign(row=rows, group=0))


# --- a float -----------------------------------------------------------------------------------------------------


def _float(
    grid: Sheet, fits: Width, below: bool, labels: Sequence[str], label: str, left_out: Sequence[str],
    notes: Sequence[tuple[str, str]],
) -> str:  # fmt: skip
    tabular = "\n".join([
        rf"{SIZES}\setlength{{\tabcolsep}}{{{2 if below else 3}pt}}",
        rf"\resizebox{{\ifdim{SCALE}\width>{fits.max_width} {SCALE}\width"
        rf"\else\ifdim\width>{fits.max_width} {fits.max_width}\else\width\fi\fi}}{{!}}{{%",
        f"{_tabular(grid, below)}}}",
    ])  # fmt: skip
    keys = [rf"{superscript(symbol)}\,{prose(note)}" for symbol, note in grid.footnotes]
    if fits.environment == "frame":
        title = escape(", ".join(filter(None, [grid.name.rstrip("."), *labels])))
        warning = [rf"\textbf{{{escape(grid.label)}.}}"] if grid.label else []
        averages = [prose(_what_it_averages(grid)), *map(prose, _bold_sentences(grid))]
        small_text = " ".join([*warning, *averages, *keys])
        lines = [rf"\begin{{frame}}{{{title}}}", r"\centering", tabular, r"\par\smallskip",
                 rf"{{\scriptsize {small_text}\par}}", r"\end{frame}"]  # fmt: skip
        return "\n".join(lines) + "\n"
    notes = sorted((note for note in notes if note[0] not in IN_CAPTION), key=lambda note: note[0] not in WORDS)
    inside = [rf"\textit{{{escape(_note_name(name))}}}: {prose(note)}" for name, note in notes[:IN_FLOAT]] + keys
    small_text = "\n".join([
        r"\par\smallskip", r"\begin{minipage}{\linewidth}", r"\scriptsize\raggedright",
        *(rf"{words}\par" for words in inside), r"\end{minipage}",
    ]) if inside else ""  # fmt: skip
    comments = [f"% {_note_name(name)}: {' '.join(note.split())}" for name, note in notes[IN_FLOAT:]]
    lines = [
        rf"\begin{{{fits.environment}}}[htbp]",
        r"\centering",
        rf"\caption{{{_caption(grid, labels, left_out)}}}",
        rf"\label{{{label}}}",
        r"\smallskip",
        tabular,
        *filter(None, [small_text]),
        *comments,
        rf"\end{{{fits.environment}}}",
    ]
    return "\n".join(lines) + "\n"


def _caption(grid: Sheet, labels: Sequence[str], left_out: Sequence[str]) -> str:
    """The caption: title, seeds and images, checkpoint, and the meaning of marks and small type."""
    values = list(grid.all())
    sentences = [_what_it_averages(grid)]
    if grid.perturbation:
        sentences.append(f"Perturbation: {grid.perturbation}.")
    if grid.checkpoint:
        trained = grid.checkpoint.startswith("training")
        sentences.append(f"{grid.checkpoint.capitalize() if trained else f'Checkpoint: {grid.checkpoint}'}.")
    sentences += _bold_sentences(grid)
    if any(value.planned and value.mean is None and not value.never for value in values):
        sentences.append("--: not measured.")
    if any(value.never for value in values):
        sentences.append(f"{number_format.NEVER}: neither evaluated nor logged.")
    if left_out:
        sentences.append(f"Without numbers and left out: {'; '.join(left_out)}.")
    if grid.has_published:
        published_at = f" ({grid.published_at})" * bool(grid.published_at)
        word = "Paper: as published" if grid.by == "paper" else "Formula: computed, not published"
        sentences.append(f"{word}{published_at}." + f" Δ: ours minus the {grid.by}'s." * grid.has_differences)
    title = caption_title(", ".join([grid.name.removesuffix("."), *labels]), grid.label)
    return " ".join([title, *(prose(sentence) for sentence in sentences if sentence)])


def _bold_sentences(grid: Sheet) -> list[str]:
    ranks = {value.rank for value in grid.all()}
    bold = ["Bold: significantly better than all others."] * ("best" in ranks)
    return bold + ["Underlined: significantly better than the rest."] * ("second" in ranks)


def _what_it_averages(grid: Sheet) -> str:
    """ "Mean ± sample standard deviation over seeds 6, 7 and 8, on 10,000 test images." """
    sizes = {n for value in grid.all() for n in value.n if n}
    images = f" on {next(iter(sizes)):,} test images" if len(sizes) == 1 else ""
    if not grid.seeds:
        return f"{images.strip().capitalize()}." if images else ""
    if len(grid.seeds) == 1:
        return f"One seed ({grid.seeds[0]}), no spread{',' * bool(images)}{images}."
    first, last = grid.seeds[0], grid.seeds[-1]
    consecutive = len(grid.seeds) > 3 and [*grid.seeds] == [*range(first, last + 1)]
    seeds = f"{first} to {last}" if consecutive else ", ".join(map(str, grid.seeds))
    return f"Mean ± sample standard deviation over {len(grid.seeds)} seeds ({seeds}){images}."


WORDS = {"MIXED": "Mixed", "OLDER": "Older", "doubt": "Caveats"}  # what a paper calls a note of a doubt


def _note_name(name: str) -> str:
    return WORDS.get(name, name[:1].upper() + name[1:])


# --- a tabular ---------------------------------------------------------------------------------------------------


def _tabular(grid: Sheet, below: bool) -> str:
    places, stub = _places(grid), len(grid.axes)
    # a number and what stands behind it are two TeX columns
    lines = [rf"\begin{{tabular}}{{@{{}}{'l' * stub}{r'r@{}l' * len(places)}@{{}}}}", r"\toprule"]
    headings = [_heading([f"{c.heading},", c.images] if c.images else [c.heading]) for c in grid.columns]
    levels = [_level([(headings[c], 2) for _, c in places], stub)]  # headings of each with the cmidrules under them
    if any(group.label for group in grid.groups):
        widths = {g: sum(2 for place in places if place[0] == g) for g in dict.fromkeys(g for g, _ in places)}
        levels.insert(0, _level([(_heading([grid.groups[g].label]), width) for g, width in widths.items()], stub))
        if len(grid.columns) == 1:  # which stands once, over all groups
            levels = [_level([(headings[0], sum(widths.values()))], stub), levels[0]]
    for level, (cells, cmidrules) in enumerate(levels):
        is_last = level == len(levels) - 1
        stub_heads = map(escape, grid.axes) if is_last else [""] * stub
        lines += [" & ".join([*stub_heads, cells]) + r" \\", *([] if is_last else [cmidrules])]
    lines.append(r"\midrule")
    begins, labels = number_format.blocks(grid), number_format.row_labels(grid)
    for index, row in enumerate(grid.rows):
        seeds = _row_seeds(row) if stub else ""
        stub_labels = [*labels[index][:-1], f"{labels[index][-1]} {seeds}".strip()] if stub else []
        if begins[index]:
            lines.append(r"\addlinespace")
        row_cells = (_cell(row.values[g][c], below, bool(seeds)) for g, c in places)
        lines.append(" & ".join([*map(_stub, stub_labels), *row_cells]) + r" \\")
        small = _small_lines(grid, row, below)
        for words, texts in small:
            heads = [*[""] * (stub - 1), rf"\quad{small_type(escape(words))}" if words else ""][:stub]
            lines.append(" & ".join([*heads, *(_small_cell(text, below) for text in texts)]) + r" \\")
        if small and index != len(grid.rows) - 1 and not begins[index + 1]:
            lines.append(r"\addlinespace[2pt]")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines)


def _level(cells: Iterable[tuple[str, int]], stub: int) -> tuple[str, str]:
    """Headings over so many TeX columns each, and the cmidrules under them."""
    heads, cmidrules, first_column = [], [], stub + 1
    for words, width in cells:
        heads.append(rf"\multicolumn{{{width}}}{{c}}{{{words}}}")
        cmidrules.append(rf"\cmidrule(lr){{{first_column}-{first_column + width - 1}}}")
        first_column += width
    return " & ".join(heads), " ".join(cmidrules)


def _heading(parts: Iterable[str]) -> str:
    """A heading; each part begins a line, and a long one is broken."""
    lines = [line for part in parts for line in textwrap.wrap(part, BROKEN, break_long_words=False)]
    words = r"\\".join(map(escape, lines))
    return rf"\shortstack{{{words}}}" if len(lines) > 1 else words


def _stub(label: str) -> str:
    """The label of a row; a long one is broken."""
    lines = [escape(line) for line in textwrap.wrap(label, STUB, break_long_words=False)]
    text = r"\\ \quad ".join(lines)
    return rf"\begin{{tabular}}[t]{{@{{}}l@{{}}}}{text}\end{{tabular}}" if len(lines) > 1 else text


def _row_seeds(row: Row) -> str:
    """ "[3/5]" where all numbers of a row lack the same number of seeds: it then stands at the label, once."""
    counts = {(len(value.seeds), value.wanted) for group in row.values for value in group if value.mean is not None}
    seeds, seeds_planned = next(iter(counts)) if len(counts) == 1 else (0, 0)
    return f"[{seeds}/{seeds_planned}]" if seeds < seeds_planned else ""


def _cell(entry: Entry, below: bool, counted: bool) -> str:
    """Our number, and its spread and marks in a second TeX column. counted: the row's label has the count of seeds."""
    if not entry.planned:
        return " & "
    marks = "".join(map(superscript, entry.marks))
    if entry.mean is None:
        return rf"\multicolumn{{2}}{{c}}{{{entry.number}{marks}}}"
    style = {"best": r"\textbf", "second": r"\underline"}.get(entry.rank, "")
    number = rf"{style}{{{signs(entry.number)}}}" if style else signs(entry.number)
    seeds = rf"\,{entry.lacking}" if entry.lacking and not counted else ""
    return f"{number} & {small_type(signs(entry.spread * (not below)) + seeds)}{marks}"


def _small_cell(text: str, below: bool) -> str:
    """What stands in small type below a number: one of two parts in the two TeX columns, where those are not narrow."""
    if not text:
        return " & "
    number, sign, spread = text.partition(r" $\pm$")
    if below or " to " in text:  # an interval is wider than its number, which then stands at the left
        return rf"\multicolumn{{2}}{{{'l' if ' to ' in text else 'r'}}}{{\scriptsize {text}}}"
    return rf"{{\scriptsize {number}}} & " + small_type((sign + spread).strip())
