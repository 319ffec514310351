"""Mutation testing: mistakes are made where they are meant to be, and what is written about them is not out of date."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path

import mutants
import pytest
import yaml

ROOT = Path(__file__).parent.parent
KNOWN = yaml.safe_load((ROOT / "tests" / "mutants.yaml").read_text())
PROGRAM = """
def fraction(n: int, of: int = 10) -> float:
    \"\"\"Not a mistake.\"\"\"
    if of == 0:
        raise ValueError("nothing of nothing")
    return n / of
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mutants.Source:
    monkeypatch.chdir(tmp_path)
    Path("fatbench").mkdir()
    Path("fatbench/some.py").write_text(PROGRAM)
    return mutants.Source("some.py")


def test_every_mistake_changes_what_is_run_and_messages_have_none(source: mutants.Source) -> None:
    made = [one for number in range(len(source.places)) if (one := source.mutant(number)) is not None]
    assert {(one.was, one.now) for one in made} == {
        ("def fraction(n: int, of: int = 10) -> float:", "def fraction(n: int, of: int = 11) -> float:"),
        ("if of == 0:", "if of != 0:"),
        ("if of == 0:", "if of == 1:"),
        ("return n / of", "return n * of"),
    }
    assert {one.lines for one in made if "return" in one.was} == {frozenset([6])}


def test_a_mistake_is_put_into_the_function_that_lives(source: mutants.Source, tmp_path: Path) -> None:
    """10 / 5 = 2 becomes 10 * 5 = 50; the default of 10 becomes 11, and 1 / 10 becomes 1 / 11."""
    file = tmp_path / "fatbench" / "some.py"
    for was, arguments, before, after in (("return", (10, 5), 2, 50), ("def", (1,), 1 / 10, 1 / 11)):
        file.write_text(PROGRAM)
        module = types.ModuleType("some")
        exec(compile(PROGRAM, str(file), "exec", dont_inherit=True), module.__dict__)
        fraction = module.fraction
        assert fraction(*arguments) == before
        made = [source.mutant(number) for number in range(len(source.places))]
        mutant = next(one for one in made if one is not None and one.was.startswith(was))
        gc.freeze()  # as after every test, see conftest.py
        mutants.put_in(mutant, file, module)
        assert fraction(*arguments) == after and file.read_text() == mutant.source


def test_a_method_may_lose_its_super(tmp_path: Path) -> None:
    file, module = tmp_path / "some.py", types.ModuleType("some")
    program = "class A:\n    def __init__(self):\n        super().__init__()\n        self.x = 1\n"
    file.write_text(program)
    exec(compile(program, str(file), "exec", dont_inherit=True), module.__dict__)
    without = program.replace("        super().__init__()\n", "        pass\n").replace("1", "2")
    mutants.put_in(mutants.Mutant("some.py", 0, without, "", "", frozenset(), frozenset()), file, module)
    assert module.A().x == 2


def test_a_field_of_a_class_gets_its_mistake(tmp_path: Path) -> None:
    """The factory of a dataclass's field, and the bound of a pydantic model's; any test of the file may see either."""
    program = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Annotated
from pydantic import BaseModel, Field, TypeAdapter

@dataclass
class Some:
    many: list = field(default_factory=list)

Size = Annotated[int, Field(ge=0)]
class Model(BaseModel):
    size: Size

FORM = TypeAdapter(Model)
"""
    file, module = tmp_path / "some.py", types.ModuleType("some")
    file.write_text(program)
    sys.modules["some"] = module
    try:
        exec(compile(program, str(file), "exec", dont_inherit=True), module.__dict__)
        assert module.Some().many == [] and module.FORM.validate_python({"size": 0}).size == 0
        wrong = program.replace("default_factory=list", "default_factory=dict").replace("ge=0", "ge=1")
        mutants.put_in(mutants.Mutant("some.py", 0, wrong, "", "", frozenset(), frozenset()), file, module)
        assert module.Some().many == {}
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            module.FORM.validate_python({"size": 0})
    finally:
        del sys.modules["some"]
    assert 1 in mutants.spans(program)[1][9] and 1 in mutants.spans(program)[1][13]


def test_the_mistakes_made_by_hand_can_still_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = [mutants.made_by_hand(one) for room in KNOWN["always"].values() for one in room]
    assert len(made) >= 6 and KNOWN["always"].keys() <= mutants.ROOMS.keys()
    for one in made:
        compile(one.source, one.file, "exec")


def test_what_is_explained_is_still_there() -> None:
    for room, known in KNOWN["explained"].items():
        files, _, _ = mutants.ROOMS[room]
        text = " ".join(" ".join((ROOT / "fatbench" / file).read_text().split()) for file in files)
        assert [one["was"] for one in known if one["was"] not in text] == [], room
        assert all(one["was"] != one["now"] and one["why"] for one in known), room
