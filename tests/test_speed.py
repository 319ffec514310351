"""What surrounds the work, gated by counting: files parsed, cells checked, statements sent, modules imported."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from stored import claimed

from fatbench.runner import progress
from fatbench.store import jsonl as lines_of_results
from fatbench.store import timing
from fatbench.store.stages import Store
from fatbench.suite import files, language

pytest_plugins = ("databases",)
SUITES = Path(__file__).parent.parent / "suites"
GRID = """
name: grid
title: A hundred points
seeds: [0, 1]
base:
  data: digits
  partition: {name: shah, clients: 5, skew: 2}
  model: {name: small_cnn}
  algorithm: {name: fedavg, rounds: 2, local: {epochs: 1, batch: 16, lr: 0.1, objective: standard}, aggregator: samples}
axes:
  lr:
{lr}
  rounds:
{rounds}
evaluate:
  attacks: {natural: natural, fgsm: {name: fgsm, eps: 8/255}}
presets: {paper: {}}
"""


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.Suite:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lr = "\n".join(f"    l{i}: {{algorithm: {{local: {{lr: 0.{i + 1}}}}}}}" for i in range(9))
    rounds = "\n".join(f"    r{i}: {{algorithm: {{rounds: {i + 1}}}}}" for i in range(10))
    text = GRID.replace("{lr}", lr).replace("{rounds}", rounds)
    Path("suites").mkdir()
    Path("suites/grid.yaml").write_text(text)
    return files.load("suites/grid.yaml")


def test_the_list_of_suites_reads_none_of_ours_and_counts_others(grid: files.Suite, monkeypatch: Any) -> None:
    """A suite of ours that was edited is another."""
    expanded, plan = [], language.Expansion.plan
    monkeypatch.setattr(language.Expansion, "plan", lambda self, *given: (expanded.append(self), plan(self, *given))[1])
    rows = {row["name"]: row["presets"] for row in files.listing()}
    assert rows["grid"] == {"paper": 180} and len(expanded) == 1
    assert rows["fat-byzantine"]["smoke"] == 100
    monkeypatch.setattr(files, "locate", lambda name: Path("suites/grid.yaml"))
    assert {row["presets"]["paper"] for row in files.listing()} == {180}


# --- the database ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(url: str) -> Any:
    """Three cells: two trained by suite a, one of them by suite b too; the third is failed, of a."""
    with Store.open(url, create=True) as store:
        for cell, suite, end in (("aa1", "a", "done"), ("aa2", "a", "failed"), ("ab3", "a", "done")):
            run = claimed(store, cell, "train", suite=suite, spec={"seed": 0}, preset="paper")
            if end == "done":
                store.finish(run, round=1)
            else:
                store.fail(run, "no")
        claimed(store, "aa1", "natural-1@1", suite="b")
        store.add_cell("zz9", {"seed": 0})
        yield store


def statements(store: Store) -> list[tuple[str, Any]]:
    """What is sent from now on, with its parameters."""
    sent: list[tuple[str, Any]] = []
    heard = lambda c, cursor, text, given, *_: sent.append((text, given))  # noqa: E731
    event.listen(store.database._engine, "before_cursor_execute", heard)
    return sent


def test_bare_status_is_one_query_and_loads_no_spec(store: Store) -> None:
    sent = statements(store)
    one = {"done": 1, "failed": 0, "running": 0, "todo": 0}
    assert progress.by_suite(store) == {("a", "paper"): {**one, "done": 2, "failed": 1}, ("b", ""): one}
    selects = [text for text, _ in sent if text.lstrip().upper().startswith("SELECT")]
    assert len(selects) == 1 and "spec" not in selects[0]


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_how_long_stages_took_is_read_by_cell_and_not_from_all_numbers(store: Store) -> None:
    """SQLite's plan of each query: numbers are searched by their keys, never scanned."""
    sent = statements(store)
    timing.timed_runs(store)
    asked = [(text, given) for text, given in sent if "numbers" in text]
    assert len(asked) == 1
    with store.database.reading() as connection:
        plan = [row[3] for row in connection.exec_driver_sql("EXPLAIN QUERY PLAN " + asked[0][0], asked[0][1])]
    assert "SEARCH round_metrics USING INDEX round_metrics_cell (cell=?)" in plan, plan
    assert not any(line.startswith("SCAN") and "numbers" in line for line in plan), plan


# --- modules -----------------------------------------------------------------------------------------------------


def imported(folder: Path, *command: str, parts: int = 1) -> set[str]:
    """What a command imports in a process of its own, by the first parts of the name.

    "garbage", where it looks for some often.
    """
    code = (
        "import gc, sys\nfrom fatbench.__main__ import main\nsys.argv = ['fatbench', *sys.argv[1:]]\n"
        "try: main()\nexcept SystemExit: pass\n"
        f"seen = {{'.'.join(name.split('.')[: n + 1]) for name in sys.modules for n in range({parts})}}\n"
        "print(*seen, 'garbage' * any(one['collections'] > 20 for one in "
        "gc.get_stats()), file=sys.stderr)"
    )
    program = [sys.executable, "-c", code, *command]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout or "--log" in command
    return set(done.stderr.split())


READING = [  # what is done one after the other, and what it must not have imported
    ("from fatbench.store import jsonl, stages", "torch pandas numpy"),
    ("from fatbench.suite.files import load\nload('sfat-cifar10').plan(refuse=False)", "torch pandas numpy"),
    ("from fatbench.data import DATASETS, catalogue, disk\nfrom fatbench.suite import calls\n"
     "calls.check('Data', {'name': 'image_folder', 'path': 'x', 'size': 32})\n"
     "catalogue.dataset_facts('cifar10'), [catalogue.files(name) for name in DATASETS]",
     "torch torchvision numpy sklearn"),
    ("from pathlib import Path\ndisk.status(Path('nowhere')), DATASETS['digits'](Path('nowhere'))",
     "torch torchvision sklearn"),
    ("from fatbench.methods.partitions import PARTITIONS\nassert PARTITIONS", "torch"),
    ("from fatbench.suite import facts, threats\nfrom fatbench.cli import app, show\n"
     "from fatbench.runner import progress\n" "for name in ('sfat-cifar10', 'privacy-updates', 'april-learning'):\n"
     "    for cell in load(name).plan('paper', refuse=False).cells:\n"
     "        threats.of_cell(cell.spec), facts.of_data(cell.spec['data'])\n"
     "        [(facts.role(one.attack), one.computes_in('bf16'), one.id) for one in cell.evaluations]\n"
     "assert facts.fractions()", "torch pandas"),
    ("from fatbench import report\nfrom fatbench.report.numbers import stored\nsuite = load('sfat-cifar10')\n"
     "grids = report.build_tables(suite, suite.plan('smoke', refuse=False), None)\n"
     "assert all(report.render(grids, format) for format in report.FORMATS)", "torch matplotlib"),
]  # fmt: skip


def test_suites_results_and_tables_are_read_without_torch(tmp_path: Path) -> None:
    """In one process, in which each step may import more than the one before."""
    code = (
        "import json, sys\nfor step, heavy in json.load(sys.stdin):\n    exec(step, globals())\n"
        "    assert not {*heavy.split()} & {*sys.modules}, (step, {*heavy.split()} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=json.dumps(READING), cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


ENTRIES = """
import importlib, json, sys
from fatbench.suite import calls, cost, files, signatures
from fatbench.suite.entry import in_table
if torch := sys.argv[1:]: import torch
found = {}
for kind, (module, table) in signatures.TABLES.items():
    for name in getattr(calls.planning(module), table):
        entry = calls.entry(signatures.describe(kind, name))
        stated = vars(entry).items()
        found[kind, name] = [(key, getattr(value, "__qualname__", type(value).__name__)) for key, value in stated]
for name in files.available():
    plan = files.load(name).plan("paper")
    found |= {cell.id: (cost.cell_work(cell, plan), cost.parameters(cell.spec)) for cell in plan.cells}
assert ("torch" in sys.modules) == bool(torch)
json.dump(sorted((repr(key), repr(value)) for key, value in found.items()), sys.stdout)
"""


@pytest.mark.nightly
def test_entries_answer_without_torch_as_with_it() -> None:
    """What every table states, and the cost of every cell of every suite."""
    without, with_torch = (
        json.loads(subprocess.run([sys.executable, "-c", ENTRIES, *more], capture_output=True, check=True).stdout)
        for more in ((), ("torch",))
    )
    assert len(without) > 3000 and without == with_torch


@pytest.mark.nightly
def test_what_only_plans_needs_no_torch(tmp_path: Path) -> None:
    for command in (["plan", "sfat-fashion"], ["check", "sfat-fashion"], ["show", "sfat-fashion"],
                    ["run", "sfat-fashion", "-n"]):  # fmt: skip
        assert not imported(tmp_path, *command) & {"torch", "pandas"}, command


def test_a_list_of_suites_needs_no_library_of_numbers(tmp_path: Path) -> None:
    assert not imported(tmp_path, "list", "suites") & {"torch", "garbage"}


def test_the_script_that_a_worker_reads_anew_imports_no_command_line() -> None:
    project = tomllib.loads((SUITES.parent / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["fatbench"].partition(":")
    code = f"import sys; from {module} import {function}; print([n for n in sys.modules if n.startswith('typer')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.nightly
def test_a_table_needs_no_library_of_figures_or_pages(tmp_path: Path) -> None:
    """`report` of one suite within 1.0 s: most of it is SQLAlchemy's import; torch's alone would be two seconds."""
    with Store.open(str(tmp_path / "fatbench.db"), create=True) as store:
        lines_of_results.import_(store, SUITES.parent / "results/sfat-fashion-cpu.jsonl.xz")
    heavy = {"torch", "statsmodels", "jinja2", "matplotlib", "garbage"}
    shown = ["sfat-fashion", "--preset", "cpu", "--db", "fatbench.db"]
    committed = str(SUITES.parent / "results/sfat-fashion-cpu.jsonl.xz")
    commands = [["status", *shown], ["report", *shown], ["report", "-k", "run.precision=bf16", *shown],  # of runs
                ["export", "--db", "fatbench.db"], ["import", committed, "--db", "fatbench.db"]]  # fmt: skip
    for command in commands:
        found = imported(tmp_path, *command)
        assert "sqlalchemy" in found and not found & heavy, command
