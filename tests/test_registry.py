"""The registry: settings read from source, canonical forms, identities."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fatbench.errors import SpecError
from fatbench.suite import calls, cells, cost, entry, files, signatures
from fatbench.suite.located import LocatedMap
from fatbench.suite.signatures import OFFERS

CLASSES = [(kind, kind.lower()) for kind in signatures.CLASSES]
PGD = {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 10}


def test_defaults_are_filled_in_and_fractions_stay_text():
    canonical = calls.check("Attack", {"name": "pgd", "eps": "8/255", "step": " 2 / 255 ", "steps": 10})
    assert canonical["eps"] == "8/255"
    assert canonical["step"] == "2/255"
    assert canonical["start"] == "uniform"


def test_a_bare_name_is_a_call_without_settings():
    assert calls.check("Aggregator", "samples") == {"name": "samples"}


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
    with pytest.raises(SpecError) as caught:
        calls.check("Attack", node)
    assert message in str(caught.value)


def test_messages_carry_file_and_line():
    node = LocatedMap({"name": "pgd", "eps": -1, "step": 0.1, "steps": 1}, {"eps": "a.yaml:7"}, "a.yaml:5")
    with pytest.raises(SpecError, match=r"^a\.yaml:7: eps: should be greater"):
        calls.check("Attack", node)


def test_build_binds_numbers_and_nested_calls():
    objective = calls.build("Objective", calls.check("Objective", {"name": "at", "attack": PGD}))
    assert objective.keywords["attack"].keywords["eps"] == 8 / 255
    assert objective.keywords["attack"].keywords["steps"] == 10


def test_every_member_of_every_table_is_described_and_is_that_function():
    """The source says what importing says: same names, same keyword-only settings, a summary line."""
    for kind, (module, table) in signatures.TABLES.items():
        entries = getattr(importlib.import_module(module), table)
        assert signatures.names(kind) == list(entries)
        for name, function in entries.items():
            signature = signatures.describe(kind, name)
            parameters = inspect.signature(function).parameters.values()
            assert [(s.name, s.annotation, s.default) for s in signature.settings] == [
                (one.name, one.annotation, signatures.REQUIRED if one.default is one.empty else one.default)
                for one in parameters
                if one.kind is one.KEYWORD_ONLY
            ]
            assert signature.summary.endswith(".") or signature.summary, f"{kind} {name} has no docstring"
            said = vars(entry.entry_of(function))
            literals = {key: value for key, value in (signature.entry or {}).items() if key != "threat"}
            assert literals == {key: said[key] for key in literals}


def test_every_settings_class_is_described_and_is_that_class():
    """The source says what importing says: a frozen dataclass with these fields and defaults."""
    for kind, (module, name) in signatures.CLASSES.items():
        signature = signatures.describe(kind)
        fields = dataclasses.fields(getattr(importlib.import_module(module), name))
        assert [s.name for s in signature.settings] == [field.name for field in fields]
        assert [None if s.default is signatures.REQUIRED else s.default for s in signature.settings] == [
            None if field.default is dataclasses.MISSING else field.default for field in fields
        ]
        assert signature.summary


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
    find = signatures._module_file
    monkeypatch.setattr(
        signatures, "_module_file", lambda m: tmp_path / "tinyclass.py" if m == "tinyclass" else find(m)
    )
    monkeypatch.setitem(signatures.CLASSES, "Tiny", ("tinyclass", "TinyTraining"))
    monkeypatch.syspath_prepend(tmp_path)
    signatures.add_plugin(tmp_path / "caller.py")
    yield
    sys.modules.pop("tinyclass", None)
    signatures._class_signature.cache_clear()


def test_a_settings_class_is_read_from_its_source_without_its_methods(tiny):
    signature = signatures.describe("Tiny")
    assert [(s.name, s.annotation) for s in signature.settings] == [
        ("epochs", "Count"), ("objective", "Objective"), ("lr", "Positive"), ("noise", "Radius"), ("shuffle", "bool"),
    ]  # fmt: skip
    assert [s.default for s in signature.settings][2:] == [0.1, 0.0, True]
    assert signature.settings[0].default is signatures.REQUIRED
    assert (signature.name, signature.summary) == ("tiny", "A client's training, for a test.")
    assert "tinyclass" not in sys.modules


def test_a_settings_class_is_a_mapping_without_a_name(tiny):
    algorithm = calls.check("Algorithm", {"name": "twice", "rounds": 3, "local": LOCAL})
    assert algorithm["other"] is None
    assert algorithm["local"] == {
        "epochs": 2, "objective": calls.check("Objective", AT), "lr": 0.1, "noise": "8/255", "shuffle": True,
    }  # fmt: skip
    assert calls.without_defaults(algorithm) == {
        "name": "twice", "rounds": 3,
        "local": {"epochs": 2, "objective": {"name": "at", "attack": PGD}, "noise": "8/255"},
    }  # fmt: skip


def test_a_settings_class_is_built_with_its_nested_calls(tiny):
    algorithm = calls.check("Algorithm", {"name": "twice", "rounds": 3, "local": LOCAL})
    local = calls.bind(algorithm)["local"]
    assert type(local).__name__ == "TinyTraining"
    assert (local.epochs, local.lr, local.noise, local.shuffle) == (2, 0.1, 8 / 255, True)
    assert local.objective.keywords["attack"].keywords["steps"] == 10


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ("loop", "a.yaml:4: local: expected a mapping of settings, got 'loop'"),
        (
            LocatedMap({"epoch": 2}, {"epoch": "a.yaml:5"}),
            "a.yaml:5: epoch: 'tiny' has no setting 'epoch' (did you mean 'ep",
        ),
        (LocatedMap({"name": "x"}, {"name": "a.yaml:5"}), "a.yaml:5: name: 'tiny' has no setting 'name'"),
        (LocatedMap({"epochs": 1}, {}, "a.yaml:4"), "a.yaml:4: local: 'tiny' needs 'objective'"),
        (
            LocatedMap({"epochs": 0, "objective": AT}, {"epochs": "a.yaml:5"}),
            "a.yaml:5: epochs: should be greater than or equal to 1, got 0",
        ),
        (
            LocatedMap({"epochs": 1, "objective": "trade"}, {"objective": "a.yaml:6"}),
            "a.yaml:6: objective: name: no objective is named 'trade' (did you mean 'trades'?)",
        ),
    ],
)
def test_mistakes_in_a_settings_class_name_file_line_and_key(tiny, local, message):
    node = LocatedMap({"name": "twice", "rounds": 1, "local": local}, {"local": "a.yaml:4"}, "a.yaml:3")
    with pytest.raises(SpecError) as caught:
        calls.check("Algorithm", node)
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
        (
            "def f(updates, context, broadcast_loss): ...\nAGGREGATORS = {'f': f}\n",
            "bad.py:1: the aggregator 'f' takes 'broadcast_loss' (did you mean 'broadcast_losses'?): beyond "
            "(updates, context) it can take broadcast_losses; put settings after '*'",
        ),
        (
            "def f(x, generator, padding): ...\nAUGMENTS = {'f': f}\n",
            "bad.py:1: the augment 'f' takes 'padding': beyond (x, generator) it cannot take any other argument; put",
        ),
        (
            "def f(updates): ...\nAGGREGATORS = {'f': f}\n",
            "bad.py:1: the aggregator 'f' is called with (updates, context), but takes (updates)",
        ),
        (
            "def f(updates, broadcast_losses): ...\nAGGREGATORS = {'f': f}\n",
            "bad.py:1: the aggregator 'f' is called with (updates, context), but takes (updates, broadcast_losses)",
        ),
        (
            "def f(problem, state, *, local: Local): ...\nALGORITHMS = {'f': f}\n",
            "bad.py:1: the algorithm 'f' needs a setting 'rounds: Count'",
        ),
        (
            "def f(problem, state, *, rounds: Count): ...\nALGORITHMS = {'f': f}\n",
            "bad.py:1: the algorithm 'f' needs a setting 'local: Local', or 'batch: Count' if clients only",
        ),
        ("class F: ...\nAGGREGATORS = {'f': F}\n", "'F' is in the table but is not a function"),
        (
            "def f(model, x, y, generator, *,\n      eps=8 / 255): ...\nATTACKS = {'f': f}\n",
            "bad.py:2: the default of 'eps', 8 / 255, is not a literal: use a number",
        ),
    ],
)
def test_what_is_not_offered_is_refused_with_the_plugin(tmp_path, text, message):
    plugin = tmp_path / "bad.py"
    plugin.write_text(text)
    with pytest.raises(SpecError) as caught:
        signatures.add_plugin(plugin)
    assert message in str(caught.value)
    assert plugin not in signatures.plugins()


def test_a_function_around_another_costs_what_that_costs(tmp_path, own_plugins):
    """Image passes, bytes, and the batch that a run makes smaller when memory is short."""
    plugin = tmp_path / "around.py"
    plugin.write_text(
        "def f(problem, state, *, rounds: Count, inner: Algorithm): ...\nALGORITHMS = {'f': f}\n"
        "def g(model, x, y, generator, *, inner: Objective): ...\nOBJECTIVES = {'g': g}\n"
    )
    signatures.add_plugin(plugin)
    plain = cell()
    inner = plain["algorithm"]
    around = {
        **inner["local"],
        "objective": {"name": "g", "inner": {"name": "g", "inner": inner["local"]["objective"]}},
    }
    other = cells.canonical({**plain, "algorithm": {"name": "f", "rounds": inner["rounds"],
                                                    "inner": {**inner, "local": around}}})  # fmt: skip
    assert cost.training(other) == cost.training(plain) and cost.training(plain).backward > 0
    assert cost.local(json.loads(json.dumps(other))["algorithm"])["batch"] == inner["local"]["batch"]


def test_what_every_kind_is_called_with_is_written_down():
    assert set(signatures.FIXED) == set(signatures.TABLES) >= set(OFFERS)


def test_identity_ignores_defaults_and_order_but_nothing_else():
    plain = cell()
    assert cells.identity(plain) == cells.identity(cell(validation=0, monitor_every=1))
    assert cells.identity(plain) == cells.identity(dict(reversed(plain.items())))
    assert cells.identity(plain) != cells.identity(cell(seed=7))
    assert cells.identity(plain) != cells.identity(cell(validation=10))
    assert len(cells.identity(plain)) == 12


def test_an_int_and_the_same_float_are_one_cell():
    one, two = cell(), cell()
    one["algorithm"]["local"]["lr"], two["algorithm"]["local"]["lr"] = 1, 1.0
    assert cells.identity(cells.canonical(one)) == cells.identity(cells.canonical(two))


def test_canonical_is_idempotent():
    assert cells.canonical(cell()) == cell()


def test_passes_add_up_through_nested_calls():
    local = cell()["algorithm"]["local"]
    assert entry.passes(local["objective"].bound) == entry.Passes(11, 11)


def test_reading_results_does_not_import_torch():
    code = (
        "import sys; from fatbench.suite import facts, files, threats; from fatbench.cli import app, show\n"
        "from fatbench.runner import progress\n"
        "for name in ('sfat-cifar10', 'privacy-updates', 'april-learning'):\n"
        "    for cell in files.load(name).plan('paper', refuse=False).cells:\n"
        "        threats.of_cell(cell.spec), facts.of_data(cell.spec['data'])\n"
        "        [(facts.role(one.attack), one.computes_in('bf16'), one.id) for one in cell.evaluations]\n"
        "assert facts.fractions() and 'torch' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_a_plugin_extends_the_tables(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from fatbench.engine.rounds import Mixing\n\n\n"
        "def first_only(updates, context, *, floor: float = 0.0):\n"
        '    """All weight on the first client."""\n'
        "    return Mixing([1.0] + [floor] * (len(updates) - 1))\n\n\n"
        'AGGREGATORS = {"first_only": first_only}\n'
    )
    script = (
        "import sys; from pathlib import Path; from fatbench.suite import calls, signatures\n"
        "signatures.add_plugin(Path(sys.argv[1]))\n"
        "spec = calls.check('Aggregator', {'name': 'first_only'})\n"
        "assert spec == {'name': 'first_only', 'floor': 0.0}\n"
        "assert calls.build('Aggregator', spec)([1, 2], None).weights == [1.0, 0.0]\n"
    )
    subprocess.run([sys.executable, "-c", script, str(plugin)], check=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", "invalid syntax"),
        ("x = 1\n", "it defines none of"),
        (
            "def samples(u, c): ...\nAGGREGATORS = {'samples': samples}\n",
            "there is already an aggregator named 'samples'",
        ),
    ],
)
def test_plugin_mistakes(tmp_path, text, message):
    plugin = tmp_path / "bad.py"
    plugin.write_text(text)
    with pytest.raises(SpecError, match=message):
        signatures.add_plugin(plugin)


def test_grid_points_that_are_one_cell_are_run_once_with_the_evaluations_of_both(tmp_path):
    file = tmp_path / "two.yaml"
    spec = json.dumps({key: value for key, value in cell().items() if key != "seed"})
    file.write_text(
        "name: two\ntitle: T\nseeds: [1]\n"
        f"base: {spec}\n"
        "axes: {a: {x: {}, y: {}}}\n"
        "evaluate:\n"
        "  attacks: {natural: natural}\n"
        "  overrides: [{when: {a: y}, set: {attacks: {fgsm: {name: fgsm, eps: 0.1}}}}]\n"
        "presets: {paper: {}}\n"
    )
    plan = files.load(str(file)).plan()
    assert len(plan.cells) == 2
    assert [[e.label for e in c.evaluations] for c in plan.unique()] == [["natural", "fgsm"]]
    assert plan.metrics() == ["natural", "fgsm"]
