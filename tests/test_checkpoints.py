"""Checkpoints that cannot be silently wrong: damage of every kind, and the same numbers after it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crew import recovering
from hypothesis import given
from hypothesis import strategies as st
from test_resume import SUITE, machine, numbers, outcomes

from fatbench.engine.rounds import State
from fatbench.errors import MachineError, SpecError, Unavailable
from fatbench.report.figures import artifacts
from fatbench.runner import checkpoints
from fatbench.runner.checkpoints import (
    DamagedCheckpoint,
    demand_tensors,
    flatten,
    load_model,
    load_state,
    save_model,
    save_state,
    unflatten,
)
from fatbench.runner.jobs import Job, Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import cleanup, jsonl
from fatbench.store.schema import STAGES
from fatbench.store.stages import Store, dumps
from fatbench.suite import cells, files

# --- files --------------------------------------------------------------------------------------------------------

STATE = State(
    7,
    {"layer.weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(3)},
    {"c/layer.weight": torch.ones(2), "adam": {"m": {"layer.weight": torch.zeros(3)}, "empty": {}}},  # type: ignore
    {4: {"c": {"layer.weight": torch.full((1,), 2.0)}}, 1: {}},  # type: ignore[dict-item]
)


def same(a: object, b: object) -> bool:
    """Whether two trees have the same names in the same places, and the same tensors."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def one_line(call: Callable[[], object], kind: type[MachineError] = DamagedCheckpoint) -> str:
    with pytest.raises(MachineError) as caught:
        call()
    assert type(caught.value) is kind and len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_state_comes_back_as_it_was_and_its_digest_is_that_of_the_bytes_on_disk(tmp_path: Path) -> None:
    file = tmp_path / "files" / "cell" / "state"
    digest = save_state(file, STATE, "mine")
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert [entry.name for entry in file.parent.iterdir()] == ["state"]  # the temporary name is gone
    found = load_state(file, "cpu", digest, "mine", 7)
    assert found.round == 7
    assert same(found.model, STATE.model) and same(found.server, STATE.server) and same(found.clients, STATE.clients)
    assert [*found.model] == [*STATE.model]  # what takes the last two tensors by place takes the same ones
    mixed = State(1, {"z": torch.zeros(1), "a": torch.ones(2)}, {"own": {"b": torch.ones(1), "z": torch.ones(1)}})
    save_state(file, mixed)
    assert [[*load_state(file, "cpu").model], [*load_state(file, "cpu").server["own"]]] == [["z", "a"], ["z", "b"]]
    assert save_state(file, STATE, "mine") == digest  # the same state, the same bytes
    assert save_state(file, replace(STATE, round=8), "mine") != digest
    elsewhere = load_state(file, "meta", None, "mine", 8)  # a device that every machine has, beside the CPU
    assert elsewhere.model["steps"].is_meta and elsewhere.server["adam"]["m"]["layer.weight"].is_meta


def test_a_model_comes_back_with_what_clients_have_of_their_own(tmp_path: Path) -> None:
    file, own = tmp_path / "model", {3: {"layer.weight": torch.zeros(2)}}
    digest = save_model(file, STATE.model, own, cell="mine", round="2", spec="{}")
    model, found, header = load_model(file, "cpu", digest, "mine", 2)
    assert same(model, STATE.model) and same(found, own)
    assert header == {"cell": "mine", "round": "2", "spec": "{}"}
    assert "not the file that was written" in one_line(lambda: load_model(file, "cpu", "0" * 64, "mine", 2))
    model, found, _ = load_model(file, "meta")
    assert model["steps"].is_meta and found[3]["layer.weight"].is_meta
    odd = {"own/x/y": torch.zeros(1)}
    save_model(file, odd, {}, cell="mine", round="2")
    assert "damaged, or not a model of fatbench" in one_line(lambda: load_model(file, "cpu"))


def test_what_a_round_kept_beside_its_numbers_comes_back_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "c" / "artifacts" / "round-000001.safetensors"
    kept = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3)}
    assert checkpoints.save_artifacts(file, kept, "c", 1) == hashlib.sha256(file.read_bytes()).hexdigest()
    found = artifacts.load(file)
    assert {name: (value.dtype, value.tolist()) for name, value in found.items()} == {
        "a": (np.float32, [[0, 3], [1, 4], [2, 5]]), "b": (np.int64, 3)
    }  # fmt: skip


def test_files_have_names_and_those_that_nobody_names_are_swept(tmp_path: Path) -> None:
    """So wide that names of up to a million rounds are in the order of the rounds."""
    kept, other = checkpoints.model_file(7), checkpoints.clients_file(12)
    assert (kept, other) == ("model-000007.safetensors", "clients-000012.safetensors")
    gone = [other, f"{kept}.4711.tmp", "state-000001.safetensors"]
    stays = [kept, "log.txt", "artifacts"]
    (tmp_path / "artifacts").mkdir()
    for name in (*gone, *stays[:2], "artifacts/round-000001.safetensors"):
        (tmp_path / name).write_text(name)
    checkpoints.sweep(tmp_path, (name for name in (kept, "state-000009.safetensors")))
    assert {file.name for file in tmp_path.iterdir()} == {*stays}
    assert [file.name for file in (tmp_path / "artifacts").iterdir()] == ["round-000001.safetensors"]
    checkpoints.sweep(tmp_path / "nothing", [kept])
    checkpoints.sweep(tmp_path, [])
    assert not (tmp_path / kept).exists()


NAMES = st.text("ab/~.", min_size=1, max_size=4)
LEAVES = st.integers(0, 3).map(lambda n: torch.arange(n))
TREES = st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3))


@given(st.dictionaries(NAMES, TREES, max_size=3))
def test_any_tree_comes_back(tree: dict) -> None:
    assert same(unflatten(flatten(tree)), tree)


def test_paths_of_nested_names() -> None:
    """By hand: names are joined by /, a / in a name is ~1, a ~ is ~0, an empty dictionary is a path that ends in /."""
    a, b, c = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    flat = flatten({"model": {"w": a}, "c/w": b, "x~1": {"y": {}, "z": c}})
    assert {path: value.numel() for path, value in flat.items()} == {"model/w": 1, "c~1w": 1, "x~01/y/": 0, "x~01/z": 1}
    with pytest.raises(ValueError, match="'w/x' leads through a tensor"):
        unflatten({"w": a, "w/x": b})
    with pytest.raises(ValueError, match="has no name"):
        flatten({"model": {"": a}})


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    """With the digest every flip is found; without it, a file loads or is said to be damaged, never anything else."""
    file = tmp_path / "state"
    digest = save_state(file, STATE, "mine")
    whole, refused = file.read_bytes(), 0
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert "not the file that was written: its SHA-256 is " in one_line(lambda: load_state(file, "cpu", digest))
        assert "not the file that was written" in one_line(lambda: checkpoints.check(file, digest))
        try:
            load_state(file, "cpu", None, "mine", 7)
        except DamagedCheckpoint:
            refused += 1
    assert refused > 100  # most of the header
    file.write_bytes(whole)
    checkpoints.check(file, digest)


def safetensors(metadata: object) -> bytes:
    """A file without tensors that has this metadata."""
    header = json.dumps({"__metadata__": metadata} if metadata is not None else {}).encode()
    return len(header).to_bytes(8, "little") + header


OURS = ("{", "[1]", '{"cell": "mine"}', '{"round": 3}', '{"cell": "mine", "round": "two"}',
        '{"cell": "mine", "round": null}')  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x" * 7, b"\xff" * 100, (2).to_bytes(8, "little") + b"{"),
        safetensors(None),  # a KeyError of ours
        safetensors({"other": "{}"}),
        *(safetensors({"fatbench": text}) for text in OURS),
    ],
)
def test_a_header_that_cannot_be_read_is_damage(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    for load in (load_state, load_model):
        said = one_line(lambda: load(file, "cpu"))  # noqa: B023
        assert re.match(rf"{re.escape(str(file))}: damaged, or not a \w+ of fatbench \(\w+(Error|Exception): ", said)


def test_another_cell_another_round_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "file"
    states = file, "cpu", save_state(file, STATE, "mine")
    assert one_line(lambda: load_state(*states, "yours", 7)) == f"{file}: is of cell mine, not of yours"
    assert one_line(lambda: load_state(*states, "mine", 8)) == f"{file}: is of round 7, not of 8"
    models = file, "cpu", save_model(file, STATE.model, {}, cell="mine", round="2")
    assert one_line(lambda: load_model(*models, "yours", 2)) == f"{file}: is of cell mine, not of yours"
    assert one_line(lambda: load_model(*models, "mine", 1)) == f"{file}: is of round 2, not of 1"
    assert "not a checkpoint of fatbench" in one_line(lambda: load_state(*models, "mine", 2))


def test_a_file_that_is_gone_is_damage_and_one_that_may_not_be_read_is_not(tmp_path: Path, monkeypatch) -> None:
    assert one_line(lambda: load_state(tmp_path / "no" / "file", "cpu")) == f"{tmp_path}/no/file: no such checkpoint"
    assert one_line(lambda: load_model(tmp_path, "cpu")) == f"{tmp_path}: cannot be read (Is a directory)"
    for number, kind in ((errno.EIO, DamagedCheckpoint), (errno.EACCES, MachineError), (errno.EMFILE, MachineError)):

        def refuse(self: Path, number: int = number) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        assert one_line(lambda: load_state(tmp_path / "file", "cpu"), kind) == (
            f"{tmp_path / 'file'}: cannot be read ({os.strerror(number)})"
        )


def test_a_file_gets_its_name_when_all_of_it_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes reach the disk, then it gets the name, then the folder reaches it; until then the old file is whole."""
    file, seen = tmp_path / "state", []
    save_state(file, STATE, "mine")
    old, fsync, rename = file.read_bytes(), os.fsync, os.replace

    def look(what: str) -> None:
        seen.append((what, "old" if file.read_bytes() == old else "new"))

    def synced(handle: int) -> None:
        look("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "bytes")
        fsync(handle)

    def renamed(before: Path, after: Path) -> None:
        look("name")
        rename(before, after)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save_state(file, replace(STATE, round=8), "mine")
    assert seen == [("bytes", "old"), ("name", "old"), ("folder", "new")]

    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    new = file.read_bytes()
    for number, reason in ((errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, None)):
        monkeypatch.setattr(os, "fsync", lambda handle, number=number: fail(number))
        said = one_line(lambda: save_state(file, STATE, "mine"), Unavailable)
        assert said == f"cannot write the checkpoint {file}: {reason or os.strerror(number)}"
        assert file.read_bytes() == new and [*tmp_path.iterdir()] == [file]
    no_folder = file / "state"
    said = one_line(lambda: save_state(no_folder, STATE, "mine"), Unavailable)
    assert said.startswith(f"cannot write the checkpoint {no_folder}: ") and file.read_bytes() == new


# --- cells --------------------------------------------------------------------------------------------------------

ROUNDS = [1, 2, 3]
LEARNS = {  # the best round on validation, the best on test images and the last one are three
    "model: {name: nin, width: 4, init: he}": "model: {name: mcmahan_cnn, width: 8}",
    "train: 80": "train: 120",
    "skew: 2": "skew: 5",
    "lr: 0.05": "lr: 0.3",
    "eps: 8/255": "eps: 1/255",
    "step: 4/255": "step: 1/255",
}


def job_of(folder: Path, seed: int) -> Job:
    text = SUITE
    for old, new in {**LEARNS, "seeds: [3]": f"seeds: [{seed}]"}.items():
        assert old in text
        text = text.replace(old, new)
    file = folder / "crash.yaml"
    file.write_text(text)
    return jobs_of(files.load(str(file)).plan())[0]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("suite"), 3)


@pytest.fixture(scope="module")
def undisturbed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    place = machine(tmp_path_factory.mktemp("undisturbed"))
    assert run(job, place) == ("done", ROUNDS)
    natural = {row[2]: row[5] for row in numbers(place) if row[1].startswith("natural") and row[4] == "natural"}
    assert natural.keys() == {1, 2, 3} and len({*natural.values()}) == 3  # it matters which model is attacked
    return place


def copied(place: Machine, folder: Path) -> Machine:
    """The database and the files of a place in another folder."""
    shutil.copytree(Path(place.db).parent, folder, dirs_exist_ok=True)
    return machine(folder)


@pytest.fixture(scope="module")
def resumable(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Machine]:
    """A copy of the cell as it is after an interruption in training, two rounds of three done."""
    place = machine(tmp_path_factory.mktemp("resumable"))
    assert run(job, place, rounds=2) == ("interrupted", [1, 2])
    return lambda folder: copied(place, folder)


@pytest.fixture(scope="module")
def unevaluated(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Machine]:
    """A copy of the cell as it is after an interruption in its first attack, one chunk of three done."""
    place = machine(tmp_path_factory.mktemp("unevaluated"))
    assert run(job, place, chunks=1) == ("interrupted", ROUNDS)
    return lambda folder: copied(place, folder)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Files of another cell: its state after round 2, or its model."""
    folder = tmp_path_factory.mktemp("stranger")
    other, stopped, whole = job_of(folder, 4), machine(folder / "a"), machine(folder / "b")
    assert run(other, stopped, rounds=2) == ("interrupted", [1, 2])
    assert run(other, whole) == ("done", ROUNDS)
    return lambda name: Path((stopped if name.startswith("state") else whole).files, other.cell, name)


def run(job: Job, place: Machine, rounds: int = 0, chunks: int = 0) -> tuple[str, list[int]]:
    """(outcome, the rounds that were trained) of a turn at a cell, stopped after so many rounds or chunks."""
    trained, asked = [], 0

    def notify(event) -> None:
        assert event.cell == job.cell
        if (event.stage, event.kind) == ("train", "progress"):
            trained.append(event.round)
        elif event.stage == "train" and event.kind in ("done", "interrupted"):
            assert (event.round, event.total) == (trained[-1], ROUNDS[-1])

    def stop() -> bool:
        nonlocal asked
        asked += len(trained) in (0, 3)
        return 0 < rounds <= len(trained) or 0 < chunks <= asked

    with Store.open(place.db, create=True) as store:
        return work(job, place, store, notify, stop), trained


def flip(file: Path, place: int = -3, bits: bytes = b"\x10") -> None:
    """One bit of the last tensor, or these bits from a place on."""
    content = bytearray(file.read_bytes())
    for at, byte in enumerate(bits, place):
        content[at] ^= byte
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "a damaged header": lambda file: flip(file, 0, b"\xff" * 8),  # a length that no file has
    "half a file": lambda file: os.truncate(file, file.stat().st_size // 2),
    "no file": Path.unlink,
    "no folder": lambda file: shutil.rmtree(file.parent),
}
WORDS = {"no file": "no such checkpoint", "no folder": "no such checkpoint"}


def log(job: Job, place: Machine) -> str:
    return Path(place.files, job.cell, "log.txt").read_text()


def assert_as_undisturbed(job: Job, place: Machine, undisturbed: Machine) -> None:
    """The same numbers and outcomes, every stage done, the same files, none left over."""
    assert numbers(place) == numbers(undisturbed)
    assert outcomes(place, job) == outcomes(undisturbed, job)
    with Store.open(place.db) as store:
        assert {row.status for row in store.stages([job.cell]).values()} == {"done"}
    models = [
        {file.name: file.read_bytes() for file in Path(at.files, job.cell).glob("*.safetensors*")}
        for at in (place, undisturbed)
    ]
    assert models[0] == models[1]


def test_the_database_has_the_digest_of_every_file_that_counts(job, resumable, undisturbed, tmp_path) -> None:
    def record(place: Machine) -> dict:
        with Store.open(place.db) as store:
            return store.stages([job.cell])[job.cell, "train"].record

    def digests(place: Machine) -> dict[str, str]:
        files = Path(place.files, job.cell).glob("*.safetensors")
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    place = resumable(tmp_path)
    assert "state-000002.safetensors" in digests(place)
    assert record(place)["sha256"] == digests(place)
    assert record(undisturbed)["sha256"] == digests(undisturbed)
    assert "model-000003.safetensors" in digests(undisturbed)
    with Store.open(undisturbed.db) as store:
        stages = [row for (_, stage), row in store.stages([job.cell]).items() if stage != "train"]
    known = {name.removeprefix("model-")[:6]: digest for name, digest in digests(undisturbed).items()}
    assert all(row.record["model"] == known[f"{int(row.stage.split('@')[1]):06d}"] for row in stages)


@pytest.mark.promise("Numbers", "With undamaged checkpoints, only the remaining rounds are trained")
def test_undamaged_only_what_is_left_is_trained(job, resumable, undisturbed, tmp_path) -> None:
    place = resumable(tmp_path)
    assert run(job, place) == ("done", [3])
    assert_as_undisturbed(job, place, undisturbed)
    assert "begins again" not in log(job, place)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("when", "name", "damage"),
    [
        *(("resumable", "state-000002", damage) for damage in DAMAGE), ("resumable", "model-000002", "a flipped bit"),
        *(("unevaluated", "model-000003", damage) for damage in DAMAGE),
        ("unevaluated", "model-000002", "a flipped bit"),
    ],
)  # fmt: skip
@pytest.mark.promise(
    "Numbers", "A damaged, foreign or missing checkpoint is never used. The cell is trained again and says so"
)
@pytest.mark.promise("Numbers", "A damaged, foreign or missing model is never attacked")
def test_damage_after_an_interruption(when, name, damage, job, request, undisturbed, tmp_path) -> None:
    """All rounds are trained again, from the beginning: 11 of 211 numbers were others after one flipped bit.

    An attack that was half done goes on, for the model that is trained again is the same.
    """
    place = request.getfixturevalue(when)(tmp_path)
    file = Path(place.files, job.cell, f"{name}.safetensors")
    DAMAGE[damage](file)
    assert run(job, place) == ("done", ROUNDS)
    assert_as_undisturbed(job, place, undisturbed)
    lines = log(job, place).splitlines()
    (said,) = [line for line in lines if line.endswith("training begins again from round 0")]
    assert when == "unevaluated" or [line for line in lines if " WARNING " in line] == [said]
    assert WORDS.get(damage, "not the file that was written") in said
    assert damage == "no folder" or str(file) in said
    assert run(job, place) == ("done", [])


@pytest.mark.parametrize(
    ("when", "name"), [("resumable", "state-000002.safetensors"), ("unevaluated", "model-000003.safetensors")]
)
def test_a_state_or_a_model_of_another_cell(when, name, job, request, undisturbed, stranger, tmp_path) -> None:
    place = request.getfixturevalue(when)(tmp_path)
    shutil.copy(stranger(name), Path(place.files, job.cell))
    assert run(job, place) == ("done", ROUNDS)
    assert_as_undisturbed(job, place, undisturbed)


FGSM = cells.Evaluation("fgsm", {"name": "fgsm", "eps": "8/255"}, 40, 15)


def test_a_model_damaged_after_everything_is_trained_again_for_an_attack_added_later(
    job, undisturbed, tmp_path
) -> None:
    place = copied(undisturbed, tmp_path)
    flip(Path(place.files, job.cell, "model-000003.safetensors"))
    events = []
    with Store.open(place.db) as store:
        assert work(replace(job, evaluations=[*job.evaluations, FGSM]), place, store, events.append) == "done"
    assert [event.round for event in events if (event.stage, event.kind) == ("train", "progress")] == ROUNDS
    assert {event.stage.split("-")[0] for event in events} == {"train", "fgsm"}  # what was done stays done
    assert [row for row in numbers(place) if not row[1].startswith("fgsm")] == numbers(undisturbed)


def test_an_evaluation_of_a_model_that_is_not_here_any_more_is_done_again(job, undisturbed, tmp_path) -> None:
    """Trained again on another machine a model can differ by rounding; its accuracies are then its own."""
    place = copied(undisturbed, tmp_path)
    with Store.open(place.db) as store:
        stages = [stage for _, stage in store.stages([job.cell]) if stage.startswith("natural")]
        with store.database.writing() as connection:
            other = STAGES.update().where(STAGES.c.stage == stages[0])
            connection.execute(other.values(record=dumps({"model": "0" * 64})))
    assert numbers(place) == numbers(undisturbed)
    events = []
    with Store.open(place.db) as store:
        assert work(job, place, store, events.append) == "done"
    assert {event.stage for event in events} == {stages[0]}
    assert_as_undisturbed(job, place, undisturbed)


def test_a_disk_that_damages_every_model_ends_in_a_failure_that_can_be_tried_again(
    job, undisturbed, tmp_path, monkeypatch
) -> None:
    place = machine(tmp_path)
    real = checkpoints.save_model

    def broken(file: Path, *args, **header) -> str:
        digest = real(file, *args, **header)
        flip(file)
        return digest

    monkeypatch.setattr(checkpoints, "save_model", broken)
    assert run(job, place) == ("failed", [*ROUNDS, *ROUNDS])
    with Store.open(place.db) as store:
        errors = {row.error for row in store.stages([job.cell]).values() if row.status == "failed"}
    assert errors and all("not the file that was written" in error and "\n" not in error for error in errors)
    monkeypatch.undo()
    assert run(job, recovering(place, retry_failed=True)) == ("done", ROUNDS)
    assert_as_undisturbed(job, place, undisturbed)


@pytest.fixture
def imported(job: Job, undisturbed: Machine, tmp_path: Path) -> tuple[Job, Machine]:
    """The cell with an attack more, and a place that has its results and no model."""
    place = machine(tmp_path)
    with Store.open(undisturbed.db) as store:
        jsonl.export(store, tmp_path / "results.jsonl")
    with Store.open(place.db, create=True) as store:
        jsonl.import_(store, tmp_path / "results.jsonl")
        assert "sha256" not in store.stages([job.cell])[job.cell, "train"].record
    return replace(job, evaluations=[*job.evaluations, FGSM]), place


def errors_of(place: Machine) -> list[str]:
    with Store.open(place.db) as store:
        return [row.error for row in store.stages().values() if row.error]


@pytest.mark.promise("Input", "An imported cell without its model says how to train it")
def test_imported_results_are_not_trained_again(imported, undisturbed) -> None:
    """Their models were never here: an attack added later says so, and the numbers stay. It says what to do, too."""
    more, place = imported
    assert run(more, place) == ("failed", [])
    errors = errors_of(place)
    assert numbers(place) == numbers(undisturbed)
    assert errors and all("is not here" in error and "imported" in error for error in errors)
    assert run(more, recovering(place, retry_failed=True)) == ("failed", [])
    (said,) = {line for error in errors for line in re.findall(r"fatbench delete (\w+) and run", error)}
    with Store.open(place.db) as store:
        cleanup.delete_cell(store, said)
    assert run(more, place) == ("done", ROUNDS)
    assert {*numbers(undisturbed)} < {*numbers(place)}


def test_a_model_beside_imported_results_must_be_theirs(imported, undisturbed) -> None:
    """A copy of it, or the same training again, can be attacked further; no other file is taken for it."""
    more, place = imported
    folder = Path(place.files, more.cell)
    shutil.copytree(Path(undisturbed.files, more.cell), folder)
    models = {file: file.read_bytes() for file in folder.glob("model-*.safetensors")}
    for file in models:
        flip(file)
    assert run(more, place) == ("failed", [])
    errors = errors_of(place)
    assert errors and all("not the file that was written" in error for error in errors)
    for file, content in models.items():
        file.write_bytes(content)
    assert run(more, recovering(place, retry_failed=True)) == ("done", [])
    with Store.open(place.db) as store:
        rows = {row.record.get("model") for (_, stage), row in store.stages([more.cell]).items() if stage != "train"}
    assert rows <= {hashlib.sha256(content).hexdigest() for content in models.values()}


def test_what_a_round_kept_for_the_report_is_not_worth_a_training(job, undisturbed, tmp_path, monkeypatch) -> None:
    """Images that are lost are said to be lost; the training goes on from its state."""
    from fatbench.engine import experiment as engine

    real = engine.experiment

    def picturesque(*args, **settings):
        for result, found in real(*args, **settings):
            yield replace(result, artifacts={"image": torch.full((2,), float(result.index))}), found

    monkeypatch.setattr(engine, "experiment", picturesque)
    place = machine(tmp_path)
    assert run(job, place, rounds=2) == ("interrupted", [1, 2])
    file = Path(place.files, job.cell, "artifacts", "round-000001.safetensors")
    flip(file)
    assert run(job, place) == ("done", [3])
    assert f"{file}: not the file that was written" in log(job, place)
    with Store.open(place.db) as store:
        digests = store.stages([job.cell])[job.cell, "train"].record["sha256"]
    for count in ROUNDS:
        name = f"artifacts/round-{count:06d}.safetensors"
        written = hashlib.sha256(Path(place.files, job.cell, name).read_bytes()).hexdigest()
        assert (written == digests[name]) == (count != 1)
    assert numbers(place) == numbers(undisturbed)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State(1, {}, {"best": 0.5}, {}), r"state.server\['best'\] is of type float"),
        (State(1, {}, {"seen": {1: torch.zeros(1)}}, {}), r"state.server\['seen'\]: the key 1 is not a string"),
        (State(1, {}, {}, {3: {"old": [torch.zeros(1)]}}),
         r"state.clients\[3\]\['old'\] is of type list; a checkpoint"),
    ],
)  # fmt: skip
def test_what_no_checkpoint_keeps_is_named(state: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        demand_tensors(state)


def test_tensors_that_share_memory_are_kept_and_come_back(tmp_path: Path) -> None:
    """Clients that have fetched the same model, and a view of it."""
    model = {"w": torch.arange(6.0).reshape(2, 3)}
    state = State(2, model, {"row": model["w"][0]}, {0: {"fetched": model}, 1: {"fetched": model}})
    demand_tensors(state)
    save_state(tmp_path / "s.safetensors", state)
    kept = load_state(tmp_path / "s.safetensors", "cpu")
    assert torch.equal(kept.clients[1]["fetched"]["w"], model["w"]) and kept.server["row"].tolist() == [0.0, 1.0, 2.0]
