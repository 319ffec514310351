"""Reads the numbers of a stage piece by piece from the text of a line, because there may be millions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fatbench.store import doubt_names

LONG = 2**20  # characters from which on a list stays text
PIECE = 2**20  # characters that are read at a time
# lists as `export` writes them, in which no string has a bracket
_LISTS = re.compile(r'"numbers":(\[(?:\[[^][]*+(?:\[[^][]*+\][^][]*+)*+\],?)++\])')
_BETWEEN = '"],['  # between two entries, each of which ends with its time


def constant(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which Python's JSON reader accepts."""
    raise ValueError(f"{name} is not a number")


class Numbers:
    """Numbers that can be iterated repeatedly, as [round, client, metric, value, n, run, created]."""

    def rounds(self) -> Iterator[list[Any]]:
        """Lists of numbers, each with all of some rounds, provided that the numbers are in the order of rounds."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return (row for rows_of_rounds in self.rounds() for row in rows_of_rounds)


class NumberText(Numbers):
    """A list of numbers whose text is `line[begin:end]`.

    translated: metrics get the names that they have today (`doubt_names.current_form`).
    """

    def __init__(self, line: str, begin: int, end: int, translated: bool = False):
        self.line, self.begin, self.end, self.translated = line, begin, end, translated

    def pieces(self) -> Iterator[str]:
        """The text as JSON lists of some entries each."""
        begin, last = self.begin + 1, self.end - 1
        while begin < last:
            end = self.line.find(_BETWEEN, begin + PIECE, last)
            end = last if end < 0 else end + 2
            yield f"[{self.line[begin:end]}]"
            begin = end + 1

    def rounds(self) -> Iterator[list[Any]]:
        open_round: list[Any] = []  # the rows of a round that may go on in the next piece
        for piece in self.pieces():
            read_rows = open_round + rows(json.loads(piece, parse_constant=constant))
            if self.translated:
                read_rows = [[*row[:2], *doubt_names.current_form(*row[2:4]), *row[4:]] for row in read_rows]
            complete = len(read_rows)
            while complete and read_rows[complete - 1][0] == read_rows[-1][0]:
                complete -= 1
            yield read_rows[:complete]
            open_round = read_rows[complete:]
        yield open_round

    def __len__(self) -> int:
        return sum(map(len, self.rounds()))


def blocks(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The rows of one round as blocks, in which shared values are written once.

    A block is [round, clients, n or [n, ...], {metric: [value, ...]}, run, created].
    """
    series: dict[tuple[Any, ...], list[tuple[int, int, float]]] = {}
    for round, client, metric, value, n, run, created in rows:
        series.setdefault((round, run, created, metric), []).append((client, n, value))
    metrics_by_key: dict[tuple[Any, ...], dict[str, Sequence[float]]] = {}
    for (round, run, created, metric), client_values in series.items():
        clients, sizes, values = zip(*client_values, strict=True)
        metrics_by_key.setdefault((round, run, created, clients, sizes), {})[metric] = values
    return [
        [round, clients, sizes[0] if len(set(sizes)) == 1 else sizes, metrics, run, created]
        for (round, run, created, clients, sizes), metrics in metrics_by_key.items()
    ]


def rows(entries: Sequence[Any]) -> list[Any]:
    """Rows of the entries, each of which is a block or a row. Raises ValueError with the position of a bad block."""
    result: list[Any] = []
    for position, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 6 and isinstance(entry[3], dict)):
            result.append(entry)
            continue
        round, clients, n, metrics, run, created = entry
        lists = [clients, *metrics.values(), *([n] if isinstance(n, list) else [])]
        if not all(isinstance(values, list) and len(values) == len(clients) for values in lists):
            raise ValueError(f"{position}: its lists differ in length")
        sizes = n if isinstance(n, list) else [n] * len(clients)
        result += (
            [round, client, metric, value, size, run, created]
            for metric, values in metrics.items()
            for client, value, size in zip(clients, values, sizes, strict=True)
        )
    return result


def rounds(numbers: Sequence[Any] | Numbers) -> Iterator[Sequence[Any]]:
    """The numbers of a stage in lists, each with all of some rounds; a plain list as one."""
    yield from numbers.rounds() if isinstance(numbers, Numbers) else [numbers]


def parsed(line: str, limit: int) -> Any:
    """A line as JSON in which long lists of numbers are `NumberText`; a list in another form or place is parsed.

    Raises ValueError for more than `limit` other characters.
    """
    lists: list[NumberText] = []

    def placeholder(match: re.Match[str]) -> str:
        if match.end() - match.start() < LONG:
            return match[0]
        lists.append(NumberText(line, *match.span(1)))
        return f'"numbers":[[{len(lists) - 1}]]'

    text = _LISTS.sub(placeholder, line) if len(line) >= LONG else line
    try:
        value = _read(text, limit)
    except ValueError:
        return _read(line, limit)  # its error names the right column
    stages = value.get("stages") if lists and isinstance(value, Mapping) else None
    placeholders = [
        stage for stage in stages or () if isinstance(stage, dict) and _is_placeholder(stage.get("numbers"))
    ]
    if [stage["numbers"] for stage in placeholders] != [[[i]] for i in range(len(lists))]:
        return _read(line, limit)
    for stage, numbers in zip(placeholders, lists, strict=True):
        stage["numbers"] = numbers
    return value


def _is_placeholder(numbers: Any) -> bool:
    return isinstance(numbers, list) and [len(row) for row in numbers if isinstance(row, list)] == [1]


def _read(text: str, limit: int) -> Any:
    if len(text) > limit:
        raise ValueError(f"more than {limit} characters besides the numbers: not written by export")
    return json.loads(text, parse_constant=constant)
