"""The registry: settings read from functions, canonical forms, identities."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest

from fatbench.errors import SpecError
from fatbench.suite import calls, cells, cost, entry, files, signatures, source_files, types

CLASSES = [(kind, kind.lower()) for kind in signatures.CLASSES]
PGD = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 10}


def test_defaults_are_filled_in_and_fractions_stay_text():
    found = calls.check("Attack", {"name": "pgd", "eps": "8/255", "step": " 2 / 255 ", "steps": 10})
    assert (found["eps"], found["step"], found["start"]) == ("8/255", "2/255", "uniform")
    assert calls.check("Aggregator", "samples") == {"name": "samples"}  # a bare name: without settings


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"name": "pgdd", "eps": 0.1}, "no attack is named 'pgdd' (did you mean 'pgd'?)"),
        ({**PGD, "epsilon": 1}, "epsilon: 'pgd' has no setting 'epsilon' (did you mean 'eps'?)"),
        ({"name": "pgd", "eps": 0.1, "step": 0.1}, "'pgd' needs 'steps'"),
        ({**PGD, "eps": "-8/255"}, "eps: should be greater than or equal to 0, got '-8/255'"),
        ({**PGD, "eps": -1}, "eps: should be greater than or equal to 0, got -1"),
        ({"name": "fgsm", "eps": 2}, "eps: should be less than or equal to 1, got 2"),
        ({**PGD, "eps": "8/0"}, "eps: division by zero, got '8/0'"),
        ({**PGD, "eps": "eight"}, "eps: should be a valid number, got 'eight'"),
        ({**PGD, "eps": True}, "eps: should be a number, got True"),
        ({**PGD, "steps": 0}, "steps: should be greater than or equal to 1, got 0"),
        ({**PGD, "steps": 2.5}, "steps: should be a valid integer, got 2.5"),
        ({**PGD, "start": "nowhere"}, "start: should be 'uniform', 'none' or 'gaussian', got 'nowhere'"),
        ([1], "attack: expected a mapping with a name, got [1]"),
        ({"eps": 1}, "attack: 'name' is missing: which attack?"),
    ],
)
def test_mistakes_get_one_clear_message(node, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        calls.check("Attack", node)


def test_an_error_has_the_keys_that_lead_to_it():
    node = {"name": "at", "attack": {"name": "pgd", "eps": -1, "step": 0.1, "steps": 1}}
    with pytest.raises(SpecError, match=r"^here: attack: eps: should be greater") as caught:
        calls.check("Objective", node, "here")
    assert caught.value.keys == ("here", "attack", "eps")
    assert str(caught.value.at(lambda keys: f"a.yaml:7: {keys[-1]}")).startswith("a.yaml:7: eps: should be greater")


def test_build_binds_numbers_and_nested_calls():
    objective = calls.build("Objective", calls.check("Objective", {"name": "at", "attack": PGD}))
    assert objective.keywords["attack"].keywords["eps"] == 8 / 255
    assert objective.keywords["attack"].keywords["steps"] == 10


def test_golden_defaults_never_change():
    """A cell's identity leaves out settings at their default, so a default is part of every identity: to change one
    is to give the function another name. New settings may be added (regenerate: make golden).
    """
    file = Path(__file__).parent / "golden" / "defaults.json"
    now = {
        f"{kind}.{name}.{setting.name}": setting.default
        for kind, name in [*((k, n) for k in signatures.TABLES for n in signatures.names(k)), *CLASSES]
        for setting in signatures.describe(kind, name).settings
        if setting.default is not signatures.REQUIRED
    }
    if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
    pinned = json.loads(file.read_text())
    changed = {key: (value, now.get(key, "gone")) for key, value in pinned.items() if now.get(key, "gone") != value}
    assert not changed
    assert set(now) == set(pinned), "new settings: regenerate the golden file"


def cell(**changes):
    spec = {
        "seed": 6,
        "data": "digits",
        "partition": {"name": "iid", "clients": 2},
        "model": {"name": "nin", "width": 16},
        "algorithm": {
            "name": "fedavg", "rounds": 2, "aggregator": "samples",
            "local": {"batch": 32, "lr": 0.01, "objective": {"name": "at", "attack": PGD}},
        },
    }  # fmt: skip
    spec.update(changes)
    return cells.canonical(spec)


# --- settings classes ---------------------------------------------------------------------------------------------

TINY = '''
from __future__ import annotations
from dataclasses import dataclass
from fatbench.suite.types import Count, Objective, Positive, Radius, Tiny


@dataclass(frozen=True)
class TinyTraining:
    """A client's training, for a test.
    """

    epochs: Count
    objective: Objective
    lr: Positive = 0.1
    noise: Radius = 0.0
    shuffle: bool = True

    def steps(self):
        return self.epochs
'''
CALLER = '''
def twice(problem, state, *, rounds: Count, local: Tiny, other: Tiny | None = None):
    """Train."""


ALGORITHMS = {"twice": twice}
'''
AT = {"name": "at", "attack": PGD}
LOCAL = {"epochs": 2, "objective": AT, "noise": "8/255"}


@pytest.fixture
def tiny(tmp_path, monkeypatch, own_plugins):
    """A settings class `Tiny`, and an algorithm `twice` that has one."""
    (tmp_path / "tinyclass.py").write_text(TINY.replace(", Tiny", ""))
    (tmp_path / "caller.py").write_text(TINY[: TINY.index("@")] + CALLER)
    monkeypatch.setitem(signatures.CLASSES, "Tiny", ("tinyclass", "TinyTraining"))
    monkeypatch.setattr(types, "Tiny", Annotated[Any, types.Named("Tiny")], raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(signatures._shipped_signatures(), "Tiny", {"tiny": signatures.described_class("Tiny")})
    signatures.add_plugin(tmp_path / "caller.py")
    yield
    sys.modules.pop("tinyclass", None)


def test_a_settings_class_is_a_mapping_without_a_name(tiny):
    """Described without its methods, built with its nested calls."""
    signature = signatures.describe("Tiny")
    assert [(s.name, s.annotation, s.default) for s in signature.settings] == [
        ("epochs", "Count", signatures.REQUIRED), ("objective", "Objective", signatures.REQUIRED),
        ("lr", "Positive", 0.1), ("noise", "Radius", 0.0), ("shuffle", "bool", True),
    ]  # fmt: skip
    assert (signature.name, signature.summary) == ("tiny", "A client's training, for a test.")
    algorithm = calls.check("Algorithm", {"name": "twice", "rounds": 3, "local": LOCAL})
    whole = {"epochs": 2, "objective": calls.check("Objective", AT), "lr": 0.1, "noise": "8/255", "shuffle": True}
    assert (algorithm["other"], algorithm["local"]) == (None, whole)
    assert calls.without_defaults(algorithm) == {"name": "twice", "rounds": 3, "local": LOCAL}
    local = calls.bind(algorithm)["local"]
    assert type(local).__name__ == "TinyTraining"
    assert (local.epochs, local.lr, local.noise, local.shuffle) == (2, 0.1, 8 / 255, True)
    assert local.objective.keywords["attack"].keywords["steps"] == 10


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ("loop", "local: expected a mapping of settings, got 'loop'"),
        ({"epoch": 2}, "local: epoch: 'tiny' has no setting 'epoch' (did you mean 'ep"),
        ({"name": "x"}, "local: name: 'tiny' has no setting 'name'"),
        ({"epochs": 1}, "local: 'tiny' needs 'objective'"),
        ({"epochs": 0, "objective": AT}, "local: epochs: should be greater than or equal to 1, got 0"),
        ({"epochs": 1, "objective": "trade"},
         "local: objective: name: no objective is named 'trade' (did you mean 'trades'?)"),
    ],
)  # fmt: skip
def test_mistakes_in_a_settings_class_name_every_key(tiny, local, message):
    with pytest.raises(SpecError) as caught:
        calls.check("Algorithm", {"name": "twice", "rounds": 1, "local": local})
    assert str(caught.value).startswith(message)


# --- what a function asks for -------------------------------------------------------------------------------------


def test_a_function_says_what_it_asks_for_by_the_names_of_its_further_parameters(tmp_path, own_plugins):
    plugin = tmp_path / "asks.py"
    plugin.write_text(
        "def wants(updates, context, broadcast_losses, *, top: int = 1): ...\ndef wants_none(u, c): ...\n"
        "def whole(part, at, gradient): ...\n"
        "AGGREGATORS = {'wants': wants, 'wants_none': wants_none}\nDEFENCES = {'whole': whole}\n"
    )
    signatures.add_plugin(plugin)
    assert signatures.describe("Aggregator", "wants").asks == ("broadcast_losses",)
    assert signatures.describe("Aggregator", "wants_none").asks == ()
    assert signatures.describe("Defence", "whole").asks == ("gradient",)
    assert [s.name for s in signatures.describe("Aggregator", "wants").settings] == ["top"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "invalid syntax"),
        ("x = 1\n", "it defines none of"),
        ("def samples(u, c): ...\nAGGREGATORS = {'samples': samples}\n",
         "there is already an aggregator named 'samples'"),
        ("def f(updates, context, broadcast_loss): ...\nAGGREGATORS = {'f': f}\n",
         "bad.py:1: the aggregator 'f' takes 'broadcast_loss' (did you mean 'broadcast_losses'?): beyond "
         "(updates, context) it can take broadcast_losses; put settings after '*'"),
        ("def f(x, generator, padding): ...\nAUGMENTS = {'f': f}\n",
         "bad.py:1: the augment 'f' takes 'padding': beyond (x, generator) it cannot take any other argument; put"),
        ("def f(updates): ...\nAGGREGATORS = {'f': f}\n",
         "bad.py:1: the aggregator 'f' is called with (updates, context), but takes (updates)"),
        ("def f(updates, broadcast_losses): ...\nAGGREGATORS = {'f': f}\n",
         "bad.py:1: the aggregator 'f' is called with (updates, context), but takes (updates, broadcast_losses)"),
        ("def f(problem, state, *, local: 'Local'): ...\nALGORITHMS = {'f': f}\n",
         "bad.py:1: the algorithm 'f' needs a setting 'rounds: Count'"),
        ("def f(problem, state, *, rounds: 'Count'): ...\nALGORITHMS = {'f': f}\n",
         "bad.py:1: the algorithm 'f' needs a setting 'local: Local', or 'batch: Count' if clients only"),
        ("class F: ...\nAGGREGATORS = {'f': F}\n", "'F' is in the table but is not a function"),
        ("def f(model, x, y, generator, *,\n      eps=[1]): ...\nATTACKS = {'f': f}\n",
         "bad.py:1: the default of 'eps', [1], cannot be written in a suite: "),
        ("def f(updates, context, *, top: 'Cuont' = 1): ...\nAGGREGATORS = {'f': f}\n",
         "bad.py:1: the type of 'top', 'Cuont': name 'Cuont' is not defined"),
        ("from fatbench.suite.entry import AggregatorEntry\ndef f(updates, context, *, top: int): ...\n"
         "def half(cell, *, tpo): ...\nAGGREGATORS = {'f': AggregatorEntry(f, refuse=(half,))}\n",
         "bad.py:3: 'half' asks for 'tpo', which is not a setting of 'f' (did you mean 'top'?)"),
        ("AGGREGATORS = {1: print}\n", "AGGREGATORS: expected a dict of functions by name"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_refused_with_the_plugin(tmp_path, text, message):
    plugin = tmp_path / "bad.py"
    plugin.write_text(text)
    with pytest.raises(SpecError, match=re.escape(message)):
        signatures.add_plugin(plugin)
    assert plugin not in signatures.plugins()


def test_a_function_around_another_costs_what_that_costs(tmp_path, own_plugins):
    """Image passes, bytes, and the batch that a run makes smaller when memory is short."""
    plugin = tmp_path / "around.py"
    plugin.write_text(
        "from fatbench.suite.types import Algorithm, Count, Objective\n"
        "def f(problem, state, *, rounds: Count, inner: Algorithm): ...\nALGORITHMS = {'f': f}\n"
        "def g(model, x, y, generator, *, inner: Objective): ...\nOBJECTIVES = {'g': g}\n"
    )
    signatures.add_plugin(plugin)
    plain = cell()
    inner = plain["algorithm"]
    objective = {"name": "g", "inner": {"name": "g", "inner": inner["local"]["objective"]}}
    around = {**inner, "local": {**inner["local"], "objective": objective}}
    other = cells.canonical({**plain, "algorithm": {"name": "f", "rounds": inner["rounds"], "inner": around}})
    assert cost.training(other) == cost.training(plain) and cost.training(plain).backward > 0
    assert cost.local(json.loads(json.dumps(other))["algorithm"])["batch"] == inner["local"]["batch"]


def test_what_every_kind_is_called_with_is_written_down():
    assert set(signatures.FORMS) == set(signatures.TABLES)
    assert entry.passes(cell()["algorithm"]["local"]["objective"].bound) == entry.Passes(11, 11)  # of nested calls


def test_identity_ignores_defaults_and_order_but_nothing_else():
    plain = cell()
    assert cells.canonical(plain) == plain
    assert cells.identity(plain) == cells.identity(cell(validation=0, monitor_every=1))
    assert cells.identity(plain) == cells.identity(dict(reversed(plain.items())))
    assert cells.identity(plain) != cells.identity(cell(seed=7))
    assert cells.identity(plain) != cells.identity(cell(validation=10))
    assert len(cells.identity(plain)) == 12
    one, two = cell(), cell()  # an int and the same float
    one["algorithm"]["local"]["lr"], two["algorithm"]["local"]["lr"] = 1, 1.0
    assert cells.identity(cells.canonical(one)) == cells.identity(cells.canonical(two))


OBJECTS = """
import functools
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Ge, Le
from fatbench.engine.rounds import Mixing
from fatbench.suite.entry import AggregatorEntry
from fatbench.suite.types import Aggregator, Positive, Radius

LEVELS = 255


def doubled(function):
    @functools.wraps(function)
    def inner(*args, **settings):
        return Mixing([2 * weight for weight in function(*args, **settings).weights])
    return inner


@doubled
def decorated(updates, context, *, eps: Radius = 8 / LEVELS, few: Annotated[int, Ge(1), Le(3)] = 2):
    \"\"\"Decorated.\"\"\"
    return Mixing([eps] * few)


def power(q):
    def powered(updates, context, *, p: Positive | None = q, inner: Aggregator | None = None):
        return Mixing([float(p)])
    return powered


class Weighted:
    def __init__(self, by):
        self.by = by

    def __call__(self, updates, context, *, r: Positive = 2.0):
        return Mixing([self.by * r])


AGGREGATORS = {
    "decorated": AggregatorEntry(decorated),
    **{f"power_{q}": power(q) for q in (1, 2)},
    "weighted": Weighted(3.0),
    "bound": functools.partial(decorated, eps=0.5),
}
"""


def test_what_is_registered_may_be_any_object_that_can_be_called(tmp_path, own_plugins):
    """Decorated, with a computed default and a type of its own; made in a loop; an object; with settings bound.

    Another process knows them by what it is told, and imports nothing to look at them.
    """
    plugin = tmp_path / "objects.py"
    plugin.write_text(OBJECTS)
    signatures.add_plugin(plugin)
    assert signatures.names("Aggregator")[-5:] == ["decorated", "power_1", "power_2", "weighted", "bound"]
    assert calls.check("Aggregator", "decorated") == {"name": "decorated", "eps": 8 / 255, "few": 2}
    assert signatures.describe("Aggregator", "decorated").summary == "Decorated."
    power = calls.check("Aggregator", {"name": "power_2", "inner": {"name": "power_1", "p": "1/2"}})
    assert power == {"name": "power_2", "p": 2, "inner": {"name": "power_1", "p": "1/2", "inner": None}}
    with pytest.raises(SpecError, match="few: should be less than or equal to 3, got 4"):
        calls.check("Aggregator", {"name": "decorated", "few": 4})

    def weights(name: str, **settings: Any) -> list[float]:
        return calls.build("Aggregator", calls.check("Aggregator", {"name": name, **settings}))([], None).weights

    assert weights("decorated", eps="1/4") == [0.5, 0.5]
    assert weights("power_1") == [1.0] and weights("power_2") == [2.0]
    assert weights("weighted") == [6.0]
    assert weights("bound", few=1) == [1.0]

    said = json.loads(json.dumps(signatures.of_plugins()))
    signatures.drop_plugins([plugin])
    source_files.delete(plugin)
    signatures.add_described({**said, str(plugin): said[str(plugin)]})
    assert calls.without_defaults(calls.call("Aggregator", power)) == {
        "name": "power_2", "inner": {"name": "power_1", "p": "1/2"}
    }  # fmt: skip
    assert plugin not in source_files._LOADED
    assert calls.build("Aggregator", {"name": "decorated", "eps": "1/4", "few": 3})([], None).weights == [0.5] * 3


def test_grid_points_that_are_one_cell_are_run_once_with_the_evaluations_of_both(tmp_path):
    file = tmp_path / "two.yaml"
    spec = json.dumps({key: value for key, value in cell().items() if key != "seed"})
    more = "[{when: {a: y}, set: {attacks: {fgsm: {name: fgsm, eps: 0.1}}}}]"
    evaluate = f"evaluate: {{attacks: {{natural: natural}}, overrides: {more}}}\npresets: {{paper: {{}}}}\n"
    file.write_text(f"name: two\ntitle: T\nseeds: [1]\nbase: {spec}\naxes: {{a: {{x: {{}}, y: {{}}}}}}\n{evaluate}")
    plan = files.load(str(file)).plan()
    assert len(plan.cells) == 2
    assert [[e.label for e in c.evaluations] for c in plan.unique()] == [["natural", "fgsm"]]
    assert plan.metrics() == ["natural", "fgsm"]
