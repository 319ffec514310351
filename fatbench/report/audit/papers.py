"""Papers' tables, each described by a YAML file beside them: suites/published/NAME.yaml.

    for paper in all_papers():
        print(paper.title, paper.numbers)

A file has the paper's name, where it was read, and its tables; further keys are those of `Known`, for the paper or for
one table. docs/sanity.md has them all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from fatbench import whole_file
from fatbench.errors import SpecError, did_you_mean
from fatbench.report.audit.grids import grids
from fatbench.report.audit.read_tables import Known, read
from fatbench.suite.folders import folders

FACTS = tuple(one.name for one in fields(Known))
OF_PAPER = ("paper", "title", "read", "threat", "selection", "answers", "tables")


@dataclass(frozen=True)
class Paper:
    """A paper, and the long table of its numbers."""

    name: str
    numbers: pandas.DataFrame
    title: str = ""
    read: str = ""  # where and when
    threat: str = ""
    selection: str = ""  # of the round or the settings, as the paper says it
    answers: Mapping[str, str] = field(default_factory=dict)  # question -> what the authors say
    unread: tuple[str, ...] = ()


@functools.cache
def all_papers() -> tuple[Paper, ...]:
    """Every paper of `published` beside the suites. SpecError: see `load`."""
    files: dict[str, Path] = {}
    for folder in folders():
        for file in sorted((folder / "published").glob("*.yaml")):
            files.setdefault(file.stem, file)
    return tuple(load(file) for _, file in sorted(files.items()))


def numbers(name: str | None = None) -> pandas.DataFrame:
    """The numbers of all papers, or of the one of this name."""
    chosen = [paper.numbers for paper in all_papers() if name in (None, paper.name)]
    return pandas.concat(chosen, ignore_index=True)


def description_of(file: Path) -> Path | None:
    """The YAML file of a paper, beside this table, that names it; None without one."""
    for description in sorted(file.parent.glob("*.yaml")):
        text = description.read_text(encoding="utf-8")
        if file.name in text and re.search("^paper:", text, re.MULTILINE):  # a suite may lie there, too
            return description
    return None


def load(file: Path) -> Paper:
    """The paper of a YAML file. SpecError: an unknown key, a missing one, or a table that is not understood."""
    try:
        facts = YAML(typ="safe").load(whole_file.regular(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise SpecError(f"{file}: {str(error).splitlines()[0]}") from None
    if not isinstance(facts, dict) or not isinstance(facts.get("tables"), list) or "paper" not in facts:
        raise SpecError(f"{file}: expected the keys paper, read and tables (docs/sanity.md)")
    _demand_keys(facts, (*OF_PAPER, *FACTS), file)
    shared = {key: value for key, value in facts.items() if key in FACTS}
    longs, unread = [], []
    for table in facts["tables"]:
        if not isinstance(table, dict) or "file" not in table:
            raise SpecError(f"{file}: tables: each needs a key file, got {str(table)[:40]!r}")
        _demand_keys(table, ("file", "only", *FACTS), file)
        known = Known(**{**shared, **{key: value for key, value in table.items() if key in FACTS}})
        source = file.parent / table["file"]
        try:
            text = whole_file.regular(source).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{source}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
        for grid in grids(text, str(source)):
            long = read(grid, source.stem, known)
            numbers = long.numbers.assign(file=source.name, table=long.numbers["table"].astype(str))
            if "only" in table:
                numbers = numbers[numbers["table"].isin([*map(str, table["only"])])]
            longs.append(numbers)
            unread += [f"{source.name}: {text}" for text in long.unread]
    numbers = pandas.concat(longs, ignore_index=True)
    named = {key: facts[key] for key in ("title", "read", "threat", "selection", "answers") if key in facts}
    return Paper(str(facts["paper"]), numbers, **named, unread=tuple(dict.fromkeys(unread)))


def _demand_keys(facts: Mapping[str, Any], allowed: tuple[str, ...], file: Path) -> None:
    if unknown := [str(key) for key in facts if key not in allowed]:
        raise SpecError(f"{file}: unknown key '{unknown[0]}'{did_you_mean(unknown[0], allowed)}")
