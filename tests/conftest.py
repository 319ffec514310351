"""What holds for every test: one thread, settings and caches of nobody, no network, the same examples each time."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import hypothesis
import pytest

from fatbench.__main__ import GARBAGE

# Before torch is imported: the arrays are small, and several processes share the cores (`make test`).
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` programs that tests start would ignore it

gc.set_threshold(GARBAGE)  # imports and suites make many objects and drop none, as in the program

# The same examples on every run, whatever ran before; no time limit per example, for machines differ.
hypothesis.settings.register_profile("fatbench", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("fatbench")

# fixtures: an empty database on SQLite and on PostgreSQL; three small cells; a folder that two users share; Ray
pytest_plugins = ("databases", "crew", "users", "ray_cluster")

KEEP = ("FATBENCH_UPDATE_GOLDEN",)  # meant for the tests themselves
TERMINAL = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "TERM")


@pytest.fixture(scope="module", autouse=True)
def _what_stays_is_not_looked_at() -> None:
    """What was imported, collected or kept by other tests is passed over by the collection at the end of every cell."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Extension modules look at the end for objects that nobody freed."""
    gc.unfreeze()


def not_run(reasons: Iterable[str]) -> list[str]:
    """How many tests could not be run, and why, the most frequent reason first."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    if not counts:
        return ["Every test could be run."]
    number = counts.total()
    head = f"{number} test{'s' * (number > 1)} could not be run:"
    return [head, *(f"{count:5}  {reason}" for reason, count in counts.most_common())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A run that leaves tests out says so, whatever the options; the number of skipped ones alone does not say why."""
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.section("could not be run", sep="-")
    for line in not_run(report.longrepr[2] for report in skipped if isinstance(report.longrepr, tuple)):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def _nobodys_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Settings, terminal and home folder of the person who runs the tests change nothing, and nothing is left there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ]:
            if name.startswith("FATBENCH_") and name not in KEEP:
                patch.delenv(name)
        for name in TERMINAL:
            patch.delenv(name, raising=False)
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
        patch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
        patch.setenv("PYTHONWARNINGS", "default")  # programs that tests start show their warnings and go on
        if "torch" in sys.modules:  # a plugin of pytest was quicker than the lines above
            sys.modules["torch"].set_num_threads(1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """A test that would fetch something fails at once, with and without a network, instead of waiting for it."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = str(address[0]) if isinstance(address, tuple) else str(address)
            if host not in ("127.0.0.1", "::1", "localhost"):
                raise OSError(f"tests do not use the network: {host}")
        connect(self, address)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """Typer makes every command anew for each call of the program in this process, which takes a tenth of a second."""
    import typer.main
    import typer.testing

    made = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", made)
        patch.setattr(typer.testing, "_get_command", made)
        yield


@pytest.fixture(scope="module", autouse=True)
def _plug_ins_of_a_file_go_with_it() -> Iterator[None]:
    """Every cell's log names the plug-ins that its process has read, those of other tests too."""
    from fatbench.suite import signatures

    before = signatures.plugins()
    yield
    signatures.drop_plugins([file for file in signatures.plugins() if file not in before])


@pytest.fixture(autouse=True)
def _pipes() -> Iterator[None]:
    """A command that was run in this process lets a broken pipe end it; the next test may write to a dead worker."""
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture
def own_plugins() -> Iterator[None]:
    """The plug-ins that a test adds are taken out after it."""
    from fatbench.suite import signatures

    before = signatures.plugins()
    yield
    signatures.drop_plugins([file for file in signatures.plugins() if file not in before])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the program in this process: (exit code, stdout, stderr)."""
    from fatbench.cli import app

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fatbench", *arguments])
        with pytest.raises(SystemExit) as exit:
            app.main()
        return exit.value.code if isinstance(exit.value.code, int) else 0, *capsys.readouterr()

    return call
