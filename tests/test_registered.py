"""Functions and arrays of a running program: known by a name while a call needs them, and forgotten afterwards."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fatbench
from fatbench.errors import SpecError
from fatbench.suite import registered, signatures, source_files

RADIUS = 80 / 255


class Brighter:
    """An attack as an object, which no file can hold."""

    def __init__(self, by: float):
        self.by = by

    def __call__(self, model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x + self.by).clamp(0, 1)


BRIGHTER = Brighter(RADIUS)


def fool(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Reads an object of this module."""
    return BRIGHTER(model, x, y)


def plain(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return x


def other_plain() -> Callable[..., Tensor]:
    def plain(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x + RADIUS).clamp(0, 1)

    return plain


def darkness(classes: int = 10) -> nn.Module:
    """Says 0 of dark images and 1 of bright ones."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
    with torch.no_grad():
        network[1].weight.zero_()
        network[1].bias.fill_(-1000.0)
        network[1].weight[1] = 1 / 64
        network[1].bias[:2] = torch.tensor([0.2, 0.0])
    return network


def images(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) / 10, torch.arange(n) % 10 * 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    registered._remove_unused.cache_clear()
    return tmp_path / "cache" / "fatbench" / "registered"


def test_nothing_of_a_call_stays(cache: Path) -> None:
    """Neither in the process nor on the disk, whatever was given and however the call ended."""

    def traces() -> list[Any]:
        modules = [name for name in sys.modules if "fatbench_plugin" in name]
        files = [path for path in cache.rglob("*") if path.is_file()]
        tables = [dict(registered._KEPT), dict(registered._FILES), dict(registered._LENT), dict(source_files._LOADED)]
        return [*tables, source_files.run_here(), signatures.plugins(), modules, [*sys.path], files,
                dir(fatbench.attacks)]  # fmt: skip

    before = traces()
    attacks: dict[str, Any] = {"fool": fool, "plain": plain, "twice": plain, "other": "fgsm"}
    for seed in range(3):
        fatbench.evaluate(darkness(), images(seed=seed), attacks)
    with pytest.raises(SpecError, match="natural_2"):
        fatbench.evaluate(darkness(), images(), {"natural": fool})
    assert traces() == before
    assert not list(cache.glob("*"))


def test_of_stored_numbers_only_the_names_stay(cache: Path, tmp_path: Path) -> None:
    """So that they are read, in this program and in one that has neither the arrays nor the function."""
    db = tmp_path / "own.db"
    forget()  # names of other tests
    for seed in range(3):
        fatbench.evaluate(darkness(), images(seed=seed), [fool, plain], db=db)
    try:
        assert registered._KEPT == {} and not registered._LENT
        assert len(registered._STAYING) == 3 + 3 + 1  # arrays, `fool` of each call, `plain`
        with pytest.raises(SpecError, match="was in the memory of a Python program, and no longer is: give it again"):
            registered.kept_object(next(name for kind, name in registered._STAYING if kind == "Data"))
        known = fatbench.table("evaluate", db=db).frame()
    finally:
        forget()
    assert known["metric"].tolist() == ["natural", "fool", "plain"] * 3
    unknown = fatbench.table("evaluate", db=db)
    assert unknown.frame()["mean"].tolist() == known["mean"].tolist()
    assert "fool = fool\\_" in unknown.markdown()
    assert fatbench.results("evaluate", db=db)["value"].notna().all()


def forget(*more: tuple[str, str]) -> None:
    for key in [*registered._STAYING, *more]:
        file = registered._FILES.pop(key)
        signatures.drop_plugins([file])
        source_files.forget(file)
    registered._STAYING.clear()


def test_an_attack_has_the_name_of_its_function(cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At every call, with its numbers; a database keeps the number of each call, and tables have the last."""
    request.addfinalizer(forget)
    db = tmp_path / "own.db"
    for radius in (0.0, RADIUS):
        BRIGHTER.by = radius
        result = fatbench.evaluate(darkness(), images(), [fool, Brighter(radius), lambda model, x, y: 0 * x], db=db)
        expected = float(radius == 0)
        assert result.accuracy == {"natural": 1.0, "fool": expected, "brighter": expected, "lambda": 1.0}
        assert result.interval("fool")[0] <= expected <= result.interval("fool")[1]
        shown = fatbench.table("evaluate", db=db).frame()
        assert shown[shown.metric == "fool"]["mean"].tolist() == [expected]
    with_settings = functools.partial(lambda model, x, y, by: (x + by).clamp(0, 1), by=RADIUS)
    assert fatbench.evaluate(darkness(), images(), with_settings).accuracy["lambda"] == 0.0


def test_two_functions_of_one_name_in_a_call(cache: Path) -> None:
    """Never one number for both: they have names of the call, or are refused."""
    attacks = {"one": plain, "two": other_plain(), "three": Brighter(RADIUS)}
    found = fatbench.evaluate(darkness(), images(), attacks).accuracy
    assert found == {"natural": 1.0, "one": 1.0, "two": 0.0, "three": 0.0}
    with pytest.raises(SpecError, match=r"^attacks: two attacks are called 'plain': name them, \{'plain_2': \.\.\.\}"):
        fatbench.evaluate(darkness(), images(), [plain, other_plain()])
    assert fatbench.evaluate(darkness(), images(), [plain, plain]).accuracy["plain"] == 1.0


@pytest.mark.parametrize("label", ["My attack", "a@b", "-x", "x-1", "é"])
def test_a_label_that_is_no_metric_is_refused_before_an_attack(cache: Path, label: str) -> None:
    with pytest.raises(SpecError, match="is no name of a metric: expected letters a to z, digits and _"):
        fatbench.evaluate(darkness(), images(), {label: refuses_to_be_called})


def refuses_to_be_called(model: Any, x: Tensor, y: Tensor) -> Tensor:
    raise AssertionError


def test_names_of_functions_become_metrics(cache: Path) -> None:
    def Loud(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return x

    def fgsm(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (x + RADIUS).clamp(0, 1)

    assert fatbench.evaluate(darkness(), images(), [Loud, fgsm]).accuracy == {"natural": 1.0, "fgsm": 0.0, "loud": 1.0}


def test_what_was_registered_stays_and_keeps_its_name(cache: Path) -> None:
    """A call with the same function uses it; one with another of the name leaves it as it is."""

    def whole(model: Any, x: Tensor, y: Tensor, generator: Any) -> Tensor:
        return x

    def another() -> Callable[..., Tensor]:
        def whole(model: Any, x: Tensor, y: Tensor, generator: Any) -> Tensor:
            return (x + 80 / 255).clamp(0, 1)

        return whole

    fatbench.register(whole, "attack")
    try:
        for _ in range(2):
            assert fatbench.evaluate(darkness(), images(), [whole, "fgsm"]).accuracy["whole"] == 1.0
            assert fatbench.evaluate(darkness(), images(), another()).accuracy["whole"] == 0.0
            assert fatbench.evaluate(darkness(), images(), "whole").accuracy["whole"] == 1.0
        assert len(list(cache.glob("*/whole.py"))) == 1
    finally:
        forget(("Attack", "whole"))


@pytest.mark.nightly
def test_calls_side_by_side_do_not_take_each_others_functions(cache: Path) -> None:
    """The same arrays in four threads, and functions of one name that differ."""
    together = threading.Barrier(4, timeout=120)

    def call(k: int) -> list[float]:
        accuracies = []
        for _ in range(5):
            together.wait()
            function = other_plain() if k % 2 else plain
            accuracies.append(fatbench.evaluate(darkness(), images(), [function]).accuracy["plain"])
        return accuracies

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(4))) == [[1.0] * 5, [0.0] * 5] * 2
    assert not list(cache.glob("*")) and not registered._LENT


def test_the_files_of_programs_that_are_long_over_are_removed(cache: Path) -> None:
    for name, days in (("old", registered.UNUSED_DAYS + 1), ("new", registered.UNUSED_DAYS - 1)):
        (cache / name).mkdir(parents=True)
        (cache / name / "mine.py").write_text("")
        then = (cache / name).stat().st_mtime - 86400 * days
        os.utime(cache / name, (then, then))
    fatbench.evaluate(darkness(), images(), [])
    assert [path.name for path in cache.iterdir()] == ["new"]
