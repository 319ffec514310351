"""A plug-in is code that may change all of torch: no cell that does not use it is computed in a process that ran it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from crew import forget_plugins, ignore, never
from small import small

from fatbench.cli import app
from fatbench.errors import SpecError
from fatbench.runner import start
from fatbench.runner.executors import local
from fatbench.runner.jobs import Event, Job, Machine, Work
from fatbench.store.stages import Store
from fatbench.suite import files, plugins, signatures, source_files

HOSTILE = """
from torch.nn import functional

from fatbench.engine.rounds import Mixing

real = functional.cross_entropy
functional.cross_entropy = lambda *given, **settings: 3 * real(*given, **settings)


def first(updates, context):
    return Mixing([1.0] + [0.0] * (len(updates) - 1))


def blank(model, x, y, generator):
    return x * 0


AGGREGATORS = {"first": first}
ATTACKS = {"blank": blank}
"""


@pytest.fixture(autouse=True)
def loss_of_torch() -> Iterator[None]:
    """What the plug-in patches in this process is put back: other tests run here too."""
    import torch
    from torch.nn import functional

    real = functional.cross_entropy
    yield
    functional.cross_entropy = real
    torch.set_default_dtype(torch.float32)


METHODS = "{method: {First: {algorithm: {aggregator: first}}, FedAvg: {}, Uniform: {algorithm: {aggregator: uniform}}}}"
OURS = "natural: natural, fgsm: {name: fgsm, eps: 8/255}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget_plugins()
    (tmp_path / "hostile.py").write_text(HOSTILE)
    yield tmp_path
    forget_plugins()


def jobs(place: Path, attacks: str = OURS) -> list[Job]:
    suite = small(plugins="[hostile.py]", rounds=2, axes=METHODS, evaluate=f"{{attacks: {{{attacks}}}}}")
    (place / "mixed.yaml").write_text(suite)
    plugins.load()
    return start.jobs_of(files.load("mixed.yaml").plan())


def numbers(
    place: Path, jobs: list[Job], slots: int = 1, fails: Sequence[Job] = (), **settings: object
) -> tuple[dict[str, list[tuple]], int]:
    """cell -> its numbers but times, of a run in a database of its own; how many processes there were.

    fails: the cells that fail.
    """
    folder = place / f"run{len(list(place.iterdir()))}"
    folder.mkdir()
    machine = Machine(str(folder / "r.db"), str(folder), str(place), plugins=signatures.of_plugins(), **settings)  # type: ignore[arg-type]
    with Store.open(machine.db, create=True):
        pass
    outcomes = local.run(Work(jobs, machine), ["cpu"] * slots, ignore, never)
    assert {cell for cell, status in outcomes.items() if status != "done"} == {job.cell for job in fails}
    with Store.open(machine.db) as store:
        rows = [row for row in store.measurements() if row["metric"] != "seconds"]
        runs = store.runs()
    assert not any("other_plugins" in run for run in runs)
    found: dict[str, list[tuple]] = {job.cell: [] for job in jobs}
    for row in rows:
        if not row["stage"].startswith("blank"):
            found[row["cell"]].append(tuple(row[key] for key in ("stage", "round", "client", "metric", "value")))
    return {cell: sorted(values) for cell, values in found.items()}, len({run["pid"] for run in runs})


DOUBLE = "\nimport torch\n\ntorch.set_default_dtype(torch.float64)\n"


@pytest.mark.parametrize("more", ["", DOUBLE])
def test_a_hostile_plug_in_changes_no_cell_that_does_not_use_it(place, forks, more):
    """It replaces a loss of torch, or its default data type, when it is imported."""
    (place / "hostile.py").write_text(HOSTILE + more)
    first, fedavg, uniform = jobs(place)
    fails = [first] if more else []  # a float32 image meets a float64 weight
    ours, processes = numbers(place, [first, fedavg, uniform], fails=fails)
    without, one = numbers(place, [fedavg, uniform])
    assert {cell: ours[cell] for cell in without} == without
    assert (processes, one) == (2, 1)  # one process for the plug-in's cell, one for both others


def test_a_hostile_attack_changes_neither_the_training_nor_the_other_attacks(place, forks):
    """The attack's name comes first in the suite, but what else the cells are attacked by comes first in time."""
    _, fedavg, uniform = jobs(place, f"blank: blank, {OURS}")
    ours, processes = numbers(place, [fedavg, uniform])
    assert processes == 2
    _, *plain = jobs(place)
    assert ours == numbers(place, plain)[0]


def test_cells_of_one_plug_in_share_a_process(place, forks):
    first, *_ = jobs(place)
    other = Job("other", {**first.spec, "seed": 9}, first.evaluations, first.checkpoints, first.suite, first.preset)
    assert numbers(place, [first, other])[1] == 1


def test_a_process_that_ran_a_plug_in_says_so_with_every_stage_that_does_not_use_it(place, monkeypatch):
    """Here, in this process: a notebook, a task of a cluster that keeps its workers."""
    from fatbench.runner.worker import work

    _, fedavg, _ = jobs(place)
    (plugin,) = signatures.plugins()
    monkeypatch.setattr(source_files, "_RUN", {plugin})
    machine = Machine(str(place / "r.db"), str(place / "files"), str(place))
    seen: list[Event] = []
    with Store.open(machine.db, create=True) as store:
        assert work(fedavg, machine, store, seen.append) == "done"
        assert [run["other_plugins"] for run in store.runs()] == [[plugins.version(plugin)]] * 3
    log = (place / "files" / fedavg.cell / "log.txt").read_text()
    assert f"train: this process has run {plugin}, which the stage does not use" in log


@pytest.mark.parametrize("where", ["in the function", "in the file"])
def test_a_plug_in_that_ends_the_program_fails_its_cell_or_its_suite_with_the_reason(place, where):
    from fatbench.runner.worker import work

    text = HOSTILE.replace("    return Mixing(", "    raise SystemExit('no licence')\n    return Mixing(")
    if where == "in the file":
        (place / "hostile.py").write_text(HOSTILE.replace("real =", "raise SystemExit('no licence')\nreal ="))
        with pytest.raises(SpecError, match="running it ends the program: SystemExit: no licence"):
            jobs(place)
        return
    (place / "hostile.py").write_text(text)
    first, *_ = jobs(place)
    machine = Machine(str(place / "r.db"), str(place / "files"), str(place))
    with Store.open(machine.db, create=True) as store:
        assert work(first, machine, store) == "failed"
        row = store.stages([first.cell])[first.cell, "train"]
    assert row.status == "failed" and "SystemExit: no licence" in row.error


def test_a_run_begins_with_the_path_and_digest_of_what_it_executes(place, capsys):
    jobs(place)
    with contextlib.suppress(SystemExit):
        app.app(["run", "suite", "mixed.yaml", "--device", "cpu", "--jobs", "1", "--verbose"])
    digest = hashlib.sha256(HOSTILE.encode()).hexdigest()[:12]
    err = capsys.readouterr().err
    line = f"runs the plug-in hostile.py (sha256 {digest}) at {place / 'hostile.py'}"
    assert line in err and err.index(line) < err.index("train start")
