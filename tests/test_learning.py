"""Has a network learned anything? The test against chance by itself, at tables, in `show`, in Python, and `--learn`."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import result_files
import torch
from scipy import stats
from small import small
from test_readme import examples, run
from typer.testing import CliRunner

import fatbench
from fatbench import report
from fatbench.cli.app import app
from fatbench.data.catalogue import CATALOGUE
from fatbench.engine.accuracy import packed
from fatbench.report.numbers import doubts, stored
from fatbench.report.numbers.doubts import Doubt
from fatbench.report.numbers.statistics import binomial_tail
from fatbench.report.numbers.stored import Number
from fatbench.runner.jobs import Machine
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store import jsonl
from fatbench.store.stages import Store
from fatbench.suite import files

AT_CHANCE = Doubt("chance").words
ROOT = Path(__file__).parent.parent
TRANSFORMERS = "fat-transformers-trained-jpeg75"


@pytest.mark.parametrize("n", [1, 7, 100, 10_000])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.196, 0.5, 0.9])
def test_the_tail_is_scipys(n: int, p: float) -> None:
    places = {0, 1, n // 2, n - 1, n, n + 1, int(n * p), int(n * p) + 1, int(n * p + 3 * (n * p * (1 - p)) ** 0.5)}
    for k in places:
        assert binomial_tail(k, n, p) == pytest.approx(stats.binom.sf(k - 1, n, p), rel=1e-9, abs=1e-300)


def test_chance_by_hand() -> None:
    """100 images of ten classes: P(X >= 18) > 0.01 > P(X >= 19). One of one image: P = 0.1."""
    assert stats.binom.sf(17, 100, 0.1) > doubts.LEVEL > stats.binom.sf(18, 100, 0.1)
    assert not doubts.above_chance(0.18, 100, 0.1) and doubts.above_chance(0.19, 100, 0.1)
    assert not doubts.above_chance(1.0, 1, 0.1) and not doubts.above_chance(0.75, 100, 0.75)
    assert not doubts.above_chance(1.0, 100, 1.0)  # one class: nothing to learn


@pytest.mark.parametrize("n", [3, 50, 500, 10_000])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_every_count_is_decided_as_scipy_decides_it(n: int, fraction: float) -> None:
    for right in range(0, n + 1, max(1, n // 400)):
        decided = stats.binomtest(right, n, fraction, alternative="greater").pvalue < doubts.LEVEL
        assert doubts.above_chance(right / n, n, fraction) == decided, right


def test_chance_is_what_was_stored_else_unknown_unless_the_labels_are_balanced() -> None:
    """The whole test set of CIFAR-100 has 100 images of each class; its first 2,000 images, and SVHN, have not."""
    assert doubts.chance({"name": "cifar100"}, None, 10_000) == 0.01
    assert doubts.chance({"name": "cifar100", "variant": "jpeg75"}, None, 10_000) == 0.01
    assert doubts.chance({"name": "cifar100"}, 0.03, 10_000) == 0.03
    for name, n in (("cifar100", 2_000), ("cifar100", None), ("svhn", 26_032), ("mnist", 10_000), ("of a plug-in", 9)):
        assert doubts.chance({"name": name}, None, n) is None
        assert doubts.chance({"name": name}, 0.2, n) == 0.2


def test_always_the_same_class_is_no_learning() -> None:
    """Shares .5, .3 and .2: 1,000 of 2,000 right is far above a third, and exactly the most frequent class."""
    assert doubts.above_chance(0.5, 2000, 1 / 3) and not doubts.above_chance(0.5, 2000, 0.5)
    cell, stage = "c", "natural-x@2"
    row = Number(cell, stage, 2, -1, "natural", 0.5, 2000)
    data = {cell: {"name": "svhn"}}
    why = doubts.doubts([row, row._replace(metric="chance")], {}, data)
    assert why == {(cell, stage): (doubts.Doubt("chance", 0.5),)}
    assert doubts.doubts([row], {}, data) == {}  # unknown


@pytest.mark.parametrize("name", ["digits", "plane", "fashion_mnist"])
def test_which_test_sets_are_balanced(name: str, tmp_path: Path) -> None:
    from fatbench.data import DATASETS
    from fatbench.errors import FatbenchError

    try:
        labels = torch.as_tensor(DATASETS[name](tmp_path).test_labels)
    except FatbenchError as error:
        pytest.skip(str(error))
    counts = labels.bincount()
    assert CATALOGUE[name].balanced == (len(set(counts.tolist())) == 1)


# --- at tables: the committed transformers, one of which is made to guess -------------------------------------------

GUESSES = "4f2fb61784ba"  # FedWAvg(10), AT, seed 6


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every committed row, and one network that has every tenth image right, and under attack every twentieth."""
    folder = tmp_path_factory.mktemp("learning")
    file = ROOT / "results" / "fat-transformers-trained-jpeg75-cpu.jsonl.xz"
    first, of = result_files.lines(file)[0].strip(), {cell["cell"]: cell for cell in result_files.cells(file)}
    for stage in of[GUESSES]["stages"]:
        if stage["outcomes"]:
            every = 10 if stage["settings"]["name"] == "natural" else 20
            right = torch.arange(stage["total"]) % every == 0
            parts = ((at, n, packed(right[at : at + n])) for at, n, _ in stage["outcomes"])
            stage["outcomes"] = [[at, n, base64.b64encode(part).decode()] for at, n, part in parts]
            metric = stage["stage"].split("-")[0]
            stage["numbers"] = [[*n[:3], 1 / every, *n[4:]] if n[2] == metric else n for n in stage["numbers"]]
    attacked = [stage for stage in of[GUESSES]["stages"] if stage["outcomes"]]
    rounds = {number[0] for stage in attacked for number in stage["numbers"]}
    for stage in of[GUESSES]["stages"]:
        if stage["stage"] == "train":  # its monitor looked at the images that the evaluation looks at
            stage["numbers"] = [
                [*n[:3], 0.1, *n[4:]] if n[2] == "natural" and n[0] in rounds else n for n in stage["numbers"]
            ]
    for cell in of.values():
        for stage, digest in result_files.mismatches(cell):
            stage["digest"] = digest
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join([first, *map(json.dumps, of.values())]) + "\n")
    with Store.open(str(folder / "r.db"), create=True) as store:
        jsonl.import_(store, rows)
    return folder / "r.db"


def test_every_format_flags_the_number_and_the_table_names_the_cell(transformers: Path) -> None:
    suite = files.load(TRANSFORMERS)
    plan = suite.plan("cpu")
    with Store.open(str(transformers)) as store:
        grids = report.build_tables(suite, plan, store)
    below = [v.mean for grid in grids for v in grid.all() if "chance" in v.codes]
    assert [round(100 * mean, 1) for mean in below] == [17.0, 11.8, 10.9]  # means over a seed that learned nothing
    said = dict(grids[0].notes)["at chance"]
    assert (
        said.startswith("1 of 36 cells is at chance; ignore its robust accuracy")
        and "FedWAvg(10), AT (seed 6: 10.0% of 10000)" in said
    )
    assert "checks" not in dict(grids[0].notes)  # nothing contradicts itself
    texts = {name: report.render(grids, name) for name in report.FORMATS}
    (mark,) = [mark for mark, text in grids[0].footnotes if text.startswith(AT_CHANCE)]
    marked = {
        "markdown": f"±6.83{mark}",
        "latex": r"$\pm$6.83}\raisebox{.6ex}{\scriptsize \text",
        "terminal": f"±6.83{mark}",
    }
    for name, text in texts.items():
        assert "natural accuracy is at chance" in text, name
        assert marked.get(name, "") in text, name
        assert "at chance; ignore" in " ".join(text.split()) or name == "csv", name


def test_a_suite_that_learned_has_no_such_flag(committed: Mapping[str, Store]) -> None:
    suite = files.load("sfat-cifar10")
    text = report.render(report.build_tables(suite, suite.plan("jpeg75-cpu"), committed["sfat-jpeg75-cpu"]), "markdown")
    assert "36.36" in text and "at chance" not in text


def test_the_python_interface_has_the_flag(transformers: Path) -> None:
    table = fatbench.table(TRANSFORMERS, preset="cpu", db=str(transformers)).frame()
    assert int(table["doubts"].fillna("").str.contains("at chance").sum()) == 3
    found = fatbench.results(TRANSFORMERS, preset="cpu", db=str(transformers))
    below = found[found["doubts"].str.contains("at chance")]
    assert set(below["metric"]) == {"natural", "pgd7", "autoattack"} and len(set(below["cell"])) == 1


def test_the_share_of_the_most_frequent_class_is_stored_and_counts(tmp_path: Path) -> None:
    """Of 64 digits the evaluation stores it. 60 % of two halves is no learning, whatever one over ten classes is."""
    plan = files.load("adfl-mnist").plan("smoke")
    job = jobs_of(plan)[0]
    machine = Machine(db=str(tmp_path / "r.db"), files=str(tmp_path / "f"), data=str(tmp_path / "d"))
    with Store.open(machine.db, create=True) as store:
        assert work(job, machine, store) == "done"
        (fraction,) = {row["value"] for row in store.measurements([job.cell], metrics=["chance"])}
        from fatbench.data import DATASETS

        labels = torch.from_numpy(DATASETS["digits"](tmp_path).test_labels[:64])
        assert fraction == labels.bincount().max().item() / 64
    values = (("natural", 0.6), ("chance", 0.5))
    numbers = [Number(job.cell, "natural-x@2", 2, -1, metric, value, 32) for metric, value in values]
    why = doubts.doubts(numbers, {}, {job.cell: job.spec["data"]})  # P(X >= 19) of 32 halves is 0.19; of tenths nothing
    assert why == {(job.cell, "natural-x@2"): (doubts.Doubt("chance", 0.5),)}


def test_show_marks_the_number(transformers: Path) -> None:
    with Store.open(str(transformers)) as store:
        why = stored.doubts_of(list(store.cells()), store)
    cell = min(cell for (cell, _), found in why.items() if "chance" in {doubt.code for doubt in found})
    shown = CliRunner().invoke(app, ["show", cell, "--db", str(transformers)])
    assert shown.exit_code == 0 and "†" in shown.stdout and f"† {AT_CHANCE}" in shown.stdout
    found = json.loads(CliRunner().invoke(app, ["show", cell, "--db", str(transformers), "--format", "json"]).stdout)
    assert {row["metric"] for row in found["numbers"] if row["doubts"]} >= {"natural"}
    assert not any(row["doubts"] for row in found["numbers"] if row["stage"] == "train")


# --- check --learn -------------------------------------------------------------------------------------------------

SMALL = small(name="small", seeds="[0]", train="", test="", model="{name: small_cnn, width: 6}", rounds=3)


def test_learn_says_at_which_step(tmp_path: Path) -> None:
    """1,442 training digits, two clients, batch 16: 46 steps a round. A rate of 1e-9 learns nothing: exit 1."""
    suite = tmp_path / "small.yaml"
    suite.write_text(SMALL)
    found = CliRunner().invoke(app, ["check", "--learn", str(suite)])
    assert found.exit_code == 0, found.output
    assert "above chance after 46 steps of a client (round 1 of 3)" in found.stdout
    assert "round 1 of 3, step 46: loss" in found.stderr
    suite.write_text(SMALL.replace("lr: 0.05", "lr: 1e-9"))
    found = CliRunner().invoke(app, ["check", "--learn", str(suite)])
    assert found.exit_code == 1
    assert "still at chance after 138 steps of a client (round 3 of 3)" in found.stdout


def test_looking_often_does_not_make_a_cell_learn() -> None:
    assert doubts.leaves_chance(0.004, 2) and doubts.leaves_chance(0.006, 1)
    assert not doubts.leaves_chance(0.006, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sfat-cifar10", "--preset", "quick"], "--preset and --device: only with --learn"),
        (["--learn", "sfat-cifar10", "sfat-svhn"], "--learn takes one suite, got 2"),
        (["--learn", "sfat-cifar10", "--preset", "quik"], "did you mean 'quick'?"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str, run: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run("check", *arguments)
    assert code == 2 and message in err and "Traceback" not in err


@pytest.mark.nightly
def test_the_page_is_true(tmp_path: Path) -> None:
    """The accuracy is not compared: it differs between CPUs."""
    found = examples((ROOT / "docs" / "learning.md").read_text(encoding="utf-8"))
    assert found and all(shown for _, shown in found)
    for command, shown in found:
        run(command, tmp_path, shown)
