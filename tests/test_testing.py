"""The properties of `fatbench check FILE.py`: ours keep them, and a function that does not is found out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import members
import pytest
from crew import fork_server

from fatbench import testing
from fatbench.engine import measures
from fatbench.suite import signatures

# Who needs the files of a data set, points in the plane, or a block that a manipulation adds refuses all others.
ELSEWHERE = {"test_images_of_cifar10", "points_in_the_plane", "imprint_manipulation"}
# Of the networks those that are not of many millions.
NETWORKS = {*testing.SMALL, "mcmahan_cnn", "leaf_cnn"}
# Seconds each: what searches a grid, and what others of its kind share.
LONG = {
    "agree", "fang_krum", "fang_trimmed", "feature_flip", "feature_noise", "feature_swap", "gaussian_upload", "mimic",
    "mimic_fixed", "min_max", "min_sum", "model_replacement", "optimal_alie", "optimal_ipm", "scale_logits",
    "sign_flip_gradients",
}  # fmt: skip
MEMBERS = [
    pytest.param(kind, name, marks=[pytest.mark.nightly] * (name in LONG))
    for kind in testing.PROPERTIES
    for name in signatures.names(kind)
    if not ELSEWHERE & members.refusals(kind, name) and (kind != "Model" or name in NETWORKS)
]


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_every_member_keeps_the_contract(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members.short_autoattack(monkeypatch)
    monkeypatch.setattr(measures, "footprint", lambda problem, batch, *, moments: {})  # counted anew in every call
    if name == "aimed":
        members.short_search(monkeypatch)
    for holds in testing.PROPERTIES[kind]:
        holds(kind, name)


HEAD = """
from fatbench.suite.entry import AlgorithmEntry, Entry, ModelEntry, Passes
import numpy as np
import torch
from dataclasses import replace
from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Mixing, Round, State
from fatbench.methods.algorithms.fedavg import fedavg
from fatbench.suite.types import Aggregator, Count, Local, Radius

CALLS = []
"""
PAIR = """class Pair(torch.nn.Linear):
    def forward(self, x):
        z = super().forward(x.flatten(1))
        return (z, z.mean()) if WHEN else z


def f(shape, classes):
    return Pair(shape[0] * shape[1] * shape[2], classes)
"""
MEMORY = "def f(updates, context):\n    return Mixing([1 / 3] * 3, memory=WHAT)"
# What is wrong, the function, the table, the property that finds it, and in which words.
BROKEN = [
    ("reads its own name", "def f(updates, context):\n    import sys\n    name = sys._getframe(1).f_code.co_name\n"
     "    return Mixing([1.0, 0.0, 0.0] if name == 'another_name' else [0.0, 1.0, 0.0])",
     "AGGREGATORS", "same bytes under another name", "gives another result"),
    ("counts its calls", "def f(updates, context):\n    CALLS.append(1)\n"
     "    return Mixing([1 / 3] * 3, metrics={'calls': len(CALLS)})",
     "AGGREGATORS", "same bytes under another name", "gives another result"),
    ("draws from a global generator", "def f(x, generator):\n    return x * torch.rand(1)",
     "AUGMENTS", "nothing from the global generators", "use the one that it is given"),
    ("draws from numpy's global generator", "def f(x, generator):\n    return x * float(np.random.rand())",
     "AUGMENTS", "nothing from the global generators", "use the one that it is given"),
    ("draws from Python's generator", "def f(x, generator):\n    import random\n    return x * random.random()",
     "AUGMENTS", "nothing from the global generators", "use the one that it is given"),
    ("weighs places", "def f(updates, context):\n    return Mixing([0.5, 0.3, 0.2])",
     "AGGREGATORS", "weights go with the client", "in another order the weights are others"),
    ("forgets to normalise", "def f(updates, context):\n    return Mixing([float(u.n) for u in updates])",
     "AGGREGATORS", "weights go with the client", "say 'Improper.'"),
    ("detaches", "def f(model, x, y, generator):\n    logits = model(x).detach() + model[-1].bias\n"
     "    return torch.nn.functional.cross_entropy(logits, y), logits.argmax(1) == y",
     "OBJECTIVES", "a gradient for every weight", "no gradient reaches 0.weight"),
    ("says nothing of its passes", "def f(model, x, y, generator):\n    model.train()\n    logits = model(x)\n"
     "    return torch.nn.functional.cross_entropy(logits, y), logits.argmax(1) == y",
     "OBJECTIVES", "passes as declared", "1 forward and 1 backward passes an image, declared are 0 and 0"),
    ("leaves the ball", "def f(model, x, y, generator, *, eps: Radius):\n    return (x + 2 * eps).clamp(0, 1)",
     "ATTACKS", "inside ball and box", "an image is moved by 0.06"),
    ("leaves the box", "def f(model, x, y, generator):\n    return x + 1",
     "ATTACKS", "inside ball and box", "an image leaves [0, 1]"),
    ("deals twice", "def f(labels, rng, writers, *, clients: Count):\n    return [np.arange(10)] * clients",
     "PARTITIONS", "disjoint shards", "an example is dealt twice"),
    ("changes its input", "def f(x, generator):\n    return x.mul_(0.5)",
     "AUGMENTS", "images stay images", "the images that came are changed in place"),
    ("returns a list", "def f(updates, context):\n    return [1 / 3] * 3",
     "AGGREGATORS", "weights go with the client", "TypeError: the aggregator returns list, not a Mixing"),
    ("returns all of them", "def f(update, others):\n    return others",
     "ADVERSARIES", "the honest stay honest", "ValueError: the adversary returns (3, 1750), expected (1750,)"),
    ("returns nothing", "def f(images, labels):\n    labels.fill_(0)",
     "ADVERSARIES", "the honest stay honest", "returns NoneType, expected (8, 1, 12, 12) and (8,)"),
    ("does nothing", "def f(update):\n    return update",
     "ADVERSARIES", "the honest stay honest", "it sends what an honest client sends"),
    ("keeps its state to itself", "def f(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local):\n"
     "    for result in fedavg(problem, state, rounds=rounds, aggregator=aggregator, local=local):\n"
     "        since = result.index - state.round\n"
     "        mine = {name: value * 0.9**since for name, value in result.state.model.items()}\n"
     "        yield replace(result, state=replace(result.state, model=mine))",
     "ALGORITHMS", "resumes with the same bytes", "after an interruption it ends elsewhere"),
    ("remembers in its module", "SEEN = []\n\n\ndef f(updates, context):\n    SEEN.append(1)\n"
     "    return Mixing([1 / len(updates)] * len(updates), memory={'calls': torch.tensor(float(len(SEEN) > 4))})",
     "AGGREGATORS", "remembers nothing outside its state", "something is remembered outside the state"),
    ("keeps a number", "def f(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local):\n"
     "    for result in fedavg(problem, state, rounds=rounds, aggregator=aggregator, local=local):\n"
     "        yield replace(result, state=replace(result.state, server={'best': 0.3}))",
     "ALGORITHMS", "resumes with the same bytes", "state.server['best'] is of type float"),
    ("miscounts", "def seven(shape, classes):\n    return 7\n\n\ndef layer(shape, classes):\n    '''One layer.'''\n"
     "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0] * shape[1] * shape[2], classes))\n\n"
     "f = ModelEntry(layer, parameters=seven)",
     "MODELS", "logits and parameters as declared", "3076 parameters, declared are 7"),
    ("returns two outputs", PAIR.replace("WHEN", "True"),
     "MODELS", "logits and parameters as declared", "the model returns a tuple, not logits (B, classes)"),
    ("returns two outputs in training", PAIR.replace("WHEN", "self.training"),
     "MODELS", "logits and parameters as declared", "the model returns a tuple, not logits (B, classes)"),
    ("returns a map", PAIR.replace("(z, z.mean()) if WHEN else z", "z[:, :, None, None]"),
     "MODELS", "logits and parameters as declared", "the model returns a tensor (2, 4, 1, 1), not logits (B, classes)"),
    ("remembers clients by number", MEMORY.replace("WHAT", "{'d': {u.client: torch.ones(1) for u in updates}}"),
     "AGGREGATORS", "its memory goes through a checkpoint", "the key 2 is not a string; a checkpoint stores tensors"),
    ("remembers a list", MEMORY.replace("WHAT", "{'seen': [u.client for u in updates]}"),
     "AGGREGATORS", "its memory goes through a checkpoint", "state.server['aggregator']['seen'] is of type list"),
    ("remembers a number after a while", MEMORY.replace("WHAT", "{'t': 1.0} if context.round == 2 else {}"),
     "AGGREGATORS", "its memory goes through a checkpoint", "state.server['aggregator']['t'] is of type float"),
    ("expects the same clients", "def f(updates, context):\n    old = context.memory.get('w', {})\n"
     "    new = {str(u.client): old[str(u.client)] if old else torch.ones(1) for u in updates}\n"
     "    return Mixing([1 / 3] * 3, memory={'w': new})",
     "AGGREGATORS", "its memory goes through a checkpoint", "KeyError: '3'"),
    ("asks what a memory is", "class Mine(dict):\n    pass\n\n\ndef f(updates, context):\n"
     "    kept = isinstance(context.memory.get('w'), Mine)\n"
     "    return Mixing([1 / 3] * 3, memory={'w': Mine(a=torch.ones(1))}, metrics={'kept': float(kept)})",
     "AGGREGATORS", "its memory goes through a checkpoint", "after an interruption it gives another result"),
    ("calls each client for itself",
     "def f(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local):\n"
     "    for t in range(state.round, rounds):\n"
     "        updates = [train_cohort(problem, state.model, [k], t, local)[0] for k in range(3)]\n"
     "        mixing = aggregate(aggregator, updates, Context(t, rounds, problem, state.model, {}, 0.1))\n"
     "        after = State(t + 1, mix(updates, mixing, state.model, problem.model))\n"
     "        yield Round(t, state.model, updates, mixing, after, cost(updates, local, state.model))\n"
     "        state = after",
     "ALGORITHMS", "adversaries see the others",
     "is called with the malicious clients [0] alone, and their adversary ipm asks for 'others'"),
]  # fmt: skip


@pytest.fixture
def plugin(tmp_path: Path, own_plugins: None) -> Callable[[str], Path]:
    """Writes a plug-in and adds it, for one test."""

    def add(text: str) -> Path:
        (tmp_path / "mine.py").write_text(text)
        signatures.add_plugin(tmp_path / "mine.py")
        return tmp_path / "mine.py"

    return add


@pytest.mark.parametrize(("text", "table", "named", "words"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN])
def test_what_does_not_hold_is_said(plugin, text: str, table: str, named: str, words: str) -> None:
    ((_, name, _, broken),) = testing.check(plugin(f"{HEAD}\n\n{text}\n\n\n{table} = {{'mine': f}}\n"))
    said = dict(line.split(": ", 1) for line in broken)
    assert name == "mine" and words in said[named], broken


def test_an_algorithm_of_groups_is_called_ok(plugin: Callable[[str], Path], forked: None) -> None:
    """Client 0 has a call for itself; where client 1 is malicious, its adversary sees client 2."""
    (text,) = [case[1] for case in BROKEN if case[0] == "calls each client for itself"]
    text = text.replace("[k], t, local)[0] for k in range(3)", "group, t, local) for group in ([0], [1, 2])")
    text = text.replace("        mixing = aggregate", "        updates = sum(updates, [])\n        mixing = aggregate")
    ((_, _, _, broken),) = testing.check(plugin(f"{HEAD}\n\n{text}\n\n\nALGORITHMS = {{'mine': f}}\n"))
    assert broken == []


def _digests(plugins: list[Path], functions: list[tuple[str, str]]) -> list[str]:
    for plugin in plugins:
        signatures.add_plugin(plugin)
    return testing.digests(functions)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh process comes from the fork server, which has met no plug-in: a new interpreter takes seconds."""

    def in_a_fork(functions: list[tuple[str, str]]) -> list[str]:
        with ProcessPoolExecutor(1, mp_context=fork_server()) as fresh:
            return fresh.submit(_digests, [*signatures.plugins()], [*functions]).result()

    monkeypatch.setattr(testing, "in_a_fresh_process", in_a_fork)


REMEMBERS = """
LAST, FIRST = [], {}


def size(updates):
    return float(next(iter(updates[0].model.values())).sum())


def last(updates, context):
    before = LAST[-1] if LAST else size(updates)
    LAST[:] = [size(updates)]
    return Mixing([1 / len(updates)] * len(updates), memory={'x': torch.tensor(before)})


def first(updates, context):
    return Mixing([1 / len(updates)] * len(updates), memory={'x': torch.tensor(FIRST.setdefault('x', size(updates)))})


def clean(updates, context):
    return Mixing([1 / len(updates)] * len(updates), memory={'x': torch.tensor(size(updates))})


def ends(updates, context):
    if os.environ.get("ENDS") != str(os.getpid()):
        os._exit(3)
    return clean(updates, context)


AGGREGATORS = {"last": last, "first": first, "clean": clean}
"""


def test_memory_of_a_module_is_found_by_a_fresh_process(plugin: Callable[[str], Path], forked: None) -> None:
    """Calls in one process give the same, the first result for ever; what the last call left is found in it."""
    ended = {name: (held, broken) for _, name, held, broken in testing.check(plugin(HEAD + REMEMBERS))}
    property = "same in a fresh process after another cell"
    words = f"{property}: it gives another result than here: something is remembered outside the state"
    assert ended["first"][1] == [words]
    said = "after an interruption it gives another result: something is remembered outside what is stored"
    assert len(ended["last"][1]) == 1 and ended["last"][1][0].endswith(said)
    assert property in ended["clean"][0] and not ended["clean"][1]


def test_a_fresh_process_that_ends_is_said(plugin: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDS", str(os.getpid()))
    text = REMEMBERS.replace('"clean": clean', '"ends": ends')
    ended = {name: broken for _, name, _, broken in testing.check(plugin(f"import os\n{HEAD}{text}"))}
    assert ended["ends"] == ["same in a fresh process after another cell: a fresh process ends with code 3: "]


def test_ours_are_the_same_in_a_fresh_process_after_another_cell(forked: None) -> None:
    quick = ("Aggregator", "Augment", "Proximal")
    assert testing._differences_in_a_fresh_process([one.values for one in MEMBERS if one.values[0] in quick]) == {}


OWN_NETWORK = """
class Embedding(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.embed = body, torch.nn.Linear(4, 4).requires_grad_(False)
        self.second_head = torch.nn.Linear(4, 4)  # no objective is to blame that it is not used

    def forward(self, x):
        return self.embed(self.body(x))


def embedding(shape, classes, *, base: Model):
    '''What a base says, once more.'''
    return Embedding(base(shape, classes))


def f(model, x, y, generator):
    '''Cross-entropy.'''
    model.train()
    model.embed
    logits = model(x)
    return torch.nn.functional.cross_entropy(logits, y), logits.argmax(1) == y


def g(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local):
    '''FedAvg.'''
    if not hasattr(problem.model, "embed"):
        raise ValueError("no embedding")
    yield from fedavg(problem, state, rounds=rounds, aggregator=aggregator, local=local)


OBJECTIVES = {"close": Entry(f, passes=Passes(1, 1)EXAMPLE)}
ALGORITHMS = {"embedded": AlgorithmEntry(gEXAMPLE)}
MODELS = {"embedding": embedding}
"""


@pytest.mark.parametrize("base", ["", ", 'base': 'small_cnn'", ", 'base': {'name': 'small_cnn', 'width': 4}"])
def test_a_method_with_a_network_of_its_own_names_it(plugin: Callable[[str], Path], forked: None, base: str) -> None:
    """By its example, and the network's base by its name, with settings, or not at all."""
    text = OWN_NETWORK.replace("EXAMPLE", f", example={{'model': {{'name': 'embedding'{base}}}}}")
    file = plugin(HEAD.replace("Local,", "Local, Model,") + text)
    broken = {name: lines for _, name, _, lines in testing.check(file)}
    assert broken == {"close": [], "embedded": [], "embedding": []}


def test_a_network_that_no_example_names_is_asked_for(plugin: Callable[[str], Path], forked: None) -> None:
    file = plugin(HEAD.replace("Local,", "Local, Model,") + OWN_NETWORK.replace("EXAMPLE", ""))
    broken = {name: lines for _, name, _, lines in testing.check(file)}
    assert broken["close"] and not broken["embedding"]
    assert len(broken["embedded"]) == len(testing.PROPERTIES["Algorithm"])
    assert all("no embedding; an entry's example, such as {'model': " in line for line in broken["embedded"])


def test_a_plug_in_on_the_command_line(tmp_path: Path, run, plugin) -> None:
    """A function a line, what does not hold below it; exit 1 if there is any such."""
    good = "def f(updates, context):\n    return Mixing([1 / len(updates)] * len(updates))"
    bad = "def g(updates, context):\n    raise KeyError('stats')"
    file = tmp_path / "p1.py"
    file.write_text(f"{HEAD}\n\n{good}\n\n\n{bad}\n\n\nAGGREGATORS = {{'mine': f, 'yours': g}}\n")
    ended, out, _ = run("check", str(file))
    assert ended == 1 and "p1.py: aggregator mine: ok\n" in out
    assert "p1.py: aggregator yours: 5 of 5 properties do not hold\n" in out
    assert re.search(r"\n  same bytes under another name, nothing .*: KeyError: 'stats' \(p1.py, line \d+\)\n", out)
    assert out.count("KeyError") == 1


def test_what_has_no_property_is_not_called_ok(plugin, run) -> None:
    file = plugin("def mine(root):\n    return None\n\n\nDATASETS = {'mine': mine}\n")
    said = f"{file.name}: data mine: has no property to test; a run reads it\n"
    assert run("check", str(file))[:2] == (0, said)
