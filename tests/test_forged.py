"""`fatbench verify` of an honest file, of forged ones, of one of another torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import result_files
import torch
from ruamel.yaml import YAML
from small import small
from sqlalchemy import select, update

import fatbench
from fatbench.api import verifying
from fatbench.cli import app
from fatbench.errors import FatbenchError, NothingMatched
from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import integrity, jsonl
from fatbench.store.cell_records import seal
from fatbench.store.schema import OUTCOME_CHUNKS, ROUND_METRICS, RUNS, STAGES, VALUES
from fatbench.store.stages import Store
from fatbench.suite import files
from fatbench.suite.asked import contradiction, identity

ROOT = Path(__file__).parent.parent
SUITE = small(  # learns; asks for more test images than there are
    name="tiny", seeds="[1]", train="800", test="60", model="mlp", monitor="natural", rounds=2,
    local="epochs: 2, batch: 16, lr: 0.1, momentum: 0.9, objective: standard",
    evaluate="{checkpoints: [last], n: 1000001, attacks: {natural: natural}}",
)  # fmt: skip


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
                for name in (name for (id, name) in store.stages() if id == cell):
                    seal(connection, cell, name)
        jsonl.export(store, folder / "results.jsonl")
    return folder / "results.jsonl"


Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def verify_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fatbench.api.verifying.estimate_here", lambda jobs: lambda job: 1.0)  # takes 10 s

    def call(file: Path) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fatbench", "verify", str(file), "--device", "cpu"])
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
                    for name in (name for (id, name) in store.stages() if id == cell):
                        seal(connection, cell, name)
        jsonl.export(store, place / "changed.jsonl")
    return place / "changed.jsonl"


def test_an_honest_file_agrees(honest: Path, verify_: Call, tmp_path: Path) -> None:
    code, out, err = verify_(honest)
    assert code == 0, out + err
    assert out.startswith("agrees: ") and "(tolerance 0: same machine, torch and precision)" in out.splitlines()[0]


def test_a_number_that_was_changed_in_the_file_is_refused_by_its_outcomes(
    honest: Path, verify_: Call, tmp_path: Path
) -> None:
    lines = honest.read_text().splitlines()
    line = json.loads(result_files.rows(lines[1]))
    stage = next(stage for stage in line["stages"] if stage["stage"].startswith("natural"))
    for number in stage["numbers"]:
        if number[2] == "natural":
            number[3] = 1.0
    (tmp_path / "forged.jsonl").write_text("\n".join([lines[0], json.dumps(line), *lines[2:], ""]))
    code, _, err = verify_(tmp_path / "forged.jsonl")
    assert code == 2 and "natural is 1.0, its outcomes say" in err


def test_a_forgery_with_new_digests_and_outcomes_is_found_by_running_it_again(
    honest: Path, verify_: Call, tmp_path: Path
) -> None:
    def forge(connection: Any) -> None:
        of = select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "natural", ROUND_METRICS.c.stage != "train")
        connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(of)).values(value=1.0))
        for row in connection.execute(OUTCOME_CHUNKS.select()).all():
            whole = bytes([0xFF] * (row.n // 8) + ([0xFF00 >> row.n % 8 & 0xFF] if row.n % 8 else []))
            connection.execute(update(OUTCOME_CHUNKS).where(OUTCOME_CHUNKS.c.stage == row.stage).values(bits=whole))

    code, out, _ = verify_(changed(honest, tmp_path, forge))
    assert code == 1 and out.startswith("differs: ")
    assert "natural (last) of cell" in out and "is 100.00 % there and" in out


def of_runs(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any], None]:
    """Change columns of every run; JSON columns are given as data."""

    def applied(connection: Any) -> None:
        for row in connection.execute(RUNS.select()).all():
            new = change({"versions": json.loads(row.versions), "extra": json.loads(row.extra)})
            values = {key: json.dumps(value) if key in ("versions", "extra") else value for key, value in new.items()}
            connection.execute(update(RUNS).where(RUNS.c.id == row.id).values(**values))

    return applied


def elsewhere(row: dict[str, Any]) -> dict[str, Any]:
    return {"versions": {**row["versions"], "torch": "2.11.0"}, "device": "cpu (Intel Xeon)"}


def test_results_that_say_another_machine_are_not_believed_where_training_gives_the_same_bits(
    honest: Path, verify_: Call, tmp_path: Path
) -> None:
    code, out, err = verify_(changed(honest, tmp_path, of_runs(elsewhere)))
    assert code == 0, out + err
    assert "(tolerance 0: training gave the same bits here)" in out.splitlines()[0]


def one_image_more(connection: Any) -> None:
    """An evaluation whose first wrong image is right: 1.67 points."""
    row = connection.execute(OUTCOME_CHUNKS.select()).one()
    bits = f"{int.from_bytes(row.bits):0{8 * len(row.bits)}b}"
    assert "0" in bits[: row.n]
    better = int(bits[: row.n].replace("0", "1", 1) + bits[row.n :], 2).to_bytes(len(row.bits))
    connection.execute(OUTCOME_CHUNKS.update().values(bits=better))
    of = select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "natural", ROUND_METRICS.c.stage != "train")
    right = (bits[: row.n].count("1") + 1) / row.n
    connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(of)).values(value=right))


def test_a_file_does_not_choose_its_tolerance_by_the_name_of_a_cpu(honest: Path, verify_: Call, tmp_path: Path) -> None:
    """Less than two points more, and "Intel Xeon" in every run."""
    code, out, _ = verify_(changed(honest, tmp_path, lambda c: (of_runs(elsewhere)(c), one_image_more(c))))
    assert code == 1 and "(tolerance 0: training gave the same bits here)" in out.splitlines()[0]
    assert "differs: natural (last) of cell" in out


def test_a_training_number_counts(honest: Path, verify_: Call, tmp_path: Path) -> None:
    """Tables and figures are made of them: the loss of the first round, a thousandth less."""

    def forge(connection: Any) -> None:
        of = select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "train_loss", ROUND_METRICS.c.round == 1)
        connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(of)).values(value=VALUES.c.value * 0.999))

    code, out, _ = verify_(changed(honest, tmp_path, forge))
    assert code == 1 and "differs: train_loss of training of cell" in out


def test_a_training_accuracy_that_the_evaluation_contradicts_is_refused(
    honest: Path, verify_: Call, tmp_path: Path
) -> None:
    def forge(connection: Any) -> None:
        of = select(ROUND_METRICS.c.id).where(ROUND_METRICS.c.metric == "natural", ROUND_METRICS.c.stage == "train")
        connection.execute(update(VALUES).where(VALUES.c.round_metric.in_(of)).values(value=0.75))

    code, _, err = verify_(changed(honest, tmp_path, forge))
    assert code == 2 and "train: natural of round 2 is 0.75, natural-" in err and "of the same 60 images" in err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "pgd", "eps": "1/25500000", "step": "1/25500000", "steps": 20}, "do not give the hash in its name"),
        ({"name": "natural", "origin": "cell 0a1b2c3d4e5f"}, "do not give the hash in its name"),
    ],
)
def test_an_attack_that_is_not_what_its_stage_is_named_after_is_refused(
    honest: Path, verify_: Call, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    """A weak attack under the name of the suite's; a key that took the number out of the comparison."""

    def forge(connection: Any) -> None:
        connection.execute(update(STAGES).where(STAGES.c.stage != "train").values(settings=json.dumps(settings)))

    file = changed(honest, tmp_path, forge)
    code, _, err = verify_(file)
    assert code == 2 and said in err
    integrity.check(str(honest.with_name("r.db")), identity, contradiction=contradiction)
    with Store.open("new.db", create=True) as store, pytest.raises(FatbenchError, match=said):
        jsonl.check(store, file, identify=identity, contradiction=contradiction)
    with pytest.raises(FatbenchError, match=said):
        integrity.check(str(tmp_path / "changed.db"), identity, contradiction=contradiction)


def test_results_without_outcomes_are_refused(honest: Path, verify_: Call, tmp_path: Path) -> None:
    """Whatever else is left out with them."""

    def bare(connection: Any) -> None:
        connection.execute(OUTCOME_CHUNKS.delete())
        connection.execute(update(STAGES).values(settings=None))

    code, out, _ = verify_(changed(honest, tmp_path, bare))
    assert code == 1 and out.startswith("not verified: ")


def test_models_that_were_trained_elsewhere_are_not_run_again_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    fatbench.evaluate(net, dataset="digits", attacks=["natural"], n=20, db="a.db", device="cpu")
    with Store.open("a.db") as store, pytest.raises(NothingMatched, match="these models were trained elsewhere"):
        verifying.choose(store, 1, None)


def test_the_workflow_runs_the_command_on_what_a_pull_request_adds() -> None:
    text = (ROOT / ".github" / "workflows" / "submission.yml").read_text()
    found = YAML(typ="safe").load(text)["jobs"]["submission"]["steps"]
    assert 'fatbench check "$file" && fatbench verify "$file" --sample 1 --sample-seed "$SEED"' in found[-1]["run"]
    assert "${{" not in found[-1]["run"]  # what a stranger writes reaches the shell as a variable only
