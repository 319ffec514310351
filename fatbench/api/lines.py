"""How a run goes on, for whoever called it from Python: a line a cell, and one that changes in a notebook."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.runner.jobs import Event, Job, Summary

NOTEBOOK, SCRIPT = 1.0, 60.0  # seconds between two looks at what is in hand


class Lines:
    """Says on stderr which cells are over, with method, time left and error; what is in hand, every now and then.

    In a notebook the latter is one line that changes. died: how the last worker ended that was lost.
    """

    def __init__(self, title: str, quiet: bool) -> None:
        self.what, self.quiet, self.died = title, quiet, ""
        self.labels: dict[str, str] = {}
        self.part: dict[str, float] = {}  # of a cell's training, done
        self.now: dict[str, str] = {}  # cell -> what is in hand
        self.began, self.done, self.cells = time.monotonic(), 0, 1
        self.shown: Any = None  # the line that changes
        self.over = threading.Event()
        self.ticker: threading.Thread | None = None

    def begin(self, jobs: Sequence[Job], earlier_states: Mapping[str, str], slots: Sequence[str]) -> None:
        """The run starts."""
        self.labels = {job.cell: job.label for job in jobs}
        done_count = sum(state == "done" for state in earlier_states.values())
        self.cells = len(jobs) - done_count
        self._say(f"{self.what}: {len(jobs)} cell{'s' * (len(jobs) != 1)}, {done_count} done, {self.cells} to go")

    def work_in(self, slots: Sequence[str]) -> None:
        """Lines name no slots."""

    def see(self, slot: int, event: Event) -> None:
        """A worker says something."""
        self._tick()
        label = self.labels.get(event.cell, event.cell)
        if event.stage == "cell" and event.kind != "start":
            self.now.pop(event.cell, None)
            self.done += event.kind == "done"
            self.part.pop(event.cell, None)
            remaining_text = f" ({self.done} of {self.cells}{self._left()})" if self.cells > 1 else ""
            self._say(f"{label}: {event.kind}{f': {event.message}' if event.message else ''}{remaining_text}")
        elif event.kind in ("failed", "interrupted"):
            self.died = event.message
            self._say(f"{label}: {event.kind}{f': {event.message}' if event.message else ''}")
        elif event.stage not in ("cell", "slot"):
            training = event.stage == "train"
            work = "round" if training else parsed(event.stage).metric
            progress_text = f" {event.round} of {event.total}" if event.total else ""
            self.now[event.cell] = f"{label}: {work}{f' {event.message}' if event.message else progress_text}"
            if event.total:
                self.part[event.cell] = (0.7 * event.round / event.total) if training else 0.7

    def note(self, text: str) -> None:
        """Something that a person should know now."""
        self._say(text)

    def summary(self, end: Summary) -> None:
        """The run is over."""
        self._say(f"{self.what}: {end.done} of {end.cells} cells done")
        if end.changed:
            from fatbench.runner import versions

            self._say("\n".join(versions.lines(end.changed)))

    def close(self) -> None:
        """No more is said."""
        self.over.set()
        if self.shown is not None:
            self.shown.update({"text/plain": ""}, raw=True)

    def _tick(self) -> None:
        """Begin to look at what is in hand."""
        if self.ticker is None and not self.quiet:
            self.ticker = threading.Thread(target=self._look, daemon=True)
            self.ticker.start()

    def _look(self) -> None:
        display = _display()
        while not self.over.wait(SCRIPT if display is None else NOTEBOOK):
            current_lines = list(self.now.values())
            if not current_lines or self.over.is_set():
                continue
            remainder = f", and {len(current_lines) - 1} more" if len(current_lines) > 1 else ""
            text = f"{current_lines[-1]}{remainder}; {span(time.monotonic() - self.began)} so far{self._left()}"
            if display is None:
                self._say(text)
            elif self.shown is None:
                self.shown = display({"text/plain": text}, raw=True, display_id=True)
            else:
                self.shown.update({"text/plain": text}, raw=True)

    def _left(self) -> str:
        """How long the rest takes if it goes on as until now."""
        done_cells = self.done + sum(self.part.values())
        if not done_cells or done_cells >= self.cells:
            return ""
        return f", {span((time.monotonic() - self.began) * (self.cells - done_cells) / done_cells)} left"

    def _say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


def span(seconds: float) -> str:
    """ "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def in_notebook() -> bool:
    """Whether this runs in a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _display() -> Any:
    """What shows a thing in the notebook that this runs in; None: it is none."""
    return sys.modules["IPython.display"].display if in_notebook() else None
