"""Printed tables as grids of text: CSV, Markdown, LaTeX, or lines pasted out of a PDF.

    for grid in grids(text, "paper.csv"):     # a file may hold several tables
        print(grid.caption, grid.cells)

A grid keeps every row in its order, heads included, and no markup. What they mean is found out by
`fatbench.report.audit.read_tables`.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pandas

from fatbench.errors import SpecError
from fatbench.suite.publish import MISSING

RULE = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*")
LATEX_RULES = re.compile(r"\\(?:top|mid|bottom|[hc])?(?:rule|line|midrule)(?:\([^)]*\))?(?:\[[^]]*\])?(?:\{[^{}]*\})?")
NUMERIC = re.compile(r"(?=.*\d)\(?[-+]?[\d.,]*\d%?\)?(?:(?:±|\()\d[\d.,]*%?\)?)?[*†‡]*%?")
TABULAR = r"\\begin\{(?:tabular|longtable|tabu)[\w*]*\}(.*?)\\end\{(?:tabular|longtable|tabu)"
BRACES = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # with one level of braces inside
NAMES = (  # of LaTeX -> plain
    (r"\\pm\b", "±"), (r"\\(?:var)?epsilon\b", "ε"), (r"\\infty\b", "∞"), (r"\\(?:up|down)arrow\b", ""),
    (r"\\d?dagger\b|\\ast\b|\\star\b", ""), (r"\\[,;:!]|~", " "), (r"\\([%&#_])", r"\1"), (r"\\times\b", "×"),
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """One printed table: its caption and its rows of cells, all of the same length."""

    caption: str
    cells: list[list[str]]


def grids(text: str, name: str) -> list[Grid]:
    """The tables of a text. SpecError: there is none, or a row of a CSV file has too many cells."""
    text = text.lstrip("\ufeff").replace("\r\n", "\n").replace("−", "-").replace("\u00a0", " ")
    lines = [line for line in text.split("\n") if line.strip()]
    if "\\begin{tabular" in text or sum(bool(re.search(r"(?<!\\)&.*\\\\", line)) for line in lines) > 1:
        found = _latex(text)
    elif any(RULE.fullmatch(line) and "-" in line and "|" in line for line in lines):
        found = _markdown(lines)
    elif separator := _separator(lines):
        found = [_separated(lines, separator, name)]
    else:
        found = [_pasted(lines, name)]
    found = [grid for grid in found if len(grid.cells) > 1]
    if not found:
        raise SpecError(f"{name}: no table found: expected CSV, Markdown, LaTeX, or lines of names and numbers")
    return found


def of_frame(frame: pandas.DataFrame) -> Grid:
    """A data frame as a grid; levels of its columns are rows of heads, and a named index is a column."""
    if frame.index.names != [None]:
        frame = frame.reset_index()
    columns: list[Any] = [*frame.columns]
    heads = [[*map(str, column)] if isinstance(column, tuple) else [str(column)] for column in columns]
    cells = [["" if pandas.isna(cell) else str(cell) for cell in row] for row in frame.astype(object).values.tolist()]
    return Grid("", [*map(list, zip(*heads, strict=True)), *cells])


# --- CSV ----------------------------------------------------------------------------------------------------------


def _separator(lines: list[str]) -> str | None:
    """The separator that most lines have equally often; None: none does."""
    best, votes = None, len(lines) // 2
    for separator in "\t;,":  # a comma may also be a decimal point
        counts = Counter(re.sub(r'"[^"]*"', "", line).count(separator) for line in lines)
        count, lines_with_it = max(((n, k) for n, k in counts.items() if n), key=lambda pair: pair[1], default=(0, 0))
        if count and lines_with_it > votes:
            best, votes = separator, lines_with_it
    return best


def _separated(lines: list[str], separator: str, name: str) -> Grid:
    caption = lines.pop(0) if lines[0].count(separator) < lines[-1].count(separator) / 2 else ""
    try:
        frame = pandas.read_csv(
            io.StringIO("\n".join(lines)), sep=separator, header=None, dtype=str, keep_default_na=False,
            skipinitialspace=True,
        )  # fmt: skip
    except (pandas.errors.ParserError, ValueError) as error:
        raise SpecError(f"{name}: {str(error).removeprefix('Error tokenizing data. C error: ').strip()}") from None
    return Grid(caption, [[_plain(cell) for cell in row] for row in frame.fillna("").values.tolist()])


# --- Markdown and LaTeX -------------------------------------------------------------------------------------------


def _markdown(lines: list[str]) -> list[Grid]:
    """Runs of lines with "|"; the text line before them is the caption."""
    found, caption, rows = [], "", []
    for line in [*lines, ""]:
        if "|" in line:
            if not RULE.fullmatch(line):
                inner = re.sub(r"^\s*\|", "", re.sub(r"(?<!\\)\|\s*$", "", line))
                rows.append([_plain(cell) for cell in re.split(r"(?<!\\)\|", inner)])
            continue
        if rows:
            found.append(Grid(caption, _rectangular(rows)))
            rows = []
        caption = line.strip("#*_ ")
    return found


def _latex(text: str) -> list[Grid]:
    text = re.sub(r"(?<!\\)%.*", "", text)
    captions = [(match.start(), match[1]) for match in re.finditer(rf"\\caption(?:\[[^]]*\])?{BRACES}", text)]
    bodies = [(match.start(), match[1]) for match in re.finditer(TABULAR, text, re.DOTALL)]
    found = []
    for start, body in bodies or [(0, text)]:
        while argument := re.match(rf"\s*(?:\[[^]]*\]|{BRACES})", body):
            body = body[argument.end() :]
        nearest = min(captions, key=lambda place: abs(place[0] - start), default=(0, ""))
        rows = []
        for row in re.split(r"\\\\(?:\[[^]]*\])?|\\tabularnewline", LATEX_RULES.sub("", body)):
            if row.strip():
                rows.append([part for cell in re.split(r"(?<!\\)&", row) for part in _spanned(cell)])
        found.append(Grid(_plain(nearest[1]), _rectangular(rows)))
    return found


def _spanned(cell: str) -> list[str]:
    r"""A cell without markup, as often as its \multicolumn says."""
    if span := re.search(rf"\\multicolumn\{{(\d+)\}}{BRACES}{BRACES}", cell):
        return [_plain(span[3])] * int(span[1])
    return [_plain(re.sub(rf"\\multirow(?:\[[^]]*\])?{BRACES}(?:\[[^]]*\])?{BRACES}{BRACES}", r"\3", cell))]


def _plain(cell: str) -> str:
    """A cell without markup of LaTeX, Markdown or HTML."""
    cell = re.sub(r"</?(?:b|i|u|em|strong|br|span)[^>]*>", "", cell)
    cell = re.sub(r"<su[pb]>.*?</su[pb]>", "", cell)
    if "\\" in cell or "$" in cell:
        for pattern, plain in NAMES:
            cell = re.sub(pattern, plain, cell)
        while (shorter := re.sub(r"\\[a-zA-Z]+\*?\s*\{([^{}]*)\}", r"\1", cell)) != cell:
            cell = shorter
        cell = re.sub(r"\\(?:bfseries|bf|it|itshape|small|tiny|centering|scriptsize|footnotesize)\b", "", cell)
        cell = re.sub(r"\^\{?\s*\}?|_\{?\s*(?=[±∞])", "^", cell).replace("^±", "±").replace("^∞", "∞")
        cell = re.sub(r"\^(?=\d)", "-", cell)
        cell = re.sub(r"[${}^]", "", cell)
    cell = re.sub(r"^(\*\*|__|\*|_)(.+?)\1", r"\2", cell.strip())
    return re.sub(r"\s+", " ", re.sub(r"[↑↓`]|\\", "", cell)).strip()


def _rectangular(rows: list[list[str]]) -> list[list[str]]:
    width = max(map(len, rows), default=0)
    return [row + [""] * (width - len(row)) for row in rows]


# --- pasted lines -------------------------------------------------------------------------------------------------


def _pasted(lines: list[str], name: str) -> Grid:
    """Lines of a label and the same number of numbers; the last line before them has the heads."""
    split = [_tokens(line) for line in lines]
    # how many of the last words are numbers, or stand for a missing one
    counts = [len([*itertools.takewhile(_is_number, reversed(tokens))]) for tokens in split]
    usual = Counter(count for count in counts if count).most_common(1)
    if not usual:
        raise SpecError(f"{name}: no table found: no line ends in a number")
    width = usual[0][0]
    first = next(i for i, count in enumerate(counts) if count >= width)
    if not first or len(split[first - 1]) < width:
        raise SpecError(
            f"{name}: no heads found for the {width} numbers of '{lines[first].strip()[:60]}': the line before it must"
            f" have {width} names of one word each, such as Clean FGSM PGD-20 AA"
        )
    rows = []
    for tokens, count in zip(split[first - 1 :], [width, *counts[first:]], strict=True):
        cut = len(tokens) - min(count, width)
        rows.append([" ".join(tokens[:cut]), *tokens[cut:], *[""] * (width - min(count, width))])
    return Grid(" ".join(line.strip() for line in lines[: first - 1]), [[_plain(cell) for cell in row] for row in rows])


def _is_number(word: str) -> bool:
    return NUMERIC.fullmatch(word) is not None or word.lower() in MISSING


def _tokens(line: str) -> list[str]:
    line = re.sub(r"\s*(?:±|\+/-|\+-)\s*", "±", line.strip())
    line = re.sub(r"(?<=\d) ?\( ?(\d[\d.]*) ?\)", r"(\1)", line)
    line = re.sub(r"(?i)\bauto attack", "AutoAttack", line)
    return re.sub(r"(?i)\b(pgd|cw) (\d+|∞)(?=\s|$)", r"\1-\2", line).split()
