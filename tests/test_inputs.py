"""What answered a number: what differs is named, and nothing is reused, resumed or paired where it does."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crew import machine_of
from PIL import Image
from small import small

from fatbench.errors import MachineError
from fatbench.runner import progress, provenance, start, versions
from fatbench.runner.heartbeat import Heartbeat
from fatbench.runner.jobs import Event, Job, Machine, Turn
from fatbench.runner.stage import demand_same_inputs
from fatbench.runner.worker import work
from fatbench.store import inputs
from fatbench.store.inputs import Inputs
from fatbench.store.schema import RUNS, STAGES
from fatbench.store.stages import Store
from fatbench.suite import files

RUN = {
    "data": {"name": "digits", "fingerprint": "a" * 64}, "auxiliary": {"name": "mnist", "fingerprint": "b" * 64},
    "weights": {"source": "w.safetensors", "digest": "sha256:" + "c" * 64}, "commit": "d" * 40, "dirty": False,
    "precision": "fp32", "path": "loop",
}  # fmt: skip
RECORD = {"model": "e" * 64, "origin": "f" * 64}


def of(run: dict | None = None, record: dict | None = None, origin: str = "cell 0123") -> Inputs:
    return Inputs.of_run({**RUN, **(run or {})}, {**RECORD, **(record or {})}, origin)


@pytest.mark.parametrize(
    ("run", "record", "code", "words"),
    [
        ({"data": {"fingerprint": "1" * 64}}, {}, "data", "other images or labels [aaaaaaaa], now [11111111]"),
        ({"auxiliary": {"fingerprint": "1" * 64}}, {}, "data", "other auxiliary images or labels [bbbbbbbb], now"),
        ({"weights": {"source": "w.safetensors", "digest": "sha256:" + "1" * 64}}, {}, "weights", "other initial"),
        ({}, {"model": "1" * 64}, "model", "another model [eeeeeeee], now [11111111]"),
        ({}, {"origin": "1" * 64}, "origin", "another attacking model of cell 0123 [ffffffff], now [11111111]"),
        ({"plugins": [{"plugin": "m.py", "sha256": "1" * 64, "names": []}]}, {}, "functions", "a plug-in of unknown"),
        ({"commit": "1" * 40}, {}, "code", "another code of fatbench"),
        ({"dirty": True, "diff": "1" * 64}, {}, "code", "another code of fatbench"),
        ({"precision": "bf16"}, {}, "asked", "another precision [fp32], now [bf16]"),
        ({"path": "graphs"}, {}, "asked", "another path [loop], now [graphs]"),
    ],
)
def test_every_input_that_differs_is_named(run: dict, record: dict, code: str, words: str) -> None:
    (reason,) = of().differ(of(run, record))
    assert reason.code == code and reason.words.startswith(words)
    assert reason.decides == (code not in ("code", "asked"))


def test_what_either_side_lacks_is_unknown_and_says_nothing() -> None:
    assert of().differ(of()) == []
    assert Inputs().differ(of()) == of().differ(Inputs()) == []
    assert Inputs.of_run({}).differ(of()) == []
    assert of({"dirty": True}).differ(of()) == []  # uncommitted, and nobody noted what
    assert of(origin="cell 4567").differ(of()) == []  # of another cell


def test_what_began_with_the_model_of_a_changed_cell_has_changed_and_so_on() -> None:
    def began(cell: str, digest: str) -> Inputs:
        return Inputs.of_run({"weights": {"cell": cell, "digest": f"sha256:{digest * 64}"}})

    answered = {("a", "train"): of(), ("b", "train"): began("a", "1"), ("c", "train"): began("b", "2")}
    models = {"cell a": "1" * 64, "cell b": "2" * 64}
    same = {stage: ({"": "a" * 64}, {}) for stage in answered}
    assert inputs.changed(answered, same, models) == {}
    found = inputs.changed(answered, {**same, ("a", "train"): ({"": "3" * 64}, {})}, models)
    assert {stage: reason.code for stage, (reason,) in found.items()} == {
        ("a", "train"): "data", ("b", "train"): "weights", ("c", "train"): "weights",
    }  # fmt: skip
    assert found["c", "train"][0].words == "other initial weights of cell b [22222222], now [changed]"


# --- a suite on data that can be changed in place --------------------------------------------------------------------

SUITE = small(
    name="own", seeds="[0]", data="{name: image_folder, path: own, size: 8}", train="40",
    model="{name: mlp, width: 4}", rounds=2, local="epochs: 1, batch: 20, lr: 0.1, objective: standard",
    evaluate="{batch: 20, attacks: {natural: natural}}",
)  # fmt: skip


def write_data(place: Path, shift: int = 0) -> None:
    """60 noisy images of four classes; `shift` gives the test images other labels."""
    rng = np.random.default_rng(0)
    shutil.rmtree(place / "own", ignore_errors=True)
    for number in range(60):
        part = "train" if number < 40 else "test"
        label = (number + shift * (part == "test")) % 4
        folder = place / "own" / part / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number:02d}.png")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(SUITE)
    write_data(tmp_path)
    return tmp_path


def job() -> Job:
    (one,) = start.jobs_of(files.load("own.yaml").plan())
    return one


def test_numbers_of_other_images_are_changed_as_soon_as_a_run_has_seen_them(place: Path) -> None:
    with Store.open(str(place / "r.db"), create=True) as store:
        store.record_data(start.check_data([job()], place))
        assert work(job(), machine_of(place), store) == "done"
        assert progress.states_of([job()], store) == {job().cell: "done"}
        write_data(place, shift=1)
        assert versions.changed([job()], store) == {}  # nobody has looked
        seen = start.check_data([job()], place)
        changed = versions.changed([job()], store, seen)
        assert sorted(stage.split("-")[0] for stage in changed[job().cell]) == ["natural", "train"]
        store.record_data(seen)
        assert versions.changed([job()], store) == changed
        (row,) = progress.cells_of(files.load("own.yaml").plan(), store)
        assert row.status == "changed" and {reason.code for reason in row.changed["train"]} == {"data"}
        assert progress.cells_left(files.load("own.yaml").plan(), store)(row.cell)[0] == 1.0
        before = store.measurements()
        assert work(job(), machine_of(place), store) == "interrupted" and store.measurements() == before
        assert work(job(), machine_of(place, rerun_changed=True), store) == "done"
        assert versions.changed([job()], store) == {} and store.measurements() != before
        write_data(place)  # as it was: the numbers of now are of the others
        store.record_data(start.check_data([job()], place))
        assert progress.states_of([job()], store) == {job().cell: "changed"}


def test_a_worker_with_other_images_does_not_go_on_with_what_is_done(place: Path) -> None:
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store, stop=lambda: True) == "interrupted"
        write_data(place, shift=1)  # as on another machine: the driver has not seen it
        assert work(job(), machine_of(place), store) == "failed"
        row = store.stages()[job().cell, "train"]
        assert row.round == 1 and "this machine has other images or labels [" in (row.error or "")
        write_data(place)
        assert work(job(), machine_of(place, retry_failed=True), store) == "done"
        write_data(place, shift=1)
        with store.database.writing() as connection:
            connection.execute(STAGES.update().where(STAGES.c.stage != "train").values(status="interrupted", round=0))
        assert work(job(), machine_of(place), store) == "failed"  # its model is of the other images


def test_a_worker_knows_that_the_model_its_cell_began_with_is_another(place: Path) -> None:
    """It sees one job at a time, without that of the cell which trained the weights."""
    origin, mine = "0123456789ab", job()
    mine = replace(mine, spec={**mine.spec, "model": {**mine.spec["model"], "weights": f"cell:{origin}"}})
    with Store.open(str(place / "r.db"), create=True) as store:
        for cell in (origin, mine.cell):
            store.add_cell(cell, mine.spec)
        began = {"weights": {"cell": origin, "source": "model", "digest": "sha256:" + "1" * 64}}
        run = store.claim(mine.cell, "train", suite="own", total=2, provenance=began)
        store.finish(run, round=2)
        for digest in ("1" * 64, "2" * 64):
            run = store.claim(origin, "train", suite="own", total=2, provenance={}, fresh=True)
            record = {"last": {"round": 2}, "sha256": {"model-000002.safetensors": digest}}
            store.finish(run, round=2, record=record)
            changed = versions.changed([mine], store)
            assert [one.code for one in changed.get(mine.cell, {}).get("train", [])] == ["weights"] * (digest[0] == "2")


def test_an_unfinished_stage_is_begun_again_by_other_uncommitted_code(place: Path, monkeypatch) -> None:
    now = {"commit": "1" * 40, "dirty": False}
    monkeypatch.setattr(provenance, "code_version", lambda: now)
    begun: dict[str, int] = {}
    first, same = dict(now), {"dirty": True, "diff": "3" * 64}
    for name, before, edit in (
        ("another commit", {}, {"commit": "2" * 40}),
        ("the same changes", same, same),
        ("other changes", {}, {**same, "diff": "4" * 64}),
    ):
        provenance.produced_by.cache_clear()
        with Store.open(str(place / f"{name}.db"), create=True) as store:
            now.clear()
            now.update({**first, **before})
            assert work(job(), machine_of(place), store, stop=lambda: True) == "interrupted"
            now.update(edit)
            provenance.produced_by.cache_clear()
            events: list[Event] = []
            work(job(), machine_of(place), store, events.append)
            begun[name] = next(event.round for event in events if event.kind == "start")
    provenance.produced_by.cache_clear()
    assert begun == {"another commit": 1, "the same changes": 1, "other changes": 0}


def test_what_is_not_committed_has_a_digest(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "fatbench" / "runner"
    package.mkdir(parents=True)
    (package / "provenance.py").write_text("1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))

    def version() -> dict:
        provenance.code_version.cache_clear()
        return provenance.code_version()

    clean = version()
    assert clean["dirty"] is False and "diff" not in clean
    seen = set()
    for file, text in (("provenance.py", "2\n"), ("provenance.py", "3\n"), ("new.py", "1\n"), ("new.py", "2\n")):
        (package / file).write_text(text)
        assert version()["dirty"] is True
        seen.add(version()["diff"])
    assert len(seen) == 4 and version()["commit"] == clean["commit"]
    provenance.code_version.cache_clear()


# --- as people meet it -----------------------------------------------------------------------------------------------


def test_run_says_what_changed_what_it_costs_and_what_it_keeps(place: Path, run) -> None:
    command = ("run", "suite", "own.yaml", "--jobs", "1", "--device", "cpu", "--data", ".")
    assert run(*command)[0] == 0
    code, _, err = run(*command, "--precision", "bf16")
    assert code == 0
    assert "1 finished cell with precision fp32 is kept: precision bf16 is for what is still to do" in err
    err = run(*command, "-c", "run.attack_precision=bf16")[2]
    assert "1 finished cell with attack precision fp32 is kept: attack precision bf16 is for what is" in err
    write_data(place, shift=1)
    code, _, err = run(*command)
    assert code == 1 and "0 of 1 cells done, 1 changed" in err
    assert "computed with other images or labels [" in err and "--rerun changed computes them again" in err
    for question in (("status", "own.yaml"), ("plan", "suite", "own.yaml")):
        code, out, _ = run(*question)
        assert code == 0 and "other images or labels [" in out, question
    status = json.loads(run("status", "own.yaml", "--format", "json")[1])
    assert status["cells"]["changed"] == 1
    ((cell, reasons),) = status["changed"].items()
    assert cell == job().cell and reasons[0]["code"] == "data"
    code, out, _ = run(*command, "-n", "--rerun", "changed")
    assert "--rerun changed computes 1 cell again (about 1 min on one worker): other images or labels [" in out
    code, _, err = run(*command, "--rerun", "changed")
    assert code == 0 and "--rerun changed computes 1 cell again" in err
    assert run("status", "own.yaml", "--format", "json")[1].count("changed") == 0


def two_files(place: Path, run) -> tuple[str, str]:
    """The same cell on two versions of its images, in a.jsonl and b.jsonl."""
    for name, shift in (("a", 0), ("b", 1)):
        write_data(place, shift)
        with Store.open(f"{name}.db", create=True) as store:
            at = Machine(f"{name}.db", str(place / f"{name}-files"), str(place))
            assert work(job(), at, store) == "done"
        assert run("export", "--db", f"{name}.db", "-o", f"{name}.jsonl")[0] == 0
    return "a.jsonl", "b.jsonl"


def test_images_are_paired_with_themselves_alone(place: Path, run) -> None:
    a, b = two_files(place, run)
    code, out, _ = run("compare", a, b)
    assert code == 0 and "=> not tested: other images or labels\n" in out
    assert "A and B differ in what answered them: other images or labels [" in out and "] and [" in out
    assert "McNemar" not in out and "95 %" not in out
    (one,) = json.loads(run("compare", a, b, "--format", "json")[1])["comparisons"]
    assert one["p"] is None and one["images"] == [] and one["inputs"][0]["code"] == "data"
    (same,) = json.loads(run("compare", a, a, "--format", "json")[1])["comparisons"]
    assert len(same["images"]) == 1 and "inputs" not in same


def test_outcomes_stand_beside_labels_of_their_own_images(place: Path, run) -> None:
    two_files(place, run)  # b's images lie there now
    labels = {}
    for name in ("a", "b"):
        here = ("--db", f"{name}.db", "--data", ".", "--format", "json")
        code, out, err = run("show", "--outcomes", job().cell[:8], *here)
        assert code == 0 and ("no labels: the outcomes are of other images or labels [" in err) == (name == "a")
        labels[name] = [row["label"] for row in json.loads(out)["outcomes"]]
    assert set(labels["a"]) == {None} and set(labels["b"]) == {0, 1, 2, 3}


def test_what_other_images_answered_is_no_repetition(place: Path, run) -> None:
    a, b = two_files(place, run)
    code, out, err = run("import", a, b, "--db", "c.db")
    assert code == 0 and "1 new replicates" in out
    assert f"{job().cell}~1 is no repetition of its cell, they differ in other images or labels [" in err
    assert "1 of their runs differ in other images or labels [" in run("report", "own.yaml", "--db", "c.db")[1]

    def shown(db: str) -> float:
        (row,) = json.loads(run("report", "own.yaml", "--db", db, "--format", "json")[1])["tables"][0]["rows"]
        return row["measured"]["natural"]["mean"]

    assert shown("a.db") != shown("b.db") == shown("c.db")  # the newest
    write_data(place)
    with Store.open("c.db") as store:
        store.record_data(start.check_data([job()], place))
    assert shown("c.db") == shown("a.db")  # the one that the images of now have answered


def test_verify_names_the_cause_and_refuses_a_file_of_two_versions(place: Path, run) -> None:
    a, b = two_files(place, run)  # b's images lie there now
    code, out, _ = run("verify", a, "--sample", "1", "--device", "cpu", "--data", ".")
    assert code == 1 and f"differs: cell {job().cell} there is of other images or labels [" in out
    code, out, _ = run("verify", b, "--sample", "1", "--device", "cpu", "--data", ".")
    assert code == 0 and out.startswith("agrees: ")
    text = (place / "own.yaml").read_text()
    (place / "own.yaml").write_text(text.replace("seeds: [0]", "seeds: [1]"))
    write_data(place)
    with Store.open("b.db") as store:
        assert work(job(), Machine("b.db", str(place / "b-files"), str(place)), store) == "done"
    assert run("export", "--db", "b.db", "-o", "mixed.jsonl")[0] == 0
    code, out, err = run("verify", "mixed.jsonl", "--device", "cpu", "--data", ".")
    assert code == 2 and '2 versions of the data [{"name":"image_folder","path":"own"' in err


def test_evaluations_of_two_models_are_no_row(place: Path) -> None:
    with Store.open("r.db", create=True) as store:
        store.add_cell("c", {"data": {"name": "digits"}})
        for metric, model in (("natural", "1" * 64), ("pgd20", "2" * 64)):
            run = store.claim("c", f"{metric}-01234567@2", suite="own", total=1, provenance={})
            store.finish(run, record={"model": model})
        expected = ["2 models in round 2 of cell c: [11111111] in natural-01234567@2, [22222222] in pgd20-01234567@2"]
        assert inputs.find_mixtures(store.database, lambda spec: {}) == expected


def test_images_of_another_cell_are_not_shown_as_a_cell_s_own(tmp_path: Path) -> None:
    import torch

    from fatbench.report.figures import artifacts
    from fatbench.runner import checkpoints

    mine, other = (tmp_path / cell / "artifacts" / "round-000002.safetensors" for cell in ("aaaa", "bbbb"))
    digest = checkpoints.save_artifacts(mine, {"image": torch.zeros(1)}, "aaaa", 2)
    checkpoints.save_artifacts(other, {"image": torch.ones(1)}, "bbbb", 2)
    assert artifacts.load(mine)["image"] == artifacts.load(mine, digest)["image"] == 0
    mine.write_bytes(other.read_bytes())
    with pytest.raises(MachineError, match="holds what cell bbbb kept of round 2, not its own cell's"):
        artifacts.load(mine)
    with pytest.raises(MachineError, match="not the file that was written: its SHA-256 is"):
        artifacts.load(mine, digest)


def test_check_reads_the_files_that_the_database_names_and_a_page_of_a_deleted_cell_goes(place: Path, run) -> None:
    run("run", "suite", "own.yaml", "--jobs", "1", "--device", "cpu", "--data", ".")
    (place / "site").mkdir()
    (place / "site" / "mine.html").write_text("<p>not of fatbench</p>")
    assert run("site", "own.yaml", "-o", "site")[0] == 0
    (page,) = [file for file in (place / "site").glob("*.html") if file.name not in ("index.html", "mine.html")]
    page.rename(place / "site" / "gone-paper.html")
    assert run("site", "own.yaml", "-o", "site")[0] == 0
    assert {file.name for file in (place / "site").glob("*.html")} == {"index.html", "mine.html", page.name}
    assert run("check")[0] == 0
    (model,) = Path("results").rglob("model-*.safetensors")
    model.write_bytes(model.read_bytes()[:-4] + b"abcd")
    code, _, err = run("check")
    assert code == 4 and f"cell {job().cell}: {model.name} is not the file that was written" in err
    model.unlink()
    assert run("check")[0] == 0


def test_a_run_of_its_own_is_no_reason(place: Path) -> None:
    """A first attempt that left nothing may have had other data."""
    with Store.open(str(place / "r.db"), create=True) as store:
        store.add_cell(job().cell, job().spec)
        run = store.claim(job().cell, "train", suite="own", total=2, provenance={"data": {"fingerprint": "a" * 64}})
        store.release(run)
        assert work(job(), machine_of(place), store) == "done"


def test_weights_that_differ_end_the_stage_before_anything_is_written(place: Path) -> None:
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store, stop=lambda: True) == "interrupted"
        first = store.runs()[0]["id"]
        turn = Turn(job(), store, place, lambda event: None, lambda: False, Heartbeat())
        with store.database.writing() as connection:
            extra = json.dumps({"weights": {"source": "timm's vit", "digest": "sha256:" + "1" * 64}})
            connection.execute(RUNS.update().where(RUNS.c.id == first).values(extra=extra))
        other = {"weights": {"source": "timm's vit", "digest": "sha256:" + "2" * 64}}
        with pytest.raises(MachineError, match=r"other initial weights of timm's vit .11111111., now .22222222."):
            demand_same_inputs(turn, first + 1, "train", other)
        demand_same_inputs(turn, first + 1, "train", {"weights": {**other["weights"], "digest": "sha256:" + "1" * 64}})
        assert store.runs()[0]["status"] == "interrupted"
