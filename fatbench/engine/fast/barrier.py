"""Cells of one process trained as one program: a table's cells often differ only in what happens once a round.

FAT, SFAT and Re-SFAT over three seeds have 45 clients, which a GPU could train at once and gets five at a time, because
each cell has its own server. Here every cell has a thread, in which all of its code runs as it would alone, and
the threads go on in turn:

    one cell's thread:  work ... | its cohort is to be trained: wait | ... aggregate, measure, commit ... | wait
    the last to come:   all waiting cohorts that are alike -> one stack (`fast.clients`) -> everybody goes on

So nothing but training happens at once, nothing is shared but images, and a cell that fails, ends or is stopped leaves
the others to meet without it. A cell's numbers depend on its company to rounding; the same company gives the same
bytes.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from fatbench.engine.fast import clients as fast
from fatbench.engine.local import Client, LocalTraining
from fatbench.engine.rounds import Update


@dataclass(eq=False)
class _Waiting:
    """A cohort that is to be trained, and what came of it."""

    cell: str
    alike: Hashable
    clients: list[Client]
    local: LocalTraining
    broadcast_loss: bool
    over: bool = False
    updates: list[Update] | None = None
    error: BaseException | None = None


class Barrier:
    """Where the cells of a process wait for each other. Threads enter by `cell`, their cohorts by `Party`."""

    def __init__(self) -> None:
        self.turn = threading.Condition()  # held by the one thread that goes on
        self.arriving = threading.Lock()
        self.cells = 0  # that are at work
        self.waiting: list[_Waiting] = []
        self.tensors: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # of data that cells have in common

    @contextlib.contextmanager
    def cell(self) -> Iterator[None]:
        """A thread's work at a cell: only while no other goes on."""
        with self.arriving:
            self.cells += 1  # before its turn, so that the others wait for it
        with self.turn:
            try:
                yield
            finally:
                with self.arriving:
                    self.cells -= 1
                self._train_waiting()

    def train(self, cohort: _Waiting) -> list[Update] | None:
        """The cohort trained together with those of the other cells; None: train it one client after another."""
        self.waiting.append(cohort)
        self._train_waiting()
        while not cohort.over:
            self.turn.wait()
        if cohort.error is not None:
            raise cohort.error
        return cohort.updates

    def _train_waiting(self) -> None:
        """Once every cell waits: train all, those that are alike in one program."""
        if not self.waiting or len(self.waiting) < self.cells:
            return
        cohorts, self.waiting = sorted(self.waiting, key=lambda cohort: cohort.cell), []  # whoever came first
        for kind in dict.fromkeys(cohort.alike for cohort in cohorts):
            _train([cohort for cohort in cohorts if cohort.alike == kind])
        self.turn.notify_all()


def _train(cohorts: Sequence[_Waiting]) -> None:
    """Cohorts that are alike, as one. An error is everybody's."""
    clients = [client for cohort in cohorts for client in cohort.clients]
    try:
        trained = fast.train_cohort(clients, cohorts[0].local, cohorts[0].broadcast_loss)
    except Exception as error:
        for cohort in cohorts:
            cohort.error, cohort.over = error, True
        return
    updates = iter(trained or [])
    for cohort in cohorts:
        cohort.updates = [next(updates) for _ in cohort.clients] if trained else None
        cohort.over = True


@dataclass(frozen=True)
class Party:
    """A `cell` at a barrier. Cells of one `model` (all that a suite says of it) may train as one program."""

    barrier: Barrier
    cell: str
    model: str

    def shared(self, key: Hashable, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Images and labels that `key` says all of, once for all cells that have them."""
        known = self.barrier.tensors
        images, labels = known.get((key, 0)), known.get((key, 1))
        if images is None or labels is None:
            images, labels = make()
            known[key, 0], known[key, 1] = images, labels
        return images, labels

    def train_cohort(
        self, clients: list[Client], local: LocalTraining, broadcast_loss: bool = False
    ) -> list[Update] | None:
        """As `fast.train_cohort`, with the clients of other cells."""
        problem, first = clients[0].problem, clients[0]
        alike = (
            self.model, problem.images.shape[1:], problem.classes, problem.precision, problem.size,
            _shown(problem.augment), tuple(_shown(getattr(local, own.name)) for own in fields(local)),
            bool(first.gradient_shift), bool(first.weight_shift), broadcast_loss,
        )  # fmt: skip
        return self.barrier.train(_Waiting(self.cell, alike, clients, local, broadcast_loss))


def _shown(value: Any) -> Hashable:
    """A setting as something that two cells' equal settings have in common: bound functions by name and settings."""
    if isinstance(value, functools.partial):
        bound = tuple((name, _shown(own)) for name, own in sorted(value.keywords.items()))
        return (_shown(value.func), bound)
    return tuple(map(_shown, value)) if isinstance(value, list | tuple) else value
