"""fp32, tf32 and bf16: what may be rounded where, the same bytes again, and what a run says where there are none.

There need be no GPU: TF32 is a switch that can be read anywhere, and `put_` has no deterministic kernel on a CPU too.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crew
import members
import pyautoattack
import pytest
import torch
from sqlalchemy import text, update
from stored import finished
from torch import Tensor, nn

from fatbench import report
from fatbench.engine import precision
from fatbench.engine.accuracy import accuracy
from fatbench.engine.local import Client, LocalTraining, copy_state, train_client
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Number, Problem
from fatbench.methods import evasion, packages
from fatbench.methods.objectives import OBJECTIVES
from fatbench.report import contrasts, sentences
from fatbench.report.pairs import measured_numbers, pairs
from fatbench.runner import progress, provenance, slots
from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.cleanup import delete_cell
from fatbench.store.schema import STAGES
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import files, signatures
from fatbench.suite.cells import Plan

CPU = torch.device("cpu")
FGSM = functools.partial(evasion.ATTACKS["fgsm"], eps=0.1)


@pytest.fixture
def ieee() -> Iterator[None]:
    """float32 as it is, and afterwards what was."""
    backends = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, was in zip(backends, before, strict=True):
        backend.allow_tf32 = was


def test_on_a_gpu_float32_is_float32_with_the_same_bits(monkeypatch, request: pytest.FixtureRequest) -> None:
    """The settings only: there need be no GPU. By default cuDNN's convolutions are TF32."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    settings = ((cudnn, "benchmark"), (cudnn, "allow_tf32"), (cublas, "allow_tf32"),
                (torch.utils.deterministic, "fill_uninitialized_memory"))  # fmt: skip
    for module, name in settings:  # not monkeypatch, which asks the modules' dictionaries
        request.addfinalizer(functools.partial(setattr, module, name, getattr(module, name)))
        setattr(module, name, True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back as it was
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: device.index + 1)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: asked.append((a, k)))
    precision.exact(torch.device("cpu"), "fp32")
    assert cudnn.allow_tf32 and cublas.allow_tf32 and not asked
    precision.exact(torch.device("cuda"), "bf16")  # the current one, which has no index
    assert not cudnn.allow_tf32 and not cublas.allow_tf32 and not asked
    assert cudnn.benchmark
    precision.exact(torch.device("cuda:1"), "fp32")
    assert asked == [((True,), {"warn_only": False})] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not cudnn.benchmark
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    precision.exact(torch.device("cuda:1"), "tf32")  # the default of training there is reproducible too
    assert asked.pop() == ((True,), {"warn_only": False}) and not cudnn.benchmark
    precision.exact(torch.device("cuda:1"), "fp32", strict=False)
    assert asked.pop() == ((True,), {"warn_only": True})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    precision.exact(torch.device("cuda:1"), "bf16")
    assert asked[1:] == [((False,), {})]


class Watched(nn.Module):
    """A linear classifier that notes whether its passes may be TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)
        self.seen: list[tuple[str, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        self.seen.append(("forward", precision.reduced_to_tf32()))
        if y.requires_grad:
            y.register_hook(lambda g: self.seen.append(("backward", precision.reduced_to_tf32())))
        return y


def test_tf32_holds_for_steps_and_attacks_and_never_for_a_outcome(ieee: None) -> None:
    images, labels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    model = Watched()
    on = Problem(model, images, labels, [torch.arange(4)], 3, 0, CPU, "tf32")
    objective = functools.partial(OBJECTIVES["at"], attack=FGSM)
    train_client(Client(on, copy_state(model), 0, 0), LocalTraining(batch=4, lr=0.1, objective=objective))
    assert model.seen == [("forward", True), ("backward", True)] * 2  # of the attack, and of the step
    model.seen.clear()
    accuracy(on, copy_state(model), images, labels, FGSM, ("a",))
    assert model.seen == [("forward", True), ("backward", True), ("forward", False)]
    with precision.forward(CPU, "tf32"), precision.ieee(CPU):
        assert not precision.reduced(CPU)
    assert not precision.reduced(CPU)


@pytest.mark.parametrize("known, emulates", [
    (["avx", "avx2", "fma"], True), (["avx512f", "avx512_vnni"], True), (["avx512f", "avx512_bf16"], False),
    (["amx_bf16"], False), (["neon", "bf16"], False), (["asimd"], True), ([], False),
])  # fmt: skip
def test_doctor_says_whether_this_cpu_emulates_bf16(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: list[str], emulates: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "instructions", lambda: known)
    assert provenance.emulates_bfloat16() == emulates
    said = run("doctor")[1]
    assert ("no instructions for bfloat16" in said) == emulates and "--precision fp32, a CPU has no TF32" in said


@pytest.mark.parametrize("running", [True, False])
def test_doctor_says_whether_mps_runs(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if running:
        (tmp_path / "control").touch()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    monkeypatch.setattr(slots, "has_tf32", lambda gpu: running)
    said = run("doctor")[1]
    assert ("--precision tf32 on cuda:0" in said) == running != ("--precision fp32 on cuda:0" in said)
    (line,) = (line for line in said.splitlines() if line.startswith("mps "))
    assert ("take turns" not in line) == ("side by side" in line) == running


def test_a_run_in_bf16_where_it_is_slow_begins_with_a_line(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "instructions", lambda: ["avx2"])
    (tmp_path / "crew.yaml").write_text(crew.SUITE)
    here = ("run", "suite", "crew.yaml", "--jobs", "1", "--device", "cpu")
    said = "this CPU has no instructions for bfloat16"
    assert said not in run(*here, "-k", "pace=slow")[2]
    code, _, err = run(*here, "-k", "pace=usual", "-c", "run.attack_precision=bf16")
    assert (code, err.count(said)) == (0, 1), err
    assert said not in run(*here, "-k", "pace=usual", "--precision", "bf16")[2]  # nothing is left to do


class Blind(nn.Module):
    """Where products are rounded it gets every image wrong; in float32 it is the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits.roll(1, 1) if precision.reduced_to_tf32() else logits


@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
def test_autoattack_in_tf32_counts_what_float32_confirms(version: Any, ieee: None, monkeypatch: Any) -> None:
    """Every stage is run again where TF32 takes for broken what is not, FAB too: the package's images result."""
    members.short_autoattack(monkeypatch, queries=50)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(5, 4, generator=generator(4, "w")))
    x = torch.rand(8, 1, 2, 2, generator=generator(0, "x"))
    y = model(x).argmax(1)
    expected = packages.autoattack(model, x, y, generator(0, "a"), eps=0.2, version=version)
    broken = model(expected).argmax(1) != y
    assert 0 < broken.sum() < 8
    stages: list[bool] = []
    model.register_forward_hook(lambda *_: stages.append(precision.reduced_to_tf32()))
    with precision.forward(CPU, "tf32"):
        found = packages.autoattack(model, x, y, generator(0, "a"), eps=0.2, version=version)
        blind = packages.autoattack(Blind(model).eval(), x, y, generator(0, "a"), eps=0.2, version=version)
    assert torch.equal(model(found).argmax(1) != y, broken)
    assert torch.equal(blind, expected)
    assert sum(stages) > 0.4 * len(stages)  # confirmations are few


@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
def test_autoattack_in_tf32_asks_the_stages_of_the_package(version: str, ieee: None, monkeypatch: Any) -> None:
    """Which object, with which loss, targets and restarts, in which order; none of these breaks anything."""
    stages: list[tuple[str, Any]] = []

    def asked(context: Any) -> list[tuple[str, Any]]:
        stages.clear()
        adversary = pyautoattack.AutoAttack(model, norm="Linf", eps=0.1, seed=7, version=version, device="cpu")
        for name in ("apgd", "apgd_targeted", "fab", "square"):

            def perturb(x: Tensor, y: Tensor, name: str = name) -> Tensor:
                own = vars(getattr(adversary, name))
                stages.append((name, {key: own.get(key) for key in ("loss", "targeted", "n_restarts", "seed")}))
                return x.clone()

            monkeypatch.setattr(getattr(adversary, name), "perturb", perturb)
        with context:
            if precision.reduced_to_tf32():
                packages._in_tf32(adversary, packages._Logits(model).eval(), x, y, 7)
            else:
                adversary.run_standard_evaluation(x, y, batch_size=4)
        return [*stages]

    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 5)).eval()
    x = torch.rand(4, 1, 2, 2, generator=generator(0, "x"))
    y = model(x).argmax(1)
    package = asked(contextlib.nullcontext())
    assert len(package) >= 2 and asked(precision.forward(CPU, "tf32")) == package


# --- no deterministic kernel --------------------------------------------------------------------------------------

PUTS = '''
def puts(model, x, y, generator):
    """Cross-entropy, and an operation that has no deterministic kernel anywhere."""
    import torch

    logits = model(x)
    torch.zeros(2).put_(torch.tensor([0]), torch.tensor([1.0]))
    return torch.nn.functional.cross_entropy(logits, y), logits.argmax(1) == y


OBJECTIVES = {"puts": puts}
'''
SUITE = """
name: puts
title: An objective without a deterministic kernel
axes: {aggregator: {samples: {}}}
grid: {product: [aggregator]}
base:
  data: digits
  train: 16
  test: 8
  partition: {name: iid, clients: 2}
  model: {name: small_cnn, width: 2}
  algorithm: {name: fedavg, rounds: 1, aggregator: samples, local: {batch: 8, lr: 0.1, objective: puts}}
  monitor: natural
evaluate: {n: 8, attacks: {natural: natural}}
tables: [{id: A, title: One, rows: [aggregator], values: {natural: natural}}]
presets: {paper: {}}
"""


def test_a_run_without_a_deterministic_kernel_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, own_plugins: None
) -> None:
    """In its provenance and under the table; the cell's evaluation, which needs no such kernel, is strict again."""

    def exact(device: torch.device, chosen: str, strict: bool = True) -> None:
        assert (device.type, chosen) == ("cpu", "fp32")
        asked.append(strict)
        torch.use_deterministic_algorithms(True, warn_only=not strict)

    asked: list[bool] = []
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    monkeypatch.setattr("fatbench.engine.setup.exact", exact)
    monkeypatch.setattr(precision, "exact", exact)
    plugin, file = tmp_path / "puts.py", tmp_path / "puts.yaml"
    plugin.write_text(PUTS)
    file.write_text(SUITE)
    signatures.add_plugin(plugin)
    suite = files.load(str(file))
    plan = suite.plan()
    (job,) = jobs_of(plan)
    machine = Machine(str(tmp_path / "r.db"), str(tmp_path / "files"), str(tmp_path / "data"))
    with Store.open(machine.db, create=True) as store, pytest.warns(UserWarning, match="put_ does not have a determ"):
        assert work(job, machine, store) == "done"
        rows = store.runs([job.cell])
        shown = report.render(report.build_tables(suite, plan, store), "markdown")
    said = {row["stage"].split("-")[0]: row.get("not_reproducible") for row in rows}
    assert said == {"train": "put_ has no deterministic kernel", "natural": None}
    assert asked == [True, False, False, True, True]  # it begins, again, without; put back; the evaluation
    assert "- *not reproducible bit for bit*: put\\_ has no deterministic kernel" in shown


# --- what a stored attack computed in ------------------------------------------------------------------------------

ATTACKED = """
name: attacked
title: The same attacks in two precisions
seeds: [0, 1]
axes: {rate: {low: {}, high: {algorithm: {local: {lr: 0.5}}}}}
grid: {product: [rate]}
base:
  data: digits
  train: 64
  test: 16
  partition: {name: iid, clients: 2}
  model: {name: small_cnn, width: 2}
  algorithm: {name: fedavg, rounds: 1, aggregator: samples, local: {batch: 8, lr: 0.1, objective: standard}}
evaluate:
  batch: 8
  attacks:
    natural: natural
    pgd2: {name: pgd, eps: 8/255, step: 4/255, steps: 2}
    autoattack: {name: autoattack, eps: 1}
tables: [{id: A, title: One, rows: [rate], values: {PGD: pgd2}}]
presets: {paper: {}}
"""


def pgd2_of(job: Any, **changes: Any) -> Any:
    """The cell with this attack alone."""
    return replace(job, evaluations=[replace(one, **changes) for one in job.evaluations if one.label == "pgd2"])


@pytest.fixture
def attacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[files.Suite, Plan, Machine, Store]]:
    members.short_autoattack(monkeypatch)
    file = tmp_path / "attacked.yaml"
    file.write_text(ATTACKED)
    suite = files.load(str(file))
    machine = Machine(str(tmp_path / "r.db"), str(tmp_path / "files"), str(tmp_path / "data"))
    with Store.open(machine.db, create=True) as store:
        yield suite, suite.plan(), machine, store


def stages_of(store: Store, cell: str) -> dict[str, str]:
    """metric.precision -> status."""
    names = {stage: parsed(stage) for _, stage in store.stages([cell]) if stage != "train"}
    return {f"{n.metric}.{n.precision}": store.stages([cell])[cell, stage].status for stage, n in names.items()}


def test_the_precision_of_an_attack_is_part_of_its_stage(attacked: tuple[Any, Plan, Machine, Store]) -> None:
    """AutoAttack computes in float32 under bf16; an attack that is done is not repeated in another precision."""
    _, plan, machine, store = attacked
    job = jobs_of(plan)[0]
    few = replace(job, evaluations=[replace(one, n=2) for one in job.evaluations])
    assert work(few, replace(machine, precision="bf16"), store) == "done"
    assert stages_of(store, job.cell) == {"natural.fp32": "done", "pgd2.bf16": "done", "autoattack.fp32": "done"}
    assert progress.states_of([few], store) == {job.cell: "done"}
    events: list[Any] = []
    assert work(few, machine, store, events.append) == "done" and events == []


def test_attacks_may_have_a_precision_of_their_own(attacked: tuple[Any, Plan, Machine, Store]) -> None:
    """Trained in float32, attacked in bfloat16: the provenance of each stage has its own."""
    _, plan, machine, store = attacked
    few = pgd2_of(job := jobs_of(plan)[0], n=2)
    assert work(few, replace(machine, attack_precision="bf16"), store) == "done"
    assert stages_of(store, job.cell) == {"pgd2.bf16": "done"}
    assert [run["precision"] for run in store.runs([job.cell])] == ["fp32", "bf16"]


def test_an_attack_is_not_continued_in_another_precision(attacked: tuple[Any, Plan, Machine, Store]) -> None:
    """Half of its images in bfloat16, half in float32, would be neither; its random numbers are the same in both."""
    _, plan, machine, store = attacked
    job = pgd2_of(jobs_of(plan)[0])
    events: list[Any] = []
    at_once = lambda: any(event.stage.startswith("pgd2") and event.kind == "progress" for event in events)  # noqa: E731
    assert work(job, replace(machine, precision="bf16"), store, events.append, at_once) == "interrupted"
    assert stages_of(store, job.cell) == {"pgd2.bf16": "interrupted"}
    assert work(job, machine, store) == "done"
    assert stages_of(store, job.cell) == {"pgd2.bf16": "interrupted", "pgd2.fp32": "done"}
    alone = replace(machine, db=machine.db.replace("r.db", "alone.db"), files=f"{machine.files}-alone")
    with Store.open(alone.db, create=True) as other:
        assert work(job, alone, other) == "done"
        (stage,) = (stage for _, stage in other.stages() if stage != "train")
        assert store.outcomes(job.cell, stage) == other.outcomes(job.cell, stage) != []
        assert work(job, replace(machine, precision="bf16"), store) == "done"


def test_an_attack_on_a_model_that_is_another_now_is_emptied(attacked: tuple[Any, Plan, Machine, Store]) -> None:
    """In every precision."""
    _, plan, machine, store = attacked
    job = pgd2_of(jobs_of(plan)[0])
    assert work(job, replace(machine, precision="bf16"), store) == "done"
    stage = job.evaluations[0].stage(1, "bf16")
    with store.database.writing() as connection:
        key = (STAGES.c.cell == job.cell) & (STAGES.c.stage == stage)
        connection.execute(update(STAGES).where(key).values(record='{"model":"of another model"}'))
    assert work(job, machine, store) == "done"
    assert stages_of(store, job.cell) == {"pgd2.bf16": "interrupted", "pgd2.fp32": "done"}
    assert not store.measurements([job.cell], stages=[stage]) and not store.outcomes(job.cell, stage)


def test_precisions_are_said_where_a_number_pools_them_and_never_compared(attacked: Any) -> None:
    suite, plan, machine, store = attacked
    jobs = [replace(job, evaluations=job.evaluations[:2]) for job in jobs_of(plan)]
    for job in jobs:
        assert work(job, replace(machine, precision="bf16" if job.spec["seed"] else "fp32"), store) == "done"

    def shown() -> str:
        return report.render(report.build_tables(suite, plan, store), "markdown")

    assert shown().count("‡ attacked in bf16 (seed 1)\n") == 1
    assert "PGD precision: bf16 (2 cells), fp32 (2 cells)" in shown()
    assert "attacked in another precision" not in shown()
    cells = pairs(plan, "low", "high")

    def compared() -> contrasts.Difference:
        of = measured_numbers(store, [cell.id for cell in plan.cells], "last").__getitem__
        (found,) = contrasts.compare(cells, of, of, ["pgd2"])
        return found

    pgd = compared()
    assert (pgd.seeds, pgd.precisions) == ((0, 1), ("fp32", "bf16"))
    said = sentences.exploratory([pgd], "low", "high", "last")
    assert "seeds 0, 1; attacked in fp32 at seed 0, bf16 at seed 1)" in said
    # the other way round in one row: its numbers are compared with none
    other = next(job for job in jobs if job.spec["seed"] == 1 and job.spec["algorithm"]["local"]["lr"] == 0.5)
    delete_cell(store, other.cell)
    assert work(other, machine, store) == "done"
    assert "attacked in another precision" in shown()
    pgd = compared()
    assert (pgd.seeds, pgd.precisions) == ((0,), ("fp32",))


def test_of_an_attack_in_two_precisions_every_view_reads_that_of_most_cells(attacked: Any) -> None:
    """All cells were attacked in bf16, one of them in fp32 too: table and `compare` read bf16."""
    suite, plan, machine, store = attacked
    jobs = [replace(job, evaluations=[job.evaluations[1]]) for job in jobs_of(plan)]
    for job in jobs:
        assert work(job, replace(machine, attack_precision="bf16"), store) == "done"
    with store.database.reading() as connection:  # what was run has its labels
        found = connection.execute(text("SELECT suite, method, attack, precision, labels FROM results")).all()
    labels = [("attacked", "fedavg", "pgd2", "bf16", f'{{"rate":"{rate}"}}') for rate in ("high", "low")]
    assert sorted(tuple(row) for row in found) == [one for one in labels for _ in range(2)]
    (twice, evaluation), stage = (jobs[0].cell, jobs[0].evaluations[0]), jobs[0].evaluations[0].stage(1)
    finished(store, twice, stage, [Number("pgd2", 0.0, 1, n=16)], suite="attacked", total=16, precision="fp32")
    (grid,) = report.build_tables(suite, plan, store)
    behind = {place for value in grid.all() for place in value.behind}
    compared = measured_numbers(store, [job.cell for job in jobs], "last")
    read = {(cell, f"{name}.{one.precision}@1") for cell, found in compared.items() for name, one in found.items()}
    assert read == behind == {(job.cell, evaluation.stage(1, "bf16")) for job in jobs}
