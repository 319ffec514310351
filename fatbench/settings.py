"""Settings: option > `-c KEY=VALUE` > environment > fatbench.toml in the working directory > default.

A key is `db`, or `run.jobs` of the table [run]; its variable of the environment is FATBENCH_DB, or FATBENCH_RUN_JOBS.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, get_args, overload

from fatbench.errors import SECRET, MachineError, SpecError, did_you_mean, reason

KEYS = {  # table of fatbench.toml -> its keys; "": those of no table
    "": ("db", "data", "files", "plugin"),
    "run": (
        "device", "jobs", "per_gpu", "executor", "precision", "attack_precision", "path", "microbatch", "time_limit",
        "fail_fast", "wait", "log", "checkpoint_seconds", "lease_seconds",
    ),
    "report": ("digits", "notes", "published", "bom", "evaluated"),
    "plot": ("serif", "format"),
    "slurm": (),  # `fatbench.runner.executors.slurm.table` knows them; not in the environment
}  # fmt: skip
NAMES = tuple(f"{table}.{key}".lstrip(".") for table, keys in KEYS.items() for key in keys)
Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
LocalPath = Literal["loop", "graphs", "reference"]  # see `fatbench.engine.local`
AUTO = "auto"  # the path that suits the cell and the device, see `fatbench.runner.gpu_estimates`
PATHS: tuple[str, ...] = (AUTO, "loop", "graphs")  # a run trains on one of these
FORMER_PATHS = ("fast", "reference")  # stored runs may have them
# name of a suite in one of its variants -> (suite, variant); results of before 29 November 2026 have these names
IN_VARIANT = {"adfl-mnist-jpeg": ("adfl-mnist", "jpeg")} | {
    f"{suite}-jpeg75": (suite, "jpeg75")
    for suite in ("april-learning", "april-masks", "fat-transformers-noniid2", "sfat-audit", "sfat-cifar10")
}
LIBPQ = re.compile(r"(?i)(^|\s)(host|hostaddr|port|dbname|user|password|passfile|service|sslmode)\s*=")


_options: dict[str, Any] = {}  # key -> what the options of a command line say


@contextlib.contextmanager
def options(given: Mapping[str, object], pairs: Sequence[str] = ()) -> Iterator[None]:
    """A context in which these hold: options by key, and the KEY=VALUE of `-c`. SpecError: a key is unknown."""
    global _options
    before, _options = _options, {**dict(map(_pair, pairs)), **given}
    try:
        yield
    finally:
        _options = before


def _pair(text: str) -> tuple[str, object]:
    """(key, value) of KEY=VALUE; a value that is not TOML is the text itself."""
    key, sign, value = text.partition("=")
    key = key.strip()
    if not sign:
        raise SpecError(f"expected KEY=VALUE such as run.jobs=2, got '{text}'", option="c")
    if key not in NAMES and not (key.startswith("slurm.") and key != "slurm."):
        raise SpecError(f"unknown setting '{key}'{did_you_mean(key, NAMES)}", option="c")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()


def of_variant(variant: str, preset: str) -> str:
    """The preset in a variant of a suite: "jpeg75-cpu", and "jpeg75" of `paper`; the preset itself without one."""
    return "-".join(filter(None, (variant, "" if variant and preset == "paper" else preset)))


def in_variant(name: str, variants: Collection[str]) -> tuple[str, str]:
    """(variant, preset in it) of a preset's name, as `of_variant` made it: ("jpeg75", "cpu"); ("", "cpu") in none."""
    variant, _, preset = name.partition("-")
    return (variant, preset or "paper") if variant in variants else ("", name)


def setting(key: str, flag: object = None) -> str | None:
    """The value of one setting, or None if it is not set. SpecError: it, or fatbench.toml, cannot be read."""
    table, _, name = key.rpartition(".")
    value = next((value for value in (flag, _options.get(key)) if value is not None), None)
    if value is None:
        value = os.environ.get(f"FATBENCH_{key.upper().replace('.', '_')}") or _table(table).get(name)
    if value is not None and "\0" in str(value):  # neither paths nor addresses can contain it
        raise SpecError(f"{key}: {str(value)!r} contains a zero byte")
    return None if value is None else str(value)


def switch(key: str, default: bool = False) -> bool:
    """A setting that is true or false. SpecError: it is neither."""
    value = (setting(key) or str(default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise SpecError(f"{key}: expected true or false, got '{value}'")
    return value in ("true", "1")


@overload
def number(key: str, default: int, low: int = 1, high: int | None = None) -> int: ...
@overload
def number(key: str, default: None = None, low: int = 1, high: int | None = None) -> int | None: ...
def number(key: str, default: int | None = None, low: int = 1, high: int | None = None) -> int | None:
    """A setting that is a whole number. SpecError: it is none, or out of range."""
    value = setting(key)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < low or (high is not None and int(value) > high):
        raise SpecError(
            f"{key}: expected a whole number from {low}{'' if high is None else f' to {high}'}, got '{value}'"
        )
    return int(value)


def choice(key: str, choices: Sequence[str]) -> str | None:
    """A setting that is one of these words. SpecError: it is another."""
    value = setting(key)
    if value is not None and value not in choices:
        raise SpecError(f"{key}: expected {', '.join(choices)}, got '{value}'{did_you_mean(value, choices)}")
    return value


def _file() -> dict[str, Any]:
    path = Path("fatbench.toml")
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: {reason(error, path)}") from None
    for key, value in content.items():
        if isinstance(value, dict) and key in KEYS and key:
            for name in () if key == "slurm" else value:
                if name not in KEYS[key]:
                    raise SpecError(f"{path}: [{key}]: unknown setting '{name}'{did_you_mean(name, KEYS[key])}")
        elif key in KEYS:
            raise SpecError(f"{path}: {key}: expected a table [{key}]")
        elif key not in KEYS[""]:
            moved = [name for name in NAMES if name.endswith(f".{key}")]
            hint = f" (it is {' or '.join(moved)})" if moved else did_you_mean(key, [*KEYS[""], *filter(None, KEYS)])
            raise SpecError(f"{path}: unknown setting '{key}'{hint}")
        elif isinstance(value, dict):
            raise SpecError(f"{path}: {key}: expected one value")
    return content


def _table(name: str) -> dict[str, Any]:
    """A table of fatbench.toml, "" for the keys outside of tables; empty if absent."""
    content = _file()
    return dict(content.get(name, {})) if name else content


def table(name: str) -> dict[str, Any]:
    """A table of settings, such as [slurm], with what `-c` says of it. SpecError: the file cannot be read."""
    given = {key.removeprefix(f"{name}."): value for key, value in _options.items() if key.startswith(f"{name}.")}
    return {**_table(name), **given}


def given(key: str) -> str | None:
    """What an option of this command line says of a key; None: nothing."""
    return None if _options.get(key) is None else str(_options[key])


def plugins() -> list[tuple[str, Path]]:
    """The plug-ins of options, fatbench.toml and FATBENCH_PLUGIN: [(where it is named, file)].

    SpecError: no list of files.
    """
    files = []
    for where, value in (
        ("fatbench.toml: plugin", _file().get("plugin", [])),
        ("-c plugin", _options.get("plugin", [])),
    ):
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str):
                raise SpecError(f'{where}: expected files such as ["mine.py"], got {name!r}')
            files.append((where, Path(name)))
    variable = os.environ.get("FATBENCH_PLUGIN", "").split(os.pathsep)
    return files + [("FATBENCH_PLUGIN", Path(name)) for name in variable if name]


def database(flag: str | None = None) -> str:
    """The database's URL or path, by default results/fatbench.db. SpecError: it is neither."""
    url = setting("db", flag) or "results/fatbench.db"
    if "://" not in url and LIBPQ.search(url):  # it may hold a password, which must not become the name of a file
        raise SpecError(
            "libpq settings (host=... password=...) are not supported; use a URL: postgresql://USER:PASSWORD@HOST/NAME",
            option="db",
        )
    return url


def precision(flag: str | None, devices: Sequence[str] = ()) -> Precision | Literal["auto"]:
    """The precision of training, by default "auto": tf32 on a GPU that has it, else fp32; attacks afterwards in fp32.

    SpecError: there is no such precision. MachineError: one of the devices lacks it.
    """
    if setting("run.precision", flag) in (None, AUTO):
        return "auto"
    return _precision("run.precision", flag, devices) or "fp32"


def evaluation_precision(flag: str | None, devices: Sequence[str] = ()) -> Precision:
    """The precision of attacks where nothing is trained, by default fp32. Raises the errors of `precision`."""
    chosen = precision(flag, devices)
    return "fp32" if chosen == "auto" else chosen


def attack_precision(flag: str | None, devices: Sequence[str] = ()) -> Precision | None:
    """The precision of attacks after training; None for that of training. Raises the errors of `precision`."""
    return _precision("run.attack_precision", flag, devices)


def _precision(key: str, flag: str | None, devices: Sequence[str]) -> Precision | None:
    chosen, option = setting(key, flag), "precision" if key == "run.precision" else key
    if chosen not in (None, *PRECISIONS):
        auto = "auto, " if key == "run.precision" else ""
        raise SpecError(f"expected {auto}fp32, tf32 or bf16, got '{chosen}'", option=option)
    if chosen == "tf32" and "cpu" in devices:
        raise MachineError(" tf32 needs an NVIDIA GPU, and this would run on a CPU; use fp32 or bf16", option=option)
    return chosen  # type: ignore[return-value]


def path(chosen: str, devices: Sequence[str] = ()) -> LocalPath | Literal["auto"]:
    """Check the path of local training. SpecError: there is no such path. MachineError: one of the devices lacks it."""
    if chosen in FORMER_PATHS:
        raise SpecError(f"'{chosen}' no longer exists; use {', '.join(PATHS)}", option="run.path")
    if chosen not in PATHS:
        raise SpecError(f"no path is named '{chosen}'{did_you_mean(chosen, PATHS)}", option="run.path")
    if chosen == "graphs" and "cpu" in devices:
        raise MachineError("=graphs needs an NVIDIA GPU, and this would run on a CPU; use loop", option="run.path")
    return chosen  # type: ignore[return-value]


def shown_url(url: str) -> str:
    """A database's address without passwords, for printing."""
    masked = re.sub(r"(?s)(://[^/?#:]*):.*@", r"\1:***@", url)
    if "://" not in url:  # settings of libpq, where everything after "password=" may belong to the password
        masked = re.sub(r"(?is)((?:password|passfile)\s*=).*", r"\1***", url)
    return re.sub(rf"(?i)([?&][^=&]*{SECRET}[^=&]*)=[^&]*", r"\1=***", masked)


_data_folder: ContextVar[Path | None] = ContextVar("data folder", default=None)


@contextlib.contextmanager
def data_in(folder: Path) -> Iterator[None]:
    """A context in which `data_folder` returns this folder: workers do not inherit the --data of their run."""
    token = _data_folder.set(folder)
    try:
        yield
    finally:
        _data_folder.reset(token)


def data_folder(flag: str | None = None) -> Path:
    """The folder of the data sets, by default the user's cache folder. SpecError: an address was given."""
    if flag is None and (folder := _data_folder.get()) is not None:
        return folder
    if value := setting("data", flag):
        if "://" in value:
            raise SpecError(f"expected a folder, got the address {value}", option="data")
        return Path(value).expanduser()
    return cache_folder()


def cache_folder() -> Path:
    """The user's cache folder for fatbench, with files that can be made again."""
    if sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fatbench"


def files_folder(db: str) -> Path:
    """The folder of checkpoints and logs: beside a SQLite file, else results/NAME-files for a database NAME."""
    if value := setting("files"):
        return Path(value).expanduser()
    path = db.removeprefix("sqlite:///")
    if "://" in path:
        name = re.sub(r"[?#].*", "", path.split("://", 1)[1]).partition("/")[2]
        return Path("results") / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name) or 'server'}-files"
    file = Path(path).expanduser()
    return file.with_name(f"{file.stem}-files")


def checkpoint_seconds() -> float:
    """The least number of seconds between two checkpoints of a cell's training, by default 30."""
    return _seconds("run.checkpoint_seconds", 30.0)


def lease_seconds(default: float) -> float:
    """Seconds without progress after which another process may take a cell over."""
    seconds = _seconds("run.lease_seconds", default)
    if not seconds >= 1:
        raise SpecError(f"run.lease_seconds: expected at least 1, got {seconds:g}")
    return seconds


def _seconds(key: str, default: float) -> float:
    value = setting(key)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < LONGEST:
        raise SpecError(f"{key}: expected seconds, from 0 to {LONGEST:g}, got '{value}'")
    return seconds


LONGEST = 1e9  # seconds: 30 years
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str) -> float | None:
    """Seconds of "90", "45m", "2h" or "1.5d"; None: no such time."""
    number = text.strip().rstrip("dhimns")
    unit = UNITS.get(text.strip()[len(number) :])
    try:
        seconds = float(number) * unit if unit else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < LONGEST else None


def time_limit(flag: str | None = None) -> float | None:
    """Seconds that a worker may spend on a cell, None for no limit. SpecError: no such time."""
    value = setting("run.time_limit", flag)
    if value is not None and not (seconds := seconds_of(value)):
        raise SpecError(f"expected a time such as 90s, 45m or 2h, got '{value}'", option="run.time_limit")
    return None if value is None else seconds


def available_memory() -> float:
    """Bytes of memory that are still available on this machine or in this process's control group.

    Infinite if the system does not tell.
    """
    amounts = [math.inf]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = Path("/sys/fs/cgroup" + Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2])
        files = (group / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in files if line.startswith("inactive_file "))
        most = int((group / "memory.max").read_text())  # "max", for no limit, is a ValueError
        amounts.append(most - int((group / "memory.current").read_text()) + cached)
    return min(amounts)
