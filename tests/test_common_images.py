"""Attacks on fewer images than others: said at the heading, or every attack on the images that all of them took."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
from stored import finished

from fatbench import report
from fatbench.engine.rounds import Number
from fatbench.report.numbers.long import CUT, NOT_CUT, first_outcomes, on_common_images
from fatbench.report.numbers.sources import OwnImages, Source
from fatbench.report.tables.sheet import Sheet
from fatbench.store.stages import Store
from fatbench.suite import files

RIGHT = {"natural": [1, 1, 0, 1, 1, 1], "pgd20": [1, 1, 0, 0, 0, 0], "autoattack": [1, 0, 0]}  # of image 0, 1, ...


def test_the_first_images_of_each_model() -> None:
    """By hand: of two models' four images each, 1011 and 0110, the first two are 10 and 01."""
    assert first_outcomes((0b1011_0110, 8), 4, 2) == (0b10_01, 4)
    generator = random.Random(0)
    for _ in range(50):
        n, models = generator.randint(1, 9), generator.randint(1, 3)
        most = generator.randint(1, n)
        texts = ["".join(generator.choice("01") for _ in range(n)) for _ in range(models)]
        expected = "".join(text[:most] for text in texts)
        assert first_outcomes((int("".join(texts), 2), n * models), n, most) == (int(expected, 2), most * models)


@pytest.fixture
def grids(tmp_path: Path) -> dict[str, Sheet]:
    """Six images, three of them under AutoAttack; PGD-20 comes out at 33.3 % of six and 66.7 % of three."""
    suite = files.load("sfat-cifar10")
    plan = suite.plan("quick", where="optimizer=FedAvg and method=FAT and partition=Non-IID")
    cell = plan.cells[0]
    round = cell.spec["algorithm"]["rounds"]
    with Store.open(str(tmp_path / "test.db"), create=True) as store:
        for one in cell.evaluations:
            if right := RIGHT.get(one.label):
                n, bits = len(right), int("".join(map(str, right)).ljust(8, "0"), 2).to_bytes(1, "big")
                numbers, spec = [Number(one.label, sum(right) / n, round, n)], cell.spec
                finished(store, cell.id, one.stage(round), numbers, round=n, outcomes=(0, n, bits), total=n, spec=spec)
        shown = suite.with_tables(["T3"])
        return {which: report.build_tables(shown, plan, store, images=which)[0] for which in ("all", "common")}


def values(grid: Sheet) -> dict[str, tuple[float | None, tuple[int, ...]]]:
    found = {c.label: v for c, v in zip(grid.columns, grid.rows[0].values[0], strict=True)}
    return {heading: (value.mean, value.n) for heading, value in found.items() if value.mean is not None}


def test_a_heading_says_that_its_attack_took_fewer_images(grids: dict[str, Sheet]) -> None:
    found = values(grids["all"])
    assert found == {"natural": (5 / 6, (6,)), "PGD-20": (2 / 6, (6,)), "AA, n = 3": (1 / 3, (3,))}
    for name in ("markdown", "terminal", "html"):
        assert "AA, n = 3" in report.render([grids["all"]], name)
    assert r"\shortstack{AA,\\n = 3}" in report.render([grids["all"]], "latex")
    assert '"heading": "AA"' in report.render([grids["all"]], "json")  # the number of images has a key of its own


def test_common_images_show_that_autoattack_is_the_strongest(grids: dict[str, Sheet]) -> None:
    assert values(grids["common"]) == {"natural": (2 / 3, (3,)), "PGD-20": (2 / 3, (3,)), "AA": (1 / 3, (3,))}
    assert ("images", "every attack on the first 3 test images, which all of them have") in grids["common"].notes
    assert NOT_CUT.words not in report.render([grids["common"]], "markdown")


def own_numbers(bits: int) -> tuple[pandas.DataFrame, list[str]]:
    """Two clients of four and two images, of which AutoAttack had two and one: PGD's outcomes are 1001 and 10."""
    cell = SimpleNamespace(id="c", spec={"data": {"name": "digits"}})
    own = {
        ("c", "pgd"): OwnImages({0: (0.5, 4), 1: (0.5, 2)}, {}, {0: 0.5, 1: 0.5}),
        ("c", "aa"): OwnImages({0: (0.5, 2), 1: (1.0, 1)}, {}, {0: 0.5, 1: 0.5}),
    }
    outcomes = {"pgd": (0b1001_10, bits), "aa": (0b10_1, 3)}
    stored: Any = SimpleNamespace(own=own, outcomes=lambda cell, stage: outcomes[stage])
    rows = [
        (cell, Source.parse(source), ("train", stage), value, n, (), own["c", stage].outcomes(value, n))
        for source, stage, value, n in (
            ("own_pgd", "pgd", 0.5, 6), ("own_aa", "aa", 0.75, 3), ("worst:own_pgd", "pgd", 0.5, 6)
        )
    ]  # fmt: skip
    frame = pandas.DataFrame(rows, columns=["cell", "source", "stages", *CUT])
    return on_common_images(frame, pandas.Series([True, True, True]), stored)


def test_clients_are_judged_on_the_first_of_their_own_images_under_every_attack() -> None:
    """By hand: client 0 has the first of its first two right, client 1 its first."""
    cut, said = own_numbers(6)
    assert cut["value"].tolist() == [0.75, 0.75, 0.5] and cut["n"].tolist() == [3, 3, 3]
    assert [of.accuracies for of in cut["outcomes"][:2]] == [(0.5, 1.0), (0.5, 1.0)]
    assert cut["doubts"].tolist() == [(), (), ()]
    assert said == ["every attack on own images on the first ones of each client, which all of them have"]


def test_own_images_whose_outcomes_are_not_stored_are_marked() -> None:
    cut, _ = own_numbers(0)
    assert cut["value"].tolist() == [0.5, 0.75, 0.5] and cut["n"].tolist() == [6, 3, 6]
    assert cut["doubts"].tolist() == [(NOT_CUT,), (), (NOT_CUT,)]
