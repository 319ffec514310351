"""Plug-ins: where they are named, which of them a cell uses, and which version of them that was.

A plug-in is a Python file with any of the tables in `signatures.TABLES`. It is named by `plugins:` in a suite file,
by `--plugin`, in FATBENCH_PLUGIN (several are separated as in PATH), by `plugin` in fatbench.toml, or by an installed
package under the entry point `fatbench.plugins`. All of them add up. Its source is read here and not imported.

The provenance of a run holds a record of each plug-in that the run used:

    {"plugin": "mine.py", "sha256": "...", "modules": {"helper.py": "..."}, "names": ["aggregator near_median"]}
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import settings
from fatbench.errors import SpecError
from fatbench.suite import signatures, sources

if TYPE_CHECKING:
    from fatbench.suite.cells import Evaluation

GROUP = "fatbench.plugins"
Record = Mapping[str, Any]


def load(files: Iterable[Path] = ()) -> None:
    """Add the plug-ins of the settings, of installed packages, and these. One that was edited is read again.

    SpecError: a file that cannot be read, has no table, or brings a name that is taken.
    """
    edited = [file for file in signatures.plugins() if sources.edited(file)]
    sources.delete(*edited)
    signatures.drop_plugins(edited)
    for place, file in [*_installed(), *settings.plugins(), *(("--plugin", file) for file in files)]:
        add(file, place)
    for file in edited:
        add(file, "")


def add(file: Path, place: str) -> None:
    """Add one plug-in, once. SpecError as for `load`, with the place that names the file."""
    if re.match(r"[\w+.-]+:/", str(file)):  # may hold a password, so it is not repeated
        raise SpecError(f"{f'{place}: ' if place else ''}a plug-in is a Python file, and what was given is an address")
    try:
        signatures.add_plugin(file.expanduser().resolve())
    except SpecError as error:
        raise SpecError(f"{place}: {error}" if place else str(error)) from None


def _installed() -> Iterator[tuple[str, Path]]:
    """(who says so, source) of each plug-in that an installed package announces."""
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.value):
        place = f"entry point {GROUP}: {point.value}"
        file = _source(point.value.partition(":")[0].strip())
        if file is None:
            raise SpecError(f"{place}: the module's source is not found")
        yield place, file


def _source(module: str) -> Path | None:
    """The file of an installed module. `importlib.util.find_spec` alone would import the packages it is in."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    for end in range(1, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *parts[:end]]), spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


# --- what a cell uses, and its version ----------------------------------------------------------------------------


def used(kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """(plug-in, "aggregator near_median") of every call of a canonical spec that reaches a function of a plug-in."""
    signature = signatures.describe(kind, spec.get("name", ""))
    if signature.plugin is not None:
        yield signature.plugin, f"{kind.lower()} {signature.name}"
    for setting in signature.settings:
        inner = signatures.nested(setting.annotation)[0]
        if inner is not None and spec[setting.name] is not None:
            yield from used(inner, spec[setting.name])


def of_evaluation(spec: Mapping[str, Any], evaluation: Evaluation) -> list[dict[str, Any]]:
    """`records` of one evaluation of a cell, and of the cell on whose model the attack is computed."""
    origin = evaluation.origin
    return records(spec, evaluation.attack, *([origin.spec] if origin is not None and origin.spec else []))


def records(
    spec: Mapping[str, Any], attack: Mapping[str, Any] | None = None, *others: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What a run of a cell, or of an attack on it, uses of plug-ins, as it stands in the provenance."""
    if not signatures.plugins():
        return []
    found: dict[Path, set[str]] = {}
    calls: list[tuple[str, Mapping[str, Any]]] = [
        ("Data", cell["data"]) if "evaluated" in cell else ("Experiment", {"name": "cell", **cell})
        for cell in (spec, *others)
    ]
    calls += [("Attack", attack)] if attack else []
    for kind, call in calls:
        for file, name in used(kind, call):
            found.setdefault(file, set()).add(name)
    return [{**version(file), "names": sorted(names)} for file, names in sorted(found.items())]


def version(file: Path) -> dict[str, Any]:
    """The version of a plug-in in the form of a record."""
    known = sources.version(file)
    return {"plugin": known.plugin, "sha256": known.sha256, "modules": dict(known.modules)}


def same(then: Iterable[Record], now: Iterable[Record]) -> bool:
    """Whether two lists of records are of the same sources, wherever the files are."""
    return _sources(then) == _sources(now)


def _sources(of: Iterable[Record]) -> set[str]:
    return {json.dumps([record.get("sha256"), record.get("modules", {})], sort_keys=True) for record in of}


def current(record: Record) -> dict[str, Any] | None:
    """The version that is loaded now of what a record is about; None: no plug-in brings these names."""
    for entry in record.get("names", ()):
        kind, _, name = entry.partition(" ")
        for table in signatures.TABLES:
            if table.lower() == kind and name in signatures.names(table):
                file = signatures.describe(table, name).plugin
                return None if file is None else version(file)
    return None


def shown(record: Record) -> str:
    """ "mine.py (sha256 1a2b3c4d5e6f; helper.py 6f5e4d3c2b1a)"."""
    modules = "".join(f"; {path} {digest[:12]}" for path, digest in record.get("modules", {}).items())
    return f"{record['plugin']} (sha256 {record['sha256'][:12]}{modules})"
