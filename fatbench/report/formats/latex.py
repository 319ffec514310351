r"""LaTeX: a float a grid in booktabs style, with the notes under it. Compiles under pdfLaTeX, XeLaTeX and LuaLaTeX.

LaTeX itself scales a tabular that is wider than the line. Labels that all rows share stand in the caption, and so do
the names of rows and headings without numbers. The paper's numbers stand in further columns where these are few,
else in small type under ours. A table that is too high for a page is one float for each label of its first axis.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fatbench.errors import SpecError, did_you_mean
from fatbench.report.contrasts import Difference
from fatbench.report.formats.latex_text import (
    SIUNITX,
    caption_title,
    decimal_column,
    decimal_number,
    escape,
    prose,
    signs,
    small_type,
    superscript,
)
from fatbench.report.sentences import p_text
from fatbench.report.tables import number_format
from fatbench.report.tables.notes import IN_CAPTION
from fatbench.report.tables.sheet import LABEL, Column, Entry, Row, Sheet, with_numbers

NUMBERS = ("text", "siunitx")  # numbers are set as text, or by siunitx in its S columns
SPREADS = ("beside", "below", "none")  # where the spread over seeds stands


@dataclass(frozen=True)
class Width:
    """The width and height that a table must fit, and the environment that floats."""

    letters: int  # about how many are in a line
    environment: str = "table"
    wide: bool = False  # has table* for what is too wide for a column
    points: float | None = None  # the largest width of a tabular; None: that of the line
    lines: int = 46  # of a tabular on a page

    @property
    def max_width(self) -> str:
        return r"\linewidth" if self.points is None else f"{self.points:g}pt"


WIDTHS = {
    "article": Width(85), "llncs": Width(85), "neurips": Width(100), "beamer": Width(85, "frame", lines=18),
    "ieee": Width(60, wide=True), "acm": Width(60, wide=True), "column": Width(60), "text": Width(125, "table*"),
}  # fmt: skip
DEFAULT = "article"
LONG = 14  # letters of a heading that is broken in two lines
STUB = 28  # letters of a row's label in one line
SMALLEST = 1.4  # lines that a table may be wide before its groups or its spreads go below
IN_FLOAT, IN_HIGH_FLOAT = 16, 4  # lines of notes and keys; of more, the notes follow the float, over pages
MOST_FLOATS = 12  # without a \clearpage: LaTeX stops at 18 (52 since 2015) that have not found a page
MOST_TESTS = 40  # paired tests of a float

GroupColumn = tuple[int, int]  # one heading of one group: indices into grid.groups and grid.columns


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
        raise SpecError(f"--width: expected {choices}, got '{width}'{did_you_mean(width, WIDTHS)}")
    return Width(round(points / 4.2), points=points)


def render(
    grids: Sequence[Sheet],
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
    width_text = f"{width} pt" if fits.points else width
    packages = "booktabs,graphicx" + ",siunitx" * (numbers == "siunitx")
    head = rf"% width: {width_text}; needs \usepackage{{{packages}}}" + "\n"
    floats = [float_text for grid in grids for float_text in _floats(grid, width, fits, published, spread, numbers)]
    if fits.environment == "frame":
        return head + "\n".join(floats)
    pages = ["\n".join(floats[i : i + MOST_FLOATS]) for i in range(0, len(floats), MOST_FLOATS)]
    return head + "\n\\clearpage\n\n".join(pages)


# --- what a float shows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FloatContent:
    """A grid as one float shows it."""

    grid: Sheet
    same: list[str]  # labels that all rows share, for the caption
    axes: list[str]  # whose labels stand beside the numbers
    paper: str  # the paper's numbers "beside" ours or "under" them
    spread: str
    numbers: str = "text"

    @property
    def group_columns(self) -> list[GroupColumn]:
        return [
            (g, c) for g in range(len(self.grid.groups)) for c in range(len(self.grid.columns)) if self.is_planned(g, c)
        ]

    def is_planned(self, g: int, c: int) -> bool:
        return any(row.values[g][c].planned for row in self.grid.rows)

    def has_paper_column(self, group_column: GroupColumn) -> bool:
        return self.paper == "beside" and any(v.published is not None for v in self.column_values(group_column))

    def column_values(self, group_column: GroupColumn) -> list[Entry]:
        return [row.values[group_column[0]][group_column[1]] for row in self.grid.rows]

    def small_lines(self) -> int:
        """Lines in small type below each row."""
        return (self.paper == "under" and self.grid.has_published) + (self.spread == "below")


def _floats(
    grid: Sheet, width: str, fits: Width, published: str | None, spread: str | None, numbers: str
) -> Iterator[str]:
    grid, left_out = with_numbers(grid)
    if len(grid.groups) > 1 and _letters(grid, "under", spread) > SMALLEST * fits.letters:
        grid = _stack_groups(grid)
    if spread is None:
        spread = "below" if _letters(grid, "under", None) > SMALLEST * fits.letters else "beside"
    paper = {"column": "beside", "below": "under"}.get(published or "", "")
    paper = paper or ("beside" if _letters(grid, "beside", spread) <= fits.letters else "under")
    small = (paper == "under" and grid.has_published) + (spread == "below")
    parts_by_name = list(_split_rows(grid, fits.lines // (1 + small)))
    if fits.wide and _letters(grid, paper, spread) > fits.letters:  # over both columns of the page
        fits = replace(fits, environment="table*")
    for number, (name, part_grid) in enumerate(parts_by_name):
        constant_axes = [axis for axis in part_grid.axes if len({row.key.get(axis, "") for row in part_grid.rows}) == 1]
        constant_axes = constant_axes if len(constant_axes) < len(part_grid.axes) else constant_axes[:-1]
        labels = (
            dict.fromkeys(filter(None, (part_grid.rows[0].key.get(axis, "") for axis in constant_axes)))
            if part_grid.rows
            else []
        )
        content = _FloatContent(
            part_grid,
            [*labels, *filter(None, [name])],
            [a for a in part_grid.axes if a not in constant_axes],
            paper,
            spread,
            numbers,
        )
        command = _command(grid, width) + " --numbers siunitx" * (numbers == "siunitx")
        yield _float(content, number, len(parts_by_name), left_out, command, fits)
        if number == len(parts_by_name) - 1 and fits.environment != "frame":
            yield from _paired_test_floats(grid, fits)


def _command(grid: Sheet, width: str) -> str:
    table = f"--rows {','.join(grid.axes)}" if grid.id == "combined" else f"--table {grid.id}"
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


def _split_rows(grid: Sheet, row_limit: int) -> Iterator[tuple[str, Sheet]]:
    """Split a grid of more than `row_limit` rows by the labels of its first axis, into parts that fit."""
    if len(grid.rows) <= row_limit:
        yield "", grid
        return
    starts = [0, *(i for i, begins in enumerate(number_format.blocks(grid)) if begins), len(grid.rows)]
    for block_start, block_end in itertools.pairwise(starts):
        # parts of about equal height, as few as fit
        count = -(-(block_end - block_start) // row_limit)
        bounds = [block_start + round(i * (block_end - block_start) / count) for i in range(count + 1)]
        for first_row, end in itertools.pairwise(bounds):
            name = (
                f"rows {first_row - block_start + 1} to {end - block_start} of {block_end - block_start}"
                if count > 1
                else ""
            )
            yield name, grid.only(grid.rows[first_row:end], range(len(grid.columns)))


def _letters(grid: Sheet, paper: str, spread: str | None) -> int:
    """An estimate of the letters in a line of the tabular."""
    small_letters = 0.7 * (spread in (None, "beside"))  # of the letters of a spread, which are small
    total: float = sum(
        max([len(axis), *(min(len(row.key.get(axis, "")), STUB) for row in grid.rows)]) for axis in grid.axes
    )
    for g in range(len(grid.groups)):
        for c, column in enumerate(grid.columns):
            entries = number_format.column_of(grid, g, c)
            measured_letters, paper_letters = (
                max(
                    (
                        len(number_text) + small_letters * len(spread_text) + tail_letters
                        for number_text, spread_text, tail_letters in texts
                    ),
                    default=0,
                )
                for texts in (
                    [(e.number, e.spread, 0.7 * len(e.lacking)) for e in entries],
                    [(e.paper_number, e.paper_spread, len(e.delta)) for e in entries],
                )
            )
            column_letters = (
                measured_letters + paper_letters + 2 * (paper_letters > 0)
                if paper == "beside"
                else max(measured_letters, 0.7 * (6 + paper_letters) * (paper_letters > 0))
            )
            total += max(column_letters, min(len(column.label), LONG)) + 1.5
    return round(total)


# --- a float -----------------------------------------------------------------------------------------------------


def _float(
    content: _FloatContent, number: int, float_count: int, left_out: Sequence[str], command: str, fits: Width
) -> str:
    grid = content.grid
    command_comment = f"% {command}" + (f"  ({grid.label})" if grid.label else "")
    notes = [
        (note_name, note) for note_name, note in grid.notes if note_name not in IN_CAPTION and note_name != "paired"
    ]
    paired = [note for note_name, note in grid.notes if note_name == "paired"]
    notes += [("paired", paired[0])] if paired else []
    note_lines = [_note(note_name, note) for note_name, note in notes] if number == float_count - 1 else []
    keys = [rf"\textsuperscript{{{escape(symbol)}}}\,{prose(note)}" for symbol, note in grid.footnotes]
    is_high = _line_count(content) > 20 or fits.environment == "frame"
    tabular = _scale_to_fit(_tabular(content), fits, is_high)
    if fits.environment == "frame":
        title = escape(", ".join(filter(None, [grid.name.rstrip("."), *content.same])))
        warning = [rf"\textbf{{{escape(grid.label)}.}}"] if grid.label else []
        small_text = " ".join(
            [
                *warning,
                prose(_what_it_averages(grid, content.spread)),
                *([prose(s) for s in _bold_sentences(grid)]),
                *keys,
            ]
        )
        lines = [command_comment, rf"\begin{{frame}}{{{title}}}", r"\centering\small", r"\setlength{\tabcolsep}{3pt}",
                 tabular, r"\par\smallskip", rf"{{\tiny {small_text}\par}}", r"\end{frame}"]  # fmt: skip
        return "\n".join(lines) + "\n"
    label = f"tab:{_slug(grid)}" + f"-{number + 1}" * (number > 0)
    lines = [
        command_comment,
        rf"\begin{{{fits.environment}}}[htbp]",
        r"\centering",
        rf"\caption{{{_caption(content, left_out if number == 0 else ())}}}",
        rf"\label{{{label}}}",
        r"\smallskip\small",
        r"\setlength{\tabcolsep}{3pt}",
        tabular,
    ]
    line_count = sum(math.ceil(len(line) / fits.letters) for line in (*note_lines, *keys))
    notes_below = bool(note_lines) and line_count > (IN_HIGH_FLOAT if is_high else IN_FLOAT)
    notes_inside = keys if notes_below else [*note_lines, *keys]
    if notes_inside:
        text = "\n".join(rf"{words}\par" for words in notes_inside)
        lines += [
            r"\par\smallskip",
            r"\begin{minipage}{\linewidth}",
            r"\scriptsize\raggedright",
            text,
            r"\end{minipage}",
        ]
    lines.append(rf"\end{{{fits.environment}}}")
    if notes_below:
        text = "\n".join(rf"{words}\par" for words in note_lines)
        lines += ["", rf"{{\scriptsize\raggedright\noindent Table~\ref{{{label}}}.", text + "}"]
    return "\n".join(lines) + "\n"


def _scale_to_fit(tabular: str, fits: Width, high: bool) -> str:
    """Let LaTeX shrink a tabular that is wider than the line or, if it is high, higher than most of the page."""
    height_share = ".62" if fits.environment == "frame" else ".66"
    if high:
        scaled_height = rf"\ifdim\totalheight>{height_share}\textheight {height_share}\textheight\else\totalheight\fi"
        tabular = f"\\resizebox*{{!}}{{{scaled_height}}}{{%\n{tabular}}}"
    scaled_width = rf"\ifdim\width>{fits.max_width} {fits.max_width}\else\width\fi"
    return f"\\resizebox{{{scaled_width}}}{{!}}{{%\n{tabular}}}"


def _line_count(content: _FloatContent) -> int:
    return len(content.grid.rows) * (1 + content.small_lines())


def _title(content: _FloatContent) -> str:
    return caption_title(", ".join([content.grid.name.removesuffix("."), *content.same]), content.grid.label)


def _caption(content: _FloatContent, left_out: Sequence[str]) -> str:
    """The caption: title, seeds and images, checkpoint, and the meaning of marks and small type."""
    grid = content.grid
    values = list(grid.all())
    sentences = [_what_it_averages(grid, content.spread)]
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
    return " ".join([_title(content), *(prose(sentence) for sentence in sentences if sentence)])


def _bold_sentences(grid: Sheet) -> list[str]:
    ranks = {value.rank for value in grid.all()}
    bold = ["Bold: significantly better than all others."] * ("best" in ranks)
    return bold + ["Underlined: significantly better than the rest."] * ("second" in ranks)


def _what_it_averages(grid: Sheet, spread: str) -> str:
    """ "Mean ± sample standard deviation over seeds 6, 7 and 8, on 10,000 test images." """
    sizes = {n for value in grid.all() for n in value.n if n}
    images = f" on {next(iter(sizes)):,} test images" if len(sizes) == 1 else ""
    if not grid.seeds:
        return f"{images.strip().capitalize()}." if images else ""
    if len(grid.seeds) == 1:
        return f"One seed ({grid.seeds[0]}), no spread{',' * bool(images)}{images}."
    statistic = "Mean" if spread == "none" else "Mean ± sample standard deviation"
    return f"{statistic} over {len(grid.seeds)} seeds ({_seed_list(grid.seeds)}){images}."


def _seed_list(seeds: Sequence[int]) -> str:
    is_consecutive = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))) if seeds else False
    return f"{seeds[0]} to {seeds[-1]}" if is_consecutive and len(seeds) > 3 else ", ".join(map(str, seeds))


WORDS = {"MIXED": "Mixed", "OLDER": "Older", "doubt": "Caveats"}  # what a paper calls a note


def _note(note_name: str, note: str) -> str:
    name = WORDS.get(note_name, note_name[:1].upper() + note_name[1:])
    return rf"\textit{{{escape(name)}}}: {prose(note)}"


def _slug(grid: Sheet) -> str:
    return re.sub("[^A-Za-z0-9.:-]", "-", f"{grid.suite}-{grid.id}")


def _paired_test_floats(grid: Sheet, fits: Width) -> Iterator[str]:
    """The paired tests as floats, a line each: labels, heading, difference, p of the t test and of Wilcoxon's."""
    if sum(note_name == "paired" for note_name, _ in grid.notes) < 2:  # the notes only count the tests
        return
    axes = list(grid.paired[0][1].labels)
    heads = [*(escape(axis) for axis in axes), "", "difference", r"\multicolumn{2}{c}{$p$ ($t$, Wilcoxon)}"]
    for start in range(0, len(grid.paired), MOST_TESTS):
        lines = [
            rf"\begin{{tabular}}{{@{{}}{'l' * (len(axes) + 1)}rrr@{{}}}}",
            r"\toprule",
            " & ".join(heads) + r" \\",
            r"\midrule",
            *(_test_line(*paired) for paired in grid.paired[start : start + MOST_TESTS]),
            r"\bottomrule",
            r"\end{tabular}",
        ]
        tabular = _scale_to_fit("\n".join(lines), fits, True)
        caption = rf"Paired tests over seeds of Table~\ref{{tab:{_slug(grid)}}}."
        body = [r"\centering", rf"\caption{{{caption}}}", r"\smallskip\scriptsize", tabular]
        yield "\n".join([rf"\begin{{{fits.environment}}}[htbp]", *body, rf"\end{{{fits.environment}}}"]) + "\n"


def _test_line(column: Column, one: Difference) -> str:
    test = one.over_seeds
    assert test is not None  # a table has no others
    labels = [*one.labels.values(), f"{' − '.join(one.sides)}, {column.heading}"]
    mean = signs(number_format.signed(test.mean, column))
    difference = rf"{mean} $\pm$ {number_format.number(test.std, column)}"
    ps = ["--" if p is None else escape(p_text(p)) for p in (test.t_p, test.wilcoxon_p)]
    return " & ".join([*map(escape, labels), difference, *ps]) + r" \\"


# --- a tabular ---------------------------------------------------------------------------------------------------


def _tabular(content: _FloatContent) -> str:
    grid, group_columns = content.grid, content.group_columns
    paper_beside = {group_column: content.has_paper_column(group_column) for group_column in group_columns}
    tex_columns = 5 if grid.has_differences else 4  # TeX columns: number@spread paper@mark [difference]
    spans = {group_column: tex_columns if paper_beside[group_column] else 2 for group_column in group_columns}
    entries_of = {
        group_column: [_entry(row, group_column, grid) for row in grid.rows] for group_column in group_columns
    }
    formats = {group_column: _formats(content, entries_of[group_column]) for group_column in group_columns}
    specs = [
        [*(f"{column_format}@{{}}l" for column_format in formats[p]), "r"][: (spans[p] + 1) // 2] for p in group_columns
    ]
    spec = "".join(" ".join(column_specs) for column_specs in specs)
    stub = len(content.axes)
    lines = [SIUNITX] * (content.numbers == "siunitx")
    lines += [rf"\begin{{tabular}}{{@{{}}{'l' * stub}{spec}@{{}}}}", r"\toprule"]
    levels = []  # headings of each level with the cmidrules under them
    if any(group.label for group in grid.groups):
        groups = [
            (grid.groups[g].label, sum(spans[p] for p in group_columns if p[0] == g))
            for g in dict.fromkeys(g for g, _ in group_columns)
        ]
        levels.append(_level([(escape(label), width) for label, width in groups], stub))
    levels.append(
        _level(
            [(_heading(grid.columns[c].heading, grid.columns[c].images), spans[g, c]) for g, c in group_columns], stub
        )
    )
    if any(paper_beside.values()):
        sub_headings = (
            r"\multicolumn{2}{c}{ours}"
            + rf" & \multicolumn{{2}}{{c}}{{{grid.by}}}" * paper_beside[group_column]
            + r" & \multicolumn{1}{c}{$\Delta$}" * (spans[group_column] == 5)
            for group_column in group_columns
        )
        levels.append((" & ".join(sub_headings), ""))
    axes = [escape(axis) for axis in content.axes]
    for level, (cells, cmidrules) in enumerate(levels):
        is_last = level == len(levels) - 1
        lines += [" & ".join([*(axes if is_last else [""] * stub), cells]) + r" \\", *([] if is_last else [cmidrules])]
    lines.append(r"\midrule")
    begins, labels = number_format.blocks(grid), number_format.row_labels(grid)
    for index, row in enumerate(grid.rows):
        stub_labels = [label for axis, label in zip(grid.axes, labels[index], strict=True) if axis in content.axes]
        stub_labels[-1:] = [f"{stub_labels[-1]} {_row_seeds(row)}".strip()] if stub_labels else []
        entries = {group_column: entries_of[group_column][index] for group_column in group_columns}
        if begins[index] and grid.axes[0] in content.axes:
            lines.append(r"\addlinespace")
        row_cells = (
            _cell(entry, spans[group_column], content, formats[group_column]) for group_column, entry in entries.items()
        )
        lines.append(" & ".join([*map(_stub, stub_labels), *row_cells]) + r" \\")
        small: list[list[str]] = []  # lines in small type below
        if content.spread == "below" and any(entry.spread for entry in entries.values()):
            small.append([_spread_below(entry, spans[group_column]) for group_column, entry in entries.items()])
        if content.paper == "under" and any(entry.paper for entry in entries.values()):
            small.append([_paper_below(entry, content.spread != "none") for entry in entries.values()])
        lines += [" & ".join([*[""] * stub, *small_line]) + r" \\" for small_line in small]
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


def _break_in_two(words: str, letter_limit: int) -> list[str]:
    """Break words into two lines of about equal length where one is too long."""
    if len(words) <= letter_limit or " " not in words:
        return [words]
    cuts = [(words[: i.start()], words[i.end() :]) for i in re.finditer(" ", words)]
    return list(min(cuts, key=lambda cut: max(map(len, cut))))


def _heading(heading: str, images: str) -> str:
    lines = [f"{heading},", images] if images else _break_in_two(heading, LONG)
    words = r"\\".join(map(escape, lines))
    return rf"\shortstack{{{words}}}" if len(lines) > 1 else words


def _stub(label: str) -> str:
    """The label of a row; a long one is broken in two lines."""
    lines = _break_in_two(label, STUB)
    if len(lines) == 1:
        return escape(label)
    return rf"\begin{{tabular}}[t]{{@{{}}l@{{}}}}{escape(lines[0])}\\ \quad {escape(lines[1])}\end{{tabular}}"


def _row_seeds(row: Row) -> str:
    """ "[3/5]" where all numbers of a row lack the same number of seeds: it then stands at the label, once."""
    seed_counts = {
        (len(value.seeds), value.wanted) for group in row.values for value in group if value.mean is not None
    }
    seeds, seeds_planned = next(iter(seed_counts)) if len(seed_counts) == 1 else (0, 0)
    return f"[{seeds}/{seeds_planned}]" if seeds < seeds_planned else ""


def _entry(row: Row, group_column: GroupColumn, grid: Sheet) -> Entry:
    """The entry of one value, without the count of seeds where the row's label has it."""
    entry = row.values[group_column[0]][group_column[1]]
    return entry._replace(lacking="") if _row_seeds(row) else entry


def _formats(content: _FloatContent, entries: Sequence[Entry]) -> tuple[str, str]:
    """The TeX columns of our number and of the paper's."""
    if content.numbers == "text":
        return "r", "r"
    spread_beside = content.spread == "beside"
    measured_numbers = [(entry.number, entry.spread * spread_beside) for entry in entries]
    return decimal_column(measured_numbers), decimal_column(
        [(entry.paper_number, entry.paper_spread * spread_beside) for entry in entries]
    )


def _cell(entry: Entry, columns: int, content: _FloatContent, formats: tuple[str, str]) -> str:
    """Our number with its spread (two TeX columns), in four also the paper's (two), in five the difference (one)."""
    if not entry.planned:
        return " & ".join([""] * columns)
    marks = "".join(map(superscript, entry.marks))
    seeds = rf"\,{entry.lacking}" if entry.lacking else ""
    if entry.mean is None:
        measured_cell = rf"\multicolumn{{2}}{{c}}{{{entry.number}{marks}}}"
    else:
        style = {"best": r"\textbf", "second": r"\underline"}.get(entry.rank, "")
        number, spread_text = _number(entry.number, entry.spread, style, content, formats[0])
        measured_cell = f"{number} & {small_type(signs(spread_text) + seeds)}{marks}"
    if columns == 2 or not entry.paper:
        return measured_cell + " &" * (columns - 2)
    number, spread_text = _number(entry.paper_number, entry.paper_spread, "", content, formats[1])
    paper_cell = small_type(signs(spread_text)) + superscript(entry.published_mark)
    return f"{measured_cell} & {number} & {paper_cell}" + f" & {signs(entry.delta)}" * (columns == 5)


def _number(number: str, spread: str, style: str, content: _FloatContent, format: str) -> tuple[str, str]:
    """(a number in its TeX column, the part of its spread behind that column)."""
    spread_text = spread if content.spread == "beside" else ""
    if content.numbers == "siunitx":
        inner_spread = spread_text if spread_text.startswith("±") else ""
        return decimal_number(number, inner_spread, style, format), "" if inner_spread else spread_text
    return rf"{style}{{{signs(number)}}}" if style else signs(number), spread_text


def _spread_below(entry: Entry, columns: int) -> str:
    """The spreads of our number and, in four TeX columns or five, the paper's, for the line below them."""
    spreads = [entry.spread, entry.paper_spread][: columns // 2]
    cells = [rf"{{\scriptsize {signs(spread_text)}}} &" if spread_text else " & " for spread_text in spreads]
    return " & ".join([*cells, *[""] * (columns == 5)])


def _paper_below(entry: Entry, with_spread: bool) -> str:
    """The paper's number, named, and the difference, for the line under ours."""
    if not entry.paper:
        return " & "
    word = "formula" if entry.formula else "paper"
    paper_text = f"{word} {entry.paper_number}" + f" {entry.paper_spread}" * with_spread
    paper_text += f" ({entry.delta})" * bool(entry.delta)
    footnote_mark = superscript(entry.published_mark)
    return rf"\multicolumn{{2}}{{r}}{{\scriptsize {signs(paper_text.rstrip())}{footnote_mark}}}"
