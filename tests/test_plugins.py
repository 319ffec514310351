"""Plug-ins: where they may be named, what is recorded of them, and what happens when one is edited."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from crew import forget_plugins, machine_of
from small import small

from fatbench import settings
from fatbench.errors import SpecError
from fatbench.runner import progress, versions
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import inputs, jsonl
from fatbench.store.stages import Store
from fatbench.suite import calls, cells, files, plugins, signatures

AGGREGATOR = """from fatbench.engine.rounds import Mixing
from helper import first


def only(updates, context):
    \"\"\"All weight on one client.\"\"\"
    return Mixing(first(len(updates)))


def blank(model, x, y, generator):
    \"\"\"A black image.\"\"\"
    return x * 0


AGGREGATORS = {"only": only}
ATTACKS = {"blank": blank}
"""
HELPER = "def first(n):\n    return [1.0] + [0.0] * (n - 1)\n"
SUITE = small(
    'figures: [{id: F, title: Loss, lines: [method], series: {Loss: "train:train_loss"}}]\n', rounds=2,
    plugins="[mine.py]", axes="{method: {FedAvg: {}, Mine: {algorithm: {aggregator: only}}}}",
    evaluate="{attacks: {natural: natural, blank: blank}}",
    tables="[{id: A, title: Mine, rows: [method], values: {Natural: natural, Blank: blank}}]",
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch, forks):
    """An empty working folder with the plug-in mine.py, its module helper.py and the suite mine.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "300")
    forget_plugins()
    for name, text in (("mine.py", AGGREGATOR), ("helper.py", HELPER), ("mine.yaml", SUITE)):
        (tmp_path / name).write_text(text)
    yield tmp_path
    forget_plugins()


@pytest.fixture
def run(run):
    """Call the program in this process, with nothing loaded: (exit code, stdout, stderr)."""
    return lambda *arguments: (forget_plugins(), run(*arguments))[1]


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# --- where a plug-in may be named ---------------------------------------------------------------------------------


def test_a_suite_names_its_plug_ins_relative_to_itself_and_those_of_what_it_extends_come_first(place, monkeypatch):
    (place / "below").mkdir()
    (place / "below" / "other.py").write_text("def two(updates, context): ...\nAGGREGATORS = {'two': two}\n")
    head = "name: child\ntitle: T\nextends: ../mine.yaml\nplugins: [other.py]\n"
    (place / "below" / "child.yaml").write_text(head + "axes: {method: {Two: {algorithm: {aggregator: two}}}}\n")
    monkeypatch.chdir("/")
    plan = files.load(str(place / "below" / "child.yaml")).plan()
    assert [cell.spec["algorithm"]["aggregator"]["name"] for cell in plan.cells] == ["samples", "only", "two"]
    assert signatures.plugins() == (place / "mine.py", place / "below" / "other.py")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("plugins: [none.py]", r"mine.yaml:3: plugins: plugin .*none.py: No such file or directory"),
        ("plugins: mine.py", r"mine.yaml:3: plugins: expected a list of files such as \[mine.py\], got 'mine.py'"),
        ("plugins: [mine.yaml]", r"mine.yaml:3: plugins: plugin .*mine.yaml: .*"),
        ("plugin: [mine.py]", r"mine.yaml:3: plugin: unknown key 'plugin' \(did you mean 'plugins'\?\)"),
    ],
)
def test_mistakes_name_file_line_and_key(place, said, message):
    (place / "mine.yaml").write_text(SUITE.replace("plugins: [mine.py]", said))
    with pytest.raises(SpecError, match=message):
        files.load("mine.yaml")


def test_settings_name_plug_ins_and_all_add_up(place, monkeypatch):
    for name in ("a", "b", "c"):
        (place / f"{name}.py").write_text(f"def {name}(updates, context): ...\nAGGREGATORS = {{'{name}': {name}}}\n")
    (place / "fatbench.toml").write_text('plugin = ["a.py"]\n')
    monkeypatch.setenv("FATBENCH_PLUGIN", "b.py:c.py")
    plugins.load([Path("mine.py")])
    assert [file.name for file in signatures.plugins()] == ["a.py", "b.py", "c.py", "mine.py"]
    assert signatures.names("Aggregator")[-4:] == ["a", "b", "c", "only"]
    plugins.load([Path("mine.py")])
    assert len(signatures.plugins()) == 4
    (place / "twin.py").write_text("def only(updates, context): ...\nAGGREGATORS = {'only': only}\n")
    both = r"^plugins: plugin .*twin.py: there is already an aggregator named 'only' in .*mine.py"
    with pytest.raises(SpecError, match=both):
        plugins.load([Path("twin.py")])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("plugin = [1]", r"fatbench.toml: plugin: expected files such as \[\"mine.py\"\], got 1"),
        ('plugin = "none.py"', r"fatbench.toml: plugin: plugin .*none.py: No such file or directory"),
        ("plugins = []", r"unknown setting 'plugins' \(did you mean 'plugin'\?\)"),
    ],
)
def test_mistakes_in_the_settings(place, toml, message):
    (place / "fatbench.toml").write_text(toml)
    with pytest.raises(SpecError, match=message):
        plugins.load()
    assert "slurm" in settings.KEYS


def installed(site, name, module, text=None):
    """A package that announces one module as a plug-in: the file with the list of its entry points."""
    if text is not None:
        (site / f"{name}.py").write_text(text)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[fatbench.plugins]\n{name} = {module}\n")
    return info / "entry_points.txt"


def test_an_installed_package_is_imported_for_a_name_that_is_not_ours(place, monkeypatch, capsys):
    site = place / "site-packages"
    package = site / "their_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not for reading')\n")
    tables = "import yaml_of_others\nfrom .part import three\nAGGREGATORS = {'three': three}\n"
    (package / "tables.py").write_text(tables)
    (package / "part.py").write_text("def three(updates, context): ...\n")
    (site / "yaml_of_others.py").write_text("")
    points = installed(site, "their_package", "their_package.tables")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    plugins.load()
    assert signatures.describe("Aggregator", "samples") and "their_package" not in sys.modules
    assert "three" not in signatures.names("Aggregator")
    said = "left out: entry point fatbench.plugins: their_package.tables: plugin"
    assert said in (err := capsys.readouterr().err) and "ImportError: not for reading" in err
    (package / "__init__.py").write_text("")
    plugins.load()  # it was mended: read again
    assert signatures.describe("Aggregator", "three").plugin == package / "tables.py"
    version = plugins.version(package / "tables.py")
    assert version["plugin"] == "their_package.tables"
    assert sorted(version["modules"]) == ["their_package/__init__.py", "their_package/part.py"]
    assert calls.function(signatures.describe("Aggregator", "three")).__module__ == "their_package.part"
    points.write_text("[fatbench.plugins]\nthree = their_package.none\n")
    plugins.load()
    said = "fatbench: left out: entry point fatbench.plugins: their_package.none: the module's source is not found\n"
    assert capsys.readouterr().err == said


def test_a_broken_package_is_left_out_and_a_clash_matters_where_the_name_is_used(place, monkeypatch, capsys):
    """Nobody chose them for this suite, so every other name goes on working; a name of ours stays ours."""
    site = place / "site-of-four"
    site.mkdir()
    both = "def shared(updates, context): ...\ndef {0}(updates, context): ...\n"
    tables = "AGGREGATORS = {{'shared_name': shared, '{0}': {0}, 'samples': shared}}\n"
    for name in ("one_of_four", "two_of_four"):
        installed(site, name, name, (both + tables).format(name))
    installed(site, "three_of_four", "three_of_four", "def broken(:\n")
    installed(site, "four_of_four", "four_of_four", "NOTHING = {}\n")
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    plugins.load()
    signatures.names("Aggregator")
    said = capsys.readouterr().err
    assert "left out: entry point fatbench.plugins: three_of_four: plugin" in said and "four_of_four" in said
    assert signatures.describe("Aggregator", "samples").plugin is None
    with pytest.raises(SpecError, match=r"aggregator 'shared_name' is in .*one_of_four.py and .*two_of_four.py: write"):
        signatures.describe("Aggregator", "shared_name")
    for name in ("one_of_four", "two_of_four"):
        assert signatures.describe("Aggregator", name).plugin == site / f"{name}.py"
        chosen = signatures.describe("Aggregator", f"{name}:shared_name")
        assert chosen.plugin == site / f"{name}.py" and chosen.name == f"{name}:shared_name"
        assert calls.function(chosen).__code__.co_filename == str(site / f"{name}.py")
        used = {f"aggregator {name}:shared_name": site / f"{name}.py"}
        assert plugins.records(used)[0]["names"] == [*used] and plugins.loaded(used) == used
    with pytest.raises(SpecError, match="no aggregator is named 'three_of_four:shared_name'"):
        signatures.describe("Aggregator", "three_of_four:shared_name")
    (place / "chosen.py").write_text("def f(updates, context): ...\nAGGREGATORS = {'one_of_four': f, 'other': f}\n")
    plugins.load([place / "chosen.py"])  # the same method, installed and beside the suite
    assert signatures.describe("Aggregator", "other").plugin == place / "chosen.py"
    message = r"aggregator 'one_of_four' is in .*one_of_four.py and .*: write one_of_four:one_of_four or chosen:one_of"
    with pytest.raises(SpecError, match=message):
        signatures.describe("Aggregator", "one_of_four")
    assert signatures.describe("Aggregator", "chosen:one_of_four").plugin == place / "chosen.py"


def test_reading_a_suite_runs_its_plug_in_and_what_was_mended_is_read_again(place):
    (place / "mine.py").write_text("raise RuntimeError('imported')\n" + AGGREGATOR)
    with pytest.raises(SpecError, match=r"^mine.yaml:3: plugins: plugin .*mine.py:1: RuntimeError: imported$"):
        files.load("mine.yaml")
    (place / "mine.py").write_text(AGGREGATOR)
    assert len(files.load("mine.yaml").plan().cells) == 2


# --- what is read of one ------------------------------------------------------------------------------------------


def test_local_modules_are_found_in_every_form_of_import_and_through_each_other(place):
    (place / "pack" / "age").mkdir(parents=True)
    modules = {
        "pack/__init__.py": "", "pack/age/__init__.py": "from . import deep\n",
        "pack/age/deep.py": "from ..shallow import x\nfrom ... import nothing\n",
        "pack/shallow.py": "import json\nx = 1\n", "lazy.py": "import mine\n", "json.py": "unused = 1\n",
    }  # fmt: skip
    mine = "import pack.age\n\n\ndef later():\n    from lazy import mine\n"
    for name, text in {**modules, "mine.py": mine}.items():
        (place / name).write_text(text)
    digests = {name: sha(text) for name, text in modules.items()}
    assert plugins.version(place / "mine.py") == {"plugin": "mine.py", "sha256": sha(mine), "modules": digests}


def test_a_local_module_with_the_name_of_another_is_refused_when_it_would_be_run(place):
    (place / "helper.py").write_text("import json\n" + HELPER)
    (place / "json.py").write_text("")
    with pytest.raises(SpecError, match=r"json.py shadows the loaded module json"):
        plugins.load([Path("mine.py")])


def test_a_table_may_name_a_function_of_a_local_module(place):
    (place / "mine.py").write_text("from helper import near as close\nAGGREGATORS = {'near': close}\n")
    (place / "helper.py").write_text("def near(updates, context, *, top: int = 1):\n    return 7\n")
    plugins.load([Path("mine.py")])
    assert [setting.name for setting in signatures.describe("Aggregator", "near").settings] == ["top"]
    assert calls.build("Aggregator", {"name": "near", "top": 2})([], None) == 7


def test_a_plug_in_runs_as_it_was_read_and_anew_after_the_next_load(place):
    """It may have dataclasses, whose module must be known."""
    plugins.load([Path("mine.py")])
    assert calls.function(signatures.describe("Aggregator", "only"))([1, 2], None).weights == [1.0, 0.0]
    (place / "helper.py").write_text("def first(n):\n    return [1 / n] * n  # another\n")
    plugins.load()
    assert calls.function(signatures.describe("Aggregator", "only"))([1, 2], None).weights == [0.5, 0.5]
    head = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    n: int = 3\n"
    )
    (place / "mine.py").write_text(f"{head}def f(updates, context):\n    return A().n\nAGGREGATORS = {{'f': f}}\n")
    plugins.load()
    (place / "mine.py").write_text("1 / 0\n")
    assert calls.function(signatures.describe("Aggregator", "f"))([], None) == 3


def expected(*names: str) -> dict:
    """The record of names of mine.py as `place` has it; by hand, what each of them reaches."""
    read = {
        "aggregator only": [
            ":only: def only(updates, context):\n    return Mixing(first(len(updates)))",
            ":Mixing is: Mixing = fatbench.engine.rounds:Mixing",
            "Mixing: fatbench.engine.rounds.Mixing",
            ":first is: first = helper.py:first",
            "helper.py:first: def first(n):\n    return [1.0] + [0.0] * (n - 1)",
        ],
        "attack blank": [":blank: def blank(model, x, y, generator):\n    return x * 0"],
    }
    version = {"plugin": "mine.py", "sha256": sha(AGGREGATOR), "modules": {"helper.py": sha(HELPER)}}
    return {**version, "names": [*names], "reach": {name: sha("\0".join(sorted(read[name]))) for name in names}}


def test_what_a_cell_uses_is_found_in_nested_calls(place):
    plan = files.load("mine.yaml").plan()
    fedavg, mine = plan.cells

    def records(cell, evaluations=()):
        return plugins.records(plugins.used(cell.spec, evaluations))

    assert records(fedavg) == []
    assert records(mine) == [expected("aggregator only")]
    assert records(fedavg, fedavg.evaluations) == [expected("attack blank")]
    assert records(mine, mine.evaluations) == [expected("aggregator only", "attack blank")]
    assert plugins.files(fedavg.spec) == set() and plugins.files(mine.spec) == {place / "mine.py"}
    assert plugins.files(fedavg.spec, fedavg.evaluations) == {place / "mine.py"}


def test_versions_are_the_same_wherever_the_file_is(place):
    record = {"plugin": "a.py", "sha256": "1", "modules": {}, "names": ["aggregator x"]}
    assert inputs.same_functions([record], [{**record, "plugin": "b.py", "names": []}])
    assert not inputs.same_functions([record], [{**record, "sha256": "2"}])
    assert not inputs.same_functions([record], [{**record, "modules": {"h.py": "3"}}])
    assert not inputs.same_functions([], [record])
    new = {**record, "names": ["aggregator x"], "reached": {"aggregator x": "4"}}
    # another text, the same function
    assert inputs.same_functions([new], [{**new, "sha256": "2", "modules": {"h.py": "3"}}])
    assert not inputs.same_functions([new], [{**new, "sha256": "2", "reached": {"aggregator x": "5"}}])
    assert inputs.same_functions([record], [new]) and not inputs.same_functions([record], [{**new, "sha256": "2"}])
    assert inputs.versions_differ([record, {**record, "sha256": "2"}]) and not inputs.versions_differ([record, record])
    assert not inputs.versions_differ([new, {**new, "sha256": "2"}])
    assert not inputs.versions_differ([new, {**new, "names": ["attack y"], "reached": {"attack y": "5"}}])
    assert inputs.versions_differ([new, {**new, "sha256": "2", "reached": {"aggregator x": "5"}}])
    # a record of now has another digest: in files that are as they were, the function is
    now = {**record, "names": ["aggregator x"], "reach": {"aggregator x": "6"}}
    assert inputs.same_functions([new], [now]) and not inputs.versions_differ([new, now])
    assert not inputs.same_functions([new], [{**now, "sha256": "2"}])
    assert inputs.same_functions([now], [{**now, "sha256": "2"}])


# --- work of an older version -------------------------------------------------------------------------------------


def jobs() -> list:
    plugins.load()
    return jobs_of(files.load("mine.yaml").plan())


def weights_of(store: Store, cell: str) -> list[float]:
    rows = [row for row in store.measurements([cell]) if row["metric"] == "weight" and row["round"] == 2]
    return sorted(row["value"] for row in rows)


UNIFORM = "def first(n):\n    return [1 / n] * n\n"


def test_edited_work_is_kept_until_it_is_asked_for_again(place):
    with Store.open(str(place / "r.db"), create=True) as store:
        for job in jobs():
            assert work(job, machine_of(place), store) == "done"
        fedavg, mine = (job.cell for job in jobs())
        train = next(run for run in store.runs([mine]) if run["stage"] == "train")
        assert [record["names"] for record in train["plugins"]] == [["aggregator only"]]
        assert "plugins" not in next(run for run in store.runs([fedavg]) if run["stage"] == "train")
        assert versions.changed(jobs(), store) == {}
        assert weights_of(store, mine) == [0.0, 1.0]

        (place / "helper.py").write_text(UNIFORM)
        plan = files.load("mine.yaml").plan()
        plugins.load()
        changed = versions.changed(jobs(), store)
        assert {cell: sorted(stage.split("-")[0] for stage in stages) for cell, stages in changed.items()} == {
            mine: ["blank", "natural", "train"]  # the other cell's attack is in the same file, and reaches no helper
        }
        was, now = sha(HELPER)[:12], sha(UNIFORM)[:12]
        words = f"mine.py (sha256 {sha(AGGREGATOR)[:12]}; helper.py {{}})"
        assert changed[mine]["train"][0].words == f"{words.format(was)}, now {words.format(now)}"
        rows = progress.cells_of(plan, store)
        assert [(row.status, row.stages_done, row.stages) for row in rows] == [("done", 3, 3), ("changed", 0, 3)]
        assert progress.count(rows) == {"done": 1, "failed": 0, "running": 0, "todo": 0, "changed": 1}

        before = store.measurements()
        assert [work(job, machine_of(place), store) for job in jobs()] == ["done", "interrupted"]
        assert store.measurements() == before

        for job in jobs():
            assert work(job, machine_of(place, rerun_changed=True), store) == "done"
        assert weights_of(store, mine) == [0.5, 0.5]
        assert versions.changed(jobs(), store) == {}
        dropped = [run["stage"].split("-")[0] for run in store.runs() if run.get("dropped")]
        assert sorted(dropped) == ["blank", "natural", "train"]
        after = {(row["cell"], row["stage"], row["round"], row["client"], row["metric"]): row["run"] for row in before}
        kept = store.measurements([fedavg])
        assert kept
        assert all(after[r["cell"], r["stage"], r["round"], r["client"], r["metric"]] == r["run"] for r in kept)


def test_training_that_was_begun_is_not_gone_on_with_by_other_code(place):
    job = jobs()[1]
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job, machine_of(place), store, stop=lambda: True) == "interrupted"
        assert store.stages()[job.cell, "train"].round == 1
        (place / "helper.py").write_text(UNIFORM)
        again = jobs()[1]
        assert progress.states_of([again], store) == {job.cell: "changed"}
        assert work(again, machine_of(place, retry_failed=True), store) == "interrupted"
        assert store.stages()[job.cell, "train"].round == 1
        assert work(again, machine_of(place, rerun_changed=True), store) == "done"
        rows = [row for row in store.measurements([job.cell]) if row["metric"] == "weight"]
        assert [row["value"] for row in rows] == [0.5] * 4
        assert len({row["run"] for row in rows}) == 1


def test_a_failed_method_is_simply_tried_again_and_results_without_a_version_are_older(place):
    (place / "helper.py").write_text("def first(n):\n    raise RuntimeError('not yet')\n")
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(jobs()[1], machine_of(place), store) == "failed"
        (place / "helper.py").write_text(HELPER)
        again = jobs()[1]
        assert versions.changed([again], store) == {}
        assert work(again, machine_of(place, retry_failed=True), store) == "done"
    with Store.open(str(place / "older.db"), create=True) as store:
        store.add_cell(again.cell, again.spec)
        run = store.claim(again.cell, "train", suite="mine", total=2, provenance={"device": "cpu"})
        store.finish(run, round=2)
        said = versions.changed([again], store)[again.cell]["train"][0].words
        assert said.startswith("a plug-in of unknown version, now mine.py")


# --- as people meet it --------------------------------------------------------------------------------------------


def test_a_plug_in_from_run_to_report_edit_and_import(place, run):
    command = ("run", "suite", "mine.yaml", "--device", "cpu", "--jobs", "1")
    code, _, err = run(*command)
    assert code == 0, err
    _, out, _ = run("report", "mine.yaml", "--format", "markdown")
    shown = f"mine.py (sha256 {sha(AGGREGATOR)[:12]}; helper.py {sha(HELPER)[:12]})"
    assert f"- *plug-in*: {shown}\n" in out
    assert "OLDER" not in out
    assert "Blank: mine.py" in out  # the attack's implementation
    # black images are all one class to the model: the digits among the first 20 test images with one label
    record = json.loads(run("report", "mine.yaml", "--format", "json")[1])["tables"][0]
    assert record["plugins"] == [expected("aggregator only", "attack blank")]
    assert run("check", "mine.yaml")[0] == 0
    assert not re.search(r"^ +only ", run("list", "suites")[1], re.MULTILINE)
    code, out, _ = run("plot", "mine.yaml", "--format", "csv")
    assert code == 0
    assert "Mine" in out
    run("export", "-o", "out.jsonl")
    assert sha(AGGREGATOR) in (place / "out.jsonl").read_text()
    code, _, err = run("import", "out.jsonl", "--db", "other.db")
    assert code == 2
    assert "no aggregator is named 'only'" in err
    assert f"its runs used the plug-in mine.py (sha256 {sha(AGGREGATOR)[:12]}): pass it with --plugin" in err
    code, out, _ = run("import", "out.jsonl", "--db", "other.db", "--plugin", "mine.py")
    assert (code, "2 new cells" in out) == (0, True)

    bare = SUITE.replace("plugins: [mine.py]\n", "").replace("name: mine\n", "name: bare\n")
    (place / "bare.yaml").write_text(bare)
    for question in (("status", "bare.yaml"), ("report", "bare.yaml"), ("check", "bare.yaml")):
        code, _, err = run(*question)
        assert code == 2
        assert f"; runs in the database used the plug-in {shown}: give --plugin mine.py, or list it" in err
        assert run(*question, "--plugin", "mine.py")[0] == 0

    (place / "helper.py").write_text(UNIFORM)
    (place / "mine.py").write_text(AGGREGATOR.replace("x * 0", "x * 0.0"))
    shown = f"mine.py (sha256 {sha(AGGREGATOR.replace('x * 0', 'x * 0.0'))[:12]}; helper.py"
    code, _, err = run(*command)
    assert code == 1
    assert "0 of 2 cells done, 2 changed" in err
    assert "2 cells were computed with other inputs than today's and are kept as they are: " in err
    assert "--rerun changed computes them again" in err
    assert "train start" not in err
    code, out, _ = run(*command, "--dry-run")
    assert "2 cells, 0 to run" in out
    assert "2 cells, 2 to run" in run(*command, "--dry-run", "--rerun", "changed")[1]
    code, out, _ = run("status", "mine.yaml")
    assert "2 changed" in out
    counts = json.loads(run("status", "mine.yaml", "--format", "json")[1])["cells"]
    with Store.open("results/fatbench.db") as store, store.database.reading() as connection:
        rows = connection.exec_driver_sql("SELECT cell, doubts FROM results").all()
    assert any("changed" in doubts for _, doubts in rows)
    assert counts == {"done": 0, "failed": 0, "running": 0, "todo": 0, "changed": 2}
    out = run("report", "mine.yaml", "--format", "markdown")[1]
    assert f"- *OLDER*: the numbers of 2 cells come from this version of mine.py; the file is now {shown}" in out

    code, _, err = run(*command, "--rerun", "changed")
    assert (code, "2 of 2 cells done" in err) == (0, True)
    out = run("report", "mine.yaml", "--format", "markdown")[1]
    assert out.count("- *plug-in*: ") == 1
    assert "OLDER" not in out
    assert "MIXED" not in out
    assert sha(UNIFORM)[:12] in out


def test_a_table_of_two_versions_says_so(place):
    plan = files.load("mine.yaml").plan()
    records = plugins.records(plugins.used(plan.cells[1].spec))
    older = [{**records[0], "sha256": "f" * 64, "reach": {"aggregator only": "f" * 64}}]
    from fatbench.report.numbers.table_facts import Facts, origin

    runs = (("a", records), ("b", older))
    facts = Facts((cell, "digits", "", 0, "train", origin({"plugins": used})) for cell, used in runs)
    said = facts.mixed()["versions of mine.py"]
    assert said == f"{inputs.describe(records[0])}, {inputs.describe(older[0])}"
    assert [what for what, _ in facts.notes()].count("OLDER") == 1


def test_importing_keeps_the_version(place):
    with Store.open("a.db", create=True) as one, Store.open("b.db", create=True) as other:
        assert work(jobs()[1], machine_of(place), one) == "done"
        jsonl.export(one, "out.jsonl")
        jsonl.import_(other, "out.jsonl", identify=cells.identity)
        assert versions.changed(jobs(), other) == {}
        assert versions.plugin_record("aggregator only", other)["sha256"] == sha(AGGREGATOR)
        assert versions.plugin_record("aggregator onl", other) is None


# --- every kind of function ---------------------------------------------------------------------------------------

EVERYTHING = '''"""One function of every kind."""

import numpy as np
import torch
from torch import nn

from fatbench.data.common import Loaded, finish
from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Mixing, Round, State
from fatbench.methods.algorithms.work import federated
from fatbench.methods.manipulations import Manipulated
from fatbench.suite.entry import AlgorithmEntry, DataEntry, Entry, Images, ModelEntry, passes
from fatbench.suite.types import Attack, Count, Local, NonNegative, Aggregator

def blobs(root, *, side: Count = 12):
    def part(n):
        labels = np.arange(n, dtype=np.int64) % 2
        images = np.random.default_rng(n).integers(0, 60, (n, 1, side, side), dtype=np.uint8)
        for image, label in zip(images, labels):
            image[0, :, label * side // 2 : (label + 1) * side // 2] += 150
        return images, labels
    return finish("blobs", None, Loaded(root, *part(80), *part(40), classes=2))

def striped(labels, rng, writers, *, clients: Count):
    return [np.arange(k, len(labels), clients) for k in range(clients)]

def one_layer(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))

def plain(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local):
    for t in range(state.round, rounds):
        now = local.at(t)
        updates = train_cohort(problem, state.model, range(len(problem.shards)), t, now, aggregator=aggregator)
        mixing = aggregate(aggregator, updates, Context(t, rounds, problem, state.model, {}, now.lr))
        after = State(t + 1, mix(updates, mixing, state.model, problem.model))
        yield Round(t, state.model, updates, mixing, after, cost(updates, now, state.model))
        state = after

def median(updates, context):
    model = {name: torch.stack([u.model[name] for u in updates]).median(0).values for name in context.broadcast}
    return Mixing([0.0] * len(updates), model=model, metrics={"medians": float(len(updates))})

def alone(gram, generator):
    return torch.eye(len(gram), dtype=gram.dtype)

def hinge(model, x, y, generator, *, attack: Attack):
    model.eval()
    x = attack(model, x, y, generator)
    model.train()
    logits = model(x)
    return nn.functional.multi_margin_loss(logits, y), logits.detach().argmax(1) == y

def pull(weights, broadcast, round, *, mu: NonNegative):
    return [mu * (w - b) for w, b in zip(weights, broadcast)]

def blank(model, x, y, generator):
    return torch.zeros_like(x)

def dim(x, generator):
    return x * 0.9

def bright(problem, result, images, labels, attack, generator):
    return {"brightness": float(images.double().mean() / 255)}

def silent(part, at):
    return {name: torch.zeros_like(value) for name, value in part.items()}, None

def honest(model, weights, generator):
    return Manipulated(model, weights, weights)

def grey(seen, model, shape, generator):
    return torch.full((len(seen[0].labels), 1, *shape), 0.5)

def shy(update):
    return update / 2

def of_side(*, side):
    return Images(80, 40, 2, side, 1)

def parameters(shape, classes):
    return shape[0] * shape[1] * shape[2] * classes + classes

def attack_and_one(*, attack):
    return passes(attack) + 1

ADVERSARIES = {"shy": shy}
DATASETS = {"blobs": DataEntry(blobs, images=of_side)}
PARTITIONS = {"striped": striped}
MODELS = {"one_layer": ModelEntry(one_layer, parameters=parameters)}
ALGORITHMS = {"plain": AlgorithmEntry(plain, work=federated)}
AGGREGATORS = {"median": median}
PREAGGREGATORS = {"alone": alone}
OBJECTIVES = {"hinge": Entry(hinge, passes=attack_and_one)}
PROXIMALS = {"pull": pull}
ATTACKS = {"blank": blank}
AUGMENTS = {"dim": dim}
DIAGNOSTICS = {"bright": bright}
DEFENCES = {"silent": silent}
INVERSIONS = {"grey": grey}
MANIPULATIONS = {"honest": honest}
'''
LEARN = """{augment: dim, monitor: blank, diagnostic: bright, malicious: {clients: 1, attack: shy}, algorithm:
    {name: plain, rounds: 4, aggregator: {name: after, pre: alone, aggregator: median}, local:
      {epochs: 2, batch: 8, lr: 0.1, proximal: {name: pull, mu: 0.1},
       objective: {name: hinge, attack: {name: pgd, eps: 8/255, step: 8/255, steps: 1}}}}}"""
LISTEN = """{algorithm: {name: gradient_inversion, rounds: 2, target_clients: 2, candidates: 20, objective: standard,
    defence: silent, inversion: grey, manipulation: honest}}"""
WITHOUT = "[{when: {what: listen}, set: {attacks: {natural: null, blank: null}}}]"
EVERY = small(
    plugins="[everything.py]", data="blobs", train="", test="", partition="{name: striped, clients: 3}",
    model="one_layer", axes=f"{{what: {{learn: {LEARN}, listen: {LISTEN}}}}}",
    evaluate=f"{{attacks: {{natural: natural, blank: blank}}, overrides: {WITHOUT}}}",
    presets="{paper: {}, smoke: {overrides: [{when: {what: learn}, set: {algorithm: {rounds: 2}}}]}}",
    tables="[{id: A, title: Every kind, rows: [what], values: {Natural: natural, Blank: blank,"
    ' Medians: "train:medians", Brightness: "train:brightness", PSNR: "train:psnr", Grey: "train:grey_psnr"}}]',
)  # fmt: skip


@pytest.mark.slow
def test_a_plug_in_may_bring_every_kind_of_function(place, run):
    """Halves of light are learnt whole (1.0); a black image is one class to any model, half of the test set (0.5)."""
    (place / "everything.py").write_text(EVERYTHING)
    (place / "every.yaml").write_text(EVERY)
    code, _, err = run("run", "suite", "every.yaml", "--smoke", "--device", "cpu", "--jobs", "1")
    assert code == 0, err
    code, out, err = run("report", "every.yaml", "--format", "json")
    assert code == 0, err
    table = json.loads(out)["tables"][0]
    learn, listen = ({name: one["mean"] for name, one in row["measured"].items()} for row in table["rows"])
    assert (learn["natural"], learn["blank"], learn["medians"]) == (1.0, 0.5, 3.0)
    images = calls.function(signatures.describe("Data", "blobs"))(place).test_images
    assert learn["brightness"] == pytest.approx(images.mean() / 255)
    assert listen["psnr"] == pytest.approx(listen["grey_psnr"], abs=1e-4)
    kinds = {name.split()[0] for record in table["plugins"] for name in record["names"]}
    assert kinds == {kind.lower() for kind in signatures.TABLES} - {"experiment"}
    assert run("plan", "suite", "every.yaml", "--smoke")[0] == 0


def test_a_model_that_was_not_trained_here_is_judged_with_a_plug_in_s_attack(place):
    """Its cell has no partition and no algorithm that anybody could look up; the attack alone is the plug-in's."""
    from fatbench.suite import external_models

    plugins.load([Path("mine.py")])
    spec = external_models.cell(external_models.Model("my.pt", "0" * 64, "Net"), "digits")
    assert plugins.used(spec) == {}
    (record,) = plugins.records(plugins.used(spec, [SimpleNamespace(attack={"name": "blank"}, origin=None)]))
    assert record["names"] == ["attack blank"]


def test_python_takes_plug_ins_as_the_commands_do(place, monkeypatch):
    import fatbench

    (place / "mine.yaml").write_text(SUITE.replace("plugins: [mine.py]\n", ""))
    (place / "fatbench.toml").write_text('plugin = ["mine.py"]\n')
    assert fatbench.plan("mine.yaml")["method"].tolist() == ["FedAvg", "Mine"]  # of the settings
    (place / "fatbench.toml").unlink()
    forget_plugins()
    with pytest.raises(SpecError, match="no attack is named 'blank'"):
        fatbench.plan("mine.yaml")
    assert fatbench.plan("mine.yaml", plugins=["mine.py"])["method"].tolist() == ["FedAvg", "Mine"]
    with pytest.raises(SpecError, match=r"^plugins: plugin .*none.py: No such file or directory"):
        fatbench.table("mine.yaml", plugins=["none.py"])
