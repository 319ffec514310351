"""Equal tuning: the choice in closed form, real trials to the end, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fatbench
from fatbench.errors import SpecError
from fatbench.suite import files, language, trees, tuning
from fatbench.suite.model import Tune, read

LR = "algorithm.local.lr"
SUITE = """
name: tuned
title: t
base:
  data: {name: digits}
  train: 120
  test: 40
  validation: 40
  partition: {name: iid, clients: 2}
  model: {name: small_cnn, width: 2}
  algorithm:
    name: fedavg
    rounds: 1
    local: {epochs: 5, batch: 20, lr: 0.1, objective: {name: standard}}
    aggregator: {name: samples}
axes:
  method:
    FedAvg: {}
    uniform: {algorithm: {aggregator: {name: uniform}}}
tune: {settings: {algorithm.local.lr: [0.05, 1.0e+6]}, seeds: [100]}
evaluate: {attacks: {natural: {name: natural}, pgd20: {name: pgd, eps: [1/255, 2/255], step: 1/255, steps: 1}}}
presets: {paper: {}}
tables: [{id: T, title: t, rows: [method], values: {natural: natural}}]
"""


def cell(trial: str, seed: int, validation: int = 100, **labels: str) -> Any:
    key = {**labels, tuning.AXIS: trial}
    return SimpleNamespace(id=f"{labels} {trial} {seed}", key=key, spec={"validation": validation})


def chosen(tune: Tune, accuracies: dict[tuple[str, ...], list[float]], **others: int) -> list[str]:
    """The choice of each method from (method, adversary, trial) -> accuracies by seed."""
    cells, by_id = [], {}
    for (method, adversary, trial), values in accuracies.items():
        for seed, value in enumerate(values):
            one = cell(trial, seed, method=method, adversary=adversary, **others)
            cells.append(one)
            by_id[one.id] = value
    return [row["trial"] for row in tuning.choices(tune, cells, by_id)]


def tune_of(**changed: Any) -> Tune:
    tree = {"settings": {LR: [0.02, 0.01]}, "seeds": [7, 8], **changed}
    return read(Tune, tree, axes={"adversary": {"none": {}, "ALIE": {}}})


def test_a_choice_is_the_best_mean_over_seeds_in_the_worst_case() -> None:
    """Rate 0.02 is better without an adversary, 0.01 in the worst of both: .5 against .3."""
    accuracies = {
        ("A", "none", "lr=0.02"): [0.9, 0.7], ("A", "ALIE", "lr=0.02"): [0.2, 0.4],
        ("A", "none", "lr=0.01"): [0.6, 0.6], ("A", "ALIE", "lr=0.01"): [0.4, 0.6],
    }  # fmt: skip
    both = {"adversary": ["none", "ALIE"]}
    assert chosen(tune_of(worst_over=both), accuracies) == ["lr=0.01"]
    assert chosen(tune_of(), accuracies) == ["lr=0.02", "lr=0.01"]  # then each adversary is a row of its own


def test_within_half_an_image_the_first_value_is_taken() -> None:
    def first(second: float) -> list[str]:
        return chosen(tune_of(), {("A", "none", "lr=0.02"): [0.5], ("A", "none", "lr=0.01"): [second]})

    assert first(0.5) == first(0.5049) == ["lr=0.02"]  # of 100 images, half of one is .005
    assert first(0.5051) == ["lr=0.01"]


@pytest.mark.parametrize(
    "tune, problem",
    [
        ({"settings": {"partition.clients": [2, 3]}}, "expected a setting of the algorithm"),
        ({"settings": {"algorithm.rounds": [1, 2]}}, "expected a setting of the algorithm"),
        ({"settings": {LR: [0.1, 0.1]}}, "different values"),
        ({"settings": {LR: [0.1]}}, "2 to 12 combinations, got 1"),
        ({"settings": {LR: [1, 2, 3, 4], "algorithm.local.momentum": [0, 1, 2, 3]}}, "2 to 12 combinations, got 16"),
        ({"settings": {"algorithm.a": [1], "algorithm.b": [1], "algorithm.c": [1, 2]}}, "one setting or 2, got 3"),
    ],
)
def test_what_may_not_be_tuned(tune: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        tune_of(**tune)


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("seeds: [100]}", "seeds: [0]}", "seeds: seed 0 is also one of preset paper"),
        ("seeds: [100]}", "seeds: [100], by: pgd40}", "by: cannot tune by 'pgd40'"),
        ("seeds: [100]}", "seeds: [100], by: pgd20}", "an attack of preset paper that has one radius"),
        ("  validation: 40\n", "", "set 'validation: N'"),
        ("algorithm.local.lr: [", "algorithm.local.rate: [", r"tuned.yaml:20: rate: .* no setting 'rate'"),
        ("tune: {settings: {algorithm.local.lr: [0.05, 1.0e+6]}, seeds: [100]}",
         "tune:\n  settings:\n    algorithm.local.objective: [{name: standard}, {nam: x}]\n  seeds: [100]",
         "tuned.yaml:22: nam: "),
        ("clients: 2}", "client: 2}", "tuned.yaml:9: client: "),
    ],
)  # fmt: skip
def test_trials_that_would_be_refused(tmp_path: Path, old: str, new: str, problem: str) -> None:
    (tmp_path / "tuned.yaml").write_text(SUITE.replace(old, new))
    with pytest.raises(SpecError, match=problem):
        tuning.demand_validation(files.load(str(tmp_path / "tuned-trials.yaml")).plan().cells, tmp_path / "tuned.yaml")


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("seeds: [100]}", "seeds: [0]}", "tuned.yaml:20: seeds: seed 0 is also one of preset paper"),
        ("  validation: 40\n", "", "tuned.yaml: FedAvg, lr=0.05: tuning needs images"),
        ("algorithm.local.lr: [", "algorithm.local.rate: [", "tuned.yaml:20: rate: 'local' has no setting 'rate'"),
    ],
)
def test_check_reads_the_trials_too(tmp_path: Path, run: Callable[..., Any], old: str, new: str, problem: str) -> None:
    (tmp_path / "tuned.yaml").write_text(SUITE.replace(old, new))
    code, _, said = run("check", str(tmp_path / "tuned.yaml"))
    assert code == 2 and problem in said


def test_check_reads_a_file_of_choices_with_its_suite(tmp_path: Path, run: Callable[..., Any]) -> None:
    """The committed choices are those of today's trials; with those of other trials the suite is not planned."""
    suite = files.locate("fat-tuned")
    choices = tuning.tuned_file("fat-tuned", "cpu", suite.parent)
    assert run("check", str(choices))[0] == 0
    (tmp_path / "common").mkdir()
    for file in (suite, suite.parent / "common" / "fat-skew.yaml"):
        (tmp_path / file.relative_to(suite.parent)).write_text(file.read_text())
    (tmp_path / choices.name).write_text(re.sub("(?m)^trials: .", "trials: -", choices.read_text()))
    code, _, err = run("check", str(tmp_path / choices.name))
    assert code == 2 and f"{choices.name}: chosen from cells with other settings" in err


def test_a_trial_trains_without_the_clients_that_never_train(tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(SUITE.replace("evaluate: {", "evaluate: {unseen: 1, "))
    suite = files.load(str(tmp_path / "tuned.yaml"))
    assert {c.spec["unseen"] for c in [*suite.plan().cells, *suite.trials().plan().cells]} == {1}


@pytest.mark.parametrize(
    "values, at_edge",
    [
        ([0.02, 0.01, 0.05], [0.01, 0.05]), (["1/50", 0.01, "1/20"], [0.01, "1/20"]), ([1, 2], []),
        (["a", "b", "c"], []), ([{"name": "a"}, {"name": "b"}, {"name": "c"}], []),
    ],
)  # fmt: skip
def test_the_edge_of_a_list_is_its_least_and_its_largest_number(values: list[Any], at_edge: list[Any]) -> None:
    """The first value stands first because it is the default, wherever it lies."""
    tune = tune_of(settings={LR: values})
    for label, value in zip(tuning.settings_by_label(tune), values, strict=True):
        said = tuning.sentence(tune, {"rows": [{"when": {"method": "A"}, "trial": label}]})
        assert ("at the edge" in said) == (value in at_edge)


def test_trials_are_cells_that_never_see_the_test_images(tmp_path: Path) -> None:
    (tmp_path / "tuned.yaml").write_text(SUITE)
    suite = files.load(str(tmp_path / "tuned.yaml"))
    plan = suite.trials().plan()
    assert plan.suite == "tuned-trials" and [*plan.cells[0].key] == ["method", "trial"]
    first = [(c.key["trial"], c.spec["seed"], c.spec["algorithm"]["local"]["lr"]) for c in plan.cells[:2]]
    assert first == [("lr=0.05", 100, 0.05), ("lr=1000000.0", 100, 1e6)]
    assert all(c.spec["test"] == 1 and not c.evaluations for c in plan.cells)
    assert suite.plan().untuned == f"fatbench run {tmp_path / 'tuned.yaml'} --preset paper --tune"
    command = tuning.command("fat-tuned+train=6", files.locate("fat-tuned"), "p")
    assert command == "fatbench run fat-tuned+train=6 --preset p"
    with pytest.raises(SpecError, match="has no section 'tune'"):
        files.load("sfat-cifar10").trials()


def test_from_trials_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """A rate of 1e6 diverges, so both rows take 0.05; a file of choices holds for these trials alone."""
    monkeypatch.chdir(tmp_path)
    file = Path("tuned.yaml")
    file.write_text(SUITE)
    code, _, said = run("run", "tuned.yaml", "--jobs", "1")
    assert code == 2 and "fatbench run tuned --preset paper --tune" in said
    code, _, said = run("run", "tuned.yaml", "--tune", "--jobs", "1", "-k", "method=FedAvg")
    assert code == 2 and "2 of 4 trials are not done" in said and not Path("tuned.paper.tuned.yaml").exists()
    code, _, said = run("run", "tuned.yaml", "--tune", "--jobs", "1")
    assert code == 0 and "wrote tuned.paper.tuned.yaml" in said
    choices = trees.read(Path("tuned.paper.tuned.yaml"))[0]
    assert [row["trial"] for row in choices["rows"]] == ["lr=0.05", "lr=0.05"]
    assert all(row["accuracy"]["lr=1000000.0"] == 0 < row["accuracy"]["lr=0.05"] for row in choices["rows"])
    plan = files.load("tuned.yaml").plan()
    assert not plan.untuned and {c.spec["algorithm"]["local"]["lr"] for c in plan.cells} == {0.05}
    fatbench.run("tuned.yaml", jobs=1, quiet=True)
    table = fatbench.table("tuned.yaml").markdown()
    assert "tuned by 2 trials (local.lr [0.05, 1000000.0]; 1 seeds" in table and "FedAvg: lr=0.05" in table
    assert "1000000.0 |" not in table and set(fatbench.results("tuned.yaml")["seed"]) == {0}  # no trial is a row
    file.write_text(SUITE.replace("1.0e+6", "0.2"))
    with pytest.raises(SpecError, match="chosen with other settings than those of the suite"):
        files.load("tuned.yaml").plan()
    file.write_text(SUITE.replace("rounds: 1", "rounds: 2"))
    with pytest.raises(SpecError, match="chosen from cells with other settings"):
        files.load("tuned.yaml").plan()


def test_a_setting_of_the_command_line_wins_over_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tuned.yaml").write_text(SUITE)
    suite = files.load(f"tuned.yaml+{LR}=0.3")
    tune = suite.contents.tune
    rows = [{"when": {"method": label}, "trial": "lr=0.05"} for label in ("FedAvg", "uniform")]
    tuned = {"trials": tuning.trials_digest(suite.trials().plan().cells), "rows": rows}
    overrides = tuning.overrides(tune, tuned, suite.trials().plan().cells, Path("x"), "")
    assert [one.set for one in overrides] == [{"algorithm": {"local": {"lr": 0.05}}}] * 2
    expansion = language.Expansion(suite, "paper")
    assert [keys[0] for keys, _ in expansion.overrides][-1] == "--set"
