"""A soak: eight runners on one database that are killed, stopped, told to end, locked out, and left without disk.

    python tests/soak.py --minutes 60 --seed 1        `make soak`

Waves of small cells, each wave in a new database, as long as there is time. Some runners have a clock that is 16
minutes fast or slow. What ends is started again, as a person would. After each wave the numbers, the outcomes and the
report are held against those of a run that nobody disturbed; no cell may be lost, failed, or done twice. The order and
the kind of the disturbances come from the seed; what they meet does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crew import SUITE

LEASE = 45  # seconds; the longest stop is twice as long
EVERY = 9.0  # seconds between two disturbances, on average
DISK = 48  # MB, where root may mount a file system
CLOCKS = (0, 0, 0, 0, 960, 960, -960, -960)  # seconds that the runners' clocks are off
ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # for an end after the round at hand
ENDS = {0, 5, -signal.SIGKILL, *(128 + ask for ask in ASKS), *(-ask for ask in ASKS[1:])}  # of a runner
TEXT = SUITE.replace("seeds: [1]", 'seeds: "0-5"').replace("rounds: 4", "rounds: 10")
PATIENCE = 1800.0  # seconds that the runners have for the rest once nobody disturbs them any more


def contents(db: Path, query: str) -> list[tuple]:
    """What a query finds, without waiting for anybody who writes."""
    with contextlib.closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


RESULTS = {
    "stages": "SELECT cell, stage, status, round, total FROM stages ORDER BY 1, 2",
    "numbers": "SELECT cell, stage, round, client, metric, value, n FROM measurements WHERE metric != 'seconds'"
    " ORDER BY 1, 2, 3, 4, 5",
    "outcomes": "SELECT cell, stage, position, correct FROM outcomes ORDER BY 1, 2, 3",
}


def faults(db: Path, expected: Path) -> list[str]:
    """What is wrong with the results in `db`, beside those of an undisturbed run."""
    found = []
    for what, query in RESULTS.items():
        here, there = contents(db, query), contents(expected, query)
        if missing := [*(Counter(there) - Counter(here))]:
            found.append(f"{what}: {len(missing)} missing or other, such as {missing[0]}")
        if more := [*(Counter(here) - Counter(there))]:
            found.append(f"{what}: {len(more)} too many or other, such as {more[0]}")
    for cell, stage, status, count in contents(db, "SELECT cell, stage, status, count(*) FROM runs GROUP BY 1, 2, 3"):
        if status == "failed":
            found.append(f"{cell} {stage}: {count} runs failed")
        if status == "done" and count > 1:
            found.append(f"{cell} {stage}: done {count} times")
    return found


def preload() -> str:
    """The library of faketime, "" where it is not installed."""
    if shutil.which("faketime") is None:
        return ""
    command = ["faketime", "-f", "+0s", "sh", "-c", "echo $LD_PRELOAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass
class Runner:
    """A `fatbench run`, which is started again as long as its exit code is not 0."""

    number: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen | None = None
    again: float = 0.0  # when it is to be started again
    done: bool = False

    def start(self) -> None:
        with self.log.open("ab") as log:
            environment, command = self.environment, self.command
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def workers(self) -> list[int]:
        """The processes that work on cells for it."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        except OSError:
            return []


@dataclass
class Wave:
    """A database, its runners, and what is done to them."""

    folder: Path
    db: Path
    runners: list[Runner]
    rng: random.Random
    count: Counter[str]
    stopped: dict[int, float] = field(default_factory=dict)  # pid -> when it goes on
    spared: set[str] = field(default_factory=set)  # cells whose worker was stopped: a second time would be its failure
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # (when, how)

    def kill(self, runner: Runner) -> None:
        """SIGKILL; its worker dies with it."""
        self.signal(runner.pid, signal.SIGKILL)

    def ask(self, runner: Runner) -> None:
        """Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP; sometimes twice."""
        which = self.rng.choice(ASKS)
        for _ in range(self.rng.choice([1, 1, 2])):
            self.signal(runner.pid, which)

    def stop(self, runner: Runner) -> None:
        """SIGSTOP, to the runner with its worker or to it alone, for up to two leases."""
        until = time.monotonic() + self.rng.uniform(1, 2 * LEASE)
        for pid in [runner.pid, *(runner.workers() if self.rng.random() < 0.7 else [])]:
            if pid is not None and self.signal(pid, signal.SIGSTOP):
                self.stopped[pid] = until

    def hang(self, runner: Runner) -> None:
        """SIGSTOP to the worker alone, for up to four leases: its runner is to notice, and kill it."""
        held = "SELECT r.pid, s.cell FROM stages s JOIN runs r ON r.id = s.run WHERE s.status = 'running'"
        try:
            cells = dict(contents(self.db, held))
        except sqlite3.Error:
            return
        for pid in runner.workers():
            if cells.get(pid) not in {None, *self.spared} and self.signal(pid, signal.SIGSTOP):
                self.spared.add(cells[pid])
                self.stopped[pid] = time.monotonic() + self.rng.uniform(LEASE, 4 * LEASE)

    def lock(self, _: Runner) -> None:
        """A foreign lock for writing, for up to 80 seconds."""
        foreign = sqlite3.connect(self.db, isolation_level=None, timeout=5)
        try:
            foreign.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:  # somebody was quicker, or there is no space
            foreign.close()
            return
        self.undo.append((time.monotonic() + self.rng.uniform(1, 80), foreign.close))

    def fill(self, _: Runner) -> None:
        """A full disk for up to 15 seconds."""
        ballast = self.folder / f"ballast-{time.monotonic_ns()}"
        with contextlib.suppress(OSError), ballast.open("wb", 0) as file:
            while True:
                file.write(bytes(4096))
        self.undo.append((time.monotonic() + self.rng.uniform(1, 15), ballast.unlink))

    def signal(self, pid: int | None, which: signal.Signals) -> bool:
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)
            self.count[which.name] += 1
            return True
        return False

    def mend(self, *, all: bool = False) -> None:
        """End what has lasted long enough."""
        now = time.monotonic()
        for pid in [pid for pid, until in self.stopped.items() if all or until < now]:
            del self.stopped[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for entry in [entry for entry in self.undo if all or entry[0] < now]:
            self.undo.remove(entry)
            entry[1]()

    def look(self) -> list[str]:
        """Start again what has ended; what ended as nothing should."""
        wrong = []
        for runner in self.runners:
            if runner.done or runner.pid is not None:
                continue
            if runner.process is not None:
                code, runner.process = runner.process.returncode, None
                self.count[f"exit {code}"] += 1
                if code not in ENDS:
                    wrong.append(f"runner {runner.number} ended with {code}: see {runner.log}")
                if code == 0:
                    runner.done = True
                    left = contents(self.db, "SELECT count(*) FROM stages WHERE status != 'done'")[0][0]
                    wrong += [f"runner {runner.number} ended with 0 and {left} stages to do"] * (left > 0)
                runner.again = time.monotonic() + self.rng.uniform(0, 5)
            elif time.monotonic() > runner.again:
                runner.start()
        return wrong


HOW = (Wave.kill, Wave.kill, Wave.kill, Wave.stop, Wave.stop, Wave.stop, Wave.hang, Wave.ask, Wave.lock, Wave.fill)


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A small file system of its own. What is on it is gone afterwards. SystemExit: only root may mount one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(folder)]).returncode:
        sys.exit("soak: a full disk needs a file system that may be filled, and only root may mount one")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fatbench(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "fatbench", *map(str, words)]


def report(suite: Path, db: Path) -> str:
    """The suite's tables as the report prints them."""
    command = fatbench("report", suite, "--db", db, "--format", "csv")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wave(
    place: Path, suite: Path, expected: Path, runners: int, rng: random.Random, end: float, count: Counter
) -> bool:
    """One wave; whether all was as it should be. It is disturbed until `end` at most."""
    logs, wrong = Path(tempfile.mkdtemp(prefix="wave-", dir=place)), list[str]()
    library = preload()
    with disk(logs / "disk") as folder:
        db = folder / "soak.db"
        crew = []
        for number in range(runners):
            off = CLOCKS[number % len(CLOCKS)]
            clock = {"LD_PRELOAD": library, "FAKETIME": f"{off:+d}s"} if off and library else {}
            crew.append(Runner(
                number, fatbench("run", "suite", suite, "--db", db, "--device", "cpu", "--jobs", "1"),
                {**os.environ, "FATBENCH_RUN_LEASE_SECONDS": str(LEASE),
                 "FATBENCH_RUN_CHECKPOINT_SECONDS": "0", **clock},
                logs / f"runner-{number}.log",
            ))  # fmt: skip
        on = Wave(folder, db, crew, rng, count)
        following, last = time.monotonic() + 3 * EVERY, end + PATIENCE
        try:
            while not all(runner.done for runner in crew):
                wrong += on.look()
                on.mend(all=time.monotonic() > end)
                busy = [runner for runner in crew if runner.pid is not None]
                if following < time.monotonic() < end and busy:
                    how = rng.choice(HOW)
                    how(on, rng.choice(busy))
                    count[how.__name__] += 1
                    following = time.monotonic() + rng.expovariate(1 / EVERY)
                if time.monotonic() > last:
                    wrong.append("not done in time")
                    break
                time.sleep(0.5)
        finally:
            on.mend(all=True)
            for runner in crew:
                on.signal(runner.pid, signal.SIGKILL)
                if runner.process is not None:
                    runner.process.wait()
        wrong += faults(db, expected)
        if not wrong and report(suite, db) != report(suite, expected):
            wrong.append("the report is another")
        torn = [log for log in logs.glob("*.log") if b"Traceback (most" in log.read_bytes()]
        wrong += [f"{log}: a traceback" for log in torn]
        done = contents(db, "SELECT count(*), sum(status = 'done'), sum(status = 'interrupted') FROM runs")[0]
        print(f"{logs.name}: {done[0]} runs, {done[1]} done, {done[2]} taken over; {dict(count)}", flush=True)
        if wrong:
            for suffix in ("", "-wal"):
                with contextlib.suppress(OSError):
                    shutil.copy(f"{db}{suffix}", logs)
            print("\n".join(wrong), flush=True)
    return not wrong


def main() -> None:
    """`make soak`."""
    parser = argparse.ArgumentParser(description="Disturb eight runners; exit 1 where that changed a number.")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runners", type=int, default=8)
    parser.add_argument("--waves", type=int, default=sys.maxsize, help="so many at most")
    asked = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    rng, count, good, begun = random.Random(asked.seed), Counter[str](), 0, 0
    place = Path(tempfile.mkdtemp(prefix="fatbench-soak-"))
    suite, expected = place / "soak.yaml", place / "undisturbed.db"
    suite.write_text(TEXT)
    subprocess.run(fatbench("run", "suite", suite, "--db", expected, "--device", "cpu", "--jobs", "1"), check=True)
    start = time.monotonic()
    end = start + 60 * asked.minutes
    while begun < asked.waves and (not begun or time.monotonic() < end):
        begun += 1
        good += wave(place, suite, expected, asked.runners, rng, end, count)
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.0f} minutes, {good} of {begun} waves as undisturbed: {dict(count)}", flush=True)
    if good == begun:
        shutil.rmtree(place)
    sys.exit(good != begun)


if __name__ == "__main__":
    main()
