"""Progress of a run that was started from Python: a line for each cell, and one that changes in a notebook."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.runner.jobs import Event, Job, Summary

NOTEBOOK, SCRIPT = 1.0, 60.0  # seconds between two lines about cells in hand


class Lines:
    """Prints on stderr each cell that is over, with the time left or its error, and from time to time the work in hand.

    In a notebook the work in hand is one line that changes. died: the message of the last worker that was lost.
    """

    def __init__(self, title: str, quiet: bool) -> None:
        self.what, self.quiet, self.died = title, quiet, ""
        self.labels: dict[str, str] = {}
        self.fractions: dict[str, float] = {}  # cell -> the fraction of its work that is done
        self.current: dict[str, str] = {}  # cell -> the line about its work in hand
        self.began, self.done, self.cells = time.monotonic(), 0, 1
        self.handle: Any = None  # of the notebook's line that changes
        self.closed = threading.Event()
        self.ticker: threading.Thread | None = None

    def begin(self, jobs: Sequence[Job], earlier_states: Mapping[str, str], slots: Sequence[str]) -> None:
        """The run starts."""
        self.labels = {job.cell: job.label for job in jobs}
        done_count = sum(state == "done" for state in earlier_states.values())
        self.cells = len(jobs) - done_count
        self._say(f"{self.what}: {len(jobs)} cell{'s' * (len(jobs) != 1)}, {done_count} done, {self.cells} to go")

    def work_in(self, slots: Sequence[str]) -> None:
        """Nothing: lines do not name slots."""

    def see(self, slot: int, event: Event) -> None:
        """Take in an event of a worker."""
        self._tick()
        label = self.labels.get(event.cell, event.cell)
        if event.stage == "cell" and event.kind != "start":
            self.current.pop(event.cell, None)
            self.done += event.kind == "done"
            self.fractions.pop(event.cell, None)
            remaining_text = f" ({self.done} of {self.cells}{self._time_left()})" if self.cells > 1 else ""
            self._say(f"{label}: {event.kind}{f': {event.message}' if event.message else ''}{remaining_text}")
        elif event.kind in ("failed", "interrupted"):
            self.died = event.message
            self._say(f"{label}: {event.kind}{f': {event.message}' if event.message else ''}")
        elif event.stage not in ("cell", "slot"):
            training = event.stage == "train"
            work = "round" if training else parsed(event.stage).metric
            progress_text = f" {event.round} of {event.total}" if event.total else ""
            self.current[event.cell] = f"{label}: {work}{f' {event.message}' if event.message else progress_text}"
            if event.total:
                # training counts as 70 % of a cell's time, its evaluation as the rest
                self.fractions[event.cell] = (0.7 * event.round / event.total) if training else 0.7

    def note(self, text: str) -> None:
        """Print a message at once."""
        self._say(text)

    def summary(self, end: Summary) -> None:
        """Print how the run ended."""
        self._say(f"{self.what}: {end.done} of {end.cells} cells done")
        if end.changed:
            from fatbench.runner import versions

            self._say("\n".join(versions.lines(end.changed)))

    def close(self) -> None:
        """Stop the thread and clear the notebook's line."""
        self.closed.set()
        if self.handle is not None:
            self.handle.update({"text/plain": ""}, raw=True)

    def _tick(self) -> None:
        """Start the thread that prints the work in hand."""
        if self.ticker is None and not self.quiet:
            self.ticker = threading.Thread(target=self._look, daemon=True)
            self.ticker.start()

    def _look(self) -> None:
        display = sys.modules["IPython.display"].display if in_notebook() else None
        while not self.closed.wait(SCRIPT if display is None else NOTEBOOK):
            current_lines = list(self.current.values())
            if not current_lines or self.closed.is_set():
                continue
            remainder = f", and {len(current_lines) - 1} more" if len(current_lines) > 1 else ""
            text = f"{current_lines[-1]}{remainder}; {span(time.monotonic() - self.began)} so far{self._time_left()}"
            if display is None:
                self._say(text)
            elif self.handle is None:
                self.handle = display({"text/plain": text}, raw=True, display_id=True)
            else:
                self.handle.update({"text/plain": text}, raw=True)

    def _time_left(self) -> str:
        """ ", 12 min left" at the speed so far; empty if nothing is done yet."""
        done_cells = self.done + sum(self.fractions.values())
        if not done_cells or done_cells >= self.cells:
            return ""
        return f", {span((time.monotonic() - self.began) * (self.cells - done_cells) / done_cells)} left"

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """A duration: "40 s", "12 min" or "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def in_notebook() -> bool:
    """Whether this runs in a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
