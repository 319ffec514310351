"""Shared by the functions of `fatbench`: arguments in the form of the commands, plug-ins, messages for Python."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from fatbench.errors import FatbenchError, SpecError, UnknownName, did_you_mean, shown, whole
from fatbench.store.opening import Db, listed_databases
from fatbench.suite import files
from fatbench.suite import plugins as naming
from fatbench.suite.files import Suite
from fatbench.suite.seeds import parse_seeds

Plugins = str | Path | Sequence[str | Path]
Seeds = int | str | Sequence[int] | None
Where = str | Mapping[str, Any] | None
Overrides = str | Sequence[str] | Mapping[str, Any]
P = ParamSpec("P")
T = TypeVar("T")


# --- messages -----------------------------------------------------------------------------------------------------

NAMES = {  # of options whose argument has another name
    "-k": "where", "-n": "n", "--set": "override", "--attack": "attacks", "--data": "data_folder", "--table": "id",
    "--plugin": "plugins", "--model": "network", "--suite": "suite", "--filter": "where",
}  # fmt: skip
COMMANDS = {
    "fatbench run": "fatbench.run", "fatbench evaluate": "fatbench.evaluate",
    "fatbench import": "fatbench.import_results", "fatbench export": "fatbench.export_results",
    "fatbench list models": "fatbench.list_models",
}  # fmt: skip
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*|-[kn])(?![\w-])( (?=[A-Z0-9'\"]))?")
KEY = re.compile(r"(?:(?<![\w-])-c )?\b(?:run|report|plot)\.([a-z_]+)(?==|: )")  # a setting, which is an argument here
RERUN = {"--rerun failed": "retry_failed=True", "--rerun changed": "rerun_changed=True"}
COMMAND = re.compile(r"fatbench [a-z]+(?: [^;,:)'\n]*)?")


def in_python(text: str) -> str:
    """Name arguments instead of options in a message of the command line: "--dataset: ..." becomes "dataset: ..."."""
    for words, argument in RERUN.items():
        text = text.replace(words, argument)
    text = KEY.sub(r"\1", text)
    pieces, position = [], 0
    for command in COMMAND.finditer(text):
        pieces += [OPTION.sub(_argument, text[position : command.start()]), _call(command[0])]
        position = command.end()
    return "".join([*pieces, OPTION.sub(_argument, text[position:])])


def _argument(option: re.Match[str]) -> str:
    name = NAMES.get(option[1], option[1].lstrip("-").replace("-", "_"))
    return name + ("=" if option[2] else "")


def _call(command: str) -> str:
    """The function that does what a command does; a command without one stays as it is."""
    if re.match("fatbench run [0-9a-f]{12}", command):  # `fatbench.run` takes suites, not cells
        return command
    return next((f"{function}(...)" for words, function in COMMANDS.items() if command.startswith(words)), command)


def with_argument_names(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that its errors name arguments and not options."""

    @functools.wraps(function)
    def wrapper(*arguments: P.args, **keywords: P.kwargs) -> T:
        try:
            return function(*arguments, **keywords)
        except FatbenchError as error:
            error.args = (in_python(str(error)),)
            vars(error).pop("keys", None)  # the text has them
            raise

    return wrapper


# --- arguments ----------------------------------------------------------------------------------------------------


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

        raise SpecError(versions.explain(error, next(iter(listed_databases(db)), None))) from None


def seed_list(seeds: Seeds) -> list[int] | None:
    """One seed, several, or a text as after `--seeds`. SpecError: anything else."""
    if seeds is None or isinstance(seeds, str):
        return parse_seeds(seeds) if seeds else None
    listed = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, Mapping) else [seeds]
    try:
        return [whole("--seeds", seed) for seed in listed]
    except SpecError:
        raise SpecError(f"--seeds: expected whole numbers such as [1, 2, 3], got {shown(seeds)}") from None


def filter_text(where: Where) -> str | None:
    """The text of a filter: {"method": "FAT", "clients": [5, 10]} is "method=FAT and (clients=5 or clients=10)"."""
    if where is None or isinstance(where, str):
        return where
    if not isinstance(where, Mapping):
        raise SpecError(f"where: expected a filter such as 'method=FAT', or a mapping, got {shown(where)}")
    conditions = []
    for name, value in where.items():
        value = value.tolist() if hasattr(value, "tolist") else value  # of numpy
        several = value if isinstance(value, list | tuple | set | range) else [value]
        conditions.append(" or ".join(f"{name}={_quoted(str(choice))}" for choice in several))
    return " and ".join(f"({condition})" for condition in conditions) or None


def _quoted(label: str) -> str:
    return f'"{label}"' if "'" in label else f"'{label}'"


def settings(override: Overrides) -> list[str]:
    """Settings as after `--set`: {"algorithm.local.lr": 0.02} is ["algorithm.local.lr=0.02"]."""
    if isinstance(override, str):
        return [override]
    if isinstance(override, Mapping):
        return [f"{key}={value if isinstance(value, str) else _json(key, value)}" for key, value in override.items()]
    if not isinstance(override, Iterable):
        raise SpecError(f"--set: expected settings such as {{'algorithm.local.lr': 0.02}}, got {shown(override)}")
    return list(override)


def _json(key: str, value: Any) -> str:
    """A setting as JSON, numbers of numpy and torch included. SpecError: no suite file can hold it."""
    try:
        return json.dumps(value, default=lambda number: number.tolist())
    except (AttributeError, TypeError, ValueError):
        raise SpecError(f"--set: {key}: expected what a suite file can hold, got {shown(value)}") from None


def names(value: str | Sequence[str] | None) -> list[str]:
    """One name, or several."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def known_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise SpecError unless the value is one of the choices."""
    if value not in choices:
        raise SpecError(f"--{option}: expected {', '.join(choices)}, got '{value}'{did_you_mean(value, choices)}")


def suite_of(name: str | Path | Suite, override: Overrides = ()) -> Suite:
    """The suite of a name or file, or the suite itself, with settings in all cells.

    SpecError: there is no such suite or setting.
    """
    overrides = settings(override)
    if isinstance(name, Suite):
        files.name_with_settings(name.name, overrides)  # which checks them
        return files.override_settings(name, overrides) if overrides else name
    return files.load(files.name_with_settings(str(name), overrides))
