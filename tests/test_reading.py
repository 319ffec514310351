"""What plug-ins read is stored with the numbers, and a number of something else that was read is a changed one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fatbench.runner import progress, reading, versions
from fatbench.runner.jobs import Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files, plugin_reads, plugins, signatures, sources

AGGREGATOR = """import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from fatbench.engine.rounds import Mixing
import helper
import mylab
from mylab.settings import POWER

FOLDER = Path(__file__).parent

@cache
def settings():
    return json.loads((FOLDER / "cfg.json").read_text())

def only(updates, context):
    importlib.import_module("late")
    for name in ("maybe.json", "own.txt"):
        try:
            (FOLDER / name).read_text()
        except FileNotFoundError:
            (FOLDER / "own.txt").write_text("a cache")
    subprocess.run([sys.executable, "-c", ""], env={**os.environ})
    os.environ.get("SLURM_JOB_ID"), os.environ.get("HOME"), os.environ.get("HOMEWORK")
    first = float(os.environ.get("FIRST", settings()["first"])) * mylab.scale * POWER
    return Mixing([first] + [(1 - first) / (len(updates) - 1)] * (len(updates) - 1))

AGGREGATORS = {"only": only}
"""
SUITE = """
name: mine
title: An aggregator that reads
plugins: [mine.py]
base:
  data: digits
  train: 60
  test: 20
  partition: {name: iid, clients: 2}
  model: {name: mlp, width: 2}
  algorithm:
    {name: fedavg, rounds: 2, aggregator: only, local: {batch: 16, lr: 0.05, objective: {name: standard}}}
axes: {method: {Mine: {}}}
evaluate: {attacks: {natural: natural}}
presets: {paper: {}}
tables:
  - {id: A, title: Mine, rows: [method], values: {Natural: natural}}
"""
HELPER = """from fatbench.engine.rounds import Mixing
def only(updates, context):
    (here / "cfg.json").read_text()
    return Mixing([1.0] + [0.0] * (len(updates) - 1))
"""
READ = {"cfg.json", "../lib/mylab/__init__.py", "../lib/mylab/settings.py", "late.py", "maybe.json", "variable FIRST"}
READ |= {"variable HOMEWORK"}


def delete() -> None:
    sources.delete(*signatures.plugins())
    signatures.drop_plugins(list(signatures.plugins()))
    plugin_reads._reads.clear(), plugin_reads._importer.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mylab", "late", "helper")]:
        del sys.modules[name]


@pytest.fixture
def place(tmp_path, monkeypatch, forks):
    """A folder with the plug-in, its files and modules, and a package of the lab in a folder beside it."""
    place = tmp_path / "place"
    for name, text in {
        "place/mine.py": AGGREGATOR, "place/mine.yaml": SUITE, "place/cfg.json": '{"first": 1.0}',
        "place/helper.py": "", "place/late.py": "", "lib/mylab/__init__.py": "scale = 1.0\n",
        "lib/mylab/settings.py": "POWER = 1\n", "lib/mylab/unused.py": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    delete()
    yield place
    delete()


def machine(place: Path, **more) -> Machine:
    return Machine(
        str(place / "r.db"), str(place / "files"), str(place), recovery=Recovery(checkpoint_seconds=0.0, **more)
    )


def job():
    plugins.load()
    return jobs_of(files.load("mine.yaml").plan())[0]


def read_by(store: Store, stage: str) -> dict[str, str]:
    return next(run.get("read", {}) for run in reversed(store.runs()) if run["stage"].startswith(stage))


def test_what_was_read_is_stored_and_decides(place, monkeypatch):
    monkeypatch.setenv("FIRST", "0.125")
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine(place), store) == "done"
        read = read_by(store, "train")
        assert set(read) == {f"{name} of mine.py" for name in READ}
        assert read["maybe.json of mine.py"] == ""
        assert "0.125" not in json.dumps(read)
        assert versions.changed([job()], store) == {}
        was = (place / "cfg.json").read_text()
        for name, text in (("cfg.json", '{"first": 0.5}'), ("../lib/mylab/settings.py", "POWER = 2\n"),
                           ("late.py", "# other\n"), ("maybe.json", "")):  # fmt: skip
            old = (place / name).read_text() if (place / name).exists() else None
            (place / name).write_text(text)
            assert plugin_reads.changed_files(read, signatures.plugins()) == [f"{name} of mine.py"]
            ((reason,),) = {tuple(reasons) for reasons in versions.changed([job()], store)[job().cell].values()}
            assert (reason.code, reason.subject) == ("read", f"{name} of mine.py")
            (place / name).unlink() if old is None else (place / name).write_text(old)
        assert (place / "cfg.json").read_text() == was and versions.changed([job()], store) == {}
        monkeypatch.setenv("FIRST", "0.25")
        assert progress.states_of([job()], store) == {job().cell: "changed"}
        monkeypatch.setenv("FIRST", "0.125")
        (place / "cfg.json").unlink()
        assert plugin_reads.changed_files(read, signatures.plugins()) == ["cfg.json of mine.py"]


def test_what_is_elsewhere_and_not_here_is_unknown(place):
    plugins.load([Path("mine.py")])
    read = {"../lib/none.json of mine.py": "1", "cfg.json of other.py": "1", "cfg.json of mine.py": "1"}
    assert plugin_reads.changed_files(read, signatures.plugins()) == ["cfg.json of mine.py"]
    assert plugin_reads.changed_files(read, []) == []


def test_what_was_begun_is_not_gone_on_with_after_an_edit_of_what_it_read(place):
    with Store.open(str(place / "r.db"), create=True) as store:
        first = job()
        assert work(first, machine(place), store, stop=lambda: True) == "interrupted"
        assert store.stages()[first.cell, "train"].round == 1
        (place / "cfg.json").write_text('{"first": 0.5}')
        assert work(job(), machine(place), store) == "interrupted"
        delete()  # as in another process
        assert work(job(), machine(place, rerun_changed=True), store) == "done"
        rows = [row for row in store.measurements() if row["metric"] == "weight"]
        assert [row["value"] for row in rows] == [0.5] * 4
        assert versions.changed([job()], store) == {}


def test_a_run_that_goes_on_keeps_what_the_one_before_it_has_read(place):
    with Store.open(str(place / "r.db"), create=True) as store:
        first = job()
        assert work(first, machine(place), store, stop=lambda: True) == "interrupted"
        delete()  # as in another process, which need not read all of it again
        reader = reading.Reader(store, -1, first.cell, "train", [place / "mine.py"])
        assert set(reader.earlier) == {f"{name} of mine.py" for name in READ}


def test_a_function_of_a_helper_reads_for_its_plug_in(place):
    """Neither the helper's function nor the lab's has a line of the plug-in above it."""
    (place / "helper.py").write_text(f"from pathlib import Path\nhere = Path({str(place)!r})\n{HELPER}")
    (place / "../lib/mylab/__init__.py").write_text(
        f"from pathlib import Path\ndef read():\n    return Path({str(place)!r}, 'late.py').read_text()\n"
    )
    (place / "mine.py").write_text("import mylab\nfrom helper import only\nAGGREGATORS = {'only': only}\n")
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine(place), store) == "done"
        read = read_by(store, "train")
        assert set(read) == {f"{name} of mine.py" for name in ("cfg.json", "../lib/mylab/__init__.py")}
        plugin_reads.recorded(signatures.plugins())
        sys.modules["mylab"].read()  # as the network of a library would
        assert "late.py of mine.py" in plugin_reads.recorded(signatures.plugins())


def test_a_cell_without_a_plug_in_has_read_nothing(place):
    (place / "mine.yaml").write_text(SUITE.replace("aggregator: only", "aggregator: samples"))
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine(place), store) == "done"
        assert all("read" not in run for run in store.runs())


def test_others_read_the_environment_as_before(place):
    """In another process: the class of `os.environ` stays changed."""
    script = (
        "import os, subprocess\nfrom fatbench.suite import plugin_reads\nplugin_reads.watch(); plugin_reads.watch()\n"
        "os.environ['A'] = '1'\nassert os.environ.get('A') == os.getenv('A') == dict(os.environ)['A'] == '1'\n"
        "assert 'B' not in os.environ and os.environ.get('B', '2') == '2' and {**os.environ}['A'] == '1'\n"
        "assert subprocess.run(['printenv', 'A'], capture_output=True).stdout == b'1\\n'\n"
        "del os.environ['A']; assert 'A' not in os.environ; assert open(os.devnull).read() == ''\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
