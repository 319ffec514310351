"""Settings: flag > environment (FATBENCH_DB, FATBENCH_DATA, ...) > fatbench.toml in the working directory > default."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, get_args

from fatbench.errors import SECRET, MachineError, SpecError, did_you_mean, reason

KEYS = (
    "db",
    "data",
    "files",
    "device",
    "jobs",
    "precision",
    "attack_precision",
    "checkpoint_seconds",
    "lease_seconds",
    "plugin",
    "time_limit",
)
TABLES = ("slurm",)
Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
LocalPath = Literal["loop", "graphs", "reference"]  # see `fatbench.engine.local`
AUTO = "auto"  # the path that suits the cell and the device, see `fatbench.runner.gpu_estimates`
PATHS: tuple[str, ...] = (AUTO, "loop", "graphs")  # a run trains on one of these
FORMER_PATHS = ("fast", "reference")  # stored runs may have them
LIBPQ = re.compile(r"(?i)(^|\s)(host|hostaddr|port|dbname|user|password|passfile|service|sslmode)\s*=")


def setting(key: str, flag: object = None) -> str | None:
    """The value of one setting, or None if it is not set. SpecError: it, or fatbench.toml, cannot be read."""
    value = flag if flag is not None else os.environ.get(f"FATBENCH_{key.upper()}") or _file().get(key)
    if value is not None and "\0" in str(value):  # neither paths nor addresses can contain it
        raise SpecError(f"{key}: {str(value)!r} contains a zero byte")
    return None if value is None else str(value)


def _file() -> dict[str, object]:
    path = Path("fatbench.toml")
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: {reason(error, path)}") from None
    for key, value in content.items():
        if key not in KEYS + TABLES:
            raise SpecError(f"{path}: unknown setting '{key}'{did_you_mean(key, KEYS + TABLES)}")
        if isinstance(value, dict) != (key in TABLES):
            raise SpecError(f"{path}: {key}: expected {f'a table [{key}]' if key in TABLES else 'one value'}")
    return content


def table(name: str) -> dict[str, object]:
    """A table of fatbench.toml, such as [slurm]; empty if absent. SpecError: the file cannot be read."""
    value = _file().get(name)
    return dict(value) if isinstance(value, dict) else {}


def plugins() -> list[tuple[str, Path]]:
    """The plug-ins in fatbench.toml and FATBENCH_PLUGIN: [(where it is named, file)]. SpecError: no list of files."""
    value = _file().get("plugin", [])
    names = value if isinstance(value, list) else [value]
    files = []
    for name in names:
        if not isinstance(name, str):
            raise SpecError(f'fatbench.toml: plugin: expected files such as ["mine.py"], got {name!r}')
        files.append(("fatbench.toml: plugin", Path(name)))
    variable = os.environ.get("FATBENCH_PLUGIN", "").split(os.pathsep)
    return files + [("FATBENCH_PLUGIN", Path(name)) for name in variable if name]


def database(flag: str | None = None) -> str:
    """The database's URL or path, by default results/fatbench.db. SpecError: it is neither."""
    url = setting("db", flag) or "results/fatbench.db"
    if "://" not in url and LIBPQ.search(url):  # it may hold a password, which must not become the name of a file
        raise SpecError(
            "--db: libpq settings (host=... password=...) are not supported; use a URL: postgresql://USER:PASSWORD@HOST/NAME"
        )
    return url


def precision(flag: str | None, devices: Sequence[str] = ()) -> Precision | Literal["auto"]:
    """The precision of training, by default "auto": tf32 on a GPU that has it, else fp32; attacks afterwards in fp32.

    SpecError: there is no such precision. MachineError: one of the devices lacks it.
    """
    if setting("precision", flag) in (None, AUTO):
        return "auto"
    return _precision("precision", flag, devices) or "fp32"


def evaluation_precision(flag: str | None, devices: Sequence[str] = ()) -> Precision:
    """The precision of attacks where nothing is trained, by default fp32. Raises the errors of `precision`."""
    chosen = precision(flag, devices)
    return "fp32" if chosen == "auto" else chosen


def attack_precision(flag: str | None, devices: Sequence[str] = ()) -> Precision | None:
    """The precision of attacks after training; None for that of training. Raises the errors of `precision`."""
    return _precision("attack_precision", flag, devices)


def _precision(key: str, flag: str | None, devices: Sequence[str]) -> Precision | None:
    chosen, option = setting(key, flag), f"--{key.replace('_', '-')}"
    if chosen not in (None, *PRECISIONS):
        auto = "auto, " if key == "precision" else ""
        raise SpecError(f"{option}: expected {auto}fp32, tf32 or bf16, got '{chosen}'")
    if chosen == "tf32" and "cpu" in devices:
        raise MachineError(f"{option} tf32 needs an NVIDIA GPU, and this would run on a CPU; use fp32 or bf16")
    return chosen  # type: ignore[return-value]


def path(chosen: str, devices: Sequence[str] = ()) -> LocalPath | Literal["auto"]:
    """Check the path of local training. SpecError: there is no such path. MachineError: one of the devices lacks it."""
    if chosen in FORMER_PATHS:
        raise SpecError(f"--path: '{chosen}' no longer exists; use {', '.join(PATHS)}")
    if chosen not in PATHS:
        raise SpecError(f"--path: no path is named '{chosen}'{did_you_mean(chosen, PATHS)}")
    if chosen == "graphs" and "cpu" in devices:
        raise MachineError("--path graphs needs an NVIDIA GPU, and this would run on a CPU; use --path loop")
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
            raise SpecError(f"--data: expected a folder, got the address {value}")
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
    return _seconds("checkpoint_seconds", 30.0)


def lease_seconds(default: float) -> float:
    """Seconds without progress after which another process may take a cell over."""
    seconds = _seconds("lease_seconds", default)
    if not seconds >= 1:
        raise SpecError(f"lease_seconds: expected at least 1, got {seconds:g}")
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


def time_limit(flag: str | None = None) -> float | None:
    """Seconds that a worker may spend on a cell, from "90", "45m", "2h" or "1.5d"; None for no limit."""
    value = setting("time_limit", flag)
    if value is None:
        return None
    number = value.strip().rstrip("dhimns")
    unit = UNITS.get(value.strip()[len(number) :])
    try:
        seconds = float(number) * unit if unit else 0.0
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < LONGEST:
        raise SpecError(f"--time-limit: expected a time such as 90s, 45m or 2h, got '{value}'")
    return seconds


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
