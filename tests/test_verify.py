"""`fatbench verify`: cells of a file are run again from the file alone."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import result_files
from small import small
from sqlalchemy import select, update

from fatbench.api import verifying as verify
from fatbench.api.verifying import candidates, choose, elsewhere, estimate_here, job
from fatbench.errors import NothingMatched, SpecError
from fatbench.runner.jobs import Machine
from fatbench.runner.run_options import RunOptions
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import jsonl
from fatbench.store.numbers import remove
from fatbench.store.schema import OUTCOME_CHUNKS, ROUND_METRICS, VALUES
from fatbench.store.stages import Store
from fatbench.suite import files

TINY = small(
    name="tiny", seeds="[1]", test="30", model="{name: small_cnn, width: 4}",
    axes="{rounds: {one: {}, three: {algorithm: {rounds: 3}}}}",
    evaluate="{checkpoints: [last], batch: 20, attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}}",
    tables="[{id: t, title: t, rows: [rounds], values: {natural: natural}}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of both cells."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "tiny.yaml").write_text(TINY)
    machine = Machine(db=str(folder / "r.db"), files=str(folder / "files"), data=str(folder), path="loop")
    with Store.open(machine.db, create=True) as store:
        for one in jobs_of(files.load(str(folder / "tiny.yaml")).plan("paper")):
            assert work(one, machine, store) == "done"
        jsonl.export(store, folder / "results.jsonl")
    return folder / "results.jsonl"


@pytest.fixture
def theirs(results: Path, tmp_path: Path) -> Any:
    with Store.open(str(tmp_path / "theirs.db"), create=True) as store:
        jsonl.import_(store, results)
        yield store


def test_the_job_is_found_without_the_suite(results: Path, theirs: Store) -> None:
    """The same stages: attack, n (all images: none is named) and batch come out of the file."""
    plan = files.load(str(results.parent / "tiny.yaml")).plan("paper")
    for expected in jobs_of(plan):
        found = job(theirs, expected.cell)
        assert found.spec == expected.spec
        assert {e.id for e in found.evaluations} == {e.id for e in expected.evaluations}
        assert (found.checkpoints, found.suite, found.preset) == (["last"], "tiny", "paper")


def test_what_ran_before_a_setting_was_added_runs_again_without_it(tmp_path: Path) -> None:
    """The committed cells, whose specs lack settings of today, are those of the suite."""
    with Store.open(str(tmp_path / "fashion.db"), create=True) as store:
        jsonl.import_(store, Path(__file__).parent.parent / "results" / "sfat-fashion-cpu.jsonl.xz")
        here = [
            cell for cell in files.load("sfat-fashion").plan("cpu").unique() if cell.id in store.known_cells([cell.id])
        ]
        assert any(set(store.cells([cell.id])[cell.id]) < set(cell.spec) for cell in here)
        for cell in here:
            again = job(store, cell.id)
            assert again.spec == cell.spec
            assert {one.id for one in again.evaluations} == {one.id for one in cell.evaluations}
        drawn, how = choose(store, 2, 0, a_minute_each)
        assert len(drawn) == 2 and {*drawn} <= {cell.id for cell in here if cell.key["method"] in ("FAT", "SFAT")}
        assert how.endswith("drawn by seed 0; 2.0 min here of at most 60 min by this machine's estimate")


def a_minute_each(jobs: Any) -> Any:
    return lambda job: 60.0


def seconds(*where: Any) -> Any:
    """The values of all stages' seconds."""
    return VALUES.c.round_metric.in_(select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "seconds", *where))


def test_cells_are_drawn_by_a_seed_and_fit_into_an_hour(theirs: Store, tmp_path: Path) -> None:
    by_rounds = {spec["algorithm"]["rounds"]: cell for cell, spec in theirs.cells().items()}
    assert {choose(theirs, 1, seed, a_minute_each)[0][0] for seed in range(20)} == set(by_rounds.values())
    assert choose(theirs, 9, 5, a_minute_each) == choose(theirs, 9, 5, a_minute_each)
    for seconds, cells in (
        ({1: 3000.0, 3: 500.0}, {1, 3}),
        ({1: 9999.0, 3: 500.0}, {3}),
        ({1: 9999.0, 3: 7200.0}, {3}),
    ):
        found, how = choose(theirs, 9, 0, lambda jobs, s=seconds: lambda job: s[job.spec["algorithm"]["rounds"]])
        assert {*found} == {by_rounds[rounds] for rounds in cells}, how
    assert how.startswith("1 of 2 cells, drawn by seed 0; none takes at most 60 min")
    assert how.endswith("the shortest, 120 min")
    found, how = choose(theirs, 9, 0, lambda jobs: lambda job: None)
    assert len(found) == 1 and "no time is known" in how
    with (
        Store.open(str(tmp_path / "empty.db"), create=True) as empty,
        pytest.raises(NothingMatched, match="no cell of these results finished its training"),
    ):
        choose(empty, 1, 0)


@pytest.mark.slow
def test_a_machine_is_measured_that_has_run_nothing(
    theirs: Store, results: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = [job(theirs, id) for id in theirs.cells()]
    seconds = estimate_here(jobs)
    assert all((seconds(one) or 0) > 0 for one in jobs)


def test_what_makes_another_machine() -> None:
    run = {"device": "cpu (A)", "cpu": {"model": "A", "capability": "AVX2"}, "precision": "fp32", "path": "loop",
           "threads": 1, "versions": {"torch": "2.15.0"}}  # fmt: skip
    assert elsewhere([(run, run)]) is None
    other = {**run, "versions": {"torch": "2.14.0"}}
    assert elsewhere([(run, run), (run, other)]) == "torch: 2.15.0 there, 2.14.0 here"
    assert elsewhere([({**run, "cpu": None}, run)]) == "cpu: not recorded there, A AVX2 here"
    assert elsewhere([({**run, "precision": "bf16"}, run)]) == "precision: bf16 there, fp32 here"
    gpu = {**run, "not_reproducible": "bf16 on a GPU"}
    assert elsewhere([(gpu, gpu)]) == "not reproducible: bf16 on a GPU"


def test_runs_say_on_which_cpu_they_were(theirs: Store) -> None:
    assert all({"model", "capability", "instructions"} == set(run["cpu"]) for run in theirs.runs())


@pytest.mark.parametrize("lacking", ["numbers", "outcomes"])
def test_a_finished_evaluation_with_nothing_in_it(theirs: Store, lacking: str) -> None:
    cell = min(theirs.cells())
    table = ROUND_METRICS if lacking == "numbers" else OUTCOME_CHUNKS
    where = (table.c.cell == cell) & (table.c.stage != "train")
    with theirs.database.writing() as connection:
        if lacking == "numbers":
            remove(connection, where)
        else:
            connection.execute(table.delete().where(where))
    with pytest.raises(
        SpecError, match=f"cell {cell} fgsm-.*@[13] is finished but has no {lacking}: it cannot be verified"
    ):
        job(theirs, cell)


def test_replicates_and_cells_at_chance_are_not_chosen(results: Path, tmp_path: Path) -> None:
    """A cell that has not learned stays at chance whatever is done to it; it is run again only where all are such."""
    with Store.open(str(tmp_path / "both.db"), create=True) as store:
        jsonl.import_(store, results)
        by_rounds = {spec["algorithm"]["rounds"]: cell for cell, spec in store.cells().items()}
        other = tmp_path / "other.jsonl"
        other.write_text(another_run(results.read_text(), by_rounds[3]))
        jsonl.import_(store, other)
        assert f"{by_rounds[3]}~1" in store.cells()
        right = (ROUND_METRICS.c.cell == by_rounds[3]) & (ROUND_METRICS.c.metric == "natural")
        low = select(ROUND_METRICS.c.id).where(
            (ROUND_METRICS.c.metric == "natural") & (ROUND_METRICS.c.stage != "train")
        )
        with store.database.writing() as connection:
            connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(low)).values(value=0.1))
        assert sorted(candidates(store)) == sorted(by_rounds.values())
        with store.database.writing() as connection:
            high = low.where(right)
            connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(high)).values(value=0.9))
        assert candidates(store) == choose(store, 9, 1, a_minute_each)[0] == [by_rounds[3]]


def another_run(text: str, cell: str) -> str:
    """The line of a cell as another run of it, whose loss is another."""
    head, *lines = text.splitlines()
    line = next(line for line in map(json.loads, map(result_files.rows, lines)) if line["cell"] == cell)
    for run in line["runs"]:
        run["uid"] = run["uid"][::-1]
    for stage in line["stages"]:
        for number in stage["numbers"]:
            number[3] += number[2] == "train_loss"
    for stage, digest in result_files.mismatches(line):
        stage["digest"] = digest
    return json.dumps({**json.loads(head), "cells": 1}) + "\n" + json.dumps(line) + "\n"


NINE_OF_TEN = [[0, 20, base64.b64encode(b"\x7f\xff\xf0").decode()], [20, 10, base64.b64encode(b"\x3f\xc0").decode()]]


@pytest.mark.parametrize(("recorded", "taken"), [("graphs", "graphs"), ("fast", "loop")])
def test_it_runs_again_on_the_path_of_the_file_if_there_still_is_one(
    recorded: str, taken: str, theirs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    monkeypatch.setattr(verify, "_trained", lambda store, cell: {"path": recorded, "precision": "fp32"})
    monkeypatch.setattr("fatbench.runner.start.run", lambda jobs, watch, options: paths.append(options.path))
    verify._run(theirs, [job(theirs, next(iter(theirs.cells())))], RunOptions(), None, lambda words: nullcontext())  # type: ignore[arg-type]
    assert paths == [taken]


def test_a_true_file_and_an_edited_one(results: Path, monkeypatch: Any, tmp_path: Path, run: Any, forks: None) -> None:
    """Run again on the same machine: nothing is apart. An accuracy of 0.9, with outcomes to match, is found out."""
    monkeypatch.chdir(tmp_path)
    code, plan, _ = run("verify", str(results), "--sample", "1", "-n", "--format", "json")
    (planned,) = json.loads(plan)["cells"]
    assert code == 0 and planned["seconds"] > 0
    code, out, err = run("verify", str(results), "--sample", "1", "--format", "json")
    assert code == 0, err
    assert planned["cell"] in err.splitlines()[2]  # said before it trains
    lines = [line.split()[1:3] for line in err.splitlines()]  # after the time of day
    assert [planned["cell"], "starts"] in lines and [planned["cell"], "done"] in lines
    said = json.loads(out)
    assert (said["apart"], said["cells"]) == (0.0, [planned["cell"]])
    assert (said["tolerance"], said["because"]) == (0.0, "same machine, torch and precision")
    assert {one["agreement"] for one in said["numbers"] if one["evaluated"]} == {1.0}
    assert said["agrees"] and said["unverified"] == [] and {one["far"] for one in said["numbers"]} == {0.0}
    assert "train_loss of training" in {one["metric"] for one in said["numbers"]}
    edited = []
    for cell in result_files.cells(results):
        for stage in cell["stages"]:
            for number in stage["numbers"]:
                number[3] = 0.9 if number[2] == "natural" else number[3]
            stage["outcomes"] = stage["outcomes"] if stage["stage"][:7] != "natural" else NINE_OF_TEN
        for stage, digest in result_files.mismatches(cell):
            stage["digest"] = digest
        edited.append(json.dumps(cell))
    file = tmp_path / "edited.jsonl"
    file.write_text("\n".join([results.read_text().splitlines()[0], *edited]) + "\n")
    code, out, _ = run("verify", str(file), "-k", f"cell={said['cells'][0]}")
    assert code == 1
    assert out.startswith("differs: ") and "(tolerance 0: same machine, torch and precision)" in out.splitlines()[0]
    assert f"differs: natural (last) of cell {said['cells'][0]} is 90.00 % there and " in out
    code, _, err = run("verify", str(results), "-k", "cell=WRONG", "-n")
    assert code == 3 and str(results) in err and all(cell["cell"] in err for cell in result_files.cells(results))
    code, _, err = run("verify", "nowhere.jsonl")
    assert (code, err) == (2, "fatbench: nowhere.jsonl: no such file (give one that 'fatbench export' wrote)\n")
