"""An algorithm that ends before its last round: a result, with the round in which it ended."""

from __future__ import annotations

from pathlib import Path

from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import integrity
from fatbench.store.stages import Store
from fatbench.suite import files

PLUGIN = '''
from fatbench.engine.rounds import Cost, Round, State, Stats, Update
from fatbench.suite.types import Natural, Count, Objective


def patient(problem, state, *, rounds: Count, ends: Natural, batch: Count, objective: Objective):
    """Ends after some rounds."""
    for t in range(state.round, min(rounds, ends)):
        updates = [Update(k, len(shard), {}, Stats(0.5 / (t + 1), 1.0, 0.5, 1, 1.0, 1))
                   for k, shard in enumerate(problem.shards)]
        state = State(t + 1, state.model)
        yield Round(t, state.model, updates, None, state, Cost(gradient_steps=3))


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
axes: {ends: {two: {}, four: {algorithm: {ends: 4}}, none: {algorithm: {ends: 0}}}}
evaluate: {n: 30, batch: 7, attacks: {natural: natural}}
presets: {paper: {}}
"""


def test_it_is_done_and_says_in_which_round_it_ended(tmp_path: Path) -> None:
    (tmp_path / "patient.py").write_text(PLUGIN)
    (tmp_path / "patient.yaml").write_text(SUITE + f"plugins: [{tmp_path / 'patient.py'}]\n")
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "files"), data=str(tmp_path))
    two, four, none = jobs_of(files.load(str(tmp_path / "patient.yaml")).plan("paper"))
    with Store.open(machine.db, create=True) as store:
        assert [work(job, machine, store) for job in (two, four, none)] == ["done", "done", "failed"]
        rows = {(job.cell, r["metric"], r["round"]): r["value"] for job in (two, four)
                for r in store.measurements([job.cell], stages=["train"]) if r["client"] < 0}  # fmt: skip
        ended = [store.stages([job.cell])[job.cell, "train"].record.get("ended") for job in (two, four)]
        doubts = [(r["metric"], r["value"]) for r in store.measurements([two.cell]) if r["metric"].startswith("doubt_")]
        error = store.stages([none.cell])[none.cell, "train"].error
    assert ended == [2, None] and rows[two.cell, "ended", 4] == 2 and (four.cell, "ended", 4) not in rows
    assert rows[two.cell, "train_loss", 2] == rows[two.cell, "train_loss", 4] == 0.25
    assert (rows[two.cell, "gradient_steps", 2], rows[two.cell, "gradient_steps", 4]) == (3, 0)
    assert rows[two.cell, "natural", 4] == rows[four.cell, "natural", 4]  # of the last model, which is the same
    assert doubts == [("doubt_ended", 2)]
    assert error is not None and "no round after round 0 of 4" in error
    assert "is intact" in integrity.check(machine.db)
    with Store.open(machine.db) as store:
        assert work(two, machine, store) == "done"  # and is not trained again
        assert len(store.runs([two.cell])) == 2
