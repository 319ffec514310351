"""What plug-ins read is stored with the numbers, and a number of something else that was read is a changed one."""

from __future__ import annotations

import _io
import builtins
import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from crew import forget_plugins, machine_of
from small import small

from fatbench.runner import progress, stage, versions
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import files, plugin_reads, plugins, signatures
from fatbench.suite.entry import AggregatorEntry

AGGREGATOR = """import importlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from fatbench.engine.rounds import Mixing
from fatbench.suite.entry import AggregatorEntry
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
    first = float(os.environ.get("FIRST", settings()["first"])) * mylab.scale * POWER
    return Mixing([first] + [(1 - first) / (len(updates) - 1)] * (len(updates) - 1))

AGGREGATORS = {"only": AggregatorEntry(only, reads=("variable FIRST", "variable NONE", "file data.h5"))}
"""
SUITE = small(plugins="[mine.py]", model="{name: mlp, width: 2}", rounds=2, rule="only")
HELPER = """from fatbench.engine.rounds import Mixing
def only(updates, context):
    (here / "cfg.json").read_text()
    return Mixing([1.0] + [0.0] * (len(updates) - 1))
"""
READ = {"cfg.json", "../lib/mylab/__init__.py", "../lib/mylab/settings.py", "late.py", "maybe.json", "variable FIRST"}
READ |= {"variable NONE", "data.h5"}


def delete() -> None:
    forget_plugins()
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


def job():
    plugins.load()
    return jobs_of(files.load("mine.yaml").plan())[0]


def read_by(store: Store, stage: str) -> dict[str, str]:
    return next(run.get("read", {}) for run in reversed(store.runs()) if run["stage"].startswith(stage))


def changed_files(read: dict[str, str], plugin_files) -> list[str]:
    return [name for name, value in plugin_reads.current(read, plugin_files).items() if value != read[name]]


def test_what_was_read_is_stored_and_decides(place, monkeypatch):
    monkeypatch.setenv("FIRST", "0.125")
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store) == "done"
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
            assert changed_files(read, signatures.plugins()) == [f"{name} of mine.py"]
            ((reason,),) = {tuple(reasons) for reasons in versions.changed([job()], store)[job().cell].values()}
            assert (reason.code, reason.subject) == ("read", f"{name} of mine.py")
            (place / name).unlink() if old is None else (place / name).write_text(old)
        assert (place / "cfg.json").read_text() == was and versions.changed([job()], store) == {}
        monkeypatch.setenv("FIRST", "0.25")
        assert progress.states_of([job()], store) == {job().cell: "changed"}
        monkeypatch.setenv("FIRST", "0.125")
        assert read["data.h5 of mine.py"] == read["variable NONE of mine.py"] == ""  # not there, and declared
        monkeypatch.setenv("NONE", "1")
        assert changed_files(read, signatures.plugins()) == ["variable NONE of mine.py"]
        monkeypatch.delenv("NONE")
        (place / "cfg.json").unlink()
        assert changed_files(read, signatures.plugins()) == ["cfg.json of mine.py"]


def test_what_is_elsewhere_and_not_here_is_unknown(place):
    plugins.load([Path("mine.py")])
    read = {"../lib/none.json of mine.py": "1", "cfg.json of other.py": "1", "cfg.json of mine.py": "1"}
    assert changed_files(read, signatures.plugins()) == ["cfg.json of mine.py"]
    assert changed_files(read, []) == []


def test_what_was_begun_is_not_gone_on_with_after_an_edit_of_what_it_read(place):
    with Store.open(str(place / "r.db"), create=True) as store:
        first = job()
        assert work(first, machine_of(place), store, stop=lambda: True) == "interrupted"
        assert store.stages()[first.cell, "train"].round == 1
        (place / "cfg.json").write_text('{"first": 0.5}')
        assert work(job(), machine_of(place), store) == "interrupted"
        delete()  # as in another process
        assert work(job(), machine_of(place, rerun_changed=True), store) == "done"
        rows = [row for row in store.measurements() if row["metric"] == "weight"]
        assert [row["value"] for row in rows] == [0.5] * 4
        assert versions.changed([job()], store) == {}


def test_a_run_that_goes_on_keeps_what_the_one_before_it_has_read(place):
    with Store.open(str(place / "r.db"), create=True) as store:
        first = job()
        assert work(first, machine_of(place), store, stop=lambda: True) == "interrupted"
        delete()  # as in another process, which need not read all of it again
        reader = stage.Reader(store, -1, job(), "train")
        assert set(reader.earlier) == {f"{name} of mine.py" for name in READ}


def test_a_function_of_a_helper_reads_for_its_plug_in(place):
    """Neither the helper's function nor the lab's has a line of the plug-in above it."""
    (place / "helper.py").write_text(f"from pathlib import Path\nhere = Path({str(place)!r})\n{HELPER}")
    (place / "../lib/mylab/__init__.py").write_text(
        f"from pathlib import Path\ndef read():\n    return Path({str(place)!r}, 'late.py').read_text()\n"
    )
    (place / "mine.py").write_text("import mylab\nfrom helper import only\nAGGREGATORS = {'only': only}\n")
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store) == "done"
        read = read_by(store, "train")
        assert set(read) == {f"{name} of mine.py" for name in ("cfg.json", "../lib/mylab/__init__.py")}
        plugin_reads.recorded(plugins.used(job().spec))
        with plugin_reads.watching():
            sys.modules["mylab"].read()  # as the network of a library would
        assert "late.py of mine.py" in plugin_reads.recorded(plugins.used(job().spec))


def test_a_cell_without_a_plug_in_has_read_nothing(place):
    (place / "mine.yaml").write_text(SUITE.replace("aggregator: only", "aggregator: samples"))
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store) == "done"
        assert all("read" not in run for run in store.runs())


def test_files_are_opened_as_before_when_nobody_watches_any_more(place):
    before = builtins.open, io.open, os.open, _io.open_code
    with plugin_reads.watching(), plugin_reads.watching():
        assert builtins.open is not before[0] and os.open is not before[2]
        with contextlib.suppress(ZeroDivisionError), plugin_reads.watching():
            raise ZeroDivisionError
        os.close(os.open(path=os.devnull, flags=os.O_RDONLY))
        with pytest.raises(FileNotFoundError):
            pd.read_csv("none.csv")
    assert (builtins.open, io.open, os.open, _io.open_code) == before


PACKAGE = "from importlib.resources import files\nskew = float(files(__package__).joinpath('skew.txt').read_text())\n"


def install(place: Path, version: str, skew: str) -> None:
    """A package of the lab with a data file, as pip installs it."""
    site = place / "site-packages"
    shutil.rmtree(site, ignore_errors=True)
    info = f"labtools-{version}.dist-info"
    texts = {"labtools/__init__.py": PACKAGE, "labtools/skew.txt": skew,
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: labtools\nVersion: {version}\n"}  # fmt: skip
    for name, text in texts.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / info / "RECORD").write_text("".join(f"{name},,\n" for name in texts))


def test_an_installed_package_counts_with_its_version_and_its_files(place, monkeypatch):
    install(place, "1.0", "1.0")
    (place / "site-packages" / "bare.py").write_text("")
    monkeypatch.syspath_prepend(place / "site-packages")
    importlib.invalidate_caches()
    plugin_reads._packages.cache_clear()
    (place / "mine.py").write_text(
        "import bare\nimport numpy\nimport labtools\nfrom fatbench.engine.rounds import Mixing\n"
        "def only(updates, context):\n    return Mixing([1.0] + [0.0] * (len(updates) - 1))\n"
        "AGGREGATORS = {'only': only}\n"
    )
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(job(), machine_of(place), store) == "done"
        read = read_by(store, "train")
        assert set(read) == {"package labtools of mine.py", "site-packages/bare.py of mine.py"}
        assert read["package labtools of mine.py"].startswith("1.0+")
        assert versions.changed([job()], store) == {}
        for version, skew in (("1.1", "1.0"), ("1.0", "50.0")):
            install(place, version, skew)
            plugin_reads._package_version.cache_clear()
            (place / "site-packages" / "bare.py").write_text("")
            (reason,) = versions.changed([job()], store)[job().cell]["train"]
            assert reason.words.startswith("another package labtools of mine.py [1.0+")
            assert f"now [{version}+" in reason.words
    sys.modules.pop("labtools"), sys.modules.pop("bare")


@pytest.mark.parametrize("reads", ["SKEW", "variables SKEW"])
def test_what_is_declared_is_a_variable_a_module_or_a_file(reads):
    with pytest.raises(ValueError, match=r"reads: expected texts as variable NAME, module NAME, file NAME, got 'v?"):
        AggregatorEntry(len, reads=(reads,))
