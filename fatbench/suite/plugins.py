"""Plug-ins: where they are named, which of them a cell uses, and which version of them that was.

A plug-in is a Python file with any of the tables in `signatures.TABLES`. It is named by `plugins:` in a suite file,
by `--plugin`, in FATBENCH_PLUGIN (several are separated as in PATH), by `plugin` in fatbench.toml, or by an installed
package under the entry point `fatbench.plugins`. All of them add up. A file is imported as soon as it is named, a
package when a suite asks for a name that is not ours.

The provenance of a run holds a record of each plug-in that the run used:

    {"plugin": "mine.py", "sha256": "...", "modules": {"helper.py": "..."}, "names": ["aggregator near_median"],
     "reached": {"aggregator near_median": "..."}}

`sha256` and `modules` are of whole files, `reached` of what a function reads and calls in them
(`fatbench.suite.reached`): two versions are the same where that is. Records of an earlier fatbench have no `reached`,
and are the same where the files are. That of a function that was registered from a program has its text, `source`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import settings
from fatbench.errors import SpecError
from fatbench.suite import calls, reached, registered, signatures, sources
from fatbench.suite.calls import Call, call

if TYPE_CHECKING:
    from fatbench.suite.cells import Evaluation

GROUP = "fatbench.plugins"
Record = Mapping[str, Any]


def load(files: Iterable[Path] = ()) -> None:
    """Add the plug-ins of the settings, of installed packages, and these. One that was edited is read again.

    SpecError: a file that cannot be read, has no table, or brings a name that is taken. A broken package is left out
    with a warning: who runs a suite has not chosen it.
    """
    edited = [file for file in signatures.plugins() if sources.edited(file)]
    sources.delete(*edited)
    signatures.drop_plugins(edited)
    for location, module in _installed():
        try:
            file = _source(module)
            if file is None:
                raise SpecError("the module's source is not found")
            signatures.add_installed(file.resolve(), functools.partial(_left_out, location))
        except (SpecError, ImportError, ValueError) as error:
            _left_out(location, error)
    for location, file in [*settings.plugins(), *(("--plugin", file) for file in files)]:
        add(file, location)
    for file in edited:
        add(file, "")


def add(file: Path, location: str) -> None:
    """Add one plug-in, once. SpecError as for `load`, with the place that names the file."""
    if re.match(r"[\w+.-]+:/", str(file)):  # may hold a password, so it is not repeated
        raise SpecError(f"{f'{location}: ' if location else ''}expected a Python file, got a URL")
    try:
        signatures.add_plugin(file.expanduser().resolve())
    except SpecError as error:
        raise SpecError(f"{location}: {error}" if location else str(error)) from None


def _left_out(location: str, error: Exception) -> None:
    """A line on stderr, once in a process."""
    if (text := f"fatbench: left out: {location}: {error}") not in _TOLD:
        _TOLD.add(text)
        print(text, file=sys.stderr)


_TOLD: set[str] = set()


def _installed() -> Iterator[tuple[str, str]]:
    """(who says so, module) of each plug-in that an installed package announces."""
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.value):
        yield f"entry point {GROUP}: {point.value}", point.value.partition(":")[0].strip()


def _source(module: str) -> Path | None:
    """The file of an installed module. `importlib.util.find_spec` alone would import the packages it is in."""
    top, *packages = module.split(".")
    spec = importlib.util.find_spec(top)
    for end in range(1, len(packages) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *packages[:end]]), spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


# --- what a cell uses, and its version ----------------------------------------------------------------------------


def used_plugins(call: Call) -> Iterator[tuple[Path, str]]:
    """(plug-in, "aggregator near_median") of this call, and of those nested in it, that reach a plug-in's function."""
    for nested_call in call.walk():
        if nested_call.signature.plugin is not None:
            yield nested_call.signature.plugin, f"{nested_call.kind.lower()} {nested_call.name}"


def of_evaluation(spec: Mapping[str, Any], evaluation: Evaluation) -> list[dict[str, Any]]:
    """`records` of one evaluation of a cell, and of the cell on whose model the attack is computed."""
    origin = evaluation.origin
    return records(spec, evaluation.attack, *([origin.spec] if origin is not None and origin.spec else []))


def records(
    spec: Mapping[str, Any], attack: Mapping[str, Any] | None = None, *other_specs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What a run of a cell, or of an attack on it, uses of plug-ins, as it stands in the provenance."""
    if not signatures.plugins():
        return []
    names_by_file: dict[Path, set[str]] = {}
    for used_call in [*map(_trained, (spec, *other_specs)), *([call("Attack", attack)] if attack else [])]:
        for file, name in used_plugins(used_call):
            names_by_file.setdefault(file, set()).add(name)
    return [_record(file, names) for file, names in sorted(names_by_file.items())]


def files(spec: Mapping[str, Any], evaluations: Iterable[Evaluation] = ()) -> frozenset[Path]:
    """The plug-ins that are run by training a cell, and by these evaluations of it."""
    if not signatures.plugins():
        return frozenset()
    return frozenset(file for used_call in calls_of(spec, evaluations) for file, _ in used_plugins(used_call))


def calls_of(spec: Mapping[str, Any], evaluations: Iterable[Evaluation] = ()) -> list[Call]:
    """What training a cell calls, and these evaluations of it."""
    used_calls = [_trained(spec)]
    for evaluation in evaluations:
        used_calls += [call("Attack", evaluation.attack)]
        used_calls += (
            [_trained(evaluation.origin.spec)] if evaluation.origin is not None and evaluation.origin.spec else []
        )
    return used_calls


def _trained(spec: Mapping[str, Any]) -> Call:
    """What training a cell calls; of a model that was not trained here, its data."""
    return call("Data", spec["data"]) if "evaluated" in spec else call("Experiment", spec)


def version(file: Path) -> dict[str, Any]:
    """The version of a plug-in's files, as it begins a record."""
    plugin_version = sources.version(file)
    return {"plugin": plugin_version.plugin, "sha256": plugin_version.sha256, "modules": dict(plugin_version.modules)}


def _record(file: Path, names: Iterable[str]) -> dict[str, Any]:
    digests = {name: _reached(file, sources.version(file), *name.split(" ", 1)) for name in sorted(names)}
    return {**version(file), "names": list(digests), "reached": digests, **registered.source(file)}


@functools.cache
def _reached(file: Path, version: sources.Version, kind: str, name: str) -> str:
    signature = signatures.known_functions(signatures.kind_of(kind))[name]
    return reached.digest(calls.function(signature), file)


def loaded_version(record: Record) -> dict[str, Any] | None:
    """The version that is loaded now of what a record is about; None: no plug-in brings these names."""
    files = {name: signatures.plugin_of(*name.split(" ", 1)) for name in record.get("names", ()) if " " in name}
    file = next((file for file in files.values() if file is not None), None)
    return None if file is None else _record(file, [name for name, own_file in files.items() if own_file == file])
