"""What several commands do first or last: read the suite, find the cell, open the database, print JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.errors import NothingMatched, SpecError, did_you_mean

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Plan
    from fatbench.suite.files import Suite

SCHEMA_VERSION = 1  # of every JSON that a command prints
FIGURES = Path("results/figures")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object with its schema's version."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2))


def known_format(value: str, known: tuple[str, ...]) -> str:
    """`value`, one of `known`. SpecError: it is not."""
    if value not in known:
        raise SpecError(f"--format: no format is named '{value}'{did_you_mean(value, known)}")
    return value


def add_plugins(files: list[Path] | None) -> None:
    """Let the tables of Python files extend ours. SpecError as for `signatures.add_plugin`."""
    from fatbench.suite import signatures

    for file in files or []:
        signatures.add_plugin(file.resolve())


def plan_of(name: str, preset: str | None, smoke: bool, seeds: str | None, where: str | None) -> Plan:
    """The plan that a suite's name and the options ask for. SpecError, NothingMatched."""
    from fatbench.suite import files

    return preset_of(files.load(name), preset, smoke, seeds, where)


def preset_of(chosen: Suite, preset: str | None, smoke: bool, seeds: str | None, where: str | None) -> Plan:
    """The same of a suite that has been read."""
    from fatbench.suite import model

    if smoke and preset not in (None, "smoke"):
        raise SpecError(f"--smoke and --preset {preset} contradict each other")
    numbers = model.parse_seeds(seeds) if seeds else None
    return chosen.plan("smoke" if smoke else preset or "paper", numbers, where)


def plan_in(
    name: str, preset: str | None, smoke: bool, seeds: str | None, where: str | None, store: Store | None
) -> tuple[Suite, Plan]:
    """A suite and the plan to look at: the preset asked for, else the first that has been run, else paper."""
    from fatbench.run import progress
    from fatbench.suite import files

    chosen = files.load(name)
    if preset is None and not smoke and store is not None:
        preset = progress.preset_run(chosen, store)
    return chosen, preset_of(chosen, preset, smoke, seeds, where)


@contextlib.contextmanager
def existing(db: str | None) -> Iterator[Store | None]:
    """The database if there is one, else None: asking about nothing is no error."""
    from fatbench import settings
    from fatbench.store.database import NoDatabase
    from fatbench.store.stages import Store

    url = settings.database(db)
    try:
        store = Store.open(url)
    except NoDatabase:
        yield None
        return
    with store:
        yield store


def cell_in(store: Store | None, cell: str) -> str:
    """The id of the cell (or, written with "~", the replicate) whose id begins so. NothingMatched: none has.

    SpecError: several have.
    """
    known = [] if store is None else [id for id in store.cells() if ("~" in id) == ("~" in cell)]
    found = [cell] if cell in known else [id for id in known if id.startswith(cell)]
    if not found:
        raise NothingMatched(f"no cell '{cell}' in the database (fatbench status NAME lists what there is)")
    if len(found) > 1:
        raise SpecError(f"'{cell}' could be any of {', '.join(sorted(found)[:8])}")
    return found[0]


def write_text(file: Path, text: str, asked: Path) -> None:
    """Write a text where `-o` asked for it: `asked` is the file, or its folder, which is made. SpecError."""
    try:
        if file != asked:
            asked.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"-o {asked}: {error.strerror}") from None
