"""Progress on stderr while cells run: a live table on a terminal, one plain line an event elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fatbench.run import versions
from fatbench.run.worker import Event, Job


class Watch:
    """Collects the workers' events and shows them: cells done/failed/left, a lane per worker, images/s, time left."""

    def __init__(self, what: str):
        self.what = what
        self.lanes: list[str] = []
        self.rounds_left: dict[str, float] = {}
        self.total = self.done = self.failed = 0
        self.at: dict[int, tuple[Event, float]] = {}
        self.recent: deque[tuple[float, float]] = deque(maxlen=200)
        self.began = 0.0
        self.rounds_done = 0.0
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self.render, transient=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:
            self.live.stop()

    def begin(self, jobs: Sequence[Job], before: Mapping[str, str], lanes: Sequence[str]) -> None:
        """Show what is about to run: its cells, how each of them stands, and who works on them."""
        self.lanes, self.began = list(lanes), time.monotonic()
        self.rounds_left = {
            job.cell: float(job.spec["protocol"]["rounds"]) for job in jobs if before[job.cell] != "done"
        }
        self.total = len(jobs)
        self.done = sum(state == "done" for state in before.values())
        self.failed = sum(state == "failed" for state in before.values())
        if self.console.is_terminal:
            self.live.start()
        else:
            self._line(f"{self.what}: {self.total} cells, {self.done} done, {self.total - self.done} to go")

    def see(self, lane: int, event: Event) -> None:
        """Take one event of the worker in `lane`."""
        now = time.monotonic()
        if event.stage == "cell":
            self.done += event.kind == "done"
            self.failed += event.kind == "failed"
            self.rounds_left.pop(event.cell, None)
            self.at.pop(lane, None)
            return
        if event.images:
            self.recent.append((now, event.images))
        if event.kind == "progress" and event.stage == "train":
            self.rounds_done += 1
            self.rounds_left[event.cell] = float(event.total - event.round)
        if event.kind in ("start", "progress"):
            self.at[lane] = (event, now)
        else:
            self.at.pop(lane, None)
        if event.kind == "failed" and self.live.is_started:
            self.console.print(f"[red]failed[/red] {event.cell} {event.stage}: {event.message}", highlight=False)
        if not self.live.is_started:
            where = f"{event.round}/{event.total}" if event.kind == "progress" else event.kind
            tail = f": {event.message}" if event.message else ""
            self._line(f"{event.cell} {event.stage} {where}{tail}")

    def summary(
        self,
        cells: int,
        failed: Sequence[str],
        interrupted: Sequence[str],
        elsewhere: Sequence[str],
        changed: versions.Changed,
    ) -> None:
        """The last lines: what was done and what to do about the rest."""
        if self.live.is_started:
            self.live.stop()
        done = cells - len(failed) - len(interrupted) - len(elsewhere) - len(changed)
        parts = [f"{done} of {cells} cells done"]
        parts += [f"{len(failed)} failed"] if failed else []
        parts += [f"{len(interrupted)} not finished"] if interrupted else []
        parts += [f"{len(elsewhere)} in another process's hands"] if elsewhere else []
        parts += [f"{len(changed)} of an older version of a plug-in"] if changed else []
        self._line(f"{self.what}: {', '.join(parts)} in {duration(time.monotonic() - self.began)}")
        for cell in failed[:5]:
            self._line(f"  failed: {cell} (fatbench logs {cell}; run it again with --retry-failed)")
        for line in versions.lines(changed) if changed else ():
            self._line(line)

    def _line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def render(self) -> Any:
        left = self.total - self.done - self.failed
        speed = self._speed()
        failed = (f"  {self.failed} failed" if self.failed else "", "red")
        rate = f"   {speed:,.0f} images/s" if speed else ""
        counts = f"   {self.done}/{self.total} cells"
        head = Text.assemble((self.what, "bold"), counts, failed, f"  {left} left", rate, f"   {self._time_left()}")
        table = Table.grid(padding=(0, 2))
        for lane, device in enumerate(self.lanes):
            if lane not in self.at:
                table.add_row(device, "", "idle", "")
                continue
            event, _ = self.at[lane]
            table.add_row(device, event.cell, event.stage, _bar(event.round, event.total))
        grid = Table.grid()
        grid.add_row(head)
        grid.add_row(table)
        return grid

    def _speed(self) -> float:
        now = time.monotonic()
        window = [(t, images) for t, images in self.recent if now - t < 60]
        return sum(images for _, images in window) / max(now - min(t for t, _ in window), 1.0) if window else 0.0

    def _time_left(self) -> str:
        """Rounds left at the speed of this run so far."""
        elapsed = time.monotonic() - self.began
        left = sum(self.rounds_left.values())
        if self.rounds_done < 2 or not left:
            return ""
        return f"about {duration(elapsed / self.rounds_done * left)} left"


def _bar(value: int, total: int, width: int = 20) -> str:
    filled = int(width * value / total) if total else 0
    return f"{'━' * filled}{'─' * (width - filled)} {value}/{total}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 10 s, 5 h 12 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
