"""`fatbench new`: what it writes works as it is; and docs/tutorial.md, every command of it run."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crew import forget_plugins

from fatbench.cli import new, shipped
from fatbench.report import build_tables, unlike
from fatbench.store.stages import Store
from fatbench.suite import calls, files, plugins, signatures

TUTORIAL = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text(encoding="utf-8")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder, no plug-in loaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    signatures.drop_plugins(list(signatures.plugins()))
    yield tmp_path
    forget_plugins()


LABELS = {"method": "my_one", "aggregator": "my_one", "objective": "my_one", "adversary": "my_one"}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.nightly] * (k not in ("suite", "aggregator", "model"))) for k in new.CHANGES],
)
def test_what_is_written_is_a_valid_suite_beside_fat_and_sfat(place, run, kind):
    code, out, err = run("new", kind, "my_one")
    assert (code, err) == (0, "")
    written = ["my_one.yaml"] if kind == "suite" else ["my_one.py", "my_one.yaml"]
    assert sorted(file.name for file in place.iterdir()) == ["fatbench.schema.json", *written]
    assert out.splitlines() == [f"wrote {', '.join(written)}, fatbench.schema.json; next:",
                                "  fatbench run my_one.yaml --smoke", "  fatbench report my_one.yaml"]  # fmt: skip
    assert run("check", "--schema")[1] == (place / "fatbench.schema.json").read_text(encoding="utf-8")
    for file in written:
        text = (place / file).read_text()
        assert "NAME" not in text
        assert text.startswith("# yaml-language-server: $schema=fatbench.schema.json\n") == (file == "my_one.yaml")
        assert not re.search(r"# [A-Z]+$", text, re.MULTILINE), "a mark was left over"
    found = files.load("my_one.yaml")
    assert list(found.presets()) == ["paper", "smoke"]
    labels = ["FAT", "SFAT", *([LABELS[kind]] if kind in LABELS else [])]
    for preset, seeds in (("paper", 3), ("smoke", 1)):
        plan = found.plan(preset)
        assert [cell.key["method"] for cell in plan.cells[::seeds]] == labels
        for key, usual in (("data", "digits"), ("model", "small_cnn"), ("partition", "shah")):
            expected = "my_one" if new.KINDS.get(kind, "").lower() == key else usual
            assert {cell.spec[key]["name"] for cell in plan.cells} == {expected}
        metrics = ["natural", "fgsm", "pgd20", *(["my_one"] if kind == "attack" else [])]
        assert plan.metrics() == metrics
    assert [one.name for one in signatures.plugins()] == written[:-1]
    if kind in LABELS:
        assert [name.split()[1] for _, name in plugins.used_plugins(plan.cells[-1].spec)] == ["my_one"]
        first, mine = plan.cells[0].spec["algorithm"], plan.cells[-1].spec["algorithm"]
        assert mine["local"]["epochs"] == first["local"]["epochs"] == 1
        assert mine["rounds"] == first["rounds"]


@pytest.mark.skipif(shutil.which("ruff", path=Path(sys.executable).parent) is None, reason="ruff is not installed")
def test_what_is_written_is_as_our_own_files_are(place, run, monkeypatch):
    for kind in new.KINDS:
        (place / kind).mkdir()
        monkeypatch.chdir(place / kind)
        run("new", kind, "my_one")
    config = Path(__file__).parent.parent / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        ruff = [Path(sys.executable).parent / "ruff", *command, "--config", config, *place.rglob("my_one.py")]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("aggregator", "sfat"), "there is already an aggregator named 'sfat'"),
        (("method", "fedavg"), "there is already an algorithm named 'fedavg'"),
        (("attack", "My-Attack"), "'My-Attack' cannot be a function name: use lower case letters, digits and '_'"),
        (("aggregator", "class"), "'class' cannot be a function name"),
        (("suite", "../x"), "'../x' cannot be a file name: use letters, digits, '.', '_' and '-'"),
        (("metod", "x"), "'metod'"),
        (("aggregator", "mine", "--beside", "nowhere"), "no suite is named 'nowhere'"),
        (("aggregator", "mine", "--beside", "no.jsonl"), "no such file: no.jsonl"),
        (("aggregator", "mine", "--beside", "fat-baselines+train=60"), "name the suite alone"),
    ],
)
def test_mistakes_write_nothing(place, run, arguments, message):
    code, _, err = run("new", *arguments)
    assert code == 2
    assert message in err
    assert not list(place.iterdir())


@pytest.mark.parametrize("there", ["my_one.py", "my_one.yaml"])
def test_nothing_is_overwritten(place, run, there):
    (place / there).write_text("mine")
    code, _, err = run("new", "aggregator", "my_one")
    assert (code, err) == (2, f"fatbench: {there} exists already: nothing was written\n")
    assert [(file.name, file.read_text()) for file in place.iterdir()] == [(there, "mine")]


BESIDE = {
    "aggregator": ("sfat-cifar10", "method", "my_one", {"algorithm.aggregator.name": "my_one"}),  # it lists its points
    "objective": ("fat-baselines", "method", "my_one", {"algorithm.local.objective.name": "my_one"}),
    "method": ("fat-baselines", "method", "my_one", {"algorithm.name": "my_one"}),
    "model": ("fat-baselines", "method", "my_one", {"model.name": "my_one"}),
    "adversary": ("fat-byzantine", "adversary", "my_one", {"malicious.attack.name": "my_one", "malicious.clients": 2}),
    "partition": ("fat-baselines", "split", "my_one", {"partition.name": "my_one", "partition.clients": 5}),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.nightly] * (k not in ("aggregator", "adversary"))) for k in BESIDE]
)
def test_a_row_beside_a_suite_of_ours_differs_from_its_baseline_in_nothing_else(place, run, kind, monkeypatch):
    """Every cell of the suite is there under the same identity, and the new ones have its radius, rounds and data."""
    parent, axis, label, own = BESIDE[kind]
    monkeypatch.setattr(shipped, "files_of", lambda cells: [])
    code, _, err = run("new", kind, "my_one", "--beside", parent)
    assert code == 0, err
    mine, theirs = files.load("my_one.yaml"), files.load(parent)
    assert mine.title != theirs.title
    preset = "cpu" if "cpu" in theirs.presets() else "quick"
    plan, known = mine.plan(preset), theirs.plan(preset)
    added = [cell for cell in plan.cells if cell.key[axis] == label]
    ids = {cell.id for cell in known.cells}
    assert added and {cell.id for cell in plan.cells if cell.key[axis] != label} == ids
    assert unlike(mine, [plan]) == unlike(theirs, [known])
    if kind in ("aggregator", "objective", "method"):
        grids = build_tables(mine, plan, None)
        shown = [{row.key.get(axis) for row in grid.rows} for grid in grids]
        assert all((label in labels) == (theirs.contents.baseline[1] in labels) for labels in shown)
    for path, value in own.items():
        assert {functools.reduce(lambda node, key: node[key], path.split("."), cell.spec) for cell in added} == {value}


def test_shipped_rows_are_imported_and_what_is_left_is_counted(place, run):
    """46 of the 100 cells of fat-baselines' preset cpu come with a clone; a copy of their file is not read twice."""
    Path("results").mkdir(exist_ok=True)
    shutil.copy(shipped.PACKAGE.parent / "results" / "fat-baselines-cpu.jsonl.xz", "results")
    code, out, err = run("new", "aggregator", "my_one", "--beside", "results/fat-baselines-cpu.jsonl.xz")
    assert (code, err) == (0, "")
    assert out.count("46 cells,") == 1 and "46 cells are there" in out and "yours: 5 cells (seeds 0, 1, 2, 3, 4)" in out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("  fatbench ")]
    assert ["fatbench", "run", "my_one.yaml", "--preset", "cpu", "-k", "method=my_one"] in commands
    assert ["fatbench", "report", "my_one.yaml", "--smoke", "-k", "method=my_one"] in commands
    code, out, _ = run("status", "my_one.yaml", "--preset", "cpu", "--format", "json")
    assert json.loads(out)["cells"] == {"done": 46, "failed": 0, "running": 0, "todo": 59}
    out = run("report", "my_one", "--preset", "cpu", "--table", "robust")[1]
    assert re.findall(r"\| (\S+) \(own\) ", out) == ["my\\_one"]  # and no other row is marked
    one = next(cell for cell in files.load("my_one.yaml").plan("smoke").cells if cell.key["method"] == "my_one")
    with Store.open("results/fatbench.db") as store:  # a smoke run of the own row leaves what is left in sight
        store.add_cell(one.id, one.spec)
        store.claim(one.id, "train", suite="my_one", total=2, provenance={"device": "cpu", "preset": "smoke"})
    out = run("status", "my_one")[1]
    assert "preset cpu: 46 done, 0 failed, 0 running, 59 todo" in out and "own rows" in out and ": 5 todo" in out
    assert "preset smoke: 0 trained" in out
    # what is deleted is one's own unless the preset is said
    assert "the presets cpu (46), smoke (1): name one" in run("delete", "my_one.yaml", "-n")[2]
    code, _, err = run("delete", "my_one.yaml", "-k", "method=SFAT")
    assert code == 2 and "these cells also belong to fat-baselines" in err
    assert run("delete", "my_one.yaml", "-k", "method=my_one", "-n")[1].startswith(one.id)
    out = run("delete", "my_one.yaml", "--preset", "cpu", "-k", "method=SFAT", "-n")[1]
    assert out.endswith("5 cells would be deleted\n")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted({*new.KINDS} - {"method"}))  # the tutorial runs the method
def test_the_smoke_preset_of_what_is_written_runs_and_is_reported(place, run, kind):
    run("new", kind, "my_one")
    code, _, err = run("run", "suite", "my_one.yaml", "--smoke", "--device", "cpu", "--jobs", "1")
    assert code == 0, err
    code, out, err = run("report", "my_one.yaml", "--format", "json")
    assert code == 0, err
    table = json.loads(out)["tables"][0]
    assert table["preset"] == "smoke"
    assert [record["plugin"] for record in table["plugins"]] == ["my_one.py"]
    for row in table["rows"]:
        assert all(0 <= one["mean"] <= 1 for one in row["measured"].values())
        if kind == "attack":
            assert row["measured"]["my_one"]["mean"] <= row["measured"]["natural"]["mean"]


def test_the_methods_of_the_templates_compute_what_they_say(place, run):
    """The aggregator: losses 1, 1.2 and 9 have the median 1.2; the third client counts 1.2/9 of its 60 examples.

    The attack: one step of 0.1 on f(x) = x w with w = (1, -1) lowers the label's logit, to the edge of its ball.
    The adversary: (3, 5) has the part (3, 0) along the mean (2, 0) of the others.
    """
    import torch

    from fatbench.engine.rounds import Stats, Update

    run("new", "aggregator", "close")
    run("new", "attack", "push")
    run("new", "adversary", "against")
    plugins.load([place / "close.py", place / "push.py", place / "against.py"])
    losses = enumerate([(30, 1.0), (10, 1.2), (60, 9.0)])
    updates = [Update(k, n, {}, Stats(loss, loss, 0.0, 1, 1.0, 1)) for k, (n, loss) in losses]
    mixing = calls.build("Aggregator", calls.check("Aggregator", "close"))(updates, None)
    assert mixing.weights == pytest.approx([30 / 48, 10 / 48, 8 / 48])
    assert mixing.metrics == {"smallest": pytest.approx(8 / 48)}

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    x = torch.tensor([0.5, 0.5]).reshape(1, 1, 1, 2)
    attack = calls.build("Attack", calls.check("Attack", {"name": "push", "eps": 0.05, "step": 0.1, "steps": 1}))
    found = attack(model, x, torch.tensor([0]), torch.Generator())
    assert found.flatten().tolist() == pytest.approx([0.45, 0.55])

    adversary = calls.build("Adversary", calls.check("Adversary", {"name": "against", "factor": 2}))
    others = torch.tensor([[1.0, 1.0], [3.0, -1.0]])
    assert adversary(torch.tensor([3.0, 5.0]), others).tolist() == [-6.0, 5.0]


@pytest.mark.nightly
def test_every_command_of_the_tutorial_runs_and_every_edit_fits(tmp_path):
    """In the order of the page, from an empty folder. `# exit N` says how a command ends; edits are ```diff blocks."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "160"}
    blocks = re.findall(r"^```(sh|diff|text)\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    printed: list[str] = []
    count = 0
    for kind, block in blocks:
        if kind == "diff":
            old, new_ = ("".join(f"{line[1:]}\n" for line in block.splitlines() if line[0] == sign) for sign in "-+")
            file = tmp_path / "my_method.py"
            assert file.read_text().count(old) == 1
            file.write_text(file.read_text().replace(old, new_))
        elif kind == "text":
            assert block == printed[-1]
        else:
            for line in block.splitlines():
                command, _, comment = line.partition("#")
                code = int(match[1]) if (match := re.search(r"exit (\d+)", comment)) else 0
                arguments = shlex.split(command)
                assert arguments[0] == "fatbench"
                program = [sys.executable, "-m", *arguments]
                done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True)
                assert done.returncode == code, f"{line}\n{done.stdout}{done.stderr}"
                assert "Traceback" not in done.stderr
                printed.append(done.stdout or done.stderr)
                count += 1
    assert count == 12
    first, told, last = printed[4], printed[8], printed[10]
    assert "*plug-in*: my\\_method.py (sha256 " in first
    assert ["OLDER" in text for text in (first, told, last)] == [False, True, False]
    assert "kept as it is" in printed[6]
    assert "2 done, 0 failed, 0 running, 0 todo, 1 changed" in printed[7]
    assert "| my\\_method (own) |" in last
    rows = [[line for line in text.splitlines() if line.startswith("| ")][1:] for text in (first, told, last)]
    of_first, of_told = (re.findall(r"\d+\.\d+", " ".join(lines)) for lines in rows[:2])
    assert of_first == of_told  # the numbers do not change with the file; a mark says that it has
    png = printed[5].strip()
    assert (tmp_path / png).is_file()
