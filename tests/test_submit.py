"""`fatbench submit`: an honest file, a forged one, one of another torch, and what else is refused."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from sqlalchemy import select, update

import fatbench
from fatbench.cli import app, verify
from fatbench.errors import NothingMatched
from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import jsonl
from fatbench.store.export_lines import seal
from fatbench.store.schema import OUTCOME_CHUNKS, ROUND_METRICS, RUNS, STAGES, VALUES
from fatbench.store.stages import Store
from fatbench.suite import files

ROOT = Path(__file__).parent.parent
SUITE = """
name: tiny
title: A cell that takes a second and learns
seeds: [1]
base:
  data: {name: digits}
  train: 800
  test: 60
  partition: {name: iid, clients: 2}
  model: {name: mlp}
  algorithm: {name: fedavg, rounds: 2, aggregator: samples,
    local: {epochs: 2, batch: 16, lr: 0.1, momentum: 0.9, objective: standard}}
axes: {method: {FedAvg: {}}}
evaluate: {checkpoints: [last], attacks: {natural: natural}}
presets: {paper: {}}
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submit")
    (folder / "tiny.yaml").write_text(SUITE)
    machine = Machine(db=str(folder / "r.db"), files=str(folder / "files"), data=str(folder))
    with Store.open(machine.db, create=True) as store:
        for one in jobs_of(files.load(str(folder / "tiny.yaml")).plan("paper")):
            assert work(one, machine, store) == "done"
        with store.database.writing() as connection:
            connection.execute(update(RUNS).values(dirty=False))  # of a checkout that somebody works in
            for cell in store.cells():
                seal(connection, cell, [name for (id, name) in store.stages() if id == cell])
        jsonl.export(store, folder / "results.jsonl")
    return folder / "results.jsonl"


Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)

    def call(file: Path) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fatbench", "submit", str(file), "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return (ended.value.code or 0, *capfd.readouterr())

    return call


def changed(honest: Path, place: Path, change: Callable[[Any], None], sealed: bool = True) -> Path:
    """The file after a change in its database, with digests made anew, as somebody who knows the program would."""
    with Store.open(str(place / "changed.db"), create=True) as store:
        jsonl.import_(store, honest)
        with store.database.writing() as connection:
            change(connection)
            if sealed:
                for cell in store.cells():
                    seal(connection, cell, [name for (id, name) in store.stages() if id == cell])
        jsonl.export(store, place / "changed.jsonl")
    return place / "changed.jsonl"


def test_an_honest_file_is_run_again_and_gets_a_record_and_a_text(honest: Path, submit: Call, tmp_path: Path) -> None:
    code, out, err = submit(honest)
    assert code == 0, out + err
    assert "at most 0 apart: within the tolerance of 0 (same machine, torch and precision)" in out
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("results/submitted/*.json"))
    assert record["cells"] == 1 and record["suites"] == ["tiny, preset paper"] and record["verified"]["apart"] == 0
    (text,) = tmp_path.glob("results/submitted/*.md")
    assert text.read_text().startswith("# Results: tiny, preset paper\n") and record["sha256"] in text.read_text()
    (copy,) = tmp_path.glob("results/submitted/*.jsonl")
    assert copy.read_bytes() == honest.read_bytes()


def test_a_full_disk_leaves_no_part_of_a_submission(
    honest: Path, submit: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the three files finds no room: one line, exit code 5, none of them."""
    monkeypatch.setattr(verify, "again", lambda *_: ([], 0.0, "not run again here"))
    sync = os.fsync

    def full(handle: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").partition(".md.")[1]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = submit(honest)
    assert code == 5 and err == "fatbench: -o results/submitted: the disk is full; nothing was changed\n"
    assert list(tmp_path.glob("results/submitted/*")) == list(tmp_path.glob("results/submitted/.*")) == []


def test_a_number_that_was_changed_in_the_file_is_refused_by_its_outcomes(
    honest: Path, submit: Call, tmp_path: Path
) -> None:
    lines = honest.read_text().splitlines()
    line = json.loads(lines[1])
    stage = next(stage for stage in line["stages"] if stage["stage"].startswith("natural"))
    for number in stage["numbers"]:
        if number[2] == "natural":
            number[3] = 1.0
    (tmp_path / "forged.jsonl").write_text("\n".join([lines[0], json.dumps(line), *lines[2:], ""]))
    code, _, err = submit(tmp_path / "forged.jsonl")
    assert code == 2 and "natural is 1.0, its outcomes say" in err and not (tmp_path / "results").exists()


def test_a_forgery_with_new_digests_and_outcomes_is_found_by_running_it_again(
    honest: Path, submit: Call, tmp_path: Path
) -> None:
    def forge(connection: Any) -> None:
        of = select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "natural", ROUND_METRICS.c.stage != "train")
        connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(of)).values(value=1.0))
        for row in connection.execute(OUTCOME_CHUNKS.select()).all():
            whole = bytes([0xFF] * (row.n // 8) + ([0xFF00 >> row.n % 8 & 0xFF] if row.n % 8 else []))
            connection.execute(update(OUTCOME_CHUNKS).where(OUTCOME_CHUNKS.c.stage == row.stage).values(bits=whole))

    code, out, _ = submit(changed(honest, tmp_path, forge))
    assert code == 1 and "beyond the tolerance of 0" in out and "the sample differs: nothing was written" in out
    assert not (tmp_path / "results").exists()


def test_results_of_another_torch_are_allowed_two_points_and_the_record_says_so(
    honest: Path, submit: Call, tmp_path: Path
) -> None:
    def older(connection: Any) -> None:
        for row in connection.execute(RUNS.select()).all():
            versions = row.versions if isinstance(row.versions, dict) else json.loads(row.versions)
            said = {**versions, "torch": "2.11.0"}
            value = said if isinstance(row.versions, dict) else json.dumps(said)
            connection.execute(update(RUNS).where(RUNS.c.id == row.id).values(versions=value))

    code, out, err = submit(changed(honest, tmp_path, older))
    assert code == 0, out + err
    assert "within the tolerance of 0.02 (torch: 2.11.0 there, " in out
    (record,) = (json.loads(file.read_text()) for file in tmp_path.glob("results/submitted/*.json"))
    assert record["torch"] == ["2.11.0"] and record["verified"]["tolerance"] == 0.02


def test_names_of_a_file_are_text_in_a_pull_request(honest: Path, submit: Call, tmp_path: Path) -> None:
    name = "a\n# b [c](https://d) <img>"
    code, out, err = submit(changed(honest, tmp_path, lambda c: c.execute(update(RUNS).values(suite=name))))
    assert code == 0, out + err
    (text,) = tmp_path.glob("results/submitted/*.md")
    said = r"# Results: a \# b [c]\(https://d) \<img\>, preset paper"
    assert text.read_text().splitlines()[0] == said


def test_results_without_outcomes_are_refused(honest: Path, submit: Call, tmp_path: Path) -> None:
    """Whatever else is left out with them."""

    def bare(connection: Any) -> None:
        connection.execute(OUTCOME_CHUNKS.delete())
        connection.execute(update(STAGES).values(settings=None))

    code, _, err = submit(changed(honest, tmp_path, bare))
    assert code == 2 and "has no outcome of each image; nothing was written" in err


def test_models_that_were_trained_elsewhere_are_not_run_again_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    fatbench.evaluate(net, dataset="digits", attacks=["natural"], n=20, db="a.db", device="cpu")
    with (
        Store.open("a.db") as store,
        pytest.raises(NothingMatched, match="these are models that were trained elsewhere"),
    ):
        verify.choose(store, 1, None)


def test_code_that_was_modified_is_refused_before_anything_runs(honest: Path, submit: Call, tmp_path: Path) -> None:
    code, _, err = submit(changed(honest, tmp_path, lambda c: c.execute(update(RUNS).values(dirty=True))))
    assert code == 2 and "modified code" in err and err.count("\n") == 1


def test_the_workflow_runs_the_command_on_what_a_pull_request_adds() -> None:
    text = (ROOT / ".github" / "workflows" / "submission.yml").read_text()
    found = YAML(typ="safe").load(text)["jobs"]["submission"]["steps"]
    assert 'fatbench submit "$file" --sample 1 --seed "$SEED"' in found[-1]["run"]
    assert "${{" not in found[-1]["run"]  # what a stranger writes reaches the shell as a variable only
