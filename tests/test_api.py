"""The interface for Python: cheap to import, true to the command line, shown well by a notebook."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from small import small
from torch import nn

import fatbench
from fatbench import api
from fatbench.cli import evaluate, reporting
from fatbench.cli.run import run as run_command
from fatbench.data import DATASETS
from fatbench.errors import NothingMatched, SpecError, UnknownName
from fatbench.methods.evasion import ATTACKS
from fatbench.runner.run_options import RunOptions

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

TINY = small(
    name="tiny", seeds="[1]", test="30", model="small_cnn", rounds=2,
    axes="{metric: {samples: {}, uniform: {algorithm: {aggregator: uniform}}}}",
    evaluate="{attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}}",
    tables="[{id: A, title: Tiny, rows: [metric], values: {natural: natural, FGSM: fgsm}}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, one of whose axes has the name of a column, and its database after a run."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = fatbench.run("tiny.yaml", jobs=1, device="cpu", quiet=True)
    rows = [[method, 1, "done", ""] for method in ("samples", "uniform")]
    assert done[["metric", "seed", "status", "error"]].values.tolist() == rows
    return folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


@pytest.mark.nightly
def test_importing_costs_nothing_and_names_stay_functions() -> None:
    """Neither torch nor pandas; `fatbench.run` is the function also after the folder of that name was imported, and
    every public name is still what it was after every submodule was.
    """
    code = (
        "import importlib, pkgutil, sys, fatbench; assert 'torch' not in sys.modules and 'pandas' not in sys.modules;"
        "from fatbench.runner import worker; import fatbench.runner.start;"
        "assert fatbench.run is fatbench.api.run;"
        "assert set(fatbench.__all__) <= set(dir(fatbench)); [getattr(fatbench, n) for n in fatbench.__all__];"
        "assert 'torch' not in sys.modules;"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(fatbench.__path__, 'fatbench.')"
        " if not m.name.endswith('__main__')];"
        "assert all(callable(getattr(fatbench, n)) for n in fatbench.__all__ if n not in ('attacks', '__version__'));"
        "assert callable(fatbench.attacks.pgd)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    with pytest.raises(AttributeError, match="module 'fatbench' has no attribute 'tabel'"):
        _ = fatbench.tabel  # type: ignore[attr-defined]


def test_suites_and_plan_are_those_of_the_command_line(here: Path, run: Run) -> None:
    planned = json.loads(run("plan", "suite", "tiny.yaml", "--format", "json")[1])["cells"]
    frame = fatbench.plan("tiny.yaml")
    assert frame["cell"].tolist() == [cell["id"] for cell in planned]
    assert frame["image_passes"].tolist() == [cell["work"]["image_passes"] for cell in planned]
    assert fatbench.plan("tiny.yaml", where="metric=samples", seeds=[4, 5])["seed"].tolist() == [4, 5]


def test_results_are_the_numbers_of_the_view(here: Path) -> None:
    """2 cells, each with natural and fgsm after round 2: the values of `show`; an axis does not hide a column."""
    frame = fatbench.results("tiny.yaml", stage=None, clients=True)
    evaluated = fatbench.results("tiny.yaml", clients=True)
    assert evaluated["value"].tolist() == frame[frame["stage"] != "train"]["value"].tolist()
    found = frame[(frame["stage"] != "train") & frame["metric"].isin(["natural", "fgsm"])]
    columns = (found[name] for name in ("axis:metric", "metric", "round", "n"))
    assert sorted(zip(*columns, strict=True)) == [
        ("samples", "fgsm", 2, 30), ("samples", "natural", 2, 30),
        ("uniform", "fgsm", 2, 30), ("uniform", "natural", 2, 30),
    ]  # fmt: skip
    fgsm = found[found["metric"] == "fgsm"]
    assert fgsm["attack"].str.startswith("fgsm(eps=8/255").all()
    assert {*fgsm["eps"]} == {8 / 255} and {*fgsm["norm"]} == {"Linf"} and {*fgsm["unit"]} == {"fraction"}
    assert found.loc[found["metric"] == "natural", "eps"].isna().all()
    assert frame["created"].dt.tz is not None
    units = dict(zip(frame["metric"], frame["unit"], strict=True))
    assert (units["seconds"], units["train_loss"], units["weight"]) == ("s", "nats", "")
    assert {"commit", "device", "precision", "suite", "preset", "created", "dirty", "run"} <= set(frame)
    with api.opened(None) as store:
        every = store.measurements()
    assert frame["value"].tolist() == [row["value"] for row in every]
    assert len(fatbench.results(stage=None, clients=True)) == len(every)
    overall = fatbench.results(stage=None)
    assert set(overall["client"]) == {-1} and 0 < len(overall) < len(every)
    half = fatbench.results("tiny.yaml", where={"metric": "samples"}, stage=None, clients=True, seeds=1)
    assert len(half) * 2 == len(every)


def test_a_table_is_what_the_command_prints(here: Path, run: Run) -> None:
    made = fatbench.table("tiny.yaml")
    assert run("report", "tiny.yaml", "--format", "markdown")[1] == made.markdown() == repr(made)
    assert made.latex() == run("report", "tiny.yaml", "--format", "latex")[1]
    numbers = fatbench.results("tiny.yaml")
    natural = numbers[(numbers["metric"] == "natural") & (numbers["stage"] != "train")]
    shown = made.frame()
    assert sorted(shown[shown["metric"] == "natural"]["mean"]) == sorted(natural["value"])
    html = made._repr_html_()
    assert html.startswith('<div class="fatbench">') and "<td" in html and "<body" not in html and ":root" not in html
    with pytest.raises(SpecError, match=r"^id: no table is named 'B' \(known: A\)"):
        fatbench.table("tiny.yaml", "B")


def test_asking_an_empty_database_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    assert fatbench.results().empty
    assert fatbench.results("tiny.yaml").empty
    assert fatbench.table("tiny.yaml").frame()["mean"].isna().all()
    with pytest.raises(NothingMatched, match="no evaluated model yet"):
        fatbench.table("evaluate")
    assert not (tmp_path / "results").exists()


# --- attacks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_images_outside_by_a_rounding_are_taken_and_nan_is_not(kind: torch.dtype) -> None:
    """They went through normalise and back."""
    x, y = torch.full((1, 1, 2, 2), 0.5, dtype=kind), torch.tensor([0])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2)).to(kind)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = -torch.finfo(kind).eps / 4, 1 + torch.finfo(kind).eps
    moved = fatbench.attacks.pgd(model, x, y, eps="8/255", step="2/255", steps=2)
    assert moved.min() >= 0 and moved.max() <= 1
    for wrong in (float("nan"), 1 + 20 * torch.finfo(kind).eps, -0.5, float("inf")):
        x[0, 0, 1, 1] = wrong
        with pytest.raises(SpecError, match=r"expected images \(B, C, H, W\) as floats in \[0, 1\]"):
            fatbench.attacks.pgd(model, x, y, eps="8/255", step="2/255", steps=2)


def test_attacks_are_those_of_the_suites_and_leave_the_model_as_it_was() -> None:
    assert set(ATTACKS) <= set(dir(fatbench.attacks))
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).train()
    x, y = torch.rand(3, 1, 8, 8), torch.tensor([1, 2, 3])
    settings: dict[str, Any] = {"eps": "0.1", "step": 0.05, "steps": 2}
    before = torch.get_rng_state()
    first, other = (fatbench.attacks.pgd(model, x, y, **settings) for _ in range(2))
    again = fatbench.attacks.pgd(model, x, y, **settings, seed=first.seed)
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(before, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert all(weight.grad is None for weight in model.parameters())
    torch.testing.assert_close(fatbench.attacks.natural(model, x, y), x)
    with pytest.raises(SpecError, match="'pgd' has no setting 'epsilon'"):
        fatbench.attacks.attack("pgd", model, x, y, epsilon=0.1, step=0.1, steps=1)
    with pytest.raises(SpecError, match=r"expected images \(B, C, H, W\) as floats in \[0, 1\]"):
        fatbench.attacks.fgsm(model, 2 * x - 1, y, eps=0.1)
    with pytest.raises(AttributeError, match="has no attack 'pgdd'"):
        _ = fatbench.attacks.pgdd
    assert {"attack", "through", "restarts", "seed"} <= inspect.signature(fatbench.attacks.dual).parameters.keys()


def test_restarts_keep_of_each_image_what_fools_the_model() -> None:
    """Right only while pixel 0 is at most 0.5: of eight starts in [0, 1] without a step, one is beyond it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([0.5 - x[:, 0, 0, 0], x[:, 0, 0, 0] - 0.5], 1)

    x, y = torch.full((64, 1, 1, 1), 0.4), torch.zeros(64, dtype=torch.int64)
    settings: dict[str, Any] = {"eps": 0.3, "step": 0, "steps": 1, "seed": 0}
    right = [(fatbench.attacks.pgd(model, x, y, **settings, restarts=k) <= 0.5).sum() for k in (1, 2, 8)]
    assert 64 > right[0] > right[1] > right[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eps": 8}, "8/255, not 8"),
        ({"steps": 0}, "attacks.pgd: steps"),
        ({"x": torch.full((2, 1, 8, 8), 2.0)}, r"in \[0, 1\].*got 2"),
        ({"x": torch.zeros(2, 1, 8, 9)}, "does not accept images of 1x8x9"),
        ({"x": torch.zeros(2, 8, 8, 1)}, r"\(2, 8, 8, 1\), with the channels last: x.permute\(0, 3, 1, 2\)"),
        ({"x": None}, r"x: expected images .* got None"),
        ({"y": "01"}, "y: expected 2 classes .* got '01'"),
        ({"y": torch.tensor([0.0, 1.0])}, "float32"),
        ({"y": torch.tensor([0, 12])}, "labels of 10 classes are 0 to 9, got 0 to 12"),
        ({"y": torch.tensor([1, -100])}, "labels of 10 classes are 0 to 9, got -100 to 1"),
        ({"y": torch.tensor([0])}, "expected 2 classes"),
        ({"restarts": 0}, "restarts: expected a whole number of 1 or more, got 0"),
        ({"restarts": 2.0}, "restarts: expected a whole number of 1 or more, got 2.0"),
        ({"seed": [0, 1]}, r"seed: expected a whole number of 0 or more, got \[0, 1\]"),
        ({"seed": True}, "seed: expected a whole number of 0 or more, got True"),
        ({"model": lambda x: {"logits": x}}, "returns a dict, not logits"),
        ({"model": lambda x: x.flatten(1).numpy()}, "model: lambda returns a ndarray, not logits"),
        ({"model": {}}, "got a dict: load the state dict into its module"),
        ({"model": nn.Flatten}, "got the class Flatten: call it"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(10))}, "has lazy layers without weights: call it once"),
        ({"model": object()}, "expected a torch.nn.Module or a function of images, got an object$"),
    ],
)
def test_a_mistake_in_what_an_attack_is_given_is_named(change: dict[str, Any], said: str) -> None:
    right = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "x": torch.zeros(2, 1, 8, 8), "y": numpy.array([1, 2]),
        "eps": 8 / 255, "step": "2/255", "steps": 1,
    }  # fmt: skip
    assert fatbench.attacks.pgd(**right, restarts=numpy.int64(2), seed=numpy.int64(1)).shape == (2, 1, 8, 8)
    with pytest.raises(SpecError, match=said):
        fatbench.attacks.pgd(**{**right, **change})


def test_fgsm_by_hand() -> None:
    """The loss of class 0 grows with pixel 1 and falls with pixel 0: a step of 0.25 along (-, +), cut at the box."""
    x = torch.tensor([[[[0.5, 0.9]]]])
    moved = fatbench.attacks.fgsm(nn.Flatten(), x, torch.tensor([0]), eps=0.25)
    torch.testing.assert_close(moved, torch.tensor([[[[0.25, 1.0]]]]))
    assert torch.equal(fatbench.attacks.fgsm(nn.Flatten(), x, torch.tensor([0]), eps="1/4"), moved)


def test_what_is_no_number_is_named() -> None:
    x, y = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    for name, value in (
        ("seed", -1), ("seed", [0, 1]), ("mean", "a"), ("mean", math.nan), ("std", math.inf), ("eps", math.nan),
        ("eps", math.inf), ("plugins", 3),
    ):  # fmt: skip
        more = {"std": 1.0} if name == "mean" else {"mean": 0.0} if name == "std" else {}
        with pytest.raises(SpecError, match=f"^{name}: expected"):
            fatbench.evaluate(zeros(), (x, y), ["fgsm"], **{name: value}, **more)
    found = fatbench.evaluate(zeros(), (x, y), [], n=numpy.int64(3), batch=numpy.int64(2), seed=numpy.int64(1))
    assert len(found.outcomes) == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: fatbench.partition([0, 1] * 9, "iid", clients=2, seed=-1), "seed: expected a whole number of 0 or"),
        (lambda: fatbench.partition([0, -1], "iid", clients=2), "labels: .* from 0 on, .* the smallest -1"),
        (lambda: fatbench.partition([0, 1], "iid", clients=2, writers=[1]), "writers: expected one for each of 2"),
        (lambda: fatbench.aggregate("samples", [torch.ones(1)], round=-1), "round: expected a whole number of 0"),
        (lambda: fatbench.aggregate("samples", [torch.ones(1)], rounds=0), "rounds: expected a whole number of 1"),
        (lambda: fatbench.aggregate("krum", torch.ones(9, 2), byzantine=4), "krum: byzantine=4 needs 11 clients in a"),
        (lambda: fatbench.aggregate("krum", torch.ones(9, 2), byzantine=numpy.float32(0.5)),
         "^aggregate: byzantine: sh"),
        (lambda: fatbench.aggregate("sfat", torch.ones(4, 2), alpha=0.1, top=3, losses=[1] * 4), "sfat: top=3 of 4"),
        (lambda: fatbench.aggregate("adfl", torch.ones(4, 2)), "this aggregator needs images, whose shape only a"),
        (lambda: fatbench.aggregate("adfl", [nn.Linear(2, 2)] * 3, model=nn.Linear(2, 2)), "needs images, whose"),  # type: ignore[type-var]
        (lambda: fatbench.aggregate("afl", torch.ones(4, 2), memory=[]), r"memory: expected a dictionary, .* got \[\]"),  # type: ignore[arg-type]
        (lambda: fatbench.aggregate(len, torch.ones(4, 2)), "name: expected a name, got a builtin"),  # type: ignore[arg-type]
        (lambda: fatbench.aggregate("samples", torch.ones(4, 2), broadcast=torch.ones(3)), r"^broadcast: .* \(2,\) at"),
        (lambda: fatbench.aggregate("samples", torch.ones(4, 2), broadcast={"w": torch.ones(2)}),
         "^broadcast: 'vector' has"),
        (lambda: fatbench.aggregate("krum", torch.ones(5, 2), broadcast=torch.ones(2) / 0, byzantine=1),
         "^broadcast: ex"),
        (lambda: fatbench.names(len), "got a builtin_function_or_method"),  # type: ignore[arg-type]
        (lambda: fatbench.partition([0, 1], "iid", clients=3), "partition: iid: 3 clients, but only 2 examples"),
        (lambda: fatbench.partition([0, 1], "by_writer", clients=2), "partition: by_writer: this data set does not"),
        (lambda: fatbench.make_suite("fat-baselines", base={"train": object()}), "train: expected what a suite file"),
        (lambda: fatbench.plan("sfat-cifar10", preset="smoke", override={"train": {1}}),
         "train: expected what a suite"),
        (lambda: fatbench.plan("sfat-cifar10", preset="smoke", seeds=1.5), "seeds: expected whole numbers .* got 1.5"),
        (lambda: fatbench.plan("sfat-cifar10", preset="smoke", override=3), "override: expected settings"),
        (lambda: RunOptions(jobs=0), "jobs: expected a whole number of 1 or more, got 0"),
        (lambda: RunOptions(per_gpu=1.5), "^per_gpu: expected a whole number of 1 or more"),  # type: ignore[arg-type]
        (lambda: RunOptions(microbatch=True), "microbatch: expected a whole number of 1 or more, got True"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_named_by_every_function(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        call()


# --- evaluate -----------------------------------------------------------------------------------------------------


def test_a_module_in_memory_is_judged_and_left_alone(here: Path) -> None:
    """Always class 0: of the first 50 digits as many are right as are zeros, under every attack."""
    module, before = zeros().train(), fatbench.results()
    frame = fatbench.evaluate(module, dataset="digits", attacks=["fgsm"], n=50).frame().set_index("metric")
    right = (DATASETS["digits"](Path()).test_labels[:50] == 0).mean()
    assert frame["mean"].to_dict() == {"natural": right, "fgsm": right}
    assert "accuracy is at chance" in frame["doubts"]["natural"] and "no gradient" in frame["doubts"]["fgsm"]
    assert module.training and len(fatbench.results()) == len(before)  # nothing was stored


def test_a_script_without_a_guard_is_told_so_before_anything_runs(tmp_path: Path) -> None:
    """One message, no process and no database; below `if`, the same call goes on to look for its suite."""
    call = "fatbench.run('nothing', jobs=1)"
    told = []
    for text in (f"import fatbench\n{call}\n", f"import fatbench\nif __name__ == '__main__':\n    {call}\n"):
        (tmp_path / "script.py").write_text(text)
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        told.append(done.stderr.splitlines()[-1])
    assert 'script.py:2: call fatbench under `if __name__ == "__main__":`' in told[0]
    assert "no suite is named 'nothing'" in told[1]
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


# --- documents ----------------------------------------------------------------------------------------------------


NOTEBOOK = ROOT / "docs" / "example.ipynb"
HEADINGS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)[: len(BLOCKS)]


def test_the_example_notebook_has_the_blocks_of_the_page() -> None:
    import nbformat

    book = nbformat.read(NOTEBOOK, as_version=4)
    assert [cell.source for cell in book.cells if cell.cell_type == "code"] == [block.rstrip() for block in BLOCKS]
    assert [cell.source.partition("\n")[0] for cell in book.cells[1::2]] == [f"## {heading}" for heading in HEADINGS]
    assert all(cell.outputs for cell in book.cells if cell.cell_type == "code")


@pytest.mark.nightly
def test_every_block_of_the_page_stands_alone_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside our results, after %reset: no block fails, tables come as HTML, and a mistake is two lines."""
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "fat-baselines-cpu.jsonl.xz", tmp_path / "results")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import nbformat
    from nbclient import NotebookClient

    new = nbformat.v4.new_code_cell
    mistake = new('import fatbench\nfatbench.table("sfat-cifar11")', metadata={"tags": ["raises-exception"]})
    cells = [part for block in BLOCKS for part in (new("%reset -f"), new(block.rstrip()))]
    book = nbformat.v4.new_notebook(cells=[*cells, mistake])
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[one["data"].get("text/html", "") for one in cell.outputs if "data" in one] for cell in cells[1::2]]
    said = ["".join(one.get("text", "") for one in cell.outputs) for cell in cells[1::2]]
    assert all('<div class="fatbench">' in shown[place][-1] for place in (0, 1, 2)) and "dataframe" in shown[3][-1]
    assert "mine" in shown[2][-1] and "'brighter':" in said[0] and "seeds 0, 1, 2" in said[1] and "A = SFAT" in said[3]
    (error,) = mistake.outputs
    assert [line.partition(":")[0] for line in error.traceback] == ["SpecError", "  line 2"]
    if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
        _write_example(cells[1::2])


def _write_example(cells: list[Any]) -> None:
    """docs/example.ipynb anew: each block below its heading, with what it gave."""
    import nbformat

    cells = [nbformat.v4.new_code_cell(cell.source, outputs=cell.outputs, execution_count=None) for cell in cells]
    head = "# fatbench in a notebook\n\nThe blocks of [python.md](python.md), each by itself."
    texts = [head, *(f"## {h}" for h in HEADINGS)]
    markdown = [nbformat.v4.new_markdown_cell(text) for text in texts]
    pairs = [part for pair in zip(markdown[1:], cells, strict=True) for part in pair]
    for place, cell in enumerate([markdown[0], *pairs]):
        cell.id = f"cell-{place}"
    for cell in cells:
        cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for one in cell.outputs:
            if "execution_count" in one:
                one.execution_count = None
    book = nbformat.v4.new_notebook(cells=[markdown[0], *pairs])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, NOTEBOOK)


PLAIN = """
import fatbench, torch
from sklearn.datasets import load_digits
digits = load_digits()
x, y = torch.tensor(digits.images[:1200] / 16).float()[:, None], torch.tensor(digits.target[:1200])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
step = torch.optim.SGD(net.parameters(), 0.5)
for _ in range(100):
    step.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    step.step()
"""
BESIDE = [
    'ours = {"preset": "smoke", "plugins": ["mine.py"]}',
    'fatbench.run("mine.yaml", **ours, quiet=True)',
    'fatbench.evaluate(net, like="mine.yaml", **ours, name="plain", db="results/fatbench.db")',
    'fatbench.table("mine.yaml", **ours, with_evaluated=True)',
]


@pytest.mark.nightly
def test_a_notebook_puts_a_plain_model_beside_a_suite_s_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained by a plain loop, attacked by AutoAttack and a plug-in's suite, in one HTML table with SFAT."""
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    import nbformat
    from nbclient import NotebookClient

    subprocess.run([sys.executable, "-m", "fatbench", "new", "aggregator", "mine"], check=True)
    suite = tmp_path / "mine.yaml"
    more = "pgd20: {name: pgd, eps: 25/255, step: 3/255, steps: 20}\n    aa: {name: autoattack, eps: 25/255}"
    text = suite.read_text().replace(more.partition("\n")[0], more, 1)
    suite.write_text(text.replace("PGD-20: pgd20}", "PGD-20: pgd20, AA: aa}").replace("n: 64", "n: 16"))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block) for block in (PLAIN, *BESIDE)])
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    html = book.cells[-1].outputs[0]["data"]["text/html"]
    assert "SFAT" in html and "external model: plain" in html and "AA" in html and "mine.py (sha256" in html


@pytest.mark.parametrize(
    ("function", "command", "not_here"),
    [
        # `fatbench.plan`; suite, attacks, retry_failed and rerun_changed
        (fatbench.run, run_command, {"dry_run", "target", "attack", "rerun"}),
        # module, network, attacks, n; exit codes
        (fatbench.evaluate, evaluate.evaluate, {"file", "attack", "format", "images"}),
        (fatbench.table, reporting.report, {"names", "format", "output", "table", "width", "by", "metric", "common"}),
    ],
)
def test_what_a_command_takes_a_function_takes(function: object, command: object, not_here: set[str]) -> None:
    """What is left out says how the text of a table looks; the names of suites and tables come first."""
    options, mine = (set(inspect.signature(one).parameters) for one in (command, function))  # type: ignore[arg-type]
    assert options - not_here <= mine and "plugins" in mine and not_here <= options


def test_an_attack_from_python_takes_what_a_suite_takes() -> None:
    """Their settings are those of the registered function; PGD in L2 and CW with its margin reach the attack."""

    def settings(function: Callable[..., Any]) -> dict[str, object]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    for name in ("fgsm", "pgd", "cw", "autoattack"):
        more = {"restarts": 1} if name in ("pgd", "cw") else {}
        assert settings(getattr(fatbench.attacks, name)) == {**settings(ATTACKS[name]), **more, "seed": None}
    x, y = torch.full((2, 1, 1, 1), 0.5), torch.tensor([0, 1])
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    moved = fatbench.attacks.pgd(model, x, y, eps=0.25, step=0.1, steps=1, start="none", norm="L2")
    torch.testing.assert_close((moved - x).abs().flatten(), torch.full((2,), 0.1))
    stopped = fatbench.attacks.cw(model, x, y, eps=0.25, step=0.1, steps=1, kappa=0.0, early_stop=True)
    assert stopped.shape == x.shape


# --- objects in ---------------------------------------------------------------------------------------------------


def zeros(classes: int = 10) -> nn.Sequential:
    """Answers class 0, whatever it is shown."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    with torch.no_grad():
        module[1].weight.zero_()
        module[1].bias.copy_(torch.eye(classes)[0])
    return module


def flip(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Negative images."""
    return 1 - x


def test_images_in_memory_are_a_data_set_in_every_form() -> None:
    """Three of eight labels are 0; of the first four, two."""
    from torch.utils.data import DataLoader, TensorDataset

    x, y = torch.rand(8, 1, 8, 8), torch.tensor([0, 1, 0, 3, 4, 5, 6, 0])
    tensors = TensorDataset(x, y)
    mine = fatbench.dataset(1 - x, y, x, y, name="mine", classes=10)
    loaders = DataLoader(tensors, batch_size=3), DataLoader(tensors, batch_size=3, shuffle=True)
    for given in ((x, y), [x.numpy(), y.tolist()], ((x * 255).byte(), y), tensors, *loaders, mine):
        found = fatbench.evaluate(zeros(), given, ["fgsm", flip])
        assert found.accuracy == {"natural": 3 / 8, "fgsm": 3 / 8, "flip": 3 / 8}, given
        assert found.outcomes["flip"].tolist() == (y == 0).tolist()
    assert fatbench.evaluate(zeros(), (x, y), flip, n=4).accuracy["natural"] == 2 / 4
    assert found.answer.startswith("robust accuracy 37.5 % (14 to 69), Linf 8/255") and found.answer in repr(found)
    low, high = found.interval("fgsm")
    assert 0 < low < 3 / 8 < high < 1 and any("no gradient" in doubt for doubt in found.doubts)
    for wrong, said in (
        ((x, -y), "the smallest is -6"), ((x, y[:3]), "8 images and 3 labels"), ((2 * x, y), r"in \[0, 1\]"),
        (3, "got a int"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=said):
            fatbench.evaluate(zeros(), wrong, "fgsm")


class Rows(dict):
    """Looks like a data set of Hugging Face: columns by name, rows as mappings, one after another."""

    column_names = ("image", "label")

    def __len__(self) -> int:
        return len(self["label"])

    def __getitem__(self, at: Any) -> Any:
        return super().__getitem__(at) if isinstance(at, str) else {name: column[at] for name, column in self.items()}

    def __iter__(self) -> Any:
        return (self[row] for row in range(len(self)))


def test_rows_of_hugging_face_are_images_and_labels() -> None:
    """Of images as PIL has them, nested lists, a stream without a length, and what a DataLoader makes of the rows."""
    image, y = (torch.rand(8, 8, 8) * 255).byte(), [0, 1, 0, 3, 4, 5, 6, 0]
    arrays, lists = Rows(image=[*image.numpy()], label=y), Rows(image=image[:, None].tolist(), label=y)
    stream = type("Stream", (), {"column_names": None, "__iter__": lambda self: iter(lists)})()
    batches = [{"img": image[at : at + 4, None], "labels": torch.tensor(y[at : at + 4])} for at in (0, 4)]
    loader = type("Loader", (), {"dataset": lists, "batch_size": 4, "__iter__": lambda self: iter(batches)})()
    right = fatbench.evaluate(zeros(), (image, y), ["fgsm"]).outcomes
    for given in (arrays, lists, stream, loader):
        assert fatbench.evaluate(zeros(), given, ["fgsm"]).outcomes.equals(right), given
    assert fatbench.evaluate(zeros(), stream, [], n=4).accuracy == {"natural": 2 / 4}
    uneven = Rows(image=[image[0].numpy(), image[1, :7].numpy()], label=[0, 1])
    splits = Rows()
    splits.column_names = {"train": [], "test": []}  # type: ignore[assignment]
    for wrong, said in (
        (uneven, "several shapes"), (splits, "splits: train, test"), (Rows(image=[], label=[]), "no images"),
        (type("Other", (), {"__iter__": lambda self: iter([{"image": image[0], "digit": 0}])})(), "among image, digit"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=said):
            fatbench.evaluate(zeros(), wrong, "fgsm")


def test_attacks_as_objects_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a function decides whether a stored number is of it; torchattacks' object is that of its name."""
    import torchattacks

    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.rand(40, 1, 8, 8).mul(255).byte(), torch.arange(40) % 10
    db = tmp_path / "own.db"
    by_name = fatbench.evaluate(net, (x, y), {"own": {"name": "fgsm", "eps": 0.1}, "short": "fgsm"}, eps=0.1, db=db)
    theirs = fatbench.evaluate(net, (x, y), torchattacks.FGSM(net, eps=0.1), db=db)
    assert theirs.accuracy["fgsm"] == by_name.accuracy["own"] == by_name.accuracy["short"]
    nothing = fatbench.evaluate(net, (x, y), lambda model, x, y: x, db=db).accuracy
    assert len(nothing) == 2 and len({*nothing.values()}) == 1
    for source in ("1 - x", "x"):
        (tmp_path / "own_attack.py").write_text(f"def own(model, x, y):\n    return {source}\n")
        monkeypatch.syspath_prepend(tmp_path)
        import importlib
        import linecache

        import own_attack  # type: ignore[import-not-found]

        linecache.checkcache()
        own = importlib.reload(own_attack).own
        expected = (net(own(net, x / 255, y)).argmax(1) == y).float().mean().item()
        assert fatbench.evaluate(net, (x, y), own, db=db).accuracy["own"] == pytest.approx(expected)
    with pytest.raises(SpecError, match="another model"):
        fatbench.evaluate(zeros(), (x, y), torchattacks.FGSM(net))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eps": 8}, "^eps: expected a part of the pixel range"),
        ({"attacks": "pgd-20"}, "^attacks: no attack is named 'pgd-20'.*did you mean 'pgd20'"),
        ({"dataset": "digit"}, "did you mean 'digits'"),
        ({"dataset": "dictionary"}, r"^dataset: .*fatbench\.register\(function, 'data'\)"),
        ({"dataset": None}, "^dataset: name the data set, or a suite to go by"),
        ({"mean": 0.3}, "^mean and std go together"),
        ({"expect_natural": 95}, "^expect_natural: expected a fraction"),
        ({"expect_natural": "0.95"}, "^expect_natural: expected a fraction"),
        ({"n": -1}, "^n: expected a whole number of 1 or more, got -1"),
        ({"n": 0}, "^n: expected a whole number"),
        ({"n": True}, "^n: expected a whole number"),
        ({"batch": 0}, "^batch: expected a whole number of 1 or more, got 0"),
        ({"batch": 2.0}, "^batch: expected a whole number"),
        ({"size": "8"}, "^size: expected a whole number"),
        ({"seed": [0, 1]}, "^seed: expected a whole number of 0 or more"),
        ({"dataset": (torch.zeros(4, 1, 8, 8), None)}, "y_test: expected integers"),
        ({"model": {}}, "got a dict"),
        ({"plugins": [flip]}, r"^plugins: expected files.*fatbench\.register"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_call(
    change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DATASETS, "dictionary", flip)
    with pytest.raises(SpecError, match=said) as caught:
        fatbench.evaluate(**{"model": zeros(), "dataset": "digits", "attacks": ["fgsm"], "n": 20, **change})
    shown = caught.value._render_traceback_()
    assert len(shown) == 2 and str(caught.value) in shown[0] and "fatbench.evaluate(" in shown[1]


# --- parts for a loop of one's own --------------------------------------------------------------------------------


def test_a_partition_is_that_of_the_suites() -> None:
    from fatbench.engine.randomness import numpy_generator
    from fatbench.methods.partitions import PARTITIONS

    x, y = fatbench.load_data("digits", "train")
    assert x.shape == (1442, 1, 8, 8) and x.dtype == torch.float32 and x.min() >= 0 and x.max() == 1
    ours = fatbench.partition(y, "dirichlet", clients=5, alpha=0.5, seed=3)
    theirs = PARTITIONS["dirichlet"](y.numpy(), numpy_generator(3, "partition"), None, clients=5, alpha=0.5)
    assert all(map(numpy.array_equal, ours, theirs)) and sorted(numpy.concatenate(ours)) == list(range(len(y)))
    for wrong, said in (
        ({"alpha": -1}, "alpha"),
        ({"clients": 0}, "clients"),
        ({"labels": y.float()}, "whole numbers"),
    ):
        with pytest.raises(SpecError, match=said):
            fatbench.partition(**{"labels": y, "how": "dirichlet", "clients": 5, "alpha": 0.5, **wrong})


def test_uploads_are_put_together_as_the_engine_does() -> None:
    """FedAvg by hand; batch normalisation: SFAT leaves its weights as FedAvg's, running numbers go by size."""
    vectors = [numpy.array([1.0, 0.0]), numpy.array([4.0, 3.0])]
    assert fatbench.aggregate("samples", vectors, sizes=[2, 1]).tolist() == [2.0, 1.0]
    nets = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(4)]
    states = [net.state_dict() for net in nets]
    for k, state in enumerate(states):
        for key in state:
            state[key] = torch.full_like(state[key], k)
    settings: dict[str, Any] = {"alpha": 1 / 3, "top": 1}
    found = fatbench.aggregate("sfat", states, losses=[4, 3, 2, 1], **settings)
    assert found["0.weight"][0, 0] == pytest.approx((0 + 1 + 2 + 2 * 3) / 5)
    assert found["1.weight"][0] == found["1.running_mean"][0] == pytest.approx(1.5)
    with_model = fatbench.aggregate("sfat", states, losses=[4, 3, 2, 1], model=nets[0], **settings)
    assert all(torch.equal(found[key], with_model[key]) for key in found)
    with pytest.raises(SpecError, match=r"^losses:"):
        fatbench.aggregate("sfat", states, **settings)
    with pytest.raises(SpecError, match=r"client 1, \(2,\) at client 0"):
        fatbench.aggregate("samples", [torch.zeros(2), torch.zeros(3)])
    part = [{"0.bias": state["0.bias"]} for state in states]
    completed = fatbench.aggregate("samples", part, broadcast=states[0], model=nets[0])
    assert completed["0.bias"].tolist() == [1.5, 1.5] and torch.equal(completed["0.weight"], states[0]["0.weight"])
    memory: dict[str, Any] = {}
    for _ in range(2):
        fatbench.aggregate("afl", vectors, losses=[1, 2], memory=memory, gamma=0.1)
    assert torch.as_tensor(memory["lambda"]).tolist() == pytest.approx([0.4, 0.6])


def test_lists_of_arrays_are_put_together_as_state_dicts_are() -> None:
    """As Flower sends them: in the order of the network's state dict, whose names say which are buffers."""
    nets = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(5)]
    states = [net.state_dict() for net in nets]
    lists = [[value.numpy() for value in state.values()] for state in states]
    settings: dict[str, dict[str, Any]] = {"samples": {}, "krum": {"byzantine": 1}, "sfat": {"alpha": 1 / 3, "top": 1}}
    for how, own in settings.items():
        more = {"sizes": [1, 2, 3, 4, 5], "losses": [5, 4, 3, 2, 1], **own}
        expected = fatbench.aggregate(how, states, broadcast=states[0], model=nets[0], **more)
        found = fatbench.aggregate(how, lists, broadcast=lists[0], model=nets[0], **more)
        assert isinstance(found, list) and all(isinstance(array, numpy.ndarray) for array in found)
        assert all(numpy.array_equal(a, b.numpy()) for a, b in zip(found, expected.values(), strict=True))
    tensors = fatbench.aggregate("coordinate_median", [tuple(map(torch.from_numpy, arrays)) for arrays in lists])
    arrays = fatbench.aggregate("coordinate_median", lists)
    assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(tensors, arrays, strict=True))
    assert fatbench.aggregate("samples", [[1.0, 2.0], [3.0, 6.0]]).tolist() == [2.0, 4.0]  # numbers are a vector
    for wrong, said in (
        ([lists[0], lists[1][:2]], "'2' has shape None at client 1"),
        ([["a"], ["b"]], "expected vectors, lists of arrays or state dicts, got a list"),
        ({"client": lists[0]}, "expected a list with one for each client, got a dict"),
        (3, "expected a list with one for each client, got a int"),
    ):
        with pytest.raises(SpecError, match=said):
            fatbench.aggregate("samples", wrong)  # type: ignore[type-var]


def test_what_there_is_can_be_listed_and_other_programs_names_are_understood() -> None:
    from typing import get_args

    from fatbench.api.making import Kind
    from fatbench.suite import registered, signatures

    kinds = get_args(Kind)
    assert {registered.kind_of(kind) for kind in kinds} == {*signatures.TABLES} - {"Experiment"}
    for kind in kinds:
        assert fatbench.names(kind) == signatures.names(registered.kind_of(kind))
    for wrong, hint in (("aggregators", "did you mean 'aggregator'"), (3, "got 3"), (None, "got None")):
        with pytest.raises(SpecError, match=f"^kind: expected data, .*{hint}"):
            fatbench.names(wrong)  # type: ignore[arg-type]
    for wrong, meant in (
        ("median", "'coordinate_median' or 'geometric_median'"), ("Median", "'coordinate_median' or"),
        ("trmean", "'trimmed_mean'"), ("FedAvg", "'samples'"), ("fedavg", "'samples'"), ("Average", "'uniform'"),
        ("geometric", "'geometric_median'"), ("clipping", "'centred_clipping'"), ("multikrum", "'multi_krum'"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=f"did you mean {meant}"):
            fatbench.aggregate(wrong, [torch.zeros(2)])


def test_every_public_name_can_be_pickled_and_called_in_another_process() -> None:
    """By its name, so that a pool that spawns processes finds it; errors cross, too."""
    import multiprocessing
    import pickle
    from concurrent.futures import ProcessPoolExecutor

    public = [getattr(fatbench, name) for name in fatbench.__all__ if name not in ("attacks", "__version__")]
    attacks = [getattr(fatbench.attacks, name) for name in dir(fatbench.attacks)]
    assert len(public) > 25 and len(attacks) > 10
    for one in (*public, *attacks):
        assert pickle.loads(pickle.dumps(one)) is one
    errors = [getattr(fatbench, name) for name in fatbench.__all__ if name.endswith("Error")]
    errors += [fatbench.Doubtful, fatbench.NothingMatched, fatbench.Unavailable]
    assert all(issubclass(error, fatbench.FatbenchError) for error in errors) and len(errors) == 7
    for error in (*(kind("x: y") for kind in errors), UnknownName("no such", "aggregator mine")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        there = pool.submit(fatbench.evaluate, module, "digits", ["fgsm"], n=30).result()
        assert there.accuracy == fatbench.evaluate(module, "digits", ["fgsm"], n=30).accuracy
        x, y = torch.rand(2, 1, 8, 8), torch.tensor([1, 2])
        moved = pool.submit(fatbench.attacks.fgsm, module, x, y, eps=0.1, seed=0).result()
        assert torch.equal(moved, fatbench.attacks.fgsm(module, x, y, eps=0.1, seed=0))
        with pytest.raises(fatbench.SpecError, match=r"^attacks: no attack is named 'no'"):
            pool.submit(fatbench.evaluate, module, "digits", ["no"], n=30).result()


def test_accuracies_are_fractions_in_what_is_asked_and_what_is_said() -> None:
    module = zeros()
    natural = fatbench.evaluate(module, "digits", [], n=60).accuracy["natural"]
    assert fatbench.evaluate(module, "digits", [], n=60, expect_natural=natural).accuracy["natural"] == natural
    natural = r"^expect_natural=0\.9: natural accuracy is 0\.\d+ of 60 images"
    with pytest.raises(fatbench.Doubtful, match=natural) as said:
        fatbench.evaluate(module, "digits", ["fgsm"], n=60, expect_natural=0.9)
    assert "%" not in str(said.value).replace("95 % interval", "")


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uploads = torch.rand(7, 3)
    expected = fatbench.aggregate("krum", uploads, byzantine=2)
    for two in (numpy.int64(2), torch.tensor(2), numpy.array(2)):
        assert torch.equal(fatbench.aggregate("krum", uploads, byzantine=two), expected)
    net, x, y = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), torch.rand(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])
    of_numpy = {"eps": numpy.float32(0.1), "step": torch.tensor(0.1), "steps": numpy.int64(1)}
    plain = {"eps": float(numpy.float32(0.1)), "step": 0.1, "steps": 1}
    first, second = (fatbench.attacks.pgd(net, x, y, **settings, seed=1) for settings in (of_numpy, plain))
    assert torch.equal(first, second)
    plain = fatbench.make_suite("sfat-cifar10", base={"train": 60}, seeds=[1, 2])
    assert fatbench.make_suite("sfat-cifar10", base={"train": numpy.int64(60)}, seeds=numpy.arange(1, 3)) == plain
    changed = {"train": numpy.int64(60), "algorithm.local.lr": numpy.float64(0.5)}
    seeds, where = numpy.arange(1), {"method": numpy.array(["FAT", "SFAT"])}
    found = fatbench.plan("sfat-cifar10", preset="smoke", override=changed, seeds=seeds, where=where)
    changed, where = {"train": 60, "algorithm.local.lr": 0.5}, "method in [FAT, SFAT]"
    asked = fatbench.plan("sfat-cifar10", preset="smoke", override=changed, seeds=[0], where=where)
    assert found["cell"].tolist() == asked["cell"].tolist() != []


def test_a_suite_can_change_every_section_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that called `base`, like the first argument's old name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = {"algorithm": {"local": {"lr": 0.02}}}
    changed = fatbench.make_suite("fat-baselines", base=local, seeds=[1, 2], name="fewer")
    specs = [cell.spec for cell in changed.plan("paper").cells]
    assert {spec["seed"] for spec in specs} == {1, 2} and 0.02 in {spec["algorithm"]["local"]["lr"] for spec in specs}
    assert changed.name == "fewer"


# --- methods from a cell ------------------------------------------------------------------------------------------

LIMIT = 0.5


def half(value: float) -> float:
    return value * LIMIT


def decorated(function):
    @functools.wraps(function)
    def inner(*args, **settings):
        return function(*args, **settings)

    return inner


@decorated
def first_alone(updates, context, *, share: float = 2 * LIMIT):
    """All weight to the first client."""
    from fatbench.engine.rounds import Mixing

    return Mixing([share, *[(1 - share) / (len(updates) - 1)] * (len(updates) - 1)], metrics={"halved": half(1.0)})


def test_a_function_from_a_cell_stands_beside_the_rows_of_a_suite(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text, with what it reads, is in the database with its numbers; the other rows keep theirs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    base = ["samples", "uniform"]
    own = functools.partial(first_alone, share=0.9)
    methods = {"first": {"algorithm": {"aggregator": own}}}
    suite = fatbench.make_suite("tiny.yaml", methods=methods, axis="metric", baseline="samples")
    assert fatbench.plan(suite)["cell"].tolist()[:2] == fatbench.plan("tiny.yaml")["cell"].tolist()
    db = tmp_path / "own.db"
    shutil.copy(here / "results" / "fatbench.db", db)
    done = fatbench.run(suite, jobs=1, device="cpu", quiet=True, db=db)
    assert done[["metric", "status", "error"]].values.tolist() == [[label, "done", ""] for label in [*base, "first"]]
    assert fatbench.table(suite, db=db).frame()["metric"].tolist() == ["natural", "fgsm"] * 3
    with sqlite3.connect(db) as connection:
        (extra,) = connection.execute("SELECT extra FROM runs WHERE extra LIKE '%first_alone%' LIMIT 1").fetchone()
    (record,) = json.loads(extra)["plugins"]
    assert all(part in record["source"] for part in ("LIMIT = 0.5", "def half", "def first_alone"))
    bits = fatbench.outcomes(suite, "fgsm", db=db)
    frame = fatbench.compare("samples", "first", suite=suite, metric="fgsm", db=db).frame()
    assert frame["difference"][0] == pytest.approx(bits.loc["samples"].values.mean() - bits.loc["first"].values.mean())
    grouped = fatbench.compare("samples", "first", suite=suite, metric="fgsm", db=db, groups="writers")
    assert grouped.difference == frame["difference"][0]  # of one seed nothing is tested
    assert grouped.parts[0].numbers[0][0].groups is not None
    differences = fatbench.table(suite, differences="fgsm", db=db)
    assert differences.frame()["difference"].tolist()[2] == pytest.approx(-frame["difference"][0])
    assert "points above samples" in differences.markdown() and "<table>" in differences._repr_html_()
    exported = tmp_path / "own.jsonl"
    assert fatbench.export_results(exported, suite=suite, where={"metric": ["first"]}, db=db) == 1
    read = fatbench.results(suite, db=[here / "results" / "fatbench.db", exported])
    assert sorted(set(read["axis:metric"])) == ["first", "samples", "uniform"]
    assert fatbench.import_results(exported, db=tmp_path / "new.db")["new cells"].tolist() == [1]
    assert fatbench.plot(suite, x="round", y="train_loss", by="metric", db=db)._repr_png_().startswith(b"\x89PNG")


def test_trainings_of_one_name_are_one_row_and_are_tested(tmp_path: Path) -> None:
    """Three networks that are right about 0, 1 and 2 alone, against three that are never right."""
    db, x = tmp_path / "own.db", torch.rand(12, 1, 8, 8)
    y = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3])
    for name, offset in (("Mine", 0), ("Never", 4)):
        for seed in range(3):
            net = zeros()
            with torch.no_grad():
                net[1].bias.copy_(torch.eye(10)[seed + offset])
            fatbench.evaluate(net, (x, y), "fgsm", name=name, db=db)  # all of seed 0: in the order of evaluation
    table = fatbench.table("evaluate", db=db)
    frame = table.frame().set_index(["model", "metric"])
    assert frame["mean"].to_dict() == {
        ("Mine", "natural"): 0.25, ("Mine", "fgsm"): 0.25, ("Never", "natural"): 0.0, ("Never", "fgsm"): 0.0,
    }  # fmt: skip
    assert frame["seeds"]["Mine", "fgsm"] == "0;1;2"
    assert "preset" not in table.markdown() and "[" not in table.latex().split(r"\midrule")[1].split(r"\bottomrule")[0]
    found = fatbench.compare("Mine", "Never", suite="evaluate", metric="fgsm", db=db)
    assert found.difference == 0.25 and found.low < 0.25 < found.high and 0 < found.p < 1
    bits = fatbench.outcomes("evaluate", "fgsm", db=db)
    arrays = fatbench.compare(bits.loc["Mine"], bits.loc["Never"])
    assert (arrays.difference, arrays.low, arrays.p) == (found.difference, found.low, found.p)
    with pytest.raises(SpecError, match="same seeds and images"):
        fatbench.compare(bits.loc["Mine"], bits.loc["Never"].iloc[:2])
    persons = list("aaabbbcccddd")
    grouped = fatbench.compare(bits.loc["Mine"], bits.loc["Never"], groups=persons)
    stored = fatbench.compare("Mine", "Never", suite="evaluate", metric="fgsm", db=db, groups=persons)
    assert grouped.p == stored.p and "seeds and 4 groups of images: 95 %" in repr(grouped)
    for groups, message in (
        ("writers", "expected a label for each, got 'writers'"),
        (persons[1:], r"12 images: expected a label for each, got \(11,\)"),
        ("a" * 12, "got 'aaaaaaaaaaaa'"),
        (["a"] * 12, "all 12 test images are of one group"),
    ):
        with pytest.raises(SpecError, match=message):
            fatbench.compare(bits.loc["Mine"], bits.loc["Never"], groups=groups)


def test_numbers_of_ones_own_are_a_table(tmp_path: Path) -> None:
    import pandas

    numbers = {"pgd20": [0.5, 0.7, 0.4], "loss": [2.0, 3.0, 1.5]}
    runs = pandas.DataFrame({"method": ["A", "A", "B"], "seed": [0, 1, 0], **numbers})
    table = fatbench.Table.from_frame(runs, "method", ["pgd20", "loss"])
    tidy = runs.melt(["method", "seed"], var_name="metric")
    for made in (table, fatbench.Table.from_frame(tidy, ["method"], "metric")):
        assert made.frame()["mean"].tolist() == pytest.approx([0.6, 2.5, 0.4, 1.5])
        assert "60.00" in made.markdown() and "2.50" in made.markdown()
    for ending in (".md", ".tex", ".html", ".csv", ".json"):
        assert "A" in table.save(tmp_path / f"own{ending}").read_text()
    assert table.latex(width="column") != table.latex(width=400)
    for wrong, said in (
        (lambda: fatbench.Table.from_frame(runs, "methd", "pgd20"), "did you mean 'method'"),
        (lambda: fatbench.Table.from_frame(pandas.concat([runs, runs]), "method", "pgd20"), "two numbers of A, pgd20"),
        (lambda: fatbench.Table([{"method": "A", "pgd20": 0.4}]), r"Table\.from_frame"),  # type: ignore[list-item]
        (lambda: table.save(tmp_path / "own.docx"), "ends in"),
    ):
        with pytest.raises(SpecError, match=said):
            wrong()


USER = 'import fatbench\nfatbench.run("sfat-cifar10", prset="smoke")\nfatbench.evaluate(lambda x: x, datset="digits")\n'


@pytest.mark.nightly
def test_a_type_checker_sees_a_misspelt_keyword(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "user.py"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1 and "prset" in done.stdout and "datset" in done.stdout
