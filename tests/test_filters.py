"""What a filter keeps: the operators as a table, on four cells."""

from __future__ import annotations

import pytest

from fatbench.errors import NothingMatched, SpecError
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.filters import select


def cell(id: str, method: str, lr: object, **more: object) -> Cell:
    return Cell(id, {"method": method}, {"seed": 0, "algorithm": {"name": "fedavg", "lr": lr, **more}}, ())


PLAN = Plan(
    "s",
    "paper",
    "",
    [
        cell("a", "FAT", 0.1, momentum=0.9),
        cell("b", "FAT", "1/5", momentum=0.9),
        cell("c", "SFAT", 0.1),
        cell("d", "SFAT (released)", 0.3, momentum=None),
    ],
    ["last"],
)


@pytest.mark.parametrize(
    "where, kept",
    [
        ("lr=0.1", "ac"), ("lr==0.1", "ac"), ("lr!=0.1", "bd"), ("lr<0.2", "ac"), ("lr<=0.2", "abc"),
        ("lr>0.2", "d"), ("lr>=0.2", "bd"), ("lr=1/5", "b"), ("lr<=1/5", "abc"), ("lr<1/5", "ac"),
        ("method=fat", "ab"), ("method!=fat", "cd"), ("method!=FAT", "cd"), ("method!=sfat", "abd"),
        ("momentum=0.9", "ab"), ("momentum!=0.9", "cd"),  # what has no momentum has not this one either
        ("momentum<1", "ab"), ("momentum=none", "d"), ("momentum!=none", "abc"),
        ("not momentum=0.9", "cd"), ("not (lr=0.1 or method=FAT)", "d"), ("lr=0.1 and method=FAT", "a"),
        ("lr=0.1 or method=FAT", "abc"), ("lr=0.1 or lr=1/5 and method=SFAT", "ac"),
        ("(lr=0.1 or lr=1/5) and method=SFAT", "c"), ("not not method=FAT", "ab"),
        ("method='SFAT (released)'", "d"), ('method="sfat (RELEASED)"', "d"), ("algorithm.lr=0.3", "d"),
        ("method in [SFAT, 'SFAT (released)']", "cd"), ("method in [FAT, SFAT (released)] and lr<0.25", "ab"),
        ("method not in [FAT, SFAT]", "d"), ("not lr in [1/5, 0.3]", "ac"), ("method IN [sfat]", "c"),
        ("algorithm=fedavg", "abcd"), ("method<1", ""), ("method>=0", ""),
    ],
)  # fmt: skip
def test_what_a_filter_keeps(where: str, kept: str) -> None:
    if not kept:
        with pytest.raises(NothingMatched):
            select(PLAN, where)
        return
    assert "".join(one.id for one in select(PLAN, where).cells) == kept


def test_a_name_that_no_cell_has() -> None:
    for where in ("momentun=0.9", "momentun!=0.9"):
        with pytest.raises(SpecError, match=r"^where: no cell has 'momentun' \(did you mean 'momentum'\?\)"):
            select(PLAN, where)


@pytest.mark.parametrize(
    "where", ["method in [FAT, SFTA]", "method=FAT or method=SFTA", "method not in [SFTA]", "lr=0.1 or not method=SFTA"]
)
def test_a_misspelt_label_beside_others_is_named_and_a_number_of_another_preset_is_not(where: str) -> None:
    with pytest.raises(SpecError, match=r"method is never 'SFTA' \(did you mean 'SFAT'\?\)"):
        select(PLAN, where)
    assert len(select(PLAN, "seed in [0, 1, 2]").cells) == 4
