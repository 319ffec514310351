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
        name_parts = (author.partition(", ") for author in self.fields["author"].split(" and "))
        return [(family, initials) for family, _, initials in name_parts]

    @property
    def short(self) -> str:
        """The short name of the method, FedProx; empty: it has none."""
        note = self.fields.get("note", "").partition(".")[0]
        return "" if note.startswith("Code") else note

    @property
    def cited_as(self) -> str:
        """The citation in text: Zhu et al. 2023."""
        names = [name for name, _ in self.authors]
        author_text = f"{names[0]} et al." if len(names) > 2 else " and ".join(names)
        return f"{author_text} {self.fields['year']}"


@cache
def entries() -> tuple[Reference, ...]:
    """All entries of `references.bib`, sorted by first author and year."""
    file = next(file for folder in folders()[1:] if (file := folder / "references.bib").is_file())
    text = file.read_text(encoding="utf-8")
    references = []
    for entry_text in re.split(r"^(?=@)", text, flags=re.MULTILINE)[1:]:
        key = entry_text[entry_text.index("{") + 1 : entry_text.index(",")]
        references.append(Reference(key, entry_text.strip(), dict(FIELD.findall(entry_text))))
    return tuple(sorted(references, key=lambda entry: (entry.authors[0][0].lower(), entry.fields["year"], entry.key)))


def cited_by(suite: Suite) -> list[Reference]:
    """The references that a suite's file and functions cite, and those behind the intervals of every table."""
    texts = {suite.file.read_text(encoding="utf-8")} if suite.file.is_file() else set()
    for preset in suite.presets():
        cells = suite.plan(preset, refuse=False).cells
        for cell in {str(cell.key): cell for cell in cells}.values():  # seeds differ in nothing else
            texts.update(_docstrings(cell))
    cited_keys = {reference.key for text in texts for reference in in_text(text)} | {*ALWAYS}
    return [reference for reference in entries() if reference.key in cited_keys]


def in_text(text: str) -> list[Reference]:
    """The entries that a text cites."""
    references = []
    for name, year in set(CITED.findall(text)):  # ("Zhu", "2023")
        same_author_and_year = [
            reference for reference in entries() if (reference.authors[0][0], reference.fields["year"]) == (name, year)
        ]
        named_in_text = [
            reference
            for reference in same_author_and_year
            if reference.short and re.search(re.escape(reference.short), text, re.IGNORECASE)
        ]
        references += named_in_text if len(same_author_and_year) > 1 and named_in_text else same_author_and_year
    return references


def _docstrings(cell: Cell) -> Iterator[str]:
    """The docstrings of all functions that a cell calls."""
    attacks = [calls.call("Attack", used_call.attack) for used_call in cell.evaluations if used_call.attack]
    for used_call in [calls.call("Experiment", cell.spec), *attacks]:
        for call in used_call.walk():
            function = calls.function(call.signature)
            yield inspect.getdoc(function) or ""
            if call.kind in ("Algorithm", "Model"):  # whose file is one method
                yield sys.modules[function.__module__].__doc__ or ""


def bibtex(references: Sequence[Reference]) -> str:
    """The entries as the text of a .bib file."""
    return "\n\n".join(reference.bibtex for reference in references) + "\n"


def markdown(references: Sequence[Reference]) -> str:
    """A Markdown list of the entries; entries of one author and year are told apart by their short names."""
    names = [reference.cited_as for reference in references]
    lines = []
    for reference in references:
        key = f"{reference.cited_as} ({reference.short})" if names.count(reference.cited_as) > 1 else reference.cited_as
        people = ", ".join(f"{initials} {name}".strip() for name, initials in reference.authors)
        venue = next(reference.fields[field] for field in VENUES if field in reference.fields)
        note = f" {reference.fields['note']}." if "note" in reference.fields else ""
        title = reference.fields["title"] + "." * (reference.fields["title"][-1] not in "?.")
        item = f"- **{key}**: {people}. {title} {venue}.{note}".replace("..", ".")
        lines.append(textwrap.fill(item, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))
    return "\n".join(lines) + "\n"
