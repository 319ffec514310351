"""What holds for every function of a table, ours or anybody's: `fatbench suite check --contract my_method.py`.

    for holds in PROPERTIES["Aggregator"]:
        holds("Aggregator", "near_median")          # Broken: what does not hold, in words

A function is called with settings that the types of its settings allow. A docstring's line `Example: {steps: 1}` gives
those that no type does, or that make it quick; `Example: {model: {name: my_network}}` the network that it needs. It
meets three clients with random images and small networks, through the engine's own doors.
"""

from __future__ import annotations

import ast
import contextvars
import copy
import functools
import hashlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn

from fatbench.engine.cohort import train_cohort
from fatbench.engine.experiment import experiment
from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import LocalTraining, frozen_copy
from fatbench.engine.malicious import Malicious, deal, finite
from fatbench.engine.mixing import aggregate
from fatbench.engine.randomness import forked, generator, numpy_generator
from fatbench.engine.rounds import Context, Problem, State, Update
from fatbench.engine.setup import Setup
from fatbench.errors import FatbenchError
from fatbench.methods import algorithms
from fatbench.methods.aggregators import samples
from fatbench.methods.attacks import pgd
from fatbench.methods.defences import DEFENCES
from fatbench.methods.objectives import standard
from fatbench.models import MODELS
from fatbench.models.dual_norm import with_dual_norm
from fatbench.runner import checkpoints
from fatbench.suite import calls, facts, foreign, signatures, types
from fatbench.suite.entry import ModelEntry, ask, entry_of, passes

ALGORITHMS: dict[str, Any] = dict(algorithms.ALGORITHMS)
SHAPE, CLASSES = (1, 12, 12), 4
# What a setting that is itself a call, or a settings class, is given.
PLAIN: dict[str, Any] = {
    "Attack": "fgsm", "Objective": "standard", "Aggregator": "samples", "Defence": "none", "Inversion": "patch_ls",
    "Proximal": "squared", "Adversary": "sign_flip", "Algorithm": "fedavg", "Model": "small_cnn",
    "Local": {"batch": 4, "lr": 0.05, "objective": "standard"}, "Server": {"batch": 4, "epochs": 1, "lr": 0.01},
}  # fmt: skip
SMALL = {
    "small_cnn": {"width": 2},
    "mlp": {},
    "vit": {"patch": 4, "dim": 16, "depth": 1, "heads": 2},
    "t2t": {"patch": 4, "dim": 16, "token_dim": 8, "depth": 1, "heads": 2},
    "edge_vit": {"width": 2, "dim": 6, "depth": 1, "heads": 2},
    "edge_resnet8": {"width": 2, "planes": 2, "blocks": 1},
}


class Broken(AssertionError):
    """What does not hold for a function."""


def expect(holds: bool, words: str) -> None:
    """Broken: it does not hold."""
    if not holds:
        raise Broken(words)


# --- any member of any table, ready to be called ------------------------------------------------------------------


def settings(kind: str, name: str) -> dict[str, Any]:
    """Settings as a suite writes them: those of the entry's example, and the others that have no default."""
    signature = signatures.describe(kind, name)
    found: dict[str, Any] = {"clients": 3} if kind == "Partition" and "clients" in signature.by_name else {}
    found |= SMALL.get(name, {}) if kind == "Model" else {}
    example = calls.entry(signature).example
    found |= {key: value for key, value in example.items() if key in signature.by_name or key != "model"}
    for setting in signature.settings:
        if setting.default is signatures.REQUIRED and setting.name not in found and not setting.optional:
            found[setting.name] = PLAIN[setting.kind] if setting.kind else value(setting.annotation)
    return found


def spec(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """The call of a suite with these settings, and with `more` of them where it has such settings."""
    signature = signatures.describe(kind, name)
    found = {**settings(kind, name), **{key: value for key, value in more.items() if key in signature.by_name}}
    inner = {setting.name: setting.kind for setting in signature.settings if setting.kind in signatures.TABLES}
    nested = {key: _nested(str(inner[key]), value) for key, value in found.items() if key in inner}
    return {"name": name, **found, **nested}


def _nested(kind: str, call: Any) -> Any:
    """`spec` of a call that is written as a name or with some settings."""
    call = {"name": call} if isinstance(call, str) else call
    return spec(kind, **call) if isinstance(call, Mapping) and call.get("name") in signatures.names(kind) else call


def own_network(function: Any) -> nn.Module | None:
    """The network that a function's example names, which is none of its settings; None: it takes others."""
    call = None if "model" in getattr(function, "keywords", {}) else entry_of(function).example.get("model")
    if call is None:
        return None
    with forked(0, "model"):
        network: nn.Module = calls.build("Model", calls.check("Model", _nested("Model", call)))(SHAPE, CLASSES)
    return network


def member(kind: str, name: str, **more: Any) -> functools.partial[Any]:
    """The function with the settings of `spec` bound to it."""
    bound: functools.partial[Any] = calls.build(kind, calls.check(kind, spec(kind, name, **more)))
    return bound


def value(annotation: str) -> Any:
    """A value that a type of `fatbench.suite.types`, a bool or a Literal allows."""
    if annotation.startswith("Literal"):
        return choices(annotation)[0]
    plain = {"bool": True, "Radius": "8/255", "Count": 1, "Clients": 1, "str": "x"}
    if annotation in plain:
        return plain[annotation]
    kind, low, high = limits(annotation)
    return kind(1) if kind is int else min(max(0.5, low), high)


def choices(annotation: str) -> list[Any]:
    """The values of a Literal."""
    return list(ast.literal_eval(annotation.removeprefix("Literal")))


def limits(annotation: str) -> tuple[type, float, float]:
    """(int or float, smallest, largest) of a numeric type, a little inside where the limit itself is not allowed."""
    kind, *about = get_args(getattr(types, annotation))
    low: Any = -30.0
    high: Any = 30.0
    for limit in about:
        if isinstance(limit, Ge):
            low, high = limit.ge, limit.ge + 5.0  # type: ignore[operator]
        elif isinstance(limit, Gt):
            low, high = limit.gt + 0.1, limit.gt + 3.0  # type: ignore[operator]
    for limit in about:
        if isinstance(limit, Le):
            high = limit.le
        elif isinstance(limit, Lt):
            high = limit.lt - 0.1  # type: ignore[operator]
    return kind, low, high


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a plug-in would write: a function of the same parameters and docstring that only calls this one."""
    parameters = inspect.signature(function).parameters.values()
    defaults, heads, given = {}, [], []
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            heads.append(f"**{p.name}")
            given.append(f"**{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in heads:
            heads.append("*")
        given.append(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name)
        if p.default is not p.empty:
            defaults[p.name] = p.default
        heads.append(p.name if p.default is p.empty else f"{p.name}=_defaults['{p.name}']")
    names: dict[str, Any] = {"_member": function, "_defaults": defaults}
    exec(f"def another_name({', '.join(heads)}):\n    return _member({', '.join(given)})", names)
    other: Callable[..., Any] = names["another_name"]
    other.__doc__, other.__annotations__ = function.__doc__, function.__annotations__
    replace(entry_of(function), function=other)  # so that what is said of it is said of the other too
    return other


# --- what it meets ------------------------------------------------------------------------------------------------


_OF_CELL = contextvars.ContextVar("seed of the cell", default=0)


def problem(model: str | nn.Module = "small_cnn", path: Any = "loop", clients: int = 3, each: int = 4) -> Problem:
    """Clients of random images 1 x 12 x 12 in four classes; the last has one example more than the others."""
    n, seed = clients * each + 1, _OF_CELL.get()
    images = torch.randint(0, 256, (n, *SHAPE), generator=generator(seed, "images"), dtype=torch.uint8)
    if isinstance(model, str):
        with forked(0, "model"):
            model = MODELS[model](SHAPE, CLASSES, **SMALL.get(model, {}))
    shards = list(torch.arange(n).split([each] * (clients - 1) + [each + 1]))
    on = Problem(model, images, torch.arange(n) % CLASSES, shards, CLASSES, seed, torch.device("cpu"), path=path)
    start(on)
    return on


@functools.cache
def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def start(on: Problem) -> State:
    """The weights that the model had when it was asked for the first time: training overwrites them."""
    return State(0, _weights(on.model))


def local(**given: Any) -> LocalTraining:
    """Plain local training, two batches a client."""
    return LocalTraining(**{"batch": 4, "lr": 0.05, "objective": standard, **given})


def four() -> nn.Module:
    """A network of four numbers: AutoAttack takes thousands of passes an image."""
    with forked(0, "model"):
        return nn.Sequential(nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, CLASSES))


# What each kind does as the engine calls it: nested dictionaries of tensors and numbers. ------------------------


def _aggregator(function: Any, order: tuple[int, ...] = (2, 0, 1)) -> Any:
    on = problem(own_network(function) or "small_cnn")
    theta = start(on).model
    updates = train_cohort(on, theta, order, 1, local(), aggregator=function)
    return vars(aggregate(function, updates, Context(1, 3, on, theta, {}, 0.05)))


def _trained(model: str | nn.Module, each: int = 4, **given: Any) -> list[Update]:
    on = problem(model, each=each)
    return train_cohort(on, start(on).model, (0, 2, 1), 1, local(**given))


def _objective(function: Any) -> Any:
    return _trained(own_network(function) or "small_cnn", objective=function)


def _proximal(function: Any) -> Any:
    return _trained(own_network(function) or "mlp", batch=2, proximal=function)


def _attack(function: Any) -> Any:
    on, model = problem(), (own_network(function) or four()).eval()
    x, y = on.images[:6] / 255, on.labels[:6]
    asked = requested_arguments(function, {"index": lambda: torch.arange(6)})
    return function(model, x, y, generator(0, "attack"), **asked).detach()


def _augment(function: Any) -> Any:
    return function(problem().images / 255, generator(0, "augment"))


def _partition(function: Any) -> Any:
    labels, writers = numpy.arange(60) % 4, numpy.arange(60) // 15
    return {k: torch.tensor(part) for k, part in enumerate(function(labels, numpy_generator(0, "partition"), writers))}


def _adversary(function: Any) -> Any:
    malicious = Malicious("1", function)
    on = problem(own_network(function) or "small_cnn", each=8)
    images, labels = deal(malicious, on.shards, on.images, on.labels, CLASSES, 0)
    liar = replace(on, images=images, labels=labels, malicious=malicious)
    return train_cohort(liar, start(on).model, (2, 0, 1), 1, local())


def _defence(function: Any) -> Any:
    on = problem(own_network(function) or "vit")
    how = {"rounds": 1, "batch": 2, "lr": 0.1, "objective": standard}
    (trained,) = ALGORITHMS["fedsgd"](on, start(on), defence=function, **how)
    return {"trained": trained.updates, "model": trained.state.model}


def _inverted(defence: Any, inversion: Any) -> Any:
    on = problem(own_network(inversion) or "vit")
    how = {"rounds": 1, "target_clients": 2, "candidates": 4, "objective": standard, "block0": "bare"}
    (result,) = ALGORITHMS["gradient_inversion"](on, start(on), defence=defence, inversion=inversion, **how)
    return {"metrics": result.metrics, "artifacts": result.artifacts}


def rounds(on: Problem, algorithm: Any, state: State | None = None, **given: Any) -> list[tuple[Any, dict[Any, float]]]:
    """A cell as the engine runs it: its rounds with their numbers, without the seconds that it took."""
    held_out = (on.images[:8].repeat(5, 1, 1, 1), on.labels[:8].repeat(5))
    ready = Setup(on, start(on), held_out, None, [], CLASSES, {})
    none: Any = None
    cell = {"seed": 0, "data": none, "partition": none, "model": none, "algorithm": algorithm, **given}
    return [
        (result, {(n.metric, n.client): n.value for n in numbers if n.metric != "seconds"})
        for result, numbers in experiment(ready, state or ready.initial, **cell)
    ]


def _diagnostic(function: Any) -> Any:
    fedavg = functools.partial(ALGORITHMS["fedavg"], rounds=1, aggregator=samples, local=local())
    attack = functools.partial(pgd, eps=8 / 255, step=4 / 255, steps=2)
    ((_, numbers),) = rounds(problem(own_network(function) or "vit"), fedavg, monitor=attack, diagnostic=function)
    return numbers


def _algorithm(function: Any, begin: Any = None) -> Any:
    """Its rounds on the network that its example names, or the first small one that it takes."""
    refused: list[Exception] = []
    own = own_network(function)
    for network in (*SMALL, "dual") if own is None else (own,):
        on = problem(with_dual_norm(copy.deepcopy(problem().model)) if network == "dual" else network)
        try:
            found = rounds(replace(on, auxiliary=on.images.flip(3), held_out=(on.images, on.labels)), function, begin)
        except (ValueError, FatbenchError) as error:  # a network without the parts that it needs
            refused.append(error)
        else:
            return [{**vars(result), "numbers": numbers} for result, numbers in found]
    if own is None:
        refused[0].add_note("an entry's example, such as {'model': {'name': 'vit'}}, names the network that it needs")
    raise refused[0]


def _model(function: Any) -> Any:
    with forked(0, "model"):
        network = function((3, 16, 16), CLASSES)
    return {"logits": network.eval()(torch.rand(3, 3, 16, 16, generator=generator(0, "x"))), **network.state_dict()}


CALLED: dict[str, Callable[[Any], Any]] = {
    "Aggregator": _aggregator,
    "Objective": _objective,
    "Proximal": _proximal,
    "Attack": _attack,
    "Augment": _augment,
    "Partition": _partition,
    "Adversary": _adversary,
    "Defence": _defence,
    "Inversion": lambda function: _inverted(DEFENCES["none"], function),
    "Diagnostic": _diagnostic,
    "Algorithm": _algorithm,
    "Model": _model,
}


def equal(a: Any, b: Any, close: bool = False) -> bool:
    """Whether two results are the same to the last bit; `close`: to rounding."""
    if is_dataclass(a) and type(a) is type(b):
        return all(equal(getattr(a, field.name), getattr(b, field.name), close) for field in fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key], close) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(one, other, close) for one, other in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if close:
            return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=2e-3, atol=2e-5, equal_nan=True)
        return torch.equal(a, b)
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


# --- what holds ---------------------------------------------------------------------------------------------------


def same_bytes_under_another_name(kind: str, name: str) -> None:
    """Nothing depends on the name of a function, and the same streams give the same bytes."""
    bound = member(kind, name)
    other = functools.partial(renamed(bound.func), **bound.keywords)
    words = "a second call, under another name, gives another result from the same streams"
    expect(equal(CALLED[kind](bound), CALLED[kind](other)), words)


def nothing_from_the_global_generators(kind: str, name: str) -> None:
    """Randomness comes from the generator that the function is given; a package's attack runs in a fork."""
    if _foreign(kind, name):
        return
    states = torch.get_rng_state(), numpy.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    CALLED[kind](member(kind, name))
    after = torch.get_rng_state(), numpy.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    expect(equal(states, after), "it draws from a global generator: use the one that it is given")


def weights_go_with_the_client(kind: str, name: str) -> None:
    """One finite weight an update; of a proper aggregator none is negative, they sum to 1, and go with the client."""
    bound = member(kind, name)
    proper = "Improper." not in (calls.function(signatures.describe(kind, name)).__doc__ or "")
    order, other = (2, 0, 1), (1, 2, 0)
    ours, theirs = (_aggregator(bound, order=one) for one in (order, other))
    for mixing in (ours, theirs):
        weights = [weight for given in (mixing["weights"], mixing["norm"] or ()) for weight in given]
        expect(len(mixing["weights"]) == len(order), f"{len(mixing['weights'])} weights for {len(order)} updates")
        expect(all(math.isfinite(weight) for weight in weights), f"a weight is not finite: {weights}")
        if mixing["model"] is not None:
            expect(finite(mixing["model"]), "the model that it gives is not finite")
        elif proper:
            total = math.fsum(mixing["weights"]) + mixing["broadcast"]
            expect(min(weights) >= 0 and abs(total - 1) < 1e-6, f"weights {weights} sum to {total}: say 'Improper.'")
    if not proper:
        return
    if ours["model"] is not None:
        same = equal(ours["model"], theirs["model"], close=True)
        expect(same, "with the clients in another order it gives another model")
        return
    by_client = [dict(zip(one, mixing["weights"], strict=True)) for one, mixing in ((order, ours), (other, theirs))]
    close = all(math.isclose(by_client[0][k], by_client[1][k], rel_tol=1e-4, abs_tol=1e-7) for k in order)
    expect(close, f"with the clients in another order the weights are others: {by_client[0]}, {by_client[1]}")


def _flat(model: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in model.values() if value.is_floating_point()])


def a_gradient_for_every_weight(kind: str, name: str) -> None:
    """A finite scalar, which words on each example, whose gradient reaches the parameters; the attack leaves none."""
    model, loss, correct = _step(member(kind, name), Passes())
    expect(loss.shape == () and bool(loss.isfinite()), f"the loss is {loss.detach()}, not one finite number")
    expect(correct.shape == (8,) and correct.dtype == torch.bool, f"correct is {tuple(correct.shape)} {correct.dtype}")
    expect(all(weight.grad is None for weight in model.parameters()), "gradients are left behind in the parameters")
    expect(loss.requires_grad, "the loss has no gradient")
    loss.backward()
    dead = [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    expect(not dead, f"no gradient reaches {', '.join(dead)}")
    expect(any(bool(weight.grad.abs().max() > 0) for weight in model.parameters() if weight.grad is not None),
           "the gradient is zero everywhere")  # fmt: skip


class Passes:
    """Image passes through networks: forward by a hook, backward by a hook on the logits."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def watch(self, model: nn.Module) -> nn.Module:
        """The model, its passes counted."""
        model.register_forward_hook(self._count)
        return model

    def _count(self, module: nn.Module, inputs: Any, logits: Tensor) -> None:
        self.forward += len(logits)
        if logits.requires_grad:
            logits.register_hook(self._count_backward)

    def _count_backward(self, gradient: Tensor) -> None:
        self.backward += len(gradient)


def _network() -> nn.Module:
    with forked(0, "model"):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(5), nn.Flatten(),
                             nn.Linear(12, CLASSES))  # fmt: skip


def _step(objective: Any, passes: Passes) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, and an objective's loss and hits of it on eight images."""
    model = own_network(objective) or _network()
    offers: dict[str, Any] = {
        "class_counts": lambda: torch.tensor([[4.0, 2.0, 1.0, 1.0]]),
        "broadcast": lambda: passes.watch(frozen_copy(own_network(objective) or _network())()),
        "client": lambda: 1,
    }
    x, y = torch.rand(8, *SHAPE, generator=generator(0, "x")), torch.arange(8) % CLASSES
    passes.watch(model)
    loss, correct = objective(model, x, y, generator(0, "step"), **requested_arguments(objective, offers))
    return model, loss, correct


def passes_as_declared(kind: str, name: str) -> None:
    """As many image passes as its entry says: `fatbench plan` adds those up."""
    if _foreign(kind, name):
        return  # what a package's attack passes depends on how many images survive
    call = calls.check(kind, spec(kind, name))
    bound, counted = calls.build(kind, call), Passes()
    if kind == "Attack":
        x, y = torch.rand(8, *SHAPE, generator=generator(0, "x")), torch.arange(8) % CLASSES
        asked = requested_arguments(bound, {"index": lambda: torch.arange(8)})
        bound(counted.watch((own_network(bound) or _network()).eval()), x, y, generator(0, "step"), **asked)
    else:
        _step(bound, counted)[1].backward()
    declared = passes(call.bound)
    real, said = (counted.forward / 8, counted.backward / 8), (declared.forward, declared.backward)
    words = f"{real[0]:g} forward and {real[1]:g} backward passes an image, declared are {said[0]:g} and {said[1]:g}"
    expect(real == said, f"{words} (`passes` of its entry)")


def _foreign(kind: str, name: str) -> bool:
    return bool(foreign.packages(signatures.describe(kind, name)))


def inside_ball_and_box(kind: str, name: str) -> None:
    """Images of the same shape in [0, 1], and within eps if there is one; the images given are unchanged."""
    bound = member(kind, name)
    x = problem().images[:6] / 255
    x_adv = _attack(bound)
    expect(x_adv.shape == x.shape and x_adv.dtype == x.dtype, f"images become {tuple(x_adv.shape)} {x_adv.dtype}")
    expect(bool(x_adv.isfinite().all()), "an image is not finite")
    expect(float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1, "an image leaves [0, 1]")
    if (eps := bound.keywords.get("eps")) is not None and facts.role({"name": name}) == "attack":
        change = (x_adv - x).flatten(1)
        far = change.norm(dim=1) if bound.keywords.get("norm") == "L2" else change.abs().amax(1)
        expect(float(far.max()) <= eps + 1e-6, f"an image is moved by {float(far.max()):.4g}, and eps is {eps:.4g}")


def disjoint_shards(kind: str, name: str) -> None:
    """Indices of every client, int64, none twice, all of them there are."""
    parts = list(_partition(member(kind, name)).values())
    together = torch.cat(parts)
    expect(all(part.dtype == torch.int64 and len(part) for part in parts), "a client has no example, or no int64 index")
    expect(len(together.unique()) == len(together), "an example is dealt twice")
    expect(int(together.min()) >= 0 and int(together.max()) < 60, "an index is not in the data")


def images_stay_images(kind: str, name: str) -> None:
    """Same shape and type in [0, 1]; the images that came are as they were."""
    bound = member(kind, name)
    x = problem().images / 255
    before = x.clone()
    y = bound(x, generator(0, "augment"))
    expect(y.shape == x.shape and y.dtype == x.dtype, f"images {tuple(x.shape)} become {tuple(y.shape)} {y.dtype}")
    expect(float(y.min()) >= 0 and float(y.max()) <= 1, "an image leaves [0, 1]")
    expect(torch.equal(x, before), "the images that came are changed in place")


def the_honest_stay_honest(kind: str, name: str) -> None:
    """What a malicious client does changes what it sends, in the same shapes, and nothing that others send."""
    bound = member(kind, name)
    honest = _trained(own_network(bound) or "small_cnn", each=8)
    plain, ours = ({u.client: u.model for u in made} for made in (honest, _adversary(bound)))
    for k in (0, 2):
        expect(equal(plain[k], ours[k]), f"client {k} is honest and sends something else")
    shapes = all(value.shape == ours[1][key].shape for key, value in plain[1].items())
    expect(shapes, "what it sends has other shapes")
    far = float((_flat(plain[1]) - _flat(ours[1])).norm())
    expect(not far <= 1e-6, "it sends what an honest client sends")


def resumes_with_the_same_bytes(kind: str, name: str) -> None:
    """Two rounds at once are one and one more: what an algorithm remembers is in its states."""
    if signatures.describe(kind, name).by_name["rounds"].default is not signatures.REQUIRED:
        return
    bound = member(kind, name, rounds=2)
    whole = _algorithm(bound)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        checkpoints.demand_tensors(whole[0]["state"])
        checkpoints.save_state(file, whole[0]["state"])
        kept = checkpoints.load_state(file, "cpu")
    again = _algorithm(bound, kept)
    expect(len(again) == 1 and equal(whole[1], again[0]), "after an interruption it ends elsewhere")


def remembers_nothing_outside_its_state(kind: str, name: str) -> None:
    """A call after others gives what the first gave: what stays in a module is another cell's, and lost with it."""
    results = [CALLED[kind](member(kind, name)) for _ in range(4)]
    words = "a later call gives another result from the same streams: something is remembered outside the state"
    expect(all(equal(results[0], one) for one in results[1:]), words)


def logits_and_parameters_as_declared(kind: str, name: str) -> None:
    """(B, classes) logits with a gradient, and as many trainable parameters as its entry says."""
    call = calls.check(kind, spec(kind, name))
    network = calls.build(kind, call)((3, 16, 16), CLASSES)
    logits = network(torch.rand(2, 3, 16, 16, generator=generator(0, "x")))
    expect(
        logits.shape == (2, CLASSES) and logits.requires_grad, f"2 images give logits {tuple(logits.shape)}, not (2, 4)"
    )
    entry = calls.entry(call.signature)
    count = entry.parameters if isinstance(entry, ModelEntry) else None
    said = None if count is None else ask(count, call.bound, (3, 16, 16), CLASSES)
    real = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    expect(said is None or said == real, f"{real} parameters, declared are {said}")


def digest(value: Any) -> str:
    """SHA-256 of what `equal` compares, to the last bit."""
    whole = hashlib.sha256()

    def take(value: Any) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            value = [part for key in sorted(value, key=repr) for part in (repr(key), value[key])]
        if isinstance(value, list | tuple):
            whole.update(f"[{len(value)}".encode())
            for part in value:
                take(part)
        elif isinstance(value, Tensor):
            whole.update(f"{value.dtype} {tuple(value.shape)}".encode())
            whole.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:  # of a function only its kind: its place in memory is another in every process
            plain = isinstance(value, str | int | float | complex | bytes | type(None))
            whole.update(repr(value if plain else type(value)).encode())

    take(value)
    return whole.hexdigest()


def digests(functions: Sequence[tuple[str, str]]) -> list[str]:
    """Of each function what it gives after a call in another cell, as SHA-256; an error is one by its words."""
    torch.set_num_threads(1)
    results = []
    for kind, name in functions:
        try:
            token = _OF_CELL.set(1)
            try:
                CALLED[kind](member(kind, name))
            finally:
                _OF_CELL.reset(token)
            results.append(digest(CALLED[kind](member(kind, name))))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def in_a_fresh_process(functions: Sequence[tuple[str, str]]) -> list[str]:
    """`digests` by another process, with the same plug-ins. Broken: it ends early."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digests.json"
        asked = json.dumps([[str(plugin) for plugin in signatures.plugins()], list(functions), str(file)])
        command = [sys.executable, "-c", "from fatbench import testing; testing._answer()"]
        path = os.pathsep.join(filter(None, sys.path))  # of this process, which found the plug-ins' helpers
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        )
        last = next(iter(done.stderr.strip().splitlines()[::-1]), "")
        expect(done.returncode == 0, f"a fresh process ends with code {done.returncode}: {last}")
        results: list[str] = json.loads(file.read_text())
        return results


def _answer() -> None:
    """What `in_a_fresh_process` starts."""
    plugins, functions, file = json.load(sys.stdin)
    for plugin in plugins:
        signatures.add_plugin(Path(plugin))
    Path(file).write_text(json.dumps(digests(functions)))


def _elsewhere(functions: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What is wrong with functions that a fresh process, after another cell, finds to give another result."""
    if not functions:
        return {}
    try:
        others = in_a_fresh_process(functions)
    except Broken as error:
        return dict.fromkeys(functions, str(error))
    words = "it gives another result than here: something is remembered outside the state"
    ours = {one: digest(CALLED[one[0]](member(*one))) for one in functions}
    return {one: words for one, other in zip(functions, others, strict=True) if ours[one] != other}


Property = Callable[[str, str], None]
_ALL: tuple[Property, ...] = (same_bytes_under_another_name, nothing_from_the_global_generators)
PROPERTIES: dict[str, tuple[Property, ...]] = {
    "Aggregator": (*_ALL, remembers_nothing_outside_its_state, weights_go_with_the_client),
    "Objective": (*_ALL, a_gradient_for_every_weight, passes_as_declared),
    "Proximal": _ALL,
    "Attack": (*_ALL, inside_ball_and_box, passes_as_declared),
    "Augment": (*_ALL, images_stay_images),
    "Partition": (*_ALL, disjoint_shards),
    "Adversary": (*_ALL, remembers_nothing_outside_its_state, the_honest_stay_honest),
    "Defence": _ALL,
    "Inversion": _ALL,
    "Diagnostic": _ALL,
    "Algorithm": (*_ALL, remembers_nothing_outside_its_state, resumes_with_the_same_bytes),
    "Model": (*_ALL, logits_and_parameters_as_declared),
}


def check(file: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Of every function that a plug-in brings: kind, name, the properties that hold, and what does not hold; neither,
    where a kind has no properties, such as a data set.
    """
    torch.set_num_threads(1)  # for networks of a few numbers, threads only wait for one another
    results = list(_held(file))
    whole = [(kind, name) for kind, name, held, broken in results if held and not broken]
    elsewhere = _elsewhere(whole)
    for kind, name, held, broken in results:
        words = "same in a fresh process after another cell"
        if (kind, name) in whole:
            wrong = elsewhere.get((kind, name))
            held, broken = ([*held, words], broken) if wrong is None else (held, [f"{words}: {wrong}"])
        yield kind.lower(), name, held, broken


def _held(file: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """`check` in this process, kinds as the tables name them."""
    for kind in [*PROPERTIES, *(other for other in signatures.TABLES if other not in PROPERTIES)]:
        for name in signatures.names(kind):
            if signatures.describe(kind, name).plugin != file:
                continue
            held, broken = [], []
            for holds in PROPERTIES.get(kind, ()):
                words = holds.__name__.replace("_", " ")
                try:
                    holds(kind, name)
                    held.append(words)
                except Broken as error:
                    broken.append(f"{words}: {error}")
                except Exception as error:
                    said = "; ".join([*str(error).splitlines()[:1], *getattr(error, "__notes__", ())])
                    places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                              if Path(frame.filename) == file]  # fmt: skip
                    where = f" ({file.name}, line {places[-1]})" if places else ""
                    broken.append(f"{words}: {type(error).__name__}: {said}{where}")
            yield kind, name, held, broken
