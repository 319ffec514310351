"""The papers behind suites and functions: `references.bib` beside the suites, and which of them a suite cites.

The entry of a function in its table names the papers that it follows, `cites=("zhu2023",)`; `papers.CITES` those of
what a suite makes of its functions.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fatbench.suite import calls
from fatbench.suite.files import Suite
from fatbench.suite.folders import CITES, folders

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
    """The references that a suite and its functions cite, and those behind the intervals of every table."""
    keys = {*ALWAYS, *(key for name, cited in CITES.items() if suite.name.startswith(name) for key in cited)}
    for preset in suite.presets():
        cells = suite.plan(preset, refuse=False).cells
        for cell in {str(cell.key): cell for cell in cells}.values():  # seeds differ in nothing else
            attacks = [calls.call("Attack", used.attack) for used in cell.evaluations if used.attack]
            for used_call in [calls.call("Experiment", cell.spec), *attacks]:
                keys.update(key for call in used_call.walk() for key in call.signature.entry.get("cites", ()))
    return [reference for reference in entries() if reference.key in keys]


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
