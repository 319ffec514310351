"""A model is known by its weights and by what its network answers, not by the text of its code."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fatbench
from fatbench.store.stages import Store

scale = 1.0  # a global that a network reads


class Body(nn.Module):
    """A linear network; `left` images are answered before it is interrupted."""

    sign = 1.0

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.after, self.left = nn.Linear(64, 10), after, 10**9
        self.register_buffer("shift", torch.zeros(10), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 20:  # a batch of an attack
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self.after(self.sign * scale * self.linear(x.flatten(1)) + self.shift)


class Renamed(Body):
    """The same network under another name."""


class Negated(Body):
    sign = -1.0


Negated.__name__ = Negated.__qualname__ = "Body"


def hooked() -> Body:
    made = Body()
    made.register_forward_hook(lambda module, x, logits: -logits)
    return made


def shifted() -> Body:
    made = Body()
    made.shift += 5 * torch.arange(10)
    return made


def rewired() -> Body:
    made = Body()
    made.forward = lambda x: -Body.forward(made, x)  # as in a notebook
    return made


def evaluated(module: nn.Module | Path, db: Path | None, **more: object) -> dict[str, float]:
    options = {"dataset": "digits", "attacks": ["fgsm"], "eps": "10/255", "n": 60, "batch": 20, **more}
    frame = fatbench.evaluate(module, db=None if db is None else str(db), **options).frame()
    return dict(zip(frame["metric"], frame["mean"], strict=True))


def stored(db: Path) -> dict[str, list[str]]:
    """Cell -> the runs of its stages."""
    with Store.open(str(db)) as store:
        runs = store.runs()
        return {cell: [run["stage"] for run in runs if run["cell"] == cell] for cell in store.cells()}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(hooked, id="hook", marks=pytest.mark.nightly),
        pytest.param(shifted, id="buffer", marks=pytest.mark.nightly),
        pytest.param(Negated, id="base class", marks=pytest.mark.nightly),
        pytest.param(rewired, id="forward"),
        pytest.param(lambda: Body(lambda logits: logits.roll(1, 1)), id="closure", marks=pytest.mark.nightly),
    ],
)
def test_another_network_with_the_same_state_has_numbers_of_its_own(tmp_path: Path, other) -> None:
    db = tmp_path / "a.db"
    truth = evaluated(other(), None)
    first = evaluated(Body(), db)
    assert first != truth
    assert evaluated(other(), db) == truth
    assert evaluated(Body(), db) == first and evaluated(other(), db) == truth
    assert sorted(map(len, stored(db).values())) == [3, 3]  # each is computed once: its model, natural and fgsm


def test_a_global_that_a_network_reads_belongs_to_it(tmp_path: Path, monkeypatch) -> None:
    db = tmp_path / "a.db"
    first = evaluated(Body(), db)
    monkeypatch.setattr(f"{__name__}.scale", -1.0)
    assert evaluated(Body(), db) == evaluated(Body(), None) != first


def test_another_text_of_the_same_network_computes_nothing(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    first = evaluated(Body(), db)
    before = stored(db)
    assert evaluated(Renamed(), db) == first
    assert stored(db) == before and len(before) == 1


def test_what_an_interruption_left_is_not_gone_on_with_by_another_network(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    module = Body()
    module.left = 8
    with pytest.raises(KeyboardInterrupt):
        evaluated(module, db)
    module.sign, module.left = -1.0, 10**9
    assert evaluated(module, db) == evaluated(module, None)
    module.sign = 1.0
    assert evaluated(module, db) == evaluated(module, None)
    with Store.open(str(db)) as store:
        known = [run["answers"] for run in store.runs() if run["stage"].startswith("fgsm")]
    assert len(known) == 3 and known[0] == known[2] != known[1]  # the first network's work is gone on with


def test_results_without_answers_are_found_by_weights_and_code(tmp_path: Path, monkeypatch) -> None:
    db = tmp_path / "a.db"
    with monkeypatch.context() as context:
        context.setattr("fatbench.runner.evaluate_external._outputs_of", lambda ready: {})
        evaluated(Body(), db)
    evaluated(Body(), db, attacks=["fgsm", "{name: pgd, eps: 10/255, step: 2/255, steps: 2}"])
    ((_, stages),) = stored(db).items()
    assert [stage.partition("-")[0] for stage in stages] == ["train", "natural", "fgsm", "pgd2"]


def test_a_name_that_is_not_taken_is_said(tmp_path: Path, capsys) -> None:
    db = tmp_path / "a.db"
    evaluated(Body(), db, name="first")
    evaluated(Body(), db)
    assert capsys.readouterr().err == ""
    evaluated(Body(), db, name="second")
    ((cell, _),) = stored(db).items()
    (line,) = capsys.readouterr().err.splitlines()
    assert "'first'" in line and "'second'" in line and f"fatbench delete {cell}" in line


def test_data_that_changed_in_place_is_attacked_anew(tmp_path: Path) -> None:
    db = tmp_path / "a.db"

    def images(shift: int) -> dict[str, float]:
        for number in range(40):
            part = "train" if number < 10 else "test"
            file = tmp_path / "mine" / part / f"c{(number + (shift if part == 'test' else 0)) % 10}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            values = numpy.random.default_rng(number).integers(0, 255, (8, 8), dtype=numpy.uint8)
            Image.fromarray(values).save(file)
        data = {"name": "image_folder", "path": "mine", "size": 8}
        return evaluated(net, db, dataset=data, data_folder=tmp_path, n=None, mean=(0.5,), std=(0.5,))

    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 10))
    first = images(0)
    assert images(0) == first
    shutil.rmtree(tmp_path / "mine")
    other = images(1)
    assert other != first
    with Store.open(str(db)) as store:
        assert len(store.cells()) == 1
        held = {row.run for row in store.stages().values()}
        assert len({run["data"]["fingerprint"] for run in store.runs() if run["id"] in held}) == 1


NET = """\
import torch
from torch import nn
from parts import SIGN
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
    def forward(self, x):
        return SIGN * self.linear(x.flatten(1))
def make():
    return Net()
"""


def test_a_network_of_a_file_is_what_it_answers(tmp_path: Path) -> None:
    db, net = tmp_path / "a.db", tmp_path / "net.py"
    torch.manual_seed(0)
    torch.save(nn.ModuleDict({"linear": nn.Linear(64, 10)}).state_dict(), tmp_path / "w.pt")

    def row(**more: object) -> dict[str, float]:
        return evaluated(tmp_path / "w.pt", db, network=f"{net}:make", **more)

    net.write_text(NET)
    (tmp_path / "parts.py").write_text("SIGN = +1\n")
    first = row()
    net.write_text(f"# a comment\n{NET.replace('Net', 'Other')}")
    assert row() == first and len(stored(db)) == 1
    (tmp_path / "parts.py").write_text("SIGN = -1\n")
    other = row(attacks=["fgsm", "{name: pgd, eps: 10/255, step: 2/255, steps: 2}"])
    assert other["natural"] != first["natural"] and set(other) == {"natural", "fgsm", "pgd2"}
    assert sorted(map(len, stored(db).values())) == [3, 4]
