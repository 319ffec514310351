"""Weights that another cell trains: it is planned and trained first; weights that cannot fit are refused before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small import small

from fatbench.api import verifying as verify
from fatbench.errors import MachineError, SpecError
from fatbench.models.pretrained import from_file
from fatbench.runner import start
from fatbench.runner.jobs import Event, Job, Machine
from fatbench.runner.run_options import RunOptions
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import calls, files, weights
from fatbench.suite.cells import Evaluation, Plan

FIRST = small(
    name="first", seeds="[0]", train="40", model="{name: vit, patch: 4, dim: 8, depth: 1, heads: 2}",
    local="batch: 20, lr: 0.1, objective: standard",
    axes="{rate: {slow: {}, fast: {algorithm: {local: {lr: 0.2}}}}, head: {CLS: {}, VIS: {model: {head: vis}}}}",
    tables="[{id: A, title: Accuracy, rows: [rate, head], values: {natural: natural}}]",
)  # fmt: skip
SECOND = """
name: second
title: Begins with it
description: As it says.
extends: first.yaml
seeds: [0, 1]
base:
  model: {weights: {suite: first.yaml, rate: fast, head: CLS}}
axes:
  rate: {own: {model: {weights: null}}, again: {model: {weights: {suite: second, rate: own, head: CLS}}}}
tables: [{id: A, title: Accuracy, rows: [rate, head], values: {natural: natural}}]
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text(FIRST)
    Path("second.yaml").write_text(SECOND)
    return tmp_path


def planned(where: str | None = None) -> Plan:
    return files.load("second.yaml").plan("paper", where=where)


def machine_of(place: Path) -> Machine:
    return Machine(db=str(place / "a.db"), files=str(place / "files"), data=str(place))


def did(job: Job, machine: Machine, store: Store) -> tuple[str, list[Event]]:
    heard: list[Event] = []
    return work(job, machine, store, heard.append), heard


def test_the_cell_that_trains_them_is_planned_first_and_its_name_is_in_the_identity(place: Path) -> None:
    plan = planned("rate=slow and head=CLS")
    [theirs] = [cell for cell in files.load("first.yaml").plan().cells if cell.key == {"rate": "fast", "head": "CLS"}]
    jobs = start.jobs_of(plan)
    assert [(job.cell, job.suite) for job in jobs] == [
        (theirs.id, "first"), *((cell.id, "second") for cell in plan.cells),
    ]  # fmt: skip
    assert jobs[0].evaluations == [] and jobs[0].spec == theirs.spec
    assert {weights.trained_by(cell.spec) for cell in plan.cells} == {theirs.id}
    Path("first.yaml").write_text(FIRST.replace("lr: 0.2", "lr: 0.3"))
    assert {cell.id for cell in planned("rate=slow and head=CLS").cells}.isdisjoint(cell.id for cell in plan.cells)


def test_a_suite_may_begin_with_its_own_cells_seed_by_seed(place: Path) -> None:
    plan = planned()
    by_key = {(*cell.key.values(), cell.spec["seed"]): cell for cell in plan.cells}
    for seed in (0, 1):
        assert by_key["again", "VIS", seed].origin == by_key["again", "CLS", seed].origin
        assert weights.trained_by(by_key["again", "CLS", seed].spec) == by_key["own", "CLS", seed].id
        assert by_key["own", "CLS", seed].origin is None
    order = [cell.id for cell in plan.to_run()]
    assert len(set(order)) == len(order)
    for cell in plan.cells:
        assert cell.origin is None or order.index(cell.origin.id) < order.index(cell.id)
    # a cell of the suite that others begin with is attacked as the suite says
    [own] = [cell for cell in plan.to_run() if cell.id == by_key["own", "CLS", 0].id]
    assert [one.label for one in own.evaluations] == ["natural"]


def test_it_waits_then_begins_with_what_was_trained_and_the_digest_is_its_provenance(place: Path) -> None:
    first, second = start.jobs_of(planned("rate=again and head=VIS and seed=0"))
    machine = machine_of(place)
    with Store.open(machine.db, create=True) as store:
        status, heard = did(second, machine, store)
        assert status == "waiting" and (second.cell, "train") not in store.stages([second.cell])
        assert [event.message for event in heard] == [f"for the weights of cell {first.cell}, not trained yet"]
        assert did(first, machine, store)[0] == "done"
        assert did(second, machine, store)[0] == "done"
        file = place / "files" / first.cell / "model-000001.safetensors"
        run = next(run for run in store.runs([second.cell]) if run["stage"] == "train")
        assert run["weights"] == {"source": file.name, "digest": weights.digest(file), "cell": first.cell}
        # a later attack needs the trained model only
        file.unlink()
        fgsm = Evaluation("fgsm", calls.check("Attack", {"name": "fgsm", "eps": "8/255"}), None, 20)
        status, heard = did(replace(second, evaluations=[*second.evaluations, fgsm]), machine, store)
        assert status == "done", heard


def test_a_new_head_does_not_keep_the_backbone_from_being_taken(place: Path) -> None:
    plan = files.load("first.yaml").plan(where="head=VIS and rate=slow")
    [job] = start.jobs_of(plan)
    machine = machine_of(place)
    with Store.open(machine.db, create=True) as store:
        assert did(job, machine, store)[0] == "done"
    file = place / "files" / job.cell / "model-000001.safetensors"
    stored, taken = load_file(file), from_file("vit", file)
    assert {f"backbone.{name}" for name in taken if not name.startswith("head.")} == {
        name for name in stored if name.startswith("backbone.")
    }


def test_a_damaged_or_missing_model_is_never_used(place: Path) -> None:
    first, second = start.jobs_of(planned("rate=again and head=VIS and seed=0"))
    machine = machine_of(place)
    with Store.open(machine.db, create=True) as store:
        assert did(first, machine, store)[0] == "done"
        file = place / "files" / first.cell / "model-000001.safetensors"
        with file.open("r+b") as handle:
            handle.seek(-4, 2)
            handle.write(b"\1\2\3\4")
        status, heard = did(second, machine, store)
        assert status == "failed" and f"fatbench run {first.cell} trains it again" in heard[-1].message
        file.unlink()
        with pytest.raises(MachineError, match=f"fatbench delete {first.cell} and run this again"):
            start._check_origins([second], store, place / "files")
        options = RunOptions(device="cpu", db=str(place / "c.db"))
        with pytest.raises(MachineError, match=f"weights of cell {first.cell}: run that first"):
            start.run([second], start.Observer, options)  # type: ignore[arg-type]
        assert not list(place.glob("c*"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("suite: first.yaml, ", "suite: frist, ", r"second.yaml:8: suite: weights: no suite is named 'frist'"),
        ("suite: first.yaml, ", "", r"second.yaml:8: suite: weights: 'suite' is missing"),
        ("rate: fast, ", "rate: fat, ", r"axis 'rate' has no label 'fat' \(did you mean 'fast'\?\)"),
        ("rate: fast, ", "rat: fast, ", r"no axis is named 'rat' \(did you mean 'rate'\?\)"),
        ("rate: fast, ", "", r"preset 'paper' of 'first' has 2 cells, not one with head CLS \(add rate\)"),
        (
            "rate: own, head: CLS",
            "rate: again, head: CLS",
            r"cannot start from its own weights: second \(rate again, head CLS\) -> second \(rate again, head CLS\)",
        ),
        ("base:\n  model: {", "base:\n  model: {dim: 16, ", "has another network: its dim is 8, that of this cell 16"),
        ("{model: {weights: null}}", "{model: {lora: 2, weights: null}}", r"trained changes of low rank \(lora: 2\)"),
        ("base:\n", "base:\n  data: {name: cifar10}\n", "trained on images of 1 channels, this cell has 3"),
        ("base:\n", "base:\n  partition: {clients: 4}\n  train: 1\n", r"4 clients, but only 1"),
    ],
)
def test_mistakes_are_found_before_anything_runs(place: Path, old: str, new: str, message: str) -> None:
    assert old in SECOND
    Path("second.yaml").write_text(SECOND.replace(old, new, 1))
    with pytest.raises(SpecError, match=message):
        planned()


def test_another_suite_in_an_override_replaces_what_the_base_says(place: Path) -> None:
    """Labels of the one are not those of the other."""
    Path("second.yaml").write_text(
        SECOND.replace("{suite: second, rate: own, head: CLS}", "{suite: second, rate: own}")
    )
    with pytest.raises(SpecError, match=r"2 cells, not one with rate own \(add head\)"):
        planned()


def test_verify_trains_them_too(place: Path) -> None:
    first, second = start.jobs_of(planned("rate=again and head=VIS and seed=0"))
    machine = machine_of(place)
    with Store.open(machine.db, create=True) as store:
        assert did(first, machine, store)[0] == did(second, machine, store)[0] == "done"
        assert verify.origins(store, [second.cell]) == [first.cell]
        assert verify.job(store, first.cell, trained_only=True).evaluations == []


@pytest.mark.nightly
def test_the_commands_run_it_first_and_say_so(place: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    def told(*arguments: str) -> tuple[int, str]:
        code, out, err = run(*arguments, "--db", "a.db")
        return code, out + err

    which = ("-k", "rate=slow and head=CLS and seed=0")
    first, second = start.jobs_of(planned(which[1]))
    code, said = told("plan", "suite", "second.yaml", *which)
    assert code == 0 and said.index(first.cell) < said.index(second.cell)
    assert f"weights of cell {first.cell}, which runs first: first, fast, CLS, seed 0" in said
    code, said = told("run", "suite", "second.yaml", *which, "--jobs", "2", "--device", "cpu")
    assert code == 0 and "2 of 2 cells done" in said
    code, said = told("status", "second.yaml", *which)
    assert code == 0 and "2 done, 0 failed, 0 running, 0 todo" in said


WRAPPED = """
from torch import nn
from fatbench.suite.types import Model


class Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def wrapped(shape, classes, *, base: Model):
    return Wrapped(base(shape, classes))


MODELS = {"wrapped": wrapped}
"""


def test_a_network_in_another_begins_with_the_weights_of_a_cell(place: Path) -> None:
    """Planned behind it, checked against it, trained from it; the file of its own model does not name it."""
    (place / "wrapped.py").write_text(WRAPPED)
    base = "{name: vit, patch: 4, dim: 8, depth: 1, heads: 2, weights: {suite: first.yaml, rate: fast, head: CLS}}"
    text = FIRST.replace("name: first", "name: third\nplugins: [wrapped.py]").replace(
        "{name: vit, patch: 4, dim: 8, depth: 1, heads: 2}", f"{{name: wrapped, base: {base}}}"
    )
    text = text.replace("head: {CLS: {}, VIS: {model: {head: vis}}}", "head: {CLS: {}}").replace("fast: {", "other: {")
    Path("third.yaml").write_text(text)
    plan = files.load("third.yaml").plan("paper", where="rate=other")
    origin, own = plan.to_run()
    assert weights.trained_by(own.spec) == origin.id and own.spec["model"]["base"]["weights"] == f"cell:{origin.id}"
    machine = machine_of(place)
    with Store.open(machine.db, create=True) as store:
        first, job = start.jobs_of(plan)
        assert did(job, machine, store)[0] == "waiting"
        assert [did(one, machine, store)[0] for one in (first, job)] == ["done", "done"]
        (run,) = store.runs([job.cell])[:1]
    folder = place / "files"
    digest = weights.digest(folder / origin.id / "model-000001.safetensors")
    assert str(digest) in str(run)
    assert "cell:" not in (folder / own.id / "model-000001.safetensors").read_bytes().decode("latin-1")
    Path("third.yaml").write_text(text.replace("dim: 8", "dim: 6"))
    with pytest.raises(SpecError, match="has another network: its dim is 8, that of this cell 6"):
        files.load("third.yaml").plan("paper", where="rate=other")
