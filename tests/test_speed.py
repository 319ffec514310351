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

from fatbench.cli import show
from fatbench.errors import SpecError
from fatbench.runner import progress
from fatbench.store import jsonl as lines_of_results
from fatbench.store import timing
from fatbench.store.stages import Store
from fatbench.suite import calls, cells, files, language, trees

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
presets:
  paper: {}
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


def calls_of(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every call of a function from now on."""
    seen: list[tuple[Any, ...]] = []
    function = getattr(where, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(where, name, counted)
    return seen


# --- files -------------------------------------------------------------------------------------------------------


def test_a_file_that_many_suites_extend_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trees.parse.cache_clear()
    for name in files.available():
        files.load(name)
    suites = [file for file in SUITES.rglob("*.yaml") if file.parent.name != "published"]
    assert trees.parse.cache_info().misses == len(suites)


# --- plans -------------------------------------------------------------------------------------------------------


def test_axes_are_laid_on_only_where_they_change(grid: files.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 labels of the first axis and 90 of the second, not 180."""
    laid: list[Any] = []
    merge = language.merge

    def counted(under: Any, over: Any) -> Any:
        laid.append(over)
        return merge(under, over)

    monkeypatch.setattr(language, "merge", counted)
    grid.plan()
    labels = [id(patch) for axis in grid.contents.axes.values() for patch in axis.values()]
    assert sum(id(over) in labels for over in laid) == 99


def test_a_part_that_suits_one_cell_is_refused_in_another(grid: files.Suite) -> None:
    spec = grid.plan().cells[0].spec
    assert cells.canonical({**spec, "size": 8})["size"] == 8
    with pytest.raises(SpecError, match="small_cnn: needs images of at least 8x8, got 4x4"):
        cells.canonical({**spec, "size": 4})


def test_a_mistake_is_found_again_where_it_is_made_again(tmp_path: Path) -> None:
    for place in ("first", "second"):
        with pytest.raises(SpecError, match=f"^{place}: eps: .*greater than or equal to 0"):
            calls.check("Attack", {"name": "fgsm", "eps": -1}, place)


def test_the_list_of_suites_reads_none_of_ours_and_counts_others(
    grid: files.Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite of ours that was edited is another."""
    expanded = calls_of(monkeypatch, language.Expansion, "plan")
    rows = {row["name"]: row["presets"] for row in files.listing()}
    assert rows["grid"] == {"paper": 180} and len(expanded) == 1
    assert rows["fat-byzantine"]["smoke"] == 100
    monkeypatch.setattr(files, "locate", lambda name: Path("suites/grid.yaml"))
    assert {row["presets"]["paper"] for row in files.listing()} == {180}


# --- what is printed ---------------------------------------------------------------------------------------------


def test_a_long_list_is_printed_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console = show.new_console()
    printed = calls_of(monkeypatch, console, "print")
    rows = [[f"c{i}", "done", str(i)] for i in range(show.LONG + 1)]
    show.print_rows(console, ("cell", "state", "n"), rows, ("n",))
    out = capsys.readouterr().out.splitlines()
    assert printed == []
    assert out[0] == "cell  state    n"
    assert out[2] == "c0    done     0" and out[-1] == "c200  done   200"
    show.print_rows(console, ("cell", "state", "n"), rows[:1], ("n",))
    assert len(printed) == 3 and "c0    done   0" in capsys.readouterr().out


# --- the database ------------------------------------------------------------------------------------------------


@pytest.fixture
def store(url: str) -> Any:
    """Three cells: two trained by suite a, one of them by suite b too; the third is failed, of a."""
    with Store.open(url, create=True) as store:
        for cell, suite, end in (("aa1", "a", "done"), ("aa2", "a", "failed"), ("ab3", "a", "done")):
            store.add_cell(cell, {"seed": 0})
            run = store.claim(cell, "train", suite=suite, total=1, provenance={"preset": "paper"})
            assert run is not None
            if end == "done":
                store.finish(run, round=1)
            else:
                store.fail(run, "no")
        run = store.claim("aa1", "natural-1@1", suite="b", total=1, provenance={})
        store.add_cell("zz9", {"seed": 0})
        yield store


def statements(store: Store) -> list[str]:
    sent: list[str] = []
    event.listen(store.database._engine, "before_cursor_execute", lambda c, cursor, text, *_: sent.append(text))
    return sent


def test_bare_status_is_one_query_and_loads_no_spec(store: Store) -> None:
    sent = statements(store)
    assert progress.by_suite(store) == {
        ("a", "paper"): {"done": 2, "failed": 1, "running": 0, "todo": 0},
        ("b", ""): {"done": 1, "failed": 0, "running": 0, "todo": 0},
    }
    selects = [text for text in sent if text.lstrip().upper().startswith("SELECT")]
    assert len(selects) == 1 and "spec" not in selects[0]


def test_a_cell_is_found_by_its_first_letters_in_one_query(store: Store) -> None:
    sent = statements(store)
    assert store.ids_beginning_with("aa") == ["aa1", "aa2"]
    assert store.ids_beginning_with("aa", maximum=1) == ["aa1"]
    assert store.ids_beginning_with("AA") == store.ids_beginning_with("%") == store.ids_beginning_with("aa1x") == []
    assert store.known_cells(["aa1", "no"]) == {"aa1"} and store.has_cells()
    assert not any("spec" in text for text in sent)


def test_what_stages_say_alike_is_parsed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = calls_of(monkeypatch, json, "loads")
    rows = store.stages(["aa1", "aa2", "ab3"])
    assert {key: (row.status, row.record, row.settings) for key, row in rows.items()} == {
        ("aa1", "train"): ("done", {}, None), ("aa1", "natural-1@1"): ("running", {}, None),
        ("aa2", "train"): ("failed", {}, None), ("ab3", "train"): ("done", {}, None),
    }  # fmt: skip
    assert parsed.count(("{}",)) == 2  # of the records, and what is said beside the columns of the run that is going on


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_how_long_stages_took_is_read_by_cell_and_not_from_all_numbers(store: Store) -> None:
    """SQLite's plan of each query: numbers are searched by their keys, never scanned."""
    sent: list[tuple[str, Any]] = []
    event.listen(
        store.database._engine, "before_cursor_execute", lambda c, cursor, text, given, *_: sent.append((text, given))
    )
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
    done = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=folder, capture_output=True, text=True, check=True
    )
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


def test_an_entry_that_computes_with_tensors_is_found_without_torch() -> None:
    """Nothing is silently wrong: what stands for torch has neither a truth nor a value."""
    torch = calls._NoTorch()
    assert torch.nn.functional(torch.ones(3)) is torch and torch.no_grad()(len) is not len
    for wrong in (bool, float, int, len, lambda stand_in: stand_in + 1, lambda stand_in: stand_in < 1):
        with pytest.raises(TypeError):
            wrong(torch)


@pytest.mark.nightly
def test_what_only_plans_needs_no_torch(tmp_path: Path) -> None:
    for command in (["plan", "sfat-fashion"], ["check", "sfat-fashion"], ["show", "sfat-fashion"],
                    ["run", "sfat-fashion", "-n"]):  # fmt: skip
        assert not imported(tmp_path, *command) & {"torch", "pandas"}, command


def test_a_list_of_suites_needs_no_library_of_numbers(tmp_path: Path) -> None:
    assert not imported(tmp_path, "list", "suites") & {"torch", "garbage"}


@pytest.mark.parametrize("arguments", [["show"], ["show", "--log"]], ids=" ".join)
def test_one_cell_needs_no_torch(arguments: list[str], tmp_path: Path) -> None:
    """Nor, for its log, tables."""
    with Store.open(str(tmp_path / "fatbench.db"), create=True) as store:
        store.add_cell("abc", {"seed": 0})
    found = imported(tmp_path, *arguments, "ab", "--db", "fatbench.db", parts=3)
    assert "sqlalchemy" in found and not found & {"torch", "yaml"}
    assert arguments == ["show"] or "fatbench.report" not in found


def test_the_script_that_a_worker_reads_anew_imports_no_command_line() -> None:
    module, _, function = tomllib.loads((SUITES.parent / "pyproject.toml").read_text())["project"]["scripts"][
        "fatbench"
    ].partition(":")
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
