"""Numbers of a stage, of which there may be millions: some are read at a time, from the text of a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fatbench.store import doubt_names

LONG = 2**20  # characters of a list that is left as text
PIECE = 2**20  # characters that are read at a time
# as `export` writes them, and no text in them has a bracket
_LISTS = re.compile(r'"numbers":(\[(?:\[[^][]*+(?:\[[^][]*+\][^][]*+)*+\],?)++\])')
_BETWEEN = '"],['  # two of them, each of which ends with its time


def constant(name: str) -> Any:
    """ValueError: NaN or an infinity, which the reader of JSON would take."""
    raise ValueError(f"{name} is not a number")


class Numbers:
    """Numbers that may be read again and again, as [round, client, metric, value, n, run, created]."""

    def rounds(self) -> Iterator[list[Any]]:
        """Lists of all numbers of some rounds, if they are in the order of their rounds."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return (row for some in self.rounds() for row in some)


class NumberText(Numbers):
    """A list of numbers whose text is `line[begin:end]`.

    translated: metrics have the names that the database has for them.
    """

    def __init__(self, line: str, begin: int, end: int, translated: bool = False):
        self.line, self.begin, self.end, self.translated = line, begin, end, translated

    def pieces(self) -> Iterator[str]:
        """The text in lists of some numbers."""
        begin, last = self.begin + 1, self.end - 1
        while begin < last:
            end = self.line.find(_BETWEEN, begin + PIECE, last)
            end = last if end < 0 else end + 2
            yield f"[{self.line[begin:end]}]"
            begin = end + 1

    def rounds(self) -> Iterator[list[Any]]:
        rest: list[Any] = []
        for piece in self.pieces():
            found = rest + rows(json.loads(piece, parse_constant=constant))
            if self.translated:
                found = [[*row[:2], *doubt_names.translated(*row[2:4]), *row[4:]] for row in found]
            whole = len(found)
            while whole and found[whole - 1][0] == found[-1][0]:  # of the last round there may be more
                whole -= 1
            yield found[:whole]
            rest = found[whole:]
        yield rest

    def __len__(self) -> int:
        return sum(map(len, self.rounds()))


def blocks(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The numbers of one round, as rows, with all that several share written once."""
    series: dict[tuple[Any, ...], list[tuple[int, int, float]]] = {}
    for round, client, metric, value, n, run, created in rows:
        series.setdefault((round, run, created, metric), []).append((client, n, value))
    alike: dict[tuple[Any, ...], dict[str, Sequence[float]]] = {}
    for (round, run, created, metric), of_metric in series.items():
        clients, sizes, values = zip(*of_metric, strict=True)
        alike.setdefault((round, run, created, clients, sizes), {})[metric] = values
    return [
        [round, clients, sizes[0] if len(set(sizes)) == 1 else sizes, metrics, run, created]
        for (round, run, created, clients, sizes), metrics in alike.items()
    ]


def rows(entries: Sequence[Any]) -> list[Any]:
    """Each number of blocks, and of rows among them, as a row. ValueError says which block is none."""
    found: list[Any] = []
    for place, entry in enumerate(entries):
        if not (isinstance(entry, list) and len(entry) == 6 and isinstance(entry[3], dict)):
            found.append(entry)
            continue
        round, clients, n, metrics, run, created = entry
        lists = [clients, *metrics.values(), *([n] if isinstance(n, list) else [])]
        if not all(isinstance(one, list) and len(one) == len(clients) for one in lists):
            raise ValueError(f"{place}: its lists are not of one length")
        sizes = n if isinstance(n, list) else [n] * len(clients)
        found += (
            [round, client, metric, value, size, run, created]
            for metric, values in metrics.items()
            for client, value, size in zip(clients, values, sizes, strict=True)
        )
    return found


def rounds(numbers: Sequence[Any] | Numbers) -> Iterator[Sequence[Any]]:
    """The numbers of a stage in lists: of some rounds, or one of all."""
    yield from numbers.rounds() if isinstance(numbers, Numbers) else [numbers]


def parsed(line: str, most: int) -> Any:
    """A line as JSON whose long lists of numbers are `NumberText`; a list of another form, or place, is read as it is.

    ValueError: it has more than `most` other characters.
    """
    lists: list[NumberText] = []

    def number(match: re.Match[str]) -> str:
        if match.end() - match.start() < LONG:
            return match[0]
        lists.append(NumberText(line, *match.span(1)))
        return f'"numbers":[[{len(lists) - 1}]]'

    text = _LISTS.sub(number, line) if len(line) >= LONG else line
    try:
        value = _read(text, most)
    except ValueError:
        return _read(line, most)  # which says the right column
    stages = value.get("stages") if lists and isinstance(value, Mapping) else None
    places = [stage for stage in stages or () if isinstance(stage, dict) and _is_place(stage.get("numbers"))]
    if [stage["numbers"] for stage in places] != [[[i]] for i in range(len(lists))]:
        return _read(line, most)
    for stage, numbers in zip(places, lists, strict=True):
        stage["numbers"] = numbers
    return value


def _is_place(numbers: Any) -> bool:
    return isinstance(numbers, list) and [len(row) for row in numbers if isinstance(row, list)] == [1]


def _read(text: str, most: int) -> Any:
    if len(text) > most:
        raise ValueError(f"more than {most} characters beside the numbers: no cell that export wrote")
    return json.loads(text, parse_constant=constant)
