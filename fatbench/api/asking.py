"""Shared by the functions of `fatbench`: arguments in the form of the commands, plug-ins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fatbench.errors import SpecError, UnknownName, did_you_mean, shown, whole
from fatbench.store.opening import Db, listed_databases
from fatbench.suite import files
from fatbench.suite import plugins as naming
from fatbench.suite.files import Suite
from fatbench.suite.filters import Where as Where
from fatbench.suite.filters import cells_and_run as cells_and_run
from fatbench.suite.filters import filter_text as filter_text
from fatbench.suite.types import parse_seeds

Plugins = str | Path | Sequence[str | Path]
Seeds = int | str | Sequence[int] | None
Overrides = str | Sequence[str] | Mapping[str, Any]


@contextlib.contextmanager
def plugged(plugins: Plugins, db: Db = None) -> Iterator[None]:
    """Load these plug-ins and those named elsewhere; explain an unknown name as the commands do."""
    listed = list(plugins) if isinstance(plugins, Iterable) and not isinstance(plugins, str) else [plugins]
    for plugin in listed:
        if not isinstance(plugin, str | Path):
            raise SpecError(
                f"plugins: expected files, got {shown(plugin)}: fatbench.register(function, kind) takes a function"
            )
    naming.load([Path(file) for file in listed])
    try:
        yield
    except UnknownName as error:
        from fatbench.runner import versions

        raise versions.explain(error, next(iter(listed_databases(db)), None), "plugins=") from None


def seed_list(seeds: Seeds) -> list[int] | None:
    """One seed, several, or a text as after `--seeds`. SpecError: anything else."""
    if seeds is None or isinstance(seeds, str):
        return parse_seeds(seeds) if seeds else None
    listed = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, Mapping) else [seeds]
    try:
        return [whole("seeds", seed) for seed in listed]
    except SpecError:
        raise SpecError(f"expected whole numbers such as [1, 2, 3], got {shown(seeds)}", option="seeds") from None


def settings(override: Overrides) -> list[str]:
    """Settings as after `--set`: {"algorithm.local.lr": 0.02} is ["algorithm.local.lr=0.02"]."""
    if isinstance(override, str):
        return [override]
    if isinstance(override, Mapping):
        return [f"{key}={value if isinstance(value, str) else _json(key, value)}" for key, value in override.items()]
    if not isinstance(override, Iterable):
        raise SpecError(
            f"expected settings such as {{'algorithm.local.lr': 0.02}}, got {shown(override)}", option="set"
        )
    return list(override)


def _json(key: str, value: Any) -> str:
    """A setting as JSON, numbers of numpy and torch included. SpecError: no suite file can hold it."""
    try:
        return json.dumps(value, default=lambda number: number.tolist())
    except (AttributeError, TypeError, ValueError):
        raise SpecError(f"{key}: expected what a suite file can hold, got {shown(value)}", option="set") from None


def names(value: str | Sequence[str] | None) -> list[str]:
    """One name, or several."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def known_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise SpecError unless the value is one of the choices."""
    if value not in choices:
        raise SpecError(f"expected {', '.join(choices)}, got '{value}'{did_you_mean(value, choices)}", option=option)


def suite_of(name: str | Path | Suite, override: Overrides = ()) -> Suite:
    """The suite of a name or file, or the suite itself, with settings in all cells.

    SpecError: there is no such suite or setting.
    """
    overrides = settings(override)
    if isinstance(name, Suite):
        files.name_with_settings(name.name, overrides)  # which checks them
        return files.override_settings(name, overrides) if overrides else name
    return files.load(files.name_with_settings(str(name), overrides))
