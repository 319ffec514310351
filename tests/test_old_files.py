"""Files of every earlier form are read for ever: one small file of each, as its version wrote it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import result_files

from fatbench import packed
from fatbench.store import jsonl, old_files
from fatbench.store.document import Cell, ExchangeError, as_line, document, sealed
from fatbench.store.old_files import UNVERIFIED
from fatbench.store.stages import Store
from fatbench.suite.asked import contradiction, identity

FOLDER = Path(__file__).parent / "old_files"
FILES = {  # name: (cell today, whether it has digests)
    "21-november": ("c7151ac6528d", False),
    "21-november-validated": ("e3dcadece0ce", False),
    "22-november": ("974f36f1ac05", False),
    "23-november": ("76c2fc051960", False),
    "24-november": ("77d1f3eb18a9", True),
    "26-november": ("658cbcee5f0b", True),
    "27-november": ("8d40d20cb5d5", True),
    "28-november": ("cce98326b6ea", True),
}


def file(name: str) -> Path:
    return FOLDER / f"{name}.jsonl.xz"


def of(name: str, line: str | None = None, version: int | None = None) -> Cell:
    first, second = result_files.lines(file(name))
    version = version or json.loads(first)["schema_version"]
    return jsonl.cell_of(line or second, version, "f:2", identity, contradiction)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.promise("Input", "Files of every earlier version are read")
def test_every_form_is_imported_and_exported_in_that_of_today(name: str, tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        counts = jsonl.import_(store, file(name), identify=identity, contradiction=contradiction)
        again = jsonl.import_(store, file(name), identify=identity, contradiction=contradiction)
        assert [*store.cells()] == [FILES[name][0]]
        assert counts["new cells"] == 1 and again["new numbers"] == again["new stages"] == again["new replicates"] == 0
        jsonl.export(store, tmp_path / "today.jsonl")
        doubts = store.measurements(metrics=[UNVERIFIED])
        finished = [row for row in store.stages().values() if row.status == "done"]
    assert len(doubts) == (0 if FILES[name][1] else len(finished))
    line = result_files.lines(tmp_path / "today.jsonl")[1]
    digests = [{stage.stage: stage.digest for stage in cell.stages} for cell in (of(name), of(name, line, 2))]
    assert digests[0] == digests[1]
    (before,) = result_files.cells(file(name))
    values = {number[3] for stage in before["stages"] for number in stage["numbers"]}
    after = {row[3] for stage in of(name).stages for row in stage.rows if row[2] != UNVERIFIED}
    assert values == after or "26" in name  # whose doubts became codes with values


def test_names_of_before_are_those_of_today() -> None:
    first, validated, probe = (of(name).spec for name in ("21-november", "21-november-validated", "22-november"))
    assert first["algorithm"]["local"]["lr"] == 0.02 and "aggregator" in first["algorithm"]
    assert first["partition"]["own_fraction"] is None and not {"protocol", "probe"} & first.keys()
    assert validated["algorithm"]["name"] == "fedavg_validated"
    assert probe["algorithm"]["name"] == "gradient_inversion" and "diagnostic" in probe
    assert of("24-november").spec["algorithm"]["aggregator"]["rank_by"] == "nk_weighted"
    names = {stage.stage for stage in of("21-november").stages}
    assert {"natural-a46d337d@20", "cw-65f59240.bf16@20", "fgsm_sfat-4a4b9107.bf16@20"} <= names
    (run, *_) = of("27-november").runs
    assert run.commit is None and run.dirty is None and (run.versions or {})["fatbench"] == "0.1.0"


def test_suites_that_became_presets_are_named_as_today() -> None:
    line = result_files.lines(file("28-november"))[1]
    assert '"preset":"cpu"' in line and '"suite":"sfat-audit-jpeg75"' in line
    cell = of("28-november")
    assert {(one.suite, one.preset) for one in (*cell.runs, *cell.points)} == {("sfat-audit", "jpeg75-cpu")}


def test_a_digest_is_compared_before_anything_is_translated() -> None:
    line = result_files.lines(file("24-november"))[1]
    with pytest.raises(ExchangeError, match="its digest does not match its numbers"):
        of("24-november", line.replace('"backward",', '"backwarb",', 1))


def test_committed_results_have_names_of_today() -> None:
    """Nothing of them is translated, so an import reads each line once."""
    for results in packed.results_in(result_files.RESULTS):
        assert not any(old_files.is_old(line, 2) for line in result_files.lines(results)[1:]), results


def test_a_setting_of_today_keeps_its_name_in_rows_too() -> None:
    """rank_by "mean_loss" of 24 November is another than that of today: the cell's id tells."""
    today = of("24-november")
    spec = json.loads(json.dumps(today.spec).replace('"nk_weighted"', '"mean_loss"'))
    cell = sealed(today.model_copy(update={"spec": spec, "cell": identity(spec)}))
    kept = of("24-november", result_files.rows(as_line(cell)))
    assert kept.spec == spec and kept.cell == cell.cell != today.cell
    assert document(json.loads(as_line(kept)), "") == kept


def test_old_settings_have_no_id_without_the_suites(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        with pytest.raises(ExchangeError, match="import it first"):
            jsonl.import_(store, file("22-november"))
        assert store.cells() == {}
