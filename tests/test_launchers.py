"""The same of every launcher: workers that are killed, runs that are stopped, two runs at once.

`test_real_slurm.py` asks the same of SLURM, on a SLURM of its own.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from crew import Watcher, each_time, ignore, kill, lasting, never, numbers, once_begun, recovering, rows, undisturbed

from fatbench.runner.executors import local, ray
from fatbench.runner.jobs import Work
from fatbench.store.stages import Store

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # files of Ray that it leaves to the collector
LOST = {
    local: "the worker process ended with SIGKILL (out of memory?)",
    ray: "its Ray worker was killed (out of memory?)",
}


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.nightly)])
def launch(request: pytest.FixtureRequest, forks: None) -> Any:
    """An executor."""
    if request.param == "local":
        return local
    request.getfixturevalue("cluster")
    assert ray.slots("cpu", None, 1, request.getfixturevalue("machine").db) == ["cpu"] * 2
    return ray


def test_a_killed_worker_takes_only_its_cell_with_it_and_that_is_begun_once_more(launch, jobs, machine):
    killed, seen = lasting(jobs[0]), Watcher()
    cells = [killed, jobs[1]]
    outcomes = launch.run(Work(cells, machine), ["cpu", "cpu"], seen, once_begun(machine, killed, kill))
    assert outcomes == {job.cell: "done" for job in cells}
    told = [kind for kind in seen.kinds(killed, "train") if kind != "progress"]
    assert told[-3:] == ["interrupted", "start", "done"] and seen.kinds(killed) == seen.kinds(jobs[1]) == ["done"]
    said = [event.message for _, event in seen.seen if event.kind == "interrupted"]
    assert said == [f"{LOST[launch]}: it starts again"]
    assert seen.kinds(jobs[1], "train") == ["start", *["progress"] * 4, "done"]
    for job in cells:
        assert {status for status, _ in rows(machine, job).values()} == {"done"} and len(rows(machine, job)) == 3
        assert numbers(machine, job) == undisturbed(machine, job)


def test_a_cell_whose_worker_is_killed_twice_fails(launch, jobs, machine):
    killed, seen = lasting(jobs[0]), Watcher()
    outcomes = launch.run(Work([killed, jobs[1]], machine), ["cpu"], seen, each_time(machine, killed, kill))
    assert outcomes == {killed.cell: "failed", jobs[1].cell: "done"}
    assert rows(machine, killed) == {"train": ("failed", LOST[launch])}
    assert seen.kinds(killed, "train")[-1] == "failed" and seen.kinds(killed) == ["failed"]
    again = recovering(machine, retry_failed=True)
    assert launch.run(Work([killed], again), ["cpu"], ignore, never) == {killed.cell: "done"}
    assert numbers(machine, killed) == undisturbed(machine, killed)


def test_a_run_that_is_stopped_commits_the_round_at_hand_and_goes_on_from_there(launch, jobs, machine):
    job, wish = lasting(jobs[0]), [0]
    seen = Watcher(job.cell, "progress", partial(wish.__setitem__, 0, 1))
    outcomes = launch.run(Work([job, *jobs[1:]], machine), ["cpu"], seen, lambda: wish[0])
    assert outcomes == dict.fromkeys(outcomes, "interrupted") and len(outcomes) == 3
    assert rows(machine, jobs[1]) == rows(machine, jobs[2]) == {}  # the rest is not begun
    with Store.open(machine.db) as store:
        row = store.stages([job.cell])[job.cell, "train"]
    assert row.status == "interrupted" and 1 <= row.round < row.total
    seen = Watcher()
    assert launch.run(Work([job], machine), ["cpu"], seen, never) == {job.cell: "done"}
    assert next(event for _, event in seen.seen if event.stage == "train").round == row.round
    assert numbers(machine, job) == undisturbed(machine, job)


def test_a_run_that_is_stopped_at_once_leaves_nothing_in_the_hands_of_a_process_that_is_gone(launch, jobs, machine):
    begun = lasting(jobs[0])
    stop = once_begun(machine, begun, lambda pid: 2)
    outcomes = launch.run(Work([begun, *jobs[1:]], machine), ["cpu"], ignore, stop)
    assert {*outcomes.values()} == {"interrupted"} and len(outcomes) == 3
    assert rows(machine, begun) == {"train": ("interrupted", None)}
    assert rows(machine, jobs[1]) == rows(machine, jobs[2]) == {}


def test_two_runs_at_once_share_the_cells(launch, jobs, machine):
    """Each stage is computed once, whichever run it is that does it."""
    found: list[dict[str, Any]] = []
    second = threading.Thread(target=lambda: found.append(launch.run(Work(jobs, machine), ["cpu"], ignore, never)))
    second.start()
    found.append(launch.run(Work(jobs[::-1], machine), ["cpu"], ignore, never))
    second.join()
    assert {status for outcomes in found for status in outcomes.values()} <= {"done", "elsewhere"}
    with Store.open(machine.db) as store:
        assert sorted(run["status"] for run in store.runs()) == ["done"] * 9
    for job in jobs:
        assert numbers(machine, job) == undisturbed(machine, job)
