"""An algorithm that ends before its last round: a result, with the round in which it ended."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from algorithm_runs import same

from fatbench.engine.accuracy import natural
from fatbench.engine.rounds import Problem, Round, State
from fatbench.methods.aggregators import samples
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import integrity
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.testing import local, rounds, small_problem

PLUGIN = '''
from fatbench.engine.rounds import Cost, Round, State, Stats, Update
from fatbench.suite.types import Natural, Count, Objective


def patient(problem, state, *, rounds: Count, ends: Natural, says: bool = False, batch: Count, objective: Objective):
    """Ends after some rounds."""
    for t in range(state.round, min(rounds, ends)):
        updates = [Update(k, len(shard), {}, Stats(0.5 / (t + 1), 1.0, 0.5, 1, 1.0, 1))
                   for k, shard in enumerate(problem.shards)]
        state = State(t + 1, state.model)
        last = says and t + 1 == ends
        yield Round(t, state.model, updates, None, state, Cost(gradient_steps=3), last=last)


ALGORITHMS = {"patient": patient}
'''
SUITE = """
name: patient
title: An early end
base:
  data: digits
  train: 80
  test: 40
  partition: {name: iid, clients: 2}
  model: {name: small_cnn, width: 2}
  algorithm: {name: patient, rounds: 4, ends: 2, batch: 8, objective: {name: standard}}
  monitor: natural
  monitor_every: 3
axes: {ends: {two: {}, four: {algorithm: {ends: 4}}, none: {algorithm: {ends: 0}}, said: {algorithm: {says: true}}}}
evaluate: {n: 30, batch: 7, attacks: {natural: natural}}
presets: {paper: {}}
"""


def test_it_is_done_and_says_in_which_round_it_ended(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(PLUGIN)
    (tmp_path / "patient.yaml").write_text(SUITE + f"plugins: [{tmp_path / 'patient.py'}]\n")
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path))
    two, four, none, said = jobs_of(files.load(str(tmp_path / "patient.yaml")).plan("paper"))
    with Store.open(machine.db, create=True) as store:
        done = [work(job, machine, store) for job in (two, four, none, said)]
        assert done == ["done", "done", "failed", "done"]
        rows = {(job.cell, r["metric"], r["round"]): r["value"] for job in (two, four, said)
                for r in store.measurements([job.cell], stages=["train"]) if r["client"] < 0}  # fmt: skip
        ended = [store.stages([job.cell])[job.cell, "train"].record.get("ended") for job in (two, four)]
        doubts = [(r["metric"], r["value"]) for r in store.measurements([two.cell]) if r["metric"].startswith("doubt_")]
        error = store.stages([none.cell])[none.cell, "train"].error
    assert ended == [2, None] and rows[two.cell, "ended", 4] == 2 and (four.cell, "ended", 4) not in rows
    assert rows[two.cell, "train_loss", 2] == rows[two.cell, "train_loss", 4] == 0.25
    assert (rows[two.cell, "gradient_steps", 2], rows[two.cell, "gradient_steps", 4]) == (3, 0)
    assert rows[two.cell, "natural", 4] == rows[four.cell, "natural", 4]  # of the last model, which is the same
    assert doubts == [("doubt_ended", 2)]
    of_two, of_said = ({key[1:]: value for key, value in rows.items() if key[0] == job.cell and key[1] != "seconds"}
                       for job in (two, said))  # fmt: skip
    monitored = ("natural", "natural_loss", "monitor", "monitor_loss")  # in the round in which it ends, too
    assert of_said == {**of_two, **{(metric, 2): of_two[metric, 4] for metric in monitored}}
    assert error is not None and "no round after round 0 of 4" in error
    assert "is intact" in integrity.check(machine.db)
    with Store.open(machine.db) as store:
        assert work(two, machine, store) == "done"  # and is not trained again
        assert len(store.runs([two.cell])) == 2


def test_what_ended_before_an_interruption_has_ended_after_it() -> None:
    """A run that was cut after the last round of an algorithm, which then yields no more."""

    def patient(problem: Problem, state: State, *, rounds: int, **_: object) -> Iterator[Round]:
        yield from ALGORITHMS["fedavg"](problem, state, rounds=2, aggregator=samples, local=local())

    how, on = functools.partial(patient, rounds=4), small_problem()
    whole = rounds(on, how, monitor=natural)
    rest = rounds(on, how, whole[1][0].state, monitor=natural)
    assert [result.index for result, _ in whole] == [0, 1, 3] and [result.index for result, _ in rest] == [3]
    assert same(rest[0][0].state.model, whole[2][0].state.model)
    for metric in ("natural", "ended", "forward"):
        assert rest[0][1][metric, -1] == whole[2][1][metric, -1]
