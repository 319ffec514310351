r"""LaTeX: a float a grid in booktabs style, with the notes under it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

LaTeX itself scales a tabular that is wider than the line. Labels that all rows share stand in the caption, and so do
the names of rows and headings without numbers. The paper's numbers stand in further columns where these are few,
else in small type under ours. A table that is too high for a page is one float for each label of its first axis.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.formats.latex_text import (
    SIUNITX,
    decimal_column,
    decimal_number,
    escape,
    prose,
    signs,
    small_type,
    superscript,
)
from fatbench.report.tables import number_format
from fatbench.report.tables.grid import Grid, Group, PairedComparison, Row, Value, measured
from fatbench.report.tables.notes import IN_CAPTION, p_value
from fatbench.report.tables.number_format import Entry

NUMBERS = ("text", "siunitx")  # numbers are set as text, or by siunitx in its S columns
SPREADS = ("beside", "below", "none")  # where the spread over seeds stands


@dataclass(frozen=True)
class Width:
    """What a table must fit: about how many letters are in a line, and what floats."""

    letters: int
    environment: str = "table"
    wide: bool = False  # has table* for what is too wide for a column
    points: float | None = None  # the most that it may take; None: the line
    lines: int = 46  # of a tabular on a page

    @property
    def most(self) -> str:
        return r"\linewidth" if self.points is None else f"{self.points:g}pt"


WIDTHS = {
    "article": Width(85), "llncs": Width(85), "neurips": Width(100), "beamer": Width(85, "frame", lines=18),
    "ieee": Width(60, wide=True), "acm": Width(60, wide=True), "column": Width(60), "text": Width(125, "table*"),
}  # fmt: skip
DEFAULT = "article"
LONG = 14  # letters of a heading that is broken in two lines
STUB = 28  # letters of a row's label in one line
SMALLEST = 1.4  # lines that a table may be wide before its groups or its spreads go below
IN_FLOAT = 12  # lines of notes; more follow the float as text, which goes on over pages
MOST_FLOATS = 12  # without a \clearpage: LaTeX stops at 18 (52 since 2015) that have not found a page
MOST_TESTS = 40  # paired tests of a float

GroupColumn = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns


def width_of(said: str) -> Width:
    """What --width says. SpecError: not a width."""
    if said in WIDTHS:
        return WIDTHS[said]
    try:
        points = float(said)
    except ValueError:
        points = 0.0
    if not 100 <= points <= 1000:
        known = f"{', '.join(WIDTHS)} or points from 100 to 1000"
        raise SpecError(f"--width: expected {known}, got '{said}'{did_you_mean(said, WIDTHS)}")
    return Width(round(points / 4.2), points=points)


def render(
    grids: Sequence[Grid],
    width: str = DEFAULT,
    published: str | None = None,
    spread: str | None = None,
    numbers: str = "text",
) -> str:
    """A fragment with a float for each grid; the first lines say what it needs and how wide it is.

    width: one of WIDTHS, or points; published: where the paper's numbers stand, in a "column" or "below" ours; None:
    in a column where that fits; spread: one of SPREADS, None: beside where that fits; numbers: one of NUMBERS.
    """
    fits = width_of(width)
    said = f"{width} pt" if fits.points else width
    packages = "booktabs,graphicx" + ",siunitx" * (numbers == "siunitx")
    head = rf"% width: {said}; needs \usepackage{{{packages}}}" + "\n"
    floats = [one for grid in grids for one in _floats(grid, width, fits, published, spread, numbers)]
    if fits.environment == "frame":
        return head + "\n".join(floats)
    pages = ["\n".join(floats[i : i + MOST_FLOATS]) for i in range(0, len(floats), MOST_FLOATS)]
    return head + "\n\\clearpage\n\n".join(pages)


# --- what a float shows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """A grid as one float shows it."""

    grid: Grid
    same: list[str]  # labels that all rows share: they stand in the caption
    axes: list[str]  # whose labels stand beside the numbers
    paper: str  # the paper's numbers "beside" ours or "under" them
    spread: str
    numbers: str = "text"

    @property
    def places(self) -> list[GroupColumn]:
        return [(g, c) for g in range(len(self.grid.groups)) for c in range(len(self.grid.columns)) if self.shown(g, c)]

    def shown(self, g: int, c: int) -> bool:
        return any(row.values[g][c].planned for row in self.grid.rows)

    def beside(self, place: GroupColumn) -> bool:
        return self.paper == "beside" and any(v.published is not None for v in self.under(place))

    def under(self, place: GroupColumn) -> list[Value]:
        return [row.values[place[0]][place[1]] for row in self.grid.rows]

    def small(self) -> int:
        """Lines in small type below each row."""
        return (self.paper == "under" and self.grid.has_published) + (self.spread == "below")


def _floats(
    grid: Grid, width: str, fits: Width, published: str | None, spread: str | None, numbers: str
) -> Iterator[str]:
    grid, left_out = measured(grid)
    if len(grid.groups) > 1 and _letters(grid, "under", spread) > SMALLEST * fits.letters:
        grid = _stacked(grid)
    if spread is None:
        spread = "below" if _letters(grid, "under", None) > SMALLEST * fits.letters else "beside"
    paper = {"column": "beside", "below": "under"}.get(published or "", "")
    paper = paper or ("beside" if _letters(grid, "beside", spread) <= fits.letters else "under")
    small = (paper == "under" and grid.has_published) + (spread == "below")
    parts = list(_cut(grid, fits.lines // (1 + small)))
    if fits.wide and _letters(grid, paper, spread) > fits.letters:
        fits = replace(fits, environment="table*")
    for number, (name, one) in enumerate(parts):
        same = [axis for axis in one.axes if len({row.key.get(axis, "") for row in one.rows}) == 1]
        same = same if len(same) < len(one.axes) else same[:-1]
        labels = dict.fromkeys(filter(None, (one.rows[0].key.get(axis, "") for axis in same))) if one.rows else []
        part = _Part(
            one, [*labels, *filter(None, [name])], [a for a in one.axes if a not in same], paper, spread, numbers
        )
        command = _command(grid, width) + " --numbers siunitx" * (numbers == "siunitx")
        yield _float(part, number, len(parts), left_out, command, fits)
        if number == len(parts) - 1 and fits.environment != "frame":
            yield from _tests(grid, fits)


def _command(grid: Grid, width: str) -> str:
    table = f"--rows {','.join(grid.axes)}" if grid.id == "combined" else f"--table {grid.id}"
    select = "" if grid.select == "last" else f" --select {grid.select}"
    suites = grid.suite.replace(" + ", " ")
    return f"fatbench report {suites} --preset {grid.preset} {table}{select} --format latex --width {width}"


def _stacked(grid: Grid) -> Grid:
    """The groups of columns one under another: their labels are those of a first axis."""
    axis = ", ".join(dict.fromkeys(axis for group in grid.groups for axis in group.key))
    rows = [
        Row({axis: group.label, **row.key}, [row.values[g]], row.own)
        for g, group in enumerate(grid.groups)
        for row in grid.rows
        if any(value.planned for value in row.values[g])
    ]
    return replace(grid, axes=[axis, *grid.axes], groups=[Group({})], rows=rows)


def _cut(grid: Grid, most: int) -> Iterator[tuple[str, Grid]]:
    """The grid, or where it has more than `most` rows one for each label of its first axis, in parts that fit."""
    if len(grid.rows) <= most:
        yield "", grid
        return
    starts = [0, *(i for i, begins in enumerate(number_format.blocks(grid)) if begins), len(grid.rows)]
    for a, b in itertools.pairwise(starts):
        count = -(-(b - a) // most)
        cuts = [a + round(i * (b - a) / count) for i in range(count + 1)]
        for first, end in itertools.pairwise(cuts):
            name = f"rows {first - a + 1} to {end - a} of {b - a}" if count > 1 else ""
            yield name, replace(grid, rows=grid.rows[first:end])


def _letters(grid: Grid, paper: str, spread: str | None) -> int:
    """About how many letters are in a line of the tabular."""
    after = 0.7 * (spread in (None, "beside"))  # of the letters of a spread, which are small
    total: float = sum(
        max([len(axis), *(min(len(row.key.get(axis, "")), STUB) for row in grid.rows)]) for axis in grid.axes
    )
    for g in range(len(grid.groups)):
        for c, column in enumerate(grid.columns):
            entries = number_format.entries(grid, g, c)
            ours, theirs = (
                max((len(one) + after * len(two) + rest for one, two, rest in each), default=0)
                for each in (
                    [(e.number, e.spread, 0.7 * len(e.seeds)) for e in entries],
                    [(e.published, e.published_spread, len(e.difference)) for e in entries],
                )
            )
            parts = (
                ours + theirs + 2 * (theirs > 0) if paper == "beside" else max(ours, 0.7 * (6 + theirs) * (theirs > 0))
            )
            total += max(parts, min(len(column.label), LONG)) + 1.5
    return round(total)


# --- a float -----------------------------------------------------------------------------------------------------


def _float(part: _Part, number: int, of: int, left_out: Sequence[str], command: str, fits: Width) -> str:
    grid = part.grid
    about = f"% {command}" + (f"  ({grid.label})" if grid.label else "")
    notes = [(what, note) for what, note in grid.notes if what not in IN_CAPTION and what != "paired"]
    paired = [note for what, note in grid.notes if what == "paired"]
    notes += [("paired", paired[0])] if paired else []
    said = [_note(what, note) for what, note in notes] if number == of - 1 else []
    keys = [rf"\textsuperscript{{{escape(mark)}}}\,{prose(note)}" for mark, note in grid.footnotes]
    high = _rows(part) > 20 or fits.environment == "frame"
    tabular = _scaled(_tabular(part), fits, high)
    if fits.environment == "frame":
        title = escape(", ".join(filter(None, [grid.name.rstrip("."), *part.same])))
        warning = [rf"\textbf{{{escape(grid.label)}.}}"] if grid.label else []
        small = " ".join([*warning, prose(_over(grid, part.spread)), *([prose(s) for s in _bold(grid)]), *keys])
        lines = [about, rf"\begin{{frame}}{{{title}}}", r"\centering\small", r"\setlength{\tabcolsep}{3pt}", tabular,
                 r"\par\smallskip", rf"{{\tiny {small}\par}}", r"\end{frame}"]  # fmt: skip
        return "\n".join(lines) + "\n"
    label = f"tab:{_slug(grid)}" + f"-{number + 1}" * (number > 0)
    lines = [
        about,
        rf"\begin{{{fits.environment}}}[htbp]",
        r"\centering",
        rf"\caption{{{_caption(part, left_out if number == 0 else ())}}}",
        rf"\label{{{label}}}",
        r"\smallskip\small",
        r"\setlength{\tabcolsep}{3pt}",
        tabular,
    ]
    room = (5 if high else IN_FLOAT) * fits.letters
    below = sum(map(len, said)) > room
    inside = keys if below else [*said, *keys]
    if inside:
        text = "\n".join(rf"{words}\par" for words in inside)
        lines += [
            r"\par\smallskip",
            r"\begin{minipage}{\linewidth}",
            r"\scriptsize\raggedright",
            text,
            r"\end{minipage}",
        ]
    lines.append(rf"\end{{{fits.environment}}}")
    if below:
        text = "\n".join(rf"{words}\par" for words in said)
        lines += ["", rf"{{\scriptsize\raggedright\noindent Table~\ref{{{label}}}.", text + "}"]
    return "\n".join(lines) + "\n"


def _scaled(tabular: str, fits: Width, high: bool) -> str:
    """A tabular that LaTeX makes smaller where it is wider than the line or, if it is high, than most of the page."""
    most = ".62" if fits.environment == "frame" else ".66"
    if high:
        tall = rf"\ifdim\totalheight>{most}\textheight {most}\textheight\else\totalheight\fi"
        tabular = f"\\resizebox*{{!}}{{{tall}}}{{%\n{tabular}}}"
    wide = rf"\ifdim\width>{fits.most} {fits.most}\else\width\fi"
    return f"\\resizebox{{{wide}}}{{!}}{{%\n{tabular}}}"


def _rows(part: _Part) -> int:
    return len(part.grid.rows) * (1 + part.small())


def _title(part: _Part) -> str:
    name = part.grid.name.removesuffix(".")
    title = f"{', '.join([name, *part.same])}."
    return escape(title) + (rf" \textbf{{{escape(part.grid.label)}.}}" if part.grid.label else "")


def _caption(part: _Part, left_out: Sequence[str]) -> str:
    """What the numbers are: over how many seeds and images, of which model, what the marks and the small type mean."""
    grid = part.grid
    values = list(grid.all())
    said = [_over(grid, part.spread)]
    if grid.perturbation:
        said.append(f"Perturbation: {grid.perturbation}.")
    if grid.checkpoint:
        trained = grid.checkpoint.startswith("training")
        said.append(f"{grid.checkpoint.capitalize() if trained else f'Checkpoint: {grid.checkpoint}'}.")
    said += _bold(grid)
    if any(value.planned and value.mean is None and not value.never for value in values):
        said.append("--: not measured.")
    if any(value.never for value in values):
        said.append(f"{number_format.NEVER}: neither evaluated nor logged.")
    if left_out:
        said.append(f"Without numbers and left out: {'; '.join(left_out)}.")
    if grid.has_published:
        at = f" ({grid.published_at})" * bool(grid.published_at)
        word = "Paper: as published" if grid.by == "paper" else "Formula: computed, not published"
        said.append(f"{word}{at}." + f" Δ: ours minus the {grid.by}'s." * grid.has_differences)
    return " ".join([_title(part), *(prose(sentence) for sentence in said if sentence)])


def _bold(grid: Grid) -> list[str]:
    ranks = {value.rank for value in grid.all()}
    bold = ["Bold: significantly better than all others."] * ("best" in ranks)
    return bold + ["Underlined: significantly better than the rest."] * ("second" in ranks)


def _over(grid: Grid, spread: str) -> str:
    """ "Mean ± sample standard deviation over seeds 6, 7 and 8, on 10,000 test images." """
    sizes = {n for value in grid.all() for n in value.n if n}
    images = f" on {next(iter(sizes)):,} test images" if len(sizes) == 1 else ""
    if not grid.seeds:
        return f"{images.strip().capitalize()}." if images else ""
    if len(grid.seeds) == 1:
        return f"One seed ({grid.seeds[0]}), no spread{',' * bool(images)}{images}."
    what = "Mean" if spread == "none" else "Mean ± sample standard deviation"
    return f"{what} over {len(grid.seeds)} seeds ({_seeds(grid.seeds)}){images}."


def _seeds(seeds: Sequence[int]) -> str:
    run = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))) if seeds else False
    return f"{seeds[0]} to {seeds[-1]}" if run and len(seeds) > 3 else ", ".join(map(str, seeds))


WORDS = {"MIXED": "Mixed", "OLDER": "Older", "doubt": "Caveats"}  # what a paper calls a note


def _note(what: str, note: str) -> str:
    name = WORDS.get(what, what[:1].upper() + what[1:])
    return rf"\textit{{{escape(name)}}}: {prose(note)}"


def _slug(grid: Grid) -> str:
    return re.sub("[^A-Za-z0-9.:-]", "-", f"{grid.suite}-{grid.id}")


def _tests(grid: Grid, fits: Width) -> Iterator[str]:
    """The paired tests as floats, a line each: labels, heading, difference, p of the t test and of Wilcoxon's."""
    if sum(what == "paired" for what, _ in grid.notes) < 2:  # the count alone
        return
    axes = list(grid.paired[0].key)
    heads = [*(escape(axis) for axis in axes), "", "difference", r"\multicolumn{2}{c}{$p$ ($t$, Wilcoxon)}"]
    for start in range(0, len(grid.paired), MOST_TESTS):
        lines = [
            rf"\begin{{tabular}}{{@{{}}{'l' * (len(axes) + 1)}rrr@{{}}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *(_test(one) for one in grid.paired[start : start + MOST_TESTS]),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        tabular = _scaled("\n".join(lines), fits, True)
        caption = rf"Paired tests over seeds of Table~\ref{{tab:{_slug(grid)}}}."
        body = [r"\centering", rf"\caption{{{caption}}}", r"\smallskip\scriptsize", tabular]
        yield "\n".join([rf"\begin{{{fits.environment}}}[htbp]", *body, rf"\end{{{fits.environment}}}"]) + "\n"


def _test(one: PairedComparison) -> str:
    test = one.test
    labels = [*one.key.values(), f"{one.label} − {one.against}, {one.column.heading}"]
    difference = (
        rf"{signs(number_format.signed(test.mean, one.column))} $\pm$ {number_format.number(test.std, one.column)}"
    )
    return " & ".join([*map(escape, labels), difference, p_value(test.t_p), p_value(test.wilcoxon_p)]) + r" \\"


# --- a tabular ---------------------------------------------------------------------------------------------------


def _tabular(part: _Part) -> str:
    grid, places = part.grid, part.places
    beside = {place: part.beside(place) for place in places}
    wide = 5 if grid.has_differences else 4  # TeX columns: number@spread paper@mark [difference]
    spans = {place: wide if beside[place] else 2 for place in places}
    entries_of = {place: [_entry(row, place, grid) for row in grid.rows] for place in places}
    formats = {place: _formats(part, entries_of[place]) for place in places}
    specs = [[*(f"{one}@{{}}l" for one in formats[p]), "r"][: (spans[p] + 1) // 2] for p in places]
    spec = "".join(" ".join(each) for each in specs)
    stub = len(part.axes)
    lines = [SIUNITX] * (part.numbers == "siunitx")
    lines += [rf"\begin{{tabular}}{{@{{}}{'l' * stub}{spec}@{{}}}}", r"\toprule"]
    levels = []  # headings of each level with the cmidrules under them
    if any(group.label for group in grid.groups):
        groups = [
            (grid.groups[g].label, sum(spans[p] for p in places if p[0] == g))
            for g in dict.fromkeys(g for g, _ in places)
        ]
        levels.append(_level([(escape(label), width) for label, width in groups], stub))
    levels.append(
        _level([(_heading(grid.columns[c].heading, grid.columns[c].images), spans[g, c]) for g, c in places], stub)
    )
    if any(beside.values()):
        below = (
            r"\multicolumn{2}{c}{ours}"
            + rf" & \multicolumn{{2}}{{c}}{{{grid.by}}}" * beside[place]
            + r" & \multicolumn{1}{c}{$\Delta$}" * (spans[place] == 5)
            for place in places
        )
        levels.append((" & ".join(below), ""))
    axes = [escape(axis) for axis in part.axes]
    for level, (cells, cmidrules) in enumerate(levels):
        last = level == len(levels) - 1
        lines += [" & ".join([*(axes if last else [""] * stub), cells]) + r" \\", *([] if last else [cmidrules])]
    lines.append(r"\midrule")
    begins, labels = number_format.blocks(grid), number_format.row_labels(grid)
    for index, row in enumerate(grid.rows):
        said = [label for axis, label in zip(grid.axes, labels[index], strict=True) if axis in part.axes]
        said[-1:] = [f"{said[-1]} {_row_seeds(row)}".strip()] if said else []
        entries = {place: entries_of[place][index] for place in places}
        if begins[index] and grid.axes[0] in part.axes:
            lines.append(r"\addlinespace")
        shown = (_cell(entry, spans[place], part, formats[place]) for place, entry in entries.items())
        lines.append(" & ".join([*map(_stub, said), *shown]) + r" \\")
        small: list[list[str]] = []  # lines in small type below
        if part.spread == "below" and any(entry.spread for entry in entries.values()):
            small.append([_spread_below(entry, spans[place]) for place, entry in entries.items()])
        if part.paper == "under" and any(entry.published for entry in entries.values()):
            small.append([_under(entry, part.spread != "none") for entry in entries.values()])
        lines += [" & ".join([*[""] * stub, *here]) + r" \\" for here in small]
        if small and index != len(grid.rows) - 1 and not begins[index + 1]:
            lines.append(r"\addlinespace[2pt]")
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines)


def _level(cells: Iterable[tuple[str, int]], stub: int) -> tuple[str, str]:
    """Headings over so many TeX columns each, and the cmidrules under them."""
    heads, cmidrules, at = [], [], stub + 1
    for words, width in cells:
        heads.append(rf"\multicolumn{{{width}}}{{c}}{{{words}}}")
        cmidrules.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
        at += width
    return " & ".join(heads), " ".join(cmidrules)


def _broken(words: str, most: int) -> list[str]:
    """Words in one line, or in two about as long as each other."""
    if len(words) <= most or " " not in words:
        return [words]
    cuts = [(words[: i.start()], words[i.end() :]) for i in re.finditer(" ", words)]
    return list(min(cuts, key=lambda cut: max(map(len, cut))))


def _heading(heading: str, images: str) -> str:
    lines = [f"{heading},", images] if images else _broken(heading, LONG)
    words = r"\\".join(map(escape, lines))
    return rf"\shortstack{{{words}}}" if len(lines) > 1 else words


def _stub(label: str) -> str:
    """A row's label; a long one goes on below."""
    lines = _broken(label, STUB)
    if len(lines) == 1:
        return escape(label)
    return rf"\begin{{tabular}}[t]{{@{{}}l@{{}}}}{escape(lines[0])}\\ \quad {escape(lines[1])}\end{{tabular}}"


def _row_seeds(row: Row) -> str:
    """ "[3/5]" where all numbers of a row lack the same number of seeds: it then stands at the label, once."""
    found = {(len(value.seeds), value.wanted) for group in row.values for value in group if value.mean is not None}
    seeds, wanted = next(iter(found)) if len(found) == 1 else (0, 0)
    return f"[{seeds}/{wanted}]" if seeds < wanted else ""


def _entry(row: Row, place: GroupColumn, grid: Grid) -> Entry:
    """What a table says of one value; the seeds that the row's label says are left out."""
    entry = number_format.entry(row.values[place[0]][place[1]], grid.columns[place[1]])
    return replace(entry, seeds="") if _row_seeds(row) else entry


def _formats(part: _Part, entries: Sequence[Entry]) -> tuple[str, str]:
    """The TeX columns of our number and of the paper's."""
    if part.numbers == "text":
        return "r", "r"
    beside = part.spread == "beside"
    ours = [(entry.number, entry.spread * beside) for entry in entries]
    return decimal_column(ours), decimal_column(
        [(entry.published, entry.published_spread * beside) for entry in entries]
    )


def _cell(entry: Entry, columns: int, part: _Part, formats: tuple[str, str]) -> str:
    """Our number with its spread (two TeX columns), in four also the paper's (two), in five the difference (one)."""
    value = entry.value
    if not value.planned:
        return " & ".join([""] * columns)
    marks = "".join(map(superscript, value.marks))
    seeds = rf"\,{entry.seeds}" if entry.seeds else ""
    if value.mean is None:
        ours = rf"\multicolumn{{2}}{{c}}{{{entry.number}{marks}}}"
    else:
        style = {"best": r"\textbf", "second": r"\underline"}.get(value.rank, "")
        number, said = _number(entry.number, entry.spread, style, part, formats[0])
        ours = f"{number} & {small_type(signs(said) + seeds)}{marks}"
    if columns == 2 or not entry.published:
        return ours + " &" * (columns - 2)
    number, said = _number(entry.published, entry.published_spread, "", part, formats[1])
    theirs = small_type(signs(said)) + superscript(value.published_mark)
    return f"{ours} & {number} & {theirs}" + f" & {signs(entry.difference)}" * (columns == 5)


def _number(number: str, spread: str, style: str, part: _Part, format: str) -> tuple[str, str]:
    """(a number in its TeX column, what of its spread stands behind that column)."""
    said = spread if part.spread == "beside" else ""
    if part.numbers == "siunitx":
        inside = said if said.startswith("±") else ""
        return decimal_number(number, inside, style, format), "" if inside else said
    return rf"{style}{{{signs(number)}}}" if style else signs(number), said


def _spread_below(entry: Entry, columns: int) -> str:
    """The spreads of our number and, in four TeX columns or five, the paper's, for the line below them."""
    shown = [entry.spread, entry.published_spread][: columns // 2]
    cells = [rf"{{\scriptsize {signs(one)}}} &" if one else " & " for one in shown]
    return " & ".join([*cells, *[""] * (columns == 5)])


def _under(entry: Entry, with_spread: bool) -> str:
    """The paper's number, named, and the difference, for the line under ours."""
    if not entry.published:
        return " & "
    word = "formula" if entry.value.formula else "paper"
    said = f"{word} {entry.published}" + f" {entry.published_spread}" * with_spread
    said += f" ({entry.difference})" * bool(entry.difference)
    mark = superscript(entry.value.published_mark)
    return rf"\multicolumn{{2}}{{r}}{{\scriptsize {signs(said.rstrip())}{mark}}}"
