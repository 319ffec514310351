"""How long a run takes: what stages took here, rates of training and attacks apart, what is done subtracted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stored import claimed, finished

from fatbench.engine.rounds import Number
from fatbench.runner import calibrate, gpu_estimates, progress, start, worker
from fatbench.runner.jobs import Machine
from fatbench.store import timing
from fatbench.store.stages import Store
from fatbench.suite import calls, cost, duration, files
from fatbench.suite.cells import Plan

pytest_plugins = ("databases",)
ROOT = Path(__file__).parent.parent
BENCH = ROOT / "results" / "bench"
SUITE = """
name: short
title: Two cells on digits
seeds: [0, 1]
base:
  data: digits
  partition: {name: shah, clients: 5, skew: 2}
  model: {name: small_cnn, width: 4}
  algorithm: {name: fedavg, rounds: 4, local: {epochs: 1, batch: 16, lr: 0.1, objective: standard}, aggregator: samples}
  train: 200
  test: 50
  monitor: {name: fgsm, eps: 8/255}
evaluate:
  n: 40
  checkpoints: [last, best-test]
  attacks:
    natural: natural
    pgd: {name: pgd, eps: 8/255, step: 2/255, steps: 5}
    autoattack: {name: autoattack, eps: 8/255}
presets: {paper: {}}
"""
PGD = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 5}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)
    Path("short.yaml").write_text(SUITE)
    return files.load("short.yaml").plan()


class Timed:
    def __init__(self, plan: Plan, attack: str | None, count: float, seconds: float, wall: float | None) -> None:
        self.spec = plan.cells[0].spec
        self.attack = next((e.attack for e in plan.cells[0].evaluations if e.label == attack), None)
        self.count, self.seconds, self.wall = count, seconds, wall


def test_training_and_attacks_have_rates_of_their_own(plan: Plan) -> None:
    """Training: 400 passes in 2 s. PGD: 100 images in 5 s, 100 * 11 passes. Natural: 100 images, passes, in 1 s.

    Two cells of (4 rounds * 200 images * 2 passes) / 200 a second = 8 s; monitored on 4 * 50 images of 3 + 1 passes at
    6 s for 1200 passes, 4 s; 40 images of PGD 2 s, natural 0.4 s; AutoAttack as its passes say.
    """
    timed = [Timed(plan, *one, None) for one in ((None, 400, 2.0), ("pgd", 100, 5.0), ("natural", 100, 1.0))]
    known = duration.speeds(timed)
    assert cost.monitoring(plan.cells[0].spec).image_passes == 800
    (one, *_), left = plan.cells, duration.whole_plan(plan)
    fraction, evaluations = left(one)
    assert fraction == 1.0
    assert [(e.label, models) for e, models in evaluations] == [("natural", 2), ("pgd", 2), ("autoattack", 2)]
    here = lambda cell: (1.0, [(e, m) for e, m in left(cell)[1] if e.label != "autoattack"])  # noqa: E731
    found = duration.estimate(plan.unique(), known, here)
    assert found.seconds == pytest.approx(2 * (8 + 4 + 2 * 2 + 2 * 0.4))
    assert (found.unknown, found.done, found.bound) == (0, 0, False)
    assert duration.estimate(plan.unique(), known, left).bound  # AutoAttack has not been run: its passes are a bound
    assert duration.estimate(plan.unique(), duration.Speeds(), left) == duration.Estimate(0.0, 2, 0, False)


def test_a_algorithm_that_deploys_a_model_a_client_is_attacked_as_often() -> None:
    """FedVKD's smoke cell against FedAvg's beside it: two clients, so twice the passes of the same attacks."""
    plan = files.load("fedvkd-cifar10").plan("smoke")
    works = {}
    for cell in plan.cells:
        attacks = [one for one in cell.evaluations if one.attack["name"] == "pgd"]
        works[cell.spec["algorithm"]["name"]] = cost.evaluation(cell.spec, attacks, 1).image_passes
    assert works["fedvkd"] == works["fedgkt"] == 2 * works["fedavg"] == 2 * works["fedaux"]


def test_what_begins_and_ends_a_stage_is_added(plan: Plan) -> None:
    """10 s beside the rate of a training of which looking at the model takes 800 passes at 0.005 s: 6 s; 1 s of PGD."""
    known = duration.speeds([Timed(plan, None, 400, 2.0, 12.0), Timed(plan, "pgd", 100, 5.5, 6.5)])
    assert known.overhead == pytest.approx((10 - 800 * 5.5 / 1100, 1.0))


@pytest.mark.parametrize("part", ["data", "monitor", "attack"])
def test_stages_with_a_name_that_is_unknown_here_are_left_out(plan: Plan, part: str, run: Run) -> None:
    """A plug-in's data set in the database, or its attack, is no reason why another suite cannot be planned."""
    timed = Timed(plan, "pgd", 100, 5.0, 6.0)
    if part == "attack":
        timed.attack = {**PGD, "name": "of_a_plugin"}
    else:
        timed.spec = {**timed.spec, part: {"name": "of_a_plugin"}}
    assert duration.speeds([timed]) == duration.Speeds()
    known = duration.speeds([Timed(plan, "pgd", 100, 5.0, 6.0)])
    assert known.attacks and duration.speeds([timed, Timed(plan, "pgd", 100, 5.0, 6.0)]) == known
    with Store.open("plan.db", create=True) as store:
        finished(store, "a", "pgd-1@4", [Number("seconds", 4.0, 4)], total=80, spec=timed.spec, settings=timed.attack,
                 device="cpu")  # fmt: skip
    assert run("plan", "suite", "short.yaml", "--db", "plan.db")[0] == 0


def test_what_is_measured_comes_from_this_machine_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and seconds of rounds; an attack's images."""
    with Store.open(url, create=True) as store:
        for cell, host in (("a", None), ("b", None), ("c", "elsewhere")):
            provenance = {"device": "cpu", **({"host": host} if host else {})}
            rounds = [Number(name, value, r) for r in (1, 2) for name, value in
                      (("forward", 30.0), ("backward", 10.0), ("seconds", 6.0 * r))]  # fmt: skip
            finished(store, cell, "train", rounds, round=2, total=2, spec={"cell": cell}, **provenance)
        settings = {**PGD, "implementation": "fatbench 0.1"}
        run = claimed(store, "a", "pgd-1@2", total=0, settings=settings, device="cpu")
        store.describe_run(run, {}, total=80)
        store.finish(run, [Number("seconds", 4.0, 2)])
        found = [(t.spec["cell"], t.attack, t.count, t.seconds) for t in timing.timed_runs(store)]
        assert found == [("a", None, 80, 18.0), ("b", None, 80, 18.0), ("a", PGD, 80, 4.0)]
        late = [(t.count, t.seconds) for t in timing.timed_runs(store, after_round=1)]
        assert late == [(40, 12.0), (40, 12.0), (80, 4.0)]
        assert all(t.wall is not None and 0 <= t.wall < 60 for t in timing.timed_runs(store))
        # a round that does not count is no start of a run either: 6 s of each cell
        every, late = ([t.wall or 0.0 for t in timing.timed_runs(store, after_round=k)] for k in (0, 1))
        assert [before - now for before, now in zip(every, late, strict=True)] == pytest.approx([6, 6, 0])
        monkeypatch.setattr(timing, "LATEST", 2)  # run here: the one elsewhere lies between them
        assert [(t.spec["cell"], t.attack) for t in timing.timed_runs(store)] == [("b", None), ("a", PGD)]


def test_what_is_done_is_subtracted(plan: Plan, tmp_path: Path) -> None:
    """One cell trained, its best and last round the same, natural done; of the other three of four rounds."""
    one, other = plan.cells
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        for cell, rounds in ((one, 4), (other, 3)):
            run = claimed(store, cell.id, "train", suite="short", total=4, spec=cell.spec)
            if rounds == 4:
                store.finish(run, round=4, record={name: {"round": 4} for name in plan.checkpoints})
            else:
                store.commit(run, round=3)
        finished(store, one.id, one.evaluations[0].stage(4), suite="short", total=0)
        left = progress.cells_left(plan, store)
        assert [(e.label, models) for e, models in left(one)[1]] == [("pgd", 1), ("autoattack", 1)]
        assert left(one)[0] == 0.0
        fraction, evaluations = left(other)
        assert fraction == 0.25 and [models for _, models in evaluations] == [1, 1, 1]  # as of the cell that is trained


@pytest.mark.slow
def test_a_calibration_knows_all_cells_of_a_plan(plan: Plan, run: Run) -> None:
    """In a process of its own, on digits; without it nothing is known, and nothing is left behind."""
    Path("short.yaml").write_text(SUITE.replace("    autoattack: {name: autoattack, eps: 8/255}\n", ""))
    assert "time: unknown, nothing comparable has run here (--on here" in run("plan", "suite", "short.yaml")[1]
    code, out, _ = run("plan", "suite", "short.yaml", "--on", "here", "--format", "json")
    time = json.loads(out)["time"]
    assert code == 0
    assert time["seconds"] > 0 and (time["unknown"], time["done"], time["bound"]) == (0, 0, False)
    assert sorted(path.name for path in Path().iterdir()) == ["short.yaml"]


def test_a_calibration_takes_one_cell_of_a_kind_and_none_that_is_known(plan: Plan, tmp_path: Path) -> None:
    assert [cell.id for cell in calibrate.samples(plan.unique(), duration.Speeds())] == [plan.cells[0].id]
    known = duration.speeds([Timed(plan, None, 1, 1.0, None),
                             *(Timed(plan, e.label, 1, 1.0, None) for e in plan.cells[0].evaluations)])  # fmt: skip
    assert calibrate.samples(plan.unique(), known) == []
    job = calibrate.job(plan.cells[0], plan, tmp_path)
    assert [e.label for e in job.evaluations] == ["natural", "pgd"]  # AutoAttack stops early at what learned nothing
    more = calibrate.job(plan.cells[0], plan, tmp_path, (4, 128))  # and later with more work, as much as there is
    assert (more.spec["train"], more.spec["test"], {e.n for e in more.evaluations}) == (200, 50, {40})
    assert job.spec["algorithm"]["rounds"] == 2 and job.spec["train"] <= 200 and job.spec["test"] == 32
    assert {evaluation.n for evaluation in job.evaluations} == {32} and job.cell != plan.cells[0].id


# --- on a GPU that is not here ------------------------------------------------------------------------------------


def test_the_default_on_a_gpu_trains_in_tf32_and_attacks_in_fp32() -> None:
    """Hours of sfat-cifar10 on an H200: training and its monitor as under tf32, attacks as under fp32."""
    plan = files.load("sfat-cifar10").plan()
    cells = plan.unique()
    auto, fp32, tf32 = known = [gpu_estimates.speeds(cells, "h200", p, None, "auto") for p in ("auto", "fp32", "tf32")]
    assert (auto.training, auto.monitoring, auto.passes) == (tf32.training, tf32.monitoring, fp32.passes)
    of_auto, of_fp32, of_tf32 = (duration.estimate(cells, one, duration.whole_plan(plan)).seconds for one in known)
    assert of_tf32 < of_auto < of_fp32 / 1.5


def on_a_gpu(precision: str, path: str) -> tuple[float, float]:
    """Seconds of an image pass of training, and of an attack, of a network of two layers on an A100."""
    model = SUITE.replace("{name: small_cnn, width: 4}", "{name: mlp, width: 100}")
    model = model.replace("  n: 40\n", "  n: 40\n  batch: 20\n")
    Path("mlp.yaml").write_text(model)
    plan = files.load("mlp.yaml").plan()
    known = gpu_estimates.speeds(plan.unique(), "a100", precision, None, path)
    spec = plan.cells[0].spec
    return known.training[duration.kind(spec)], known.passes[duration.network(spec)]


def test_a_pass_takes_as_long_as_its_operations_or_as_starting_its_kernels(plan: Plan, monkeypatch) -> None:
    """A row times a matrix (n, m) is 2 n m operations, and as many backward. Digits are 8 x 8, of 10 classes."""
    operations = 2 * (64 * 100 + 100 * 10)
    spec = {**plan.cells[0].spec, "model": {"name": "mlp", "width": 100}}
    flops, kernels = gpu_estimates.count(spec) or (0, 0)
    assert flops == operations
    assert 5 <= kernels <= 10  # two products and a ReLU forward, the loss, and as much back
    assert on_a_gpu("fp32", "loop") == pytest.approx((kernels * 4e-5 / 16, kernels * 4e-5 / 20))
    recorded = operations / 0.25 / 19.5e12 + kernels * 5e-6 / 16  # the GPU starts kernels between its arithmetic
    assert on_a_gpu("fp32", "graphs") == pytest.approx((recorded, kernels * 4e-5 / 20))
    monkeypatch.setattr(gpu_estimates, "LAUNCH", 0.0)
    assert on_a_gpu("fp32", "loop") == pytest.approx((operations / 0.25 / 19.5e12,) * 2)
    assert on_a_gpu("bf16", "loop")[0] == pytest.approx(operations / 0.07 / 312e12)
    cells = files.load("mlp.yaml").plan().unique()
    known, exact = (gpu_estimates.speeds(cells, "a100", bits, None, "loop") for bits in ("bf16", "fp32"))
    assert list(known.autoattack.values()) == pytest.approx([operations / 0.25 / 19.5e12])  # it stays in float32
    left = lambda cell: (0.0, [(one, 1) for one in cell.evaluations if one.label == "autoattack"])  # noqa: E731
    bf16, fp32 = (duration.estimate(cells[:1], speeds, left).seconds for speeds in (known, exact))
    assert bf16 == pytest.approx(fp32) and bf16 > 0


def test_steps_that_repeat_are_recorded_on_a_gpu() -> None:
    """100 rounds of 10 epochs of 5 clients; a round of a client with two batches is over before it pays."""
    spec = files.load("sfat-cifar10").plan().cells[0].spec
    assert (cost.client_steps(spec), gpu_estimates.path_for(spec)) == (100 * 5 * 10 * (49_000 // 5 // 32), "graphs")
    algorithm = {**spec["algorithm"], "rounds": 1, "local": {**spec["algorithm"]["local"], "epochs": 1}}
    two = {"partition": {**spec["partition"], "clients": 2}, "train": 2 * 64, "validation": 0}
    few = {**spec, **two, "algorithm": algorithm}
    assert (cost.client_steps(few), gpu_estimates.path_for(few)) == (2 * 2, "loop")
    assert cost.client_steps({**few, "train": 2 * 320}) == 2 * 10 == gpu_estimates.OFTEN
    assert gpu_estimates.path_for({**few, "train": 2 * 320}) == "graphs"


def test_the_monitor_looks_after_the_last_round_too() -> None:
    """Every second of five rounds is 2, 4 and the last."""
    spec = files.load("sfat-cifar10").plan().cells[0].spec
    every_second, each = (
        cost.monitoring({**spec, "monitor_every": every, "algorithm": {**spec["algorithm"], "rounds": rounds}})
        for every, rounds in ((2, 5), (1, 3))
    )
    assert every_second == each and each.forward > 0


def test_a_worker_chooses_for_each_cell() -> None:
    job, *_ = start.jobs_of(files.load("fat-transformers-iid").plan())
    auto = Machine("", "", "", "cuda:1", precision="fp32", path="auto")
    assert worker.path_of(job, auto) == worker.path_of(job, replace(auto, device="cpu", path="graphs")) == "graphs"
    assert worker.path_of(job, replace(auto, device="cpu")) == worker.path_of(job, replace(auto, path="loop")) == "loop"


def test_recorded_steps_were_never_slower_where_both_were_measured() -> None:
    """What `auto` rests on: a network for which it is otherwise would need a rule that knows it."""
    times: dict[tuple[str, ...], dict[str, float]] = {}
    for gpu, name, images, bits, path, seconds in measurements():
        times.setdefault((gpu, name, str(images), bits), {})[path] = seconds
    both = [paths["loop"] / paths["graphs"] for paths in times.values() if len(paths) == 2]
    assert len(both) >= 24 and min(both) >= 1


def test_a_gpu_is_known_by_what_its_driver_calls_it() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s", "NVIDIA L40": None,
             "NVIDIA GeForce RTX 4090": "rtx4090"}  # fmt: skip
    assert {driver: gpu_estimates.known_gpu(driver) for driver in names} == names


MEASURED = {  # network of results/bench/h200.json -> its settings, the side of its images, its name in the documents
    "nin": ({"name": "nin"}, None, "NIN"),
    "small_cnn": ({"name": "small_cnn", "width": 64}, None, "SmallCNN, width 64"),
    "small_cnn8": ({"name": "small_cnn", "width": 8}, None, "SmallCNN, width 8"),
    "resnet18": ({"name": "resnet18"}, None, "ResNet18"),
    "vit_s": ({"name": "vit"}, 224, "ViT-S/16 at 224"),
}
STEPS = 11  # of an image in a step of training: PGD-10 and the update


def measurements() -> Iterator[tuple[str, str, int, str, str, float]]:
    """(GPU, network, images, precision, path, seconds of a pass forward and one back) of all that was measured."""
    for row in json.loads((BENCH / "h200.json").read_text()):
        if row["kind"] == "pass":
            yield "h200", row["net"], row["b"], row["bits"], "loop", row["ms"] / 1e3
            yield "h200", row["net"], row["b"], row["bits"], "graphs", row["graph_ms"] / 1e3
        elif row["path"] in ("loop", "graphs"):  # the other paths are no longer there
            yield "h200", row["net"], 32, row["bits"], row["path"], row["ms_step"] / 1e3 / STEPS
    rates = r"^\| (\w+) \| ([\d,]+) \| [\d,]+ \| ([\d,]+) \| \d+ \| [\d.]+ \|$"
    for bits, loop, graphs in re.findall(rates, (BENCH / "h100.md").read_text(), re.M):
        for path, rate in (("loop", loop), ("graphs", graphs)):
            yield "h100", "nin", 32, bits, path, 32 / float(rate.replace(",", ""))


def test_the_estimate_is_what_was_measured_or_the_page_says_where_it_is_off() -> None:
    """Within 1.5 each way; docs/gpu.md lists the others with their ratio, and none that is not off."""
    base = files.load("sfat-cifar10").plan().cells[0].spec
    found, seen = set(), 0
    for gpu, name, images, bits, path, seconds in measurements():
        model, size, title = MEASURED[name]
        spec = {**base, "model": dict(calls.check("Model", model, "model")), "size": size}
        ratio = gpu_estimates.step_seconds(spec, gpu, bits, path, images) / seconds
        seen += 1
        if not 1 / 1.5 <= ratio <= 1.5:
            assert gpu == "h200"
            found.add(f"| {title} | {images} | {bits} | `{path}` | {ratio:.1f} |")
    row = r"^\| [^|]+ \| \d+ \| \w+ \| `\w+` \| [\d.]+ \|$"
    listed = re.findall(row, (ROOT / "docs" / "gpu.md").read_text(), re.M)
    assert (seen, sorted(found)) == (66, sorted(listed))


LATER = ("sfat-cifar10", "fat-transformers-iid", "fedvkd-cifar10", "april-learning")


@pytest.mark.parametrize("name", ["adfl-mnist", *(pytest.param(name, marks=pytest.mark.nightly) for name in LATER)])
def test_a_weekend_is_a_part_of_the_paper_that_one_gpu_finishes(name: str) -> None:
    """Its cells and attacks are the paper's own, of one seed."""
    suite = files.load(name)
    weekend, paper = suite.plan("weekend"), {cell.id: cell for cell in suite.plan("paper").cells}
    assert len({cell.spec["seed"] for cell in weekend.cells}) == 1
    for cell in weekend.cells:
        assert cell.id in paper and cell.key == paper[cell.id].key
        assert {one.id for one in cell.evaluations} <= {one.id for one in paper[cell.id].evaluations}
    cells = weekend.to_run()
    speeds = gpu_estimates.speeds(cells, "h200", "auto", None, "auto")
    time = duration.estimate(cells, speeds, duration.whole_plan(weekend))
    assert not time.unknown and time.seconds < 48 * 3600


def test_a_run_on_a_gpu_says_what_is_chosen_and_what_would_be_faster() -> None:
    cells = files.load("sfat-cifar10").plan().unique()[:6]
    said = gpu_estimates.choices(cells, "NVIDIA H200", "fp32", None, "auto")
    begin = "NVIDIA H200: --precision fp32, run.path graphs for 6 cells (graphs where steps repeat"
    assert said.startswith(begin) and "; estimated " in said
    said = gpu_estimates.choices(cells, "NVIDIA H100", "tf32", "fp32", "auto", auto=True, gpus=8)
    auto = "--precision auto (tf32 for training and its monitor; fp32 for attacks after training)"
    assert said.startswith(f"8 x NVIDIA H100: {auto}, run.path graphs for 6")
    assert "times as fast with --precision bf16" in said
    assert "times as fast with --precision bf16,tf32" in said  # AutoAttack is float32 under bf16
    said = gpu_estimates.choices(cells[:1], "NVIDIA H200", "bf16", "tf32", "graphs")
    assert said == "NVIDIA H200: --precision bf16,tf32, run.path graphs for 1 cells"
    assert gpu_estimates.choices(cells[:1], "Tesla T4", "fp32", None, "loop").endswith("its data sheet is not known")


def test_a_plan_says_its_time_on_a_gpu_that_is_not_here(plan: Plan, run: Run) -> None:
    short = ("plan", "suite", "short.yaml", "--on", "h200")
    _, shown, _ = run(*short, "--precision", "bf16", "--jobs", "2")
    assert "time left on one H200: about " in shown and "an estimate: operations and kernels were counted" in shown
    assert "on 2 workers of that kind: " in shown
    told, auto = (json.loads(run(*short, *more, "--format", "json")[1]) for more in ((), ("--precision", "auto")))
    assert told == auto
    assert told["on"] == "h200" and told["time"]["seconds"] > 0 and told["time"]["unknown"] == 0
    assert list(Path().glob("*.db")) == []
