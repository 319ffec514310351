"""Plug-ins: where they are named, which of them a cell uses, and in which version.

A plug-in is a Python file with any of the tables in `signatures.TABLES`. It is named by `plugins:` in a suite file,
by `--plugin`, in FATBENCH_PLUGIN (several are separated as in PATH), by `plugin` in fatbench.toml, or by an installed
package under the entry point `fatbench.plugins`. All these are combined. A file is imported as soon as it is named, a
package only when a suite uses a name that is not ours.

The provenance of a run holds a record of each plug-in that the run used:

    {"plugin": "mine.py", "sha256": "...", "modules": {"helper.py": "..."}, "names": ["aggregator near_median"],
     "reach": {"aggregator near_median": "..."}}

`sha256` and `modules` are digests of whole files, `reach` of the code that a function reads and calls in them
(`fatbench.suite.reach`): versions with equal files or equal `reach` are the same. Records of an earlier fatbench have
`reached`, another digest, or none. The record of a function that a program registered also has its text, `source`.
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
from fatbench.errors import SpecError, about
from fatbench.suite import calls, plugin_reads, registered, signatures, source_files
from fatbench.suite.calls import Call, call
from fatbench.suite.reach import digest, reach

if TYPE_CHECKING:
    from fatbench.suite.cells import Evaluation

GROUP = "fatbench.plugins"
Record = Mapping[str, Any]


def load(files: Iterable[Path] = ()) -> None:
    """Add the plug-ins of the settings, of installed packages, and these files; read edited ones again.

    SpecError for a file that cannot be read, has no table, or brings a name that is taken. A broken package is only
    left out with a warning, because the user did not choose it.
    """
    edited = [file for file in signatures.plugins() if not registered.is_lent(file) and source_files.is_edited(file)]
    source_files.delete(*edited)
    signatures.drop_plugins(edited)
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.value):
        location, module = f"entry point {GROUP}: {point.value}", point.value.partition(":")[0].strip()
        try:
            file = _module_file(module)
            if file is None:
                raise SpecError("the module's source is not found")
            signatures.add_installed(file.resolve(), functools.partial(_report_left_out, location))
        except (SpecError, ImportError, ValueError) as error:
            _report_left_out(location, error)
    for location, file in settings.plugins():
        add(file, location)
    for file in files:
        with about("plugin"):
            add(file, "")
    for file in edited:
        add(file, "")


def add(file: Path, location: str) -> None:
    """Add one plug-in, once. Errors as for `load`, with the location where the file was named."""
    if re.match(r"[\w+.-]+:/", str(file)):  # a URL may hold a password, so it is not printed
        raise SpecError(f"{f'{location}: ' if location else ''}expected a Python file, got a URL")
    try:
        signatures.add_plugin(file.expanduser().resolve())
    except SpecError as error:
        raise SpecError(f"{location}: {error}" if location else str(error)) from None


def _report_left_out(location: str, error: Exception) -> None:
    """Warn on stderr about a package that is left out, once in a process."""
    if (text := f"fatbench: left out: {location}: {error}") not in _REPORTED:
        _REPORTED.add(text)
        print(text, file=sys.stderr)


_REPORTED: set[str] = set()


def _module_file(module: str) -> Path | None:
    """The file of an installed module, found without importing its packages as `importlib.util.find_spec` would."""
    top, *packages = module.split(".")
    spec = importlib.util.find_spec(top)
    for end in range(1, len(packages) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *packages[:end]]), spec.submodule_search_locations)
    return None if spec is None or spec.origin is None else Path(spec.origin)


# --- what a cell uses, and its version ----------------------------------------------------------------------------


def used_plugins(call: Call) -> Iterator[tuple[Path, str]]:
    """(file, "aggregator near_median") for each plug-in function in a call and those nested in it."""
    for nested_call in call.walk():
        if nested_call.signature.plugin is not None:
            yield nested_call.signature.plugin, f"{nested_call.kind.lower()} {nested_call.name}"


def used(spec: Mapping[str, Any], evaluations: Iterable[Evaluation] = ()) -> dict[str, Path]:
    """Name -> file of the plug-ins' functions that training a cell and these evaluations use.

    An evaluation uses those of the cell on whose model its attack is computed, too.
    """
    if not signatures.plugins():
        return {}
    return {name: file for used_call in calls_of(spec, evaluations) for file, name in used_plugins(used_call)}


def files(spec: Mapping[str, Any], evaluations: Iterable[Evaluation] = ()) -> frozenset[Path]:
    """The files of the plug-ins that training a cell and these evaluations run."""
    return frozenset(used(spec, evaluations).values())


def calls_of(spec: Mapping[str, Any], evaluations: Iterable[Evaluation] = ()) -> list[Call]:
    """The calls made by training a cell and by these evaluations."""
    used_calls = [_training_call(spec)]
    for evaluation in evaluations:
        used_calls.append(call("Attack", evaluation.attack))
        if evaluation.origin is not None and evaluation.origin.spec:
            used_calls.append(_training_call(evaluation.origin.spec))
    return used_calls


def _training_call(spec: Mapping[str, Any]) -> Call:
    """The call that trains a cell; for an external model, that of its data set."""
    return call("Data", spec["data"]) if "evaluated" in spec else call("Experiment", spec)


def version(file: Path) -> dict[str, Any]:
    """The beginning of a record: {"plugin": ..., "sha256": ..., "modules": {path: sha256}}."""
    plugin_version = source_files.version(file)
    return {"plugin": plugin_version.plugin, "sha256": plugin_version.sha256, "modules": dict(plugin_version.modules)}


def records(used: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The provenance records of plug-ins' functions."""
    result = []
    for file in sorted({*used.values()}):
        names = sorted(name for name, own_file in used.items() if own_file == file)
        digests = {name: _function_digest(file, source_files.version(file), *name.split(" ", 1)) for name in names}
        result.append({**version(file), "names": names, "reach": digests, **registered.source(file)})
    return result


@functools.cache
def _function_digest(file: Path, version: source_files.Version, kind: str, name: str) -> str:
    signature = signatures.known(signatures.kind_of(kind), name)
    assert signature is not None
    return digest(reach(calls.function(signature), file))


def loaded(names: Iterable[str]) -> dict[str, Path]:
    """Those of some functions, "aggregator near_median", that a plug-in in use has -> its file."""
    files = {}
    for name in names:
        kind, space, function = name.partition(" ")
        found = signatures.known(signatures.kind_of(kind), function) if space else None
        if found is not None and found.plugin is not None:
            files[name] = found.plugin
    return files


def now(functions: Iterable[Record], read: Mapping[str, str], used: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """What a stage has recorded of its plug-ins, as it is now: {"functions": records, "read": digests}.

    used: the functions that it uses now; None for those of the records, which are unknown if no plug-in has them.
    """
    known = (
        loaded(names := [name for record in functions for name in record.get("names", ())]) if used is None else used
    )
    is_known = used is not None or len(known) == len({*names})
    return {
        "functions": records(known) if is_known else None,
        "read": plugin_reads.current(read, {*known.values()}) if read else {},
    }
