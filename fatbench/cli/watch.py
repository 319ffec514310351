"""Progress on stderr while cells run: a live table on a terminal, one plain line a cell elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fatbench.runner import progress, versions
from fatbench.runner.jobs import Event, Job, Summary
from fatbench.store import timing
from fatbench.store.opening import opened
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import duration as durations
from fatbench.suite.cells import Plan


@dataclass(frozen=True)
class SlotState:
    """What a slot is at: its last event, since when it is at this stage, and how far the stage was then."""

    event: Event
    since: float
    first: int


class Watch:
    """Collects the workers' events and shows them: cells done/failed/left, a slot per worker, images/s, time left."""

    def __init__(self, title: str, lines: str = "cell", starts: bool = False):
        """lines: what is a line where no live table is: "none" but failures, a "cell", or every "event".

        starts: whether a cell's start is a line as well as its end.
        """
        self.what, self.lines, self.starts = title, lines, starts
        self.slots: list[str] = []
        self.total = self.done = self.failed = 0
        self.labels: dict[str, str] = {}  # cell -> what it is
        self.shared = ""  # what all labels begin with, which a line leaves out
        self.at: dict[int, SlotState] = {}
        self.begun = False  # whether a worker has said anything: until then it starts
        self.seen: dict[str, tuple[float | None, float | None]] = {}  # cell -> its last loss and accuracy
        self.errors: dict[str, str] = {}  # cell -> why it failed
        self.recent: deque[tuple[float, float]] = deque(maxlen=200)
        self.began = 0.0
        self.done_here = 0  # cells, by this run
        self.console = Console(stderr=True, markup=False)
        self.live = Live(console=self.console, refresh_per_second=4, get_renderable=self.render, transient=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live.is_started:
            self.live.stop()

    def begin(self, jobs: Sequence[Job], earlier_states: Mapping[str, str], slots: Sequence[str]) -> None:
        """Show what is about to run: its cells, how each of them stands, and who works on them."""
        self.slots, self.began = list(slots), time.monotonic()
        self.labels = {job.cell: job.label for job in jobs}
        self.shared = _shared_prefix([job.label for job in jobs])
        self.total = len(jobs)
        self.done = sum(state == "done" for state in earlier_states.values())
        self.failed = sum(state == "failed" for state in earlier_states.values())
        if self.console.is_terminal and self.lines == "cell":
            self.live.start()
        elif self.lines != "none":
            cells = f"{self.total} cell{'s' * (self.total != 1)}"
            self._line(f"{self.what}: {cells}, {self.done} done, {self.total - self.done} to go")

    def work_in(self, slots: Sequence[str]) -> None:
        """Show these places from now on."""
        self.slots, self.at = list(slots), {}

    def see(self, slot: int, event: Event) -> None:
        """Take one event of the worker in `slot`."""
        current_time, self.begun = time.monotonic(), True
        if event.kind == "given":
            self.at[slot] = SlotState(event, current_time, 0)
            if self._prints_lines("cell" if self.starts else "event"):
                self._line(f"{event.cell} starts: {self.labels.get(event.cell, '')}".removesuffix(": "))
            return
        if event.stage == "cell":
            self.done += event.kind == "done"
            self.done_here += event.kind == "done"
            self.failed += event.kind == "failed"
            self.at.pop(slot, None)
            if event.kind == "elsewhere" and self._prints_lines("cell"):
                self._line(f"{event.cell} is being run by another process")
            elif event.kind == "done" and self._prints_lines("cell"):
                self._line(f"{event.cell} done: {self.labels.get(event.cell, '')}".removesuffix(": "))
            return
        if event.images and event.stage == "train":  # an attack tells what it may need at most
            self.recent.append((current_time, event.images))
        if event.loss is not None or event.accuracy is not None:
            self.seen[event.cell] = (event.loss, event.accuracy)
        if event.kind in ("start", "progress"):
            earlier_state = self.at.get(slot)
            if earlier_state is None or earlier_state.event.stage != event.stage or event.kind == "start":
                self.at[slot] = SlotState(event, current_time, event.round)
            else:
                self.at[slot] = SlotState(event, earlier_state.since, earlier_state.first)
        else:
            self.at.pop(slot, None)
        if event.kind == "failed":
            said_before = event.message in self.errors.values()
            self.errors.setdefault(event.cell, event.message)
            event = replace(event, message="as above") if said_before else event
            if self.live.is_started:
                said = f" {event.cell} {event.stage}: {event.message}"
                self.console.print(Text.assemble(("failed", "red"), said), highlight=False)
        lines = not self.live.is_started
        is_line = {"failed": lines, "waiting": self._prints_lines("cell")}  # also where events are no lines
        if event.message:  # its worker or its node is lost, which a person should know
            is_line["interrupted"] = lines
        if is_line.get(event.kind, self._prints_lines("event")):
            progress_text = f"{event.round}/{event.total}" if event.kind == "progress" else event.kind
            tail = f": {event.message}" if event.message else ""
            self._line(f"{event.cell} {event.stage} {progress_text}{_numbers(event.loss, event.accuracy)}{tail}")

    def note(self, text: str) -> None:
        """Something that a person should know now."""
        if self.live.is_started:
            self.console.print(text, highlight=False)
        elif self._prints_lines("cell"):
            self._line(text)

    def summary(self, end: Summary) -> None:
        """The last lines: what was done and what to do about the rest."""
        if self.live.is_started:
            self.live.stop()
        counts = [f"{end.done} of {end.cells} cells done"]
        counts += [f"{len(end.failed)} failed"] if end.failed else []
        counts += [f"{len(end.interrupted)} not finished"] if end.interrupted else []
        counts += [f"{len(end.elsewhere)} being run by another process"] if end.elsewhere else []
        counts += [f"{len(end.changed)} changed"] if end.changed else []
        if self.lines != "none" or end.done < end.cells:
            self._line(f"{self.what}: {', '.join(counts)} in {duration(time.monotonic() - self.began)}")
        by_error: dict[str, list[str]] = {}
        for cell in end.failed:
            by_error.setdefault(self.errors.get(cell, ""), []).append(cell)
        for error, cells_of_it in by_error.items():
            self._line(f"  failed: {said_once(cells_of_it, error)}")
        if end.failed:
            self._line("  run them again with --rerun failed")
        for line in versions.lines(end.changed) if end.changed else ():
            self._line(line)

    def _prints_lines(self, line_kind: str) -> bool:
        """Whether each of these, "cell" or "event", is a plain line."""
        return not self.live.is_started and self.lines in ("event", line_kind)

    def _line(self, text: str) -> None:
        """A line; with the time of day where it is no terminal."""
        time_of_day = "" if self.console.is_terminal else time.strftime("%H:%M:%S ")
        print(f"{time_of_day}{text}", file=sys.stderr, flush=True)

    def render(self) -> Any:
        """The counts, and a line for each slot that fits the terminal.

        Labels are cut last, at their beginning, so that method and seed stand; numbers never.
        """
        cells_left = self.total - self.done - self.failed
        now = time.monotonic()
        window = [(t, images) for t, images in self.recent if now - t < 60]
        speed = sum(images for _, images in window) / max(now - window[0][0], 1.0) if window else 0.0
        counts = f"{self.done}/{self.total} cells"
        head_parts = [self.what, counts, *([f"{self.failed} failed"] if self.failed else []), f"{cells_left} left"]
        head_parts += [*filter(None, [self._time_left()])] + [f"{speed:,.0f} images/s"] * bool(speed)
        while len("  ".join(head_parts)) > self.console.width and len(head_parts) > 2:
            head_parts.pop()
        head = Text("  ".join(head_parts), no_wrap=True, overflow="ellipsis")
        head.stylize("bold", 0, len(self.what))
        head.highlight_regex(r"\d+ failed", "red")
        several = len({*self.slots}) > 1
        rows = [((device,) if several else ()) + self._slot(slot) for slot, device in enumerate(self.slots)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(5 + several)]
        other_widths = sum(width + 2 for i, width in enumerate(widths) if i != several and width)
        widths[several] = max(min(widths[several], self.console.width - other_widths), 10)
        lines = [head]
        for row in rows:
            cells = (
                f"{text if len(text) <= width else '…' + text[len(text) - width + 1 :]:{width}}"
                for text, width in zip(row, widths, strict=True)
                if width
            )
            lines.append(Text("  ".join(cells).rstrip(), no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _slot(self, slot: int) -> tuple[str, ...]:
        """What a slot does: its cell's labels, how far it is, its pace, the time left; with room, loss and accuracy."""
        doing = self.at.get(slot)
        if doing is None:
            return ("", "idle" if self.begun else "starting", "", "", "")
        event, current_time = doing.event, time.monotonic()
        label = self.labels.get(event.cell, "").removeprefix(self.shared) or event.cell
        if event.kind == "given":
            return (label, "starting", "", duration(current_time - doing.since), "")
        done_count, elapsed = event.round - doing.first, current_time - doing.since
        seconds_each = elapsed / done_count if done_count > 0 else None
        trains = event.stage == "train"
        attack = f"{parsed(event.stage).metric} {event.message}".strip()
        progress_text = f"round {event.round}/{event.total}" if trains else attack
        progress_text += "" if trains or event.message else f" {event.round}/{event.total}"
        pace = (
            ""
            if seconds_each is None
            else f"{_two_digits(seconds_each)} s/round"
            if trains
            else f"{_two_digits(1 / seconds_each)} images/s"
        )
        left = None if seconds_each is None else f"{duration(seconds_each * (event.total - event.round))} left"
        times = left or duration(elapsed)
        roomy = self.console.width >= ROOMY
        numbers = _numbers(*self.seen.get(event.cell, (None, None))).strip() if roomy else ""
        return (label, progress_text, pace, times, numbers)

    def _time_left(self) -> str:
        """For the cells left at the pace of those that this run has done; unknown until one is, attacks included."""
        left = self.total - self.done - self.failed
        if not self.done_here or not left:
            return ""
        return f"about {duration((time.monotonic() - self.began) / self.done_here * left)} left"


ROOMY = 110  # letters from which a line has room for loss and accuracy


def _shared_prefix(labels: Sequence[str]) -> str:
    """What several labels, parts with commas between them, all begin with: "CIFAR-10, Non-IID, ", but the last two."""
    if len({*labels}) < 2:
        return ""
    columns = zip(*(label.split(", ")[:-2] for label in labels), strict=False)
    shared_parts = itertools.takewhile(lambda part: len({*part}) == 1, columns)
    return "".join(f"{label_part[0]}, " for label_part in shared_parts)


def said_once(cells: Sequence[str], error: str) -> str:
    """The cells that one error ended, the error, and where to read more."""
    remainder = f" and {len(cells) - 4} more" if len(cells) > 4 else ""
    return f"{', '.join(cells[:4])}{remainder}{f': {error}' if error else ''} (fatbench show {cells[0]} --log)"


def _numbers(loss: float | None, accuracy: float | None) -> str:
    """ " loss 1.204, accuracy 31.2 %": what is known of it."""
    number_texts = [] if loss is None else [f"loss {loss:.4g}"]
    number_texts += [] if accuracy is None else [f"accuracy {100 * accuracy:.1f} %"]
    return f" {', '.join(number_texts)}" if number_texts else ""


def _two_digits(number: float) -> str:
    """ "0.34", "2.1", "290", never "2.9e+02"."""
    number = float(f"{number:.2g}")
    return f"{number:,.0f}" if number >= 10 else f"{number:g}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 10 s, 5 h 12 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


# --- status --watch ----------------------------------------------------------------------------------------------


IDLE = 3  # looks: between two cells of a run there may be a moment without one


def watch_plan(name: str, plan_of: Callable[[Store | None], Plan], interval: float) -> None:
    """Show how far the cells of a plan are, whoever runs them: live, or a line at a time.

    Ends when none is left, or when none has run for IDLE looks.
    """
    with opened(None):
        pass  # NoDatabase: it was named, and is misspelt
    console, idle = Console(markup=False), 0
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            with opened(None, create=True) as store:
                plan = plan_of(store)
                rows = progress.cells_of(plan, store)
                time_left = None
                if store is not None:  # at the speed of the machine that worked last
                    speeds = durations.speeds(timing.timed_runs(store, everywhere=True))
                    time_left = durations.estimate(plan.to_run(), speeds, progress.cells_left(plan, store))
            counts = progress.count(rows)
            states = ", ".join(f"{n} {state}" for state, n in counts.items())
            head = f"suite {plan.suite}, preset {plan.preset}: {states}"
            running = [row for row in rows if row.status == "running"]
            if time_left is not None and time_left.seconds and running:
                more = " and more" * bool(time_left.unknown)
                head += f", about {duration(time_left.seconds / len(running))} left{more}"
            if live is None:
                print(f"{time.strftime('%H:%M:%S')} {head}", flush=True)
            else:
                live.update(_looked(head, running), refresh=True)
            idle = 0 if running else idle + 1
            if not running and (not counts["todo"] or idle == IDLE):
                if counts["todo"]:
                    command = f"fatbench run {name} --preset {plan.preset}"
                    print(f"nothing runs; {counts['todo']} cells to do: {command}", file=sys.stderr)
                return
            time.sleep(interval)


def _looked(head: str, running: Sequence[progress.CellProgress]) -> Table:
    """The counts, and a line for each cell that runs."""
    table = Table.grid(padding=(0, 2))
    for row in running:
        label = ", ".join([*row.cell.key.values(), f"seed {row.cell.spec['seed']}"])
        stages = f"{row.stages_done}/{row.stages} stages"
        filled = int(10 * row.round / row.total) if row.total else 0
        rounds = f"{'━' * filled}{'─' * (10 - filled)} {row.round}/{row.total}"
        table.add_row(row.cell.id, label, rounds, stages)
    grid = Table.grid()
    grid.add_row(Text(head, "bold"))
    grid.add_row(table)
    return grid
