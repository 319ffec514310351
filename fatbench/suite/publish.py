"""A paper's table, or RobustBench's records, as the published numbers of a suite's table.

    rows = read_table(file)
    paper_numbers = match_rows(rows, suite, table)     # rows by our labels, and the reasons for refused ones
    write(paper_numbers, suite, select, unit)          # suites/published/NAME-TABLE.csv, and `published:` in the suite

Rows without known labels, and texts that are no numbers, are refused, each with its reason.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.util import load_yaml_guess_indent

from fatbench import whole_file
from fatbench.errors import FatbenchError, SpecError, did_you_mean
from fatbench.suite import files
from fatbench.suite.files import Suite
from fatbench.suite.tables import Table

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"
PRINTED = re.compile(rf"({NUMBER})\s*%?\s*(?:(?:±|\+/-|\+-|\\pm)\s*({NUMBER})|\(\s*±?\s*({NUMBER})\s*\))?\s*%?")
MISSING = {"", "-", "--", "---", "–", "—", "n/a"}
ORNAMENT = " \t\u00a0*†‡$"
OTHER_NAMES = {"aa": "autoattack", "clean": "natural", "cleanacc": "natural", "autoattackacc": "autoattack"}


@dataclass(frozen=True)
class Row:
    """A row of a paper's table: its place in the file, and its texts by column."""

    place: str
    text: Mapping[str, str]


@dataclass
class PaperNumbers:
    """A paper's numbers for the points of a table, and reasons for the rows that are refused."""

    table: Table
    axes: list[str]
    # labels of a point -> {heading: (value, deviation)}
    rows: dict[tuple[str, ...], dict[str, tuple[float, float | None]]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # columns of the paper without a use

    @property
    def count(self) -> int:
        return sum(map(len, self.rows.values()))


def normalise(text: str) -> str:
    """A name without case and punctuation, so that "PGD-20" equals "pgd20"."""
    letters = re.sub(r"[^a-z0-9]+", "", text.lower())
    return OTHER_NAMES.get(letters, letters)


def read_table(file: Path) -> list[Row]:
    """The rows of a CSV file (comma, semicolon or tab), or of a RobustBench record; SpecError for other files."""
    try:
        text = whole_file.regular(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{file}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    if text.lstrip().startswith("{"):
        return [_record(text, str(file))]
    head = text.partition("\n")[0]
    separator = max(",;\t", key=head.count)  # spreadsheets write ";" where the comma is the decimal point
    lines = list(csv.reader(io.StringIO(text), delimiter=separator))
    columns = [name.strip(ORNAMENT) for name in lines[0]] if lines else []
    if len(columns) < 2 or len({*columns}) < len(columns):
        raise SpecError(f"{file}:1: expected a line of column names, each once, got {head[:60]!r}")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if any(map(str.strip, line)):
            if len(line) != len(columns):
                raise SpecError(f"{file}:{number}: {len(line)} values under {len(columns)} column names")
            texts = {c: v.strip(ORNAMENT) for c, v in zip(columns, line, strict=True)}
            if separator == ";":
                texts = {c: point if PRINTED.fullmatch(point := v.replace(",", ".")) else v for c, v in texts.items()}
            rows.append(Row(f"{file}:{number}", texts))
    return rows


def _record(text: str, file: str) -> Row:
    try:
        record = json.loads(text)
        values = {key: str(record[key]) for key in ("name", "clean_acc", "autoattack_acc")}
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{file}: not one of RobustBench's records: no name, clean_acc and autoattack_acc") from None
    return Row(file, values)


def number(text: str) -> tuple[float, float | None] | None:
    """(value, deviation) as papers print them: 58.13, 58.13 ±0.68, 58.13 (0.68), 58.13%; None for an empty entry.

    ValueError for anything else, such as 58,13.
    """
    text = re.sub(r"[*†‡$\u00a0]", " ", text).strip()  # marks of best numbers and footnotes
    if text.lower() in MISSING:
        return None
    match = PRINTED.fullmatch(text)
    if match is None:
        raise ValueError(text)
    deviation = match[2] or match[3]
    return float(match[1]), None if deviation is None else float(deviation)


def table_of(suite: Suite, id: str | None) -> Table:
    """The table of this id, or the only one; SpecError without one, or if it already has published numbers."""
    tables = {table.id: table for table in suite.tables}
    if id is None and len(tables) != 1:
        raise SpecError(f"{suite.file} has {len(tables)} tables: {', '.join(tables) or 'none'}", option="table")
    if id is not None and id not in tables:
        raise SpecError(f"{suite.file} has no table '{id}'{did_you_mean(id, tables)}", option="table")
    table = tables[id or next(iter(tables))]
    if table.reference is not None:
        raise SpecError(f"{suite.file}: table {table.id} has published numbers already: {table.reference.file}")
    return table


def match_rows(
    rows: Sequence[Row], suite: Suite, table: Table, our_label_by_paper: Mapping[str, str] | None = None
) -> PaperNumbers:
    """The paper's numbers under our labels. our_label_by_paper: label of the paper -> ours.

    Rows with unknown labels, repeated rows and unreadable numbers are refused. Records of several seeds become one row.
    SpecError if no column has the labels of an axis, or no number is found.
    """
    axes_of_suite = suite.axes()
    labels = {
        axis: [label for label in axes_of_suite[axis] if label in table.where.get(axis, axes_of_suite[axis])]
        for axis in [*table.rows, *table.across]
        if axis in axes_of_suite
    }
    axes = [axis for axis, axis_labels in labels.items() if len(axis_labels) > 1]  # a single label needs no column
    columns = list(rows[0].text) if rows else []
    headings = _headings(columns, table)
    column_by_axis = {
        axis: _column(axis, labels[axis], rows, columns, headings, our_label_by_paper or {}) for axis in axes
    }
    paper_numbers = PaperNumbers(table, axes)
    used_columns = {*column_by_axis.values(), *headings.values(), *(f"{c}_std" for c in headings.values())}
    paper_numbers.unused = [column for column in columns if column not in used_columns]
    records_by_point: dict[tuple[str, ...], list[dict[str, tuple[float, float | None]]]] = {}
    for row in rows:
        try:
            point = tuple(
                _label(row.text[column_by_axis[axis]], labels[axis], axis, our_label_by_paper or {}) for axis in axes
            )
            numbers = _numbers(row, headings)
        except ValueError as error:
            paper_numbers.refused.append(f"{row.place}: {error}")
            continue
        if point in records_by_point and "clean_acc" not in row.text:  # only records have a row for each seed
            paper_numbers.refused.append(f"{row.place}: a second row of {', '.join(point)}")
        else:
            records_by_point.setdefault(point, []).append(numbers)
    paper_numbers.rows = {
        point: records[0] if len(records) == 1 else _mean(records) for point, records in records_by_point.items()
    }
    if not paper_numbers.refused and not paper_numbers.count:
        raise SpecError(f"no number for table {table.id} (its headings: {', '.join(table.values)})")
    return paper_numbers


def _headings(columns: Sequence[str], table: Table) -> dict[str, str]:
    """heading -> the column of the same name, or with the name of its metric."""
    column_by_name = {normalise(column): column for column in columns}
    column_by_heading = {}
    for heading, source in table.values.items():
        column = column_by_name.get(normalise(heading)) or column_by_name.get(normalise(source))
        if column is not None:
            column_by_heading[heading] = column
    return column_by_heading


def _column(
    axis: str,
    labels: Sequence[str],
    rows: Sequence[Row],
    columns: Sequence[str],
    headings: Mapping[str, str],
    our_label_by_paper: Mapping[str, str],
) -> str:
    """The column of an axis: the one of its name, else the one with most of its labels; SpecError without any."""
    free_columns = [column for column in columns if column not in headings.values()]
    if same_name := next((column for column in free_columns if normalise(column) == normalise(axis)), None):
        return same_name

    def label_count(column: str) -> int:
        return sum(bool(_matching_labels(row.text[column], labels, our_label_by_paper)) for row in rows)

    best = max(free_columns, key=label_count, default=None)
    if best is None or not label_count(best):
        raise SpecError(
            f"no column has labels of the axis '{axis}' ({', '.join(labels)}); the columns: {', '.join(columns)}."
            " --label 'PAPER=OURS' maps a label of the paper to ours"
        )
    return best


def _matching_labels(text: str, labels: Sequence[str], our_label_by_paper: Mapping[str, str]) -> list[str]:
    """Our labels that equal a text, or else one of its parts between commas and colons, as in names of records."""
    for words in ([text], re.split(r"[,:]\s*", text)):
        normalised_words = [normalise(our_label_by_paper.get(word, word)) for word in words]
        if labels_found := [label for label in labels if normalise(label) in normalised_words]:
            return labels_found
    return []


def _label(text: str, labels: Sequence[str], axis: str, our_label_by_paper: Mapping[str, str]) -> str:
    """The label that a text means; ValueError if it means none, or several."""
    labels_found = _matching_labels(text, labels, our_label_by_paper)
    if len(labels_found) != 1:
        raise ValueError(f"'{text[:60]}' is not a label of '{axis}'{did_you_mean(text, labels)}")
    return labels_found[0]


def _numbers(row: Row, headings: Mapping[str, str]) -> dict[str, tuple[float, float | None]]:
    """heading -> (value, deviation) where the row has a number; ValueError for an unreadable entry."""
    number_by_heading = {}
    for heading, column in headings.items():
        try:
            parsed = number(row.text[column])
            deviation = number(row.text.get(f"{column}_std", ""))
        except ValueError as error:
            raise ValueError(f"'{str(error)[:60]}' in column '{column}' is no number") from None
        if parsed is not None:
            number_by_heading[heading] = parsed if deviation is None else (parsed[0], deviation[0])
    return number_by_heading


def _mean(records: Sequence[Mapping[str, tuple[float, float | None]]]) -> dict[str, tuple[float, float | None]]:
    """heading -> (mean, standard deviation) over the records of several seeds."""
    found = {}
    for heading in dict.fromkeys(heading for item in records for heading in item):
        values = [item[heading][0] for item in records if heading in item]
        found[heading] = round(statistics.fmean(values), 6), round(statistics.stdev(values), 6) if values[1:] else None
    return found


def as_csv(paper_numbers: PaperNumbers) -> str:
    """The numbers as CSV, one row per point: its labels, then each number and its deviation."""
    headings = [h for h in paper_numbers.table.values if any(h in row for row in paper_numbers.rows.values())]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*paper_numbers.axes, *(name for h in headings for name in (h, f"{h}_std"))])
    for point, row in paper_numbers.rows.items():
        cells = [row.get(heading, (None, None)) for heading in headings]
        writer.writerow([*point, *("" if v is None else f"{v:.10g}" for pair in cells for v in pair)])
    return stream.getvalue()


def block(paper_numbers: PaperNumbers, file: str, select: str, unit: str) -> dict[str, Any]:
    """The value of the table's key `published` in the suite."""
    headings = [h for h in paper_numbers.table.values if any(h in row for row in paper_numbers.rows.values())]
    rows = paper_numbers.rows.values()
    with_deviation = [h for h in headings if any(row.get(h, (0, None))[1] is not None for row in rows)]
    return {
        "file": file,
        "select": select,
        "rows": {axis: axis for axis in paper_numbers.axes},
        "values": {heading: heading for heading in headings},
        **({"std": {heading: f"{heading}_std" for heading in with_deviation}} if with_deviation else {}),
        "unit": unit,
    }


def write(paper_numbers: PaperNumbers, suite: Suite, select: str, unit: str | None) -> Path:
    """Write the numbers to a file beside the suite and name it in the suite, both or neither; returns the file.

    unit: None for per cent if a number is above 1. SpecError if the table is not in the suite's own file, the file
    exists, or the suite came with the program.
    """
    suite_file, id = suite.file, paper_numbers.table.id
    if Path(__file__).parent.parent.resolve() in suite_file.resolve().parents:
        raise SpecError(f"{suite_file} came with the program: copy it, or extend it in a suite of your own")
    name = f"published/{suite_file.stem}-{re.sub(r'[^A-Za-z0-9]+', '-', id).strip('-').lower()}.csv"
    target = suite_file.parent / name
    if target.exists():
        raise SpecError(f"{target} exists: move it away")
    # an accuracy above 1 can only be in per cent
    largest = max(value for row in paper_numbers.rows.values() for value, _ in row.values())
    published = block(paper_numbers, name, select, unit or ("percent" if largest > 1 else "plain"))
    old_text = suite_file.read_text(encoding="utf-8")
    new_text = _with_published(old_text, id, published, suite_file)
    whole_file.write_all({target: as_csv(paper_numbers), suite_file: new_text}, suite_file)
    try:
        files.load(str(suite_file))
    except FatbenchError:  # the edited suite cannot be read: restore both files
        whole_file.write(suite_file, old_text)
        target.unlink()
        raise
    return target


def _keep_anchors(node: Any) -> None:
    """Make ruamel write every anchor again, even one that no alias uses."""
    if anchor := getattr(node, "yaml_anchor", lambda: None)():
        anchor.always_dump = True
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _keep_anchors(inner)


def _with_published(text: str, id: str, published: Mapping[str, Any], suite_file: Path) -> str:
    """A suite's text with `published` in one table and everything else unchanged."""
    _, indent, offset = load_yaml_guess_indent(text)
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = 10**6, True  # no line of the person's is broken, no quotation mark lost
    yaml.indent(mapping=2, sequence=indent or 4, offset=offset or 0)
    contents = yaml.load(text)
    _keep_anchors(contents)
    table = next((table_node for table_node in contents.get("tables") or () if str(table_node.get("id")) == id), None)
    if table is None:
        raise SpecError(f"{suite_file}: table {id} stands in the suite that this one extends")
    published_node = CommentedMap(published)
    for key, value in published.items():
        if isinstance(value, dict):
            published_node[key] = CommentedMap(value)
            published_node[key].fa.set_flow_style()
    if table.fa.flow_style():  # a table written in one line stays in one line
        published_node.fa.set_flow_style()
    table["published"] = published_node
    stream = io.StringIO()
    yaml.dump(contents, stream)
    return stream.getvalue()
