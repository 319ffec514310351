"""The papers behind suites and functions: `references.bib` beside the suites, and which of them a suite cites.

A docstring and a suite's file cite by author and year, "Zhu et al. 2023"; the first author's name and the year find the
entry. Of several papers of one author and year those count whose short name, such as FedProx, stands in the text too.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fatbench.suite import calls
from fatbench.suite.cells import Cell
from fatbench.suite.files import Suite
from fatbench.suite.folders import folders

CITED = re.compile(r"\b((?:Ben |de |El )?[A-Z][\w'-]+)(?:(?:, [A-Z]\w+)*,? and [A-Z]\w+| et al\.)?,? \(?(\d{4})\b")
FIELD = re.compile(r"^  (\w+) = \{(.*?)\},?$", re.MULTILINE)
VENUES = ("booktitle", "journal", "howpublished")
ALWAYS = ("howe1974", "wilson1927")  # of every interval that a table or a page prints
WIDTH = 120


@dataclass(frozen=True)
class Reference:
    """An entry of the file."""

    key: str
    bibtex: str
    fields: Mapping[str, str]

    @property
    def authors(self) -> list[tuple[str, str]]:
        """(family name, initials) of each; ("others", "") for those that are not named."""
        parts = (one.partition(", ") for one in self.fields["author"].split(" and "))
        return [(family, initials) for family, _, initials in parts]

    @property
    def short(self) -> str:
        """The short name of the method, FedProx; empty: it has none."""
        note = self.fields.get("note", "").partition(".")[0]
        return "" if note.startswith("Code") else note

    @property
    def cited_as(self) -> str:
        """As text cites it: Zhu et al. 2023."""
        names = [name for name, _ in self.authors]
        who = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
        return f"{who} {self.fields['year']}"


@cache
def entries() -> tuple[Reference, ...]:
    """All of the file, by first author and year."""
    file = next(file for folder in folders()[1:] if (file := folder / "references.bib").is_file())
    text = file.read_text(encoding="utf-8")
    found = []
    for part in re.split(r"^(?=@)", text, flags=re.MULTILINE)[1:]:
        key = part[part.index("{") + 1 : part.index(",")]
        found.append(Reference(key, part.strip(), dict(FIELD.findall(part))))
    return tuple(sorted(found, key=lambda one: (one.authors[0][0].lower(), one.fields["year"], one.key)))


def cited_by(suite: Suite) -> list[Reference]:
    """What the suite's file and the functions that its cells call cite, and what the intervals of tables rest on."""
    texts = {suite.file.read_text(encoding="utf-8")} if suite.file.is_file() else set()
    for preset in suite.presets():
        cells = suite.plan(preset, refuse=False).cells
        for cell in {str(cell.key): cell for cell in cells}.values():  # seeds differ in nothing else
            texts.update(_documented(cell))
    wanted = {one.key for text in texts for one in in_text(text)} | {*ALWAYS}
    return [one for one in entries() if one.key in wanted]


def in_text(text: str) -> list[Reference]:
    """The entries that a text cites."""
    found = []
    for name, year in set(CITED.findall(text)):
        several = [one for one in entries() if (one.authors[0][0], one.fields["year"]) == (name, year)]
        named = [one for one in several if one.short and re.search(re.escape(one.short), text, re.IGNORECASE)]
        found += named if len(several) > 1 and named else several
    return found


def _documented(cell: Cell) -> Iterator[str]:
    """The docstrings of all functions that a cell calls."""
    attacks = [calls.call("Attack", one.attack) for one in cell.evaluations if one.attack]
    for one in [calls.call("Experiment", cell.spec), *attacks]:
        for call in one.walk():
            function = calls.function(call.signature)
            yield inspect.getdoc(function) or ""
            if call.kind in ("Algorithm", "Model"):  # whose file is one method
                yield sys.modules[function.__module__].__doc__ or ""


def bibtex(found: Sequence[Reference]) -> str:
    """The entries, as a .bib file has them."""
    return "\n\n".join(one.bibtex for one in found) + "\n"


def markdown(found: Sequence[Reference]) -> str:
    """A list, an entry an item; of one author and year the short name tells them apart."""
    names = [one.cited_as for one in found]
    lines = []
    for one in found:
        key = f"{one.cited_as} ({one.short})" if names.count(one.cited_as) > 1 else one.cited_as
        people = ", ".join(f"{first} {name}".strip() for name, first in one.authors)
        venue = next(one.fields[what] for what in VENUES if what in one.fields)
        note = f" {one.fields['note']}." if "note" in one.fields else ""
        title = one.fields["title"] + "." * (one.fields["title"][-1] not in "?.")
        item = f"- **{key}**: {people}. {title} {venue}.{note}".replace("..", ".")
        lines.append(textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))
    return "\n".join(lines) + "\n"
