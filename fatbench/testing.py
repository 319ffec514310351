"""Properties that every function of a table keeps, ours or a plug-in's: `fatbench check FILE.py`.

    for holds in PROPERTIES["Aggregator"]:
        holds("Aggregator", "near_median")          # Broken: what does not hold, in words

A function is called with values that the types of its settings allow. The `example` of its entry names others, such as
a number of steps that makes it quick, or {"model": {"name": "my_network"}}, the network that it needs. The problem has
three clients with random images and small networks, and the engine makes the calls.
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
import random
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
from fatbench.engine.gradients import demand_logits
from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import LocalTraining, frozen_copy
from fatbench.engine.malicious import Malicious, NoHonestClient, deal, finite, target_of
from fatbench.engine.mixing import aggregate
from fatbench.engine.optimizers import ServerTraining
from fatbench.engine.randomness import forked, generator, numpy_generator
from fatbench.engine.rounds import Context, Problem, State, Update
from fatbench.engine.setup import Setup
from fatbench.errors import FatbenchError
from fatbench.methods import algorithms
from fatbench.methods.adversaries import ADVERSARIES
from fatbench.methods.aggregators import AGGREGATORS, samples
from fatbench.methods.defences import DEFENCES
from fatbench.methods.evasion import fgsm, pgd
from fatbench.methods.objectives import at, standard
from fatbench.models import MODELS
from fatbench.models.dual_norm import with_dual_norm
from fatbench.runner import checkpoints
from fatbench.suite import calls, facts, signatures, types
from fatbench.suite.entry import ModelEntry, ask, entry_of, passes

ALGORITHMS: dict[str, Any] = dict(algorithms.ALGORITHMS)
SHAPE, CLASSES = (1, 12, 12), 4
# The value of a setting that is itself a call, or a settings class.
PLAIN: dict[str, Any] = {
    "Attack": "fgsm", "Objective": "standard", "Aggregator": "samples", "Defence": "none", "Inversion": "patch_ls",
    "PreAggregator": "nnm",
    "Proximal": "squared", "Adversary": "sign_flip", "Algorithm": "fedavg", "Model": "small_cnn",
    "Local": {"batch": 4, "lr": 0.05, "objective": "standard"}, "Server": {"batch": 4, "epochs": 1, "lr": 0.01},
}  # fmt: skip
SMALL = {  # settings with which our networks take 12 x 12 images in milliseconds
    "small_cnn": {"width": 2},
    "mlp": {},
    "vit": {"patch": 4, "dim": 16, "depth": 1, "heads": 2},
    "t2t": {"patch": 4, "dim": 16, "token_dim": 8, "depth": 1, "heads": 2},
    "edge_vit": {"width": 2, "dim": 6, "depth": 1, "heads": 2},
    "edge_resnet8": {"width": 2, "planes": 2, "blocks": 1},
}


class Broken(AssertionError):
    """A property does not hold for a function; the message says why."""


def expect(condition: bool, message: str) -> None:
    """Raise Broken with the message unless the condition is true."""
    if not condition:
        raise Broken(message)


# --- any member of any table, ready to be called ------------------------------------------------------------------


def settings(kind: str, name: str) -> dict[str, Any]:
    """Settings as a suite writes them: those of the entry's example, and the others that have no default."""
    signature = signatures.describe(kind, name)
    # three clients: among the one that `value` gives, every partition is disjoint
    values: dict[str, Any] = {"clients": 3} if kind == "Partition" and "clients" in signature.by_name else {}
    values |= SMALL.get(name, {}) if kind == "Model" else {}
    example = calls.entry(signature).example
    # an example's model that is no setting is the network that the function needs, see `own_network`
    values |= {key: value for key, value in example.items() if key in signature.by_name or key != "model"}
    for setting in signature.settings:
        if setting.default is signatures.REQUIRED and setting.name not in values and not setting.optional:
            values[setting.name] = PLAIN[setting.kind] if setting.kind else value(setting.annotation)
    return values


def spec(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A call as a suite writes it, with `settings`, and with those of `more` that the function has."""
    signature = signatures.describe(kind, name)
    values = {**settings(kind, name), **{key: value for key, value in more.items() if key in signature.by_name}}
    inner = {setting.name: setting.kind for setting in signature.settings if setting.kind in signatures.TABLES}
    nested = {key: _nested(str(inner[key]), value) for key, value in values.items() if key in inner}
    return {"name": name, **values, **nested}


def _nested(kind: str, call: Any) -> Any:
    """The full call for one that is written as a name, or with some settings."""
    call = {"name": call} if isinstance(call, str) else call
    return spec(kind, **call) if isinstance(call, Mapping) and call.get("name") in signatures.names(kind) else call


def own_network(function: Any) -> nn.Module | None:
    """The network that a function's example names; None if it names none, or `model` is a setting."""
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
    kind, *constraints = get_args(getattr(types, annotation))  # of Annotated[int, Ge(1)]
    low: Any = -30.0
    high: Any = 30.0
    for limit in constraints:
        if isinstance(limit, Ge):
            low, high = limit.ge, limit.ge + 5.0  # type: ignore[operator]
        elif isinstance(limit, Gt):
            low, high = limit.gt + 0.1, limit.gt + 3.0  # type: ignore[operator]
    for limit in constraints:
        if isinstance(limit, Le):
            high = limit.le
        elif isinstance(limit, Lt):
            high = limit.lt - 0.1  # type: ignore[operator]
    return kind, low, high


def renamed_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of another name with the same parameters, docstring and entry, which only calls this one."""
    parameters = inspect.signature(function).parameters.values()
    defaults, declarations, arguments = {}, [], []
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            declarations.append(f"**{parameter.name}")
            arguments.append(f"**{parameter.name}")
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in declarations:
            declarations.append("*")
        name = parameter.name
        arguments.append(f"{name}={name}" if parameter.kind is parameter.KEYWORD_ONLY else name)
        if parameter.default is not parameter.empty:
            defaults[name] = parameter.default
        declarations.append(name if parameter.default is parameter.empty else f"{name}=_defaults['{name}']")
    namespace: dict[str, Any] = {"_member": function, "_defaults": defaults}
    # by exec: the engine passes arguments by the names of parameters, which (*args, **kwargs) would hide
    exec(f"def another_name({', '.join(declarations)}):\n    return _member({', '.join(arguments)})", namespace)
    wrapper: Callable[..., Any] = namespace["another_name"]
    wrapper.__doc__, wrapper.__annotations__ = function.__doc__, function.__annotations__
    replace(entry_of(function), function=wrapper)  # a new entry registers itself: same refusals, costs and example
    return wrapper


# --- the problem --------------------------------------------------------------------------------------------------


CELL_SEED = contextvars.ContextVar("seed of the cell", default=0)


def small_problem(
    model: str | nn.Module = "small_cnn", path: Any = "loop", clients: int = 3, images_per_client: int = 4
) -> Problem:
    """Clients of random images 1 x 12 x 12 in four classes; the last has one example more than the others."""
    # one more: with equal counts, weights by count would fit any order of the clients
    count, seed = clients * images_per_client + 1, CELL_SEED.get()
    images = torch.randint(0, 256, (count, *SHAPE), generator=generator(seed, "images"), dtype=torch.uint8)
    if isinstance(model, str):
        with forked(0, "model"):
            model = MODELS[model](SHAPE, CLASSES, **SMALL.get(model, {}))
    shards = list(torch.arange(count).split([images_per_client] * (clients - 1) + [images_per_client + 1]))
    labels = torch.arange(count) % CLASSES
    problem = Problem(model, images, labels, shards, CLASSES, seed, torch.device("cpu"), path=path)
    initial_state(problem)
    return problem


@functools.cache
def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def initial_state(problem: Problem) -> State:
    """The state before training, with the weights that the model had at the first call."""
    return State(0, _weights(problem.model))


def local(**changes: Any) -> LocalTraining:
    """Plain local training, two batches a client."""
    return LocalTraining(**{"batch": 4, "lr": 0.05, "objective": standard, **changes})


def tiny_network() -> nn.Module:
    """A linear network on four averages: AutoAttack takes thousands of passes an image."""
    with forked(0, "model"):
        return nn.Sequential(nn.AvgPool2d(6), nn.Flatten(), nn.Linear(4, CLASSES))


# --- a call of each kind, as the engine makes it: nested dictionaries of tensors and numbers ----------------------


def _call_aggregator(function: Any, order: tuple[int, ...] = (2, 0, 1)) -> Any:  # no client stands at its own number
    problem = small_problem(own_network(function) or "small_cnn")
    theta = initial_state(problem).model
    updates = train_cohort(problem, theta, order, 1, local(), aggregator=function)
    return vars(aggregate(function, updates, Context(1, 3, problem, theta, {}, 0.05)))


def _call_preaggregator(function: Any) -> Any:
    uploads = torch.randn(7, 5, dtype=torch.float64, generator=generator(0, "uploads"))
    return function(uploads @ uploads.T, generator(0, "preaggregate"))


def _train(model: str | nn.Module, images_per_client: int = 4, **local_settings: Any) -> list[Update]:
    problem = small_problem(model, images_per_client=images_per_client)
    return train_cohort(problem, initial_state(problem).model, (0, 2, 1), 1, local(**local_settings))


def _call_attack(function: Any) -> Any:
    problem, model = small_problem(), (own_network(function) or tiny_network()).eval()
    x, y = problem.images[:6] / 255, problem.labels[:6]
    requested = requested_arguments(function, {"index": lambda: torch.arange(6)})
    return function(model, x, y, generator(0, "attack"), **requested).detach()


def _call_partition(function: Any) -> Any:
    labels, writers = numpy.arange(60) % 4, numpy.arange(60) // 15
    shards = function(labels, numpy_generator(0, "partition"), writers)
    return {k: torch.tensor(shard) for k, shard in enumerate(shards)}


def _among_adversaries(function: Any, malicious: bool = True) -> tuple[Problem, LocalTraining]:
    """Five clients that train adversarially, of whom 1 and 3 are malicious."""
    two = Malicious("1,3", function)
    problem = small_problem(own_network(function) or "small_cnn", clients=5, images_per_client=8)
    trained = local(objective=functools.partial(at, attack=functools.partial(fgsm, eps=8 / 255)))
    if not malicious:
        return problem, trained
    images, labels = deal(two, problem.shards, problem.images, problem.labels, CLASSES, 0)
    return replace(problem, images=images, labels=labels, malicious=two), trained


def _call_adversary(function: Any, malicious: bool = True) -> Any:
    problem, trained = _among_adversaries(function, malicious)
    if target_of(function) == "features":
        edges = small_problem(own_network(function) or "edge_resnet8", clients=5, images_per_client=8)
        edges, server = replace(edges, malicious=problem.malicious), ServerTraining(epochs=1, lr=0.01)
        (sent,) = ALGORITHMS["fedgkt"](edges, initial_state(edges), rounds=1, local=local(), server=server)
        return [replace(u, model={name: rows.float() for name, rows in u.extra.items()}) for u in sent.updates]
    theta = initial_state(problem).model
    context = Context(1, 3, problem, theta, {}, 0.05)
    return train_cohort(
        problem, theta, (2, 0, 3, 1, 4), 1, trained, aggregator=AGGREGATORS["coordinate_median"], context=context
    )


def _call_defence(function: Any) -> Any:
    problem = small_problem(own_network(function) or "vit")
    fixed = {"rounds": 1, "batch": 2, "lr": 0.1, "objective": standard}
    (trained,) = ALGORITHMS["fedsgd"](problem, initial_state(problem), defence=function, **fixed)
    return {"trained": trained.updates, "model": trained.state.model}


def _call_inversion(inversion: Any) -> Any:
    problem = small_problem(own_network(inversion) or "vit")
    fixed = {"rounds": 1, "target_clients": 2, "candidates": 4, "objective": standard, "block0": "bare"}
    (result,) = ALGORITHMS["gradient_inversion"](
        problem, initial_state(problem), defence=DEFENCES["none"], inversion=inversion, **fixed
    )
    return {"metrics": result.metrics, "artifacts": result.artifacts}


def rounds(
    problem: Problem, algorithm: Any, state: State | None = None, **sections: Any
) -> list[tuple[Any, dict[Any, float]]]:
    """The rounds of a cell as the engine runs it, each with its numbers; without seconds, which always differ."""
    held_out = (problem.images[:8].repeat(5, 1, 1, 1), problem.labels[:8].repeat(5))
    cell_setup = Setup(problem, initial_state(problem), held_out, None, [], CLASSES, {})
    unused: Any = None
    spec = {"seed": 0, "data": unused, "partition": unused, "model": unused, "algorithm": algorithm, **sections}
    return [
        (result, {(n.metric, n.client): n.value for n in numbers if n.metric != "seconds"})
        for result, numbers in experiment(cell_setup, state or cell_setup.initial, **spec)
    ]


def _call_diagnostic(function: Any) -> Any:
    fedavg = functools.partial(ALGORITHMS["fedavg"], rounds=1, aggregator=samples, local=local())
    attack = functools.partial(pgd, eps=8 / 255, step=4 / 255, steps=2)
    ((_, numbers),) = rounds(small_problem(own_network(function) or "vit"), fedavg, monitor=attack, diagnostic=function)
    return numbers


def _call_algorithm(function: Any, initial: Any = None, malicious: Malicious | None = None) -> Any:
    """The rounds on the network that its example names, else on the first small one that it accepts."""
    refused: list[Exception] = []
    example_network = own_network(function)
    for network in (*SMALL, "dual") if example_network is None else (example_network,):
        problem = small_problem(with_dual_norm(copy.deepcopy(small_problem().model)) if network == "dual" else network)
        held_out = problem.images, problem.labels
        problem = replace(problem, auxiliary=problem.images.flip(3), held_out=held_out, malicious=malicious)
        try:
            results = rounds(problem, function, initial, malicious=malicious)
        except NoHonestClient:
            raise
        except (ValueError, FatbenchError) as error:  # the network lacks parts that the algorithm needs
            refused.append(error)
        else:
            return [{**vars(result), "numbers": numbers} for result, numbers in results]
    if example_network is None:
        refused[0].add_note("an entry's example, such as {'model': {'name': 'vit'}}, names the network that it needs")
    raise refused[0]


def _call_model(function: Any) -> Any:
    with forked(0, "model"):
        network = function((3, 16, 16), CLASSES)
    return {"logits": network.eval()(torch.rand(3, 3, 16, 16, generator=generator(0, "x"))), **network.state_dict()}


CALLERS: dict[str, Callable[[Any], Any]] = {
    "Aggregator": _call_aggregator,
    "PreAggregator": _call_preaggregator,
    "Objective": lambda function: _train(own_network(function) or "small_cnn", objective=function),
    "Proximal": lambda function: _train(own_network(function) or "mlp", batch=2, proximal=function),
    "Attack": _call_attack,
    "Augment": lambda function: function(small_problem().images / 255, generator(0, "augment")),
    "Partition": _call_partition,
    "Adversary": _call_adversary,
    "Defence": _call_defence,
    "Inversion": _call_inversion,
    "Diagnostic": _call_diagnostic,
    "Algorithm": _call_algorithm,
    "Model": _call_model,
}


def equal(a: Any, b: Any, close: bool = False) -> bool:
    """Whether two results are equal to the last bit, or with `close` up to rounding."""
    if is_dataclass(a) and type(a) is type(b):
        return all(equal(getattr(a, field.name), getattr(b, field.name), close) for field in fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key], close) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(item_a, item_b, close) for item_a, item_b in zip(a, b, strict=True))
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if close:
            return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=2e-3, atol=2e-5, equal_nan=True)
        return torch.equal(a, b)
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


# --- the properties -----------------------------------------------------------------------------------------------


def same_bytes_under_another_name(kind: str, name: str) -> None:
    """A function's name changes nothing, and the same random streams give the same bytes."""
    bound = member(kind, name)
    bound_copy = functools.partial(renamed_copy(bound.func), **bound.keywords)
    message = "a second call, under another name, gives another result from the same streams"
    expect(equal(CALLERS[kind](bound), CALLERS[kind](bound_copy)), message)


def nothing_from_the_global_generators(kind: str, name: str) -> None:
    """Randomness comes from the generator that the function receives."""
    if _is_foreign(kind, name):
        return  # attacks of packages use them, inside the fork of `methods/packages.py`
    states_before = _global_states()
    CALLERS[kind](member(kind, name))
    expect(equal(states_before, _global_states()), "it draws from a global generator: use the one that it is given")


def _global_states() -> list[Any]:
    state: Any = numpy.random.get_state(legacy=False)  # noqa: NPY002
    # the position, too: numpy changes its keys only after 624 draws
    numpy_state = [state["state"]["key"].tolist(), state["state"]["pos"]]
    return [torch.get_rng_state(), numpy_state, random.getstate()]


def weights_go_with_the_client(kind: str, name: str) -> None:
    """One finite weight for each update; unless Improper, none is negative, they sum to 1 and follow the client."""
    bound = member(kind, name)
    proper = "Improper." not in (calls.function(signatures.describe(kind, name)).__doc__ or "")
    order, second_order = (2, 0, 1), (1, 2, 0)
    mixing_a, mixing_b = (_call_aggregator(bound, order=clients) for clients in (order, second_order))
    for mixing in (mixing_a, mixing_b):
        weights = [weight for values in (mixing["weights"], mixing["norm"] or ()) for weight in values]
        expect(len(mixing["weights"]) == len(order), f"{len(mixing['weights'])} weights for {len(order)} updates")
        expect(all(math.isfinite(weight) for weight in weights), f"a weight is not finite: {weights}")
        if mixing["model"] is not None:
            expect(finite(mixing["model"]), "the model that it gives is not finite")
        elif proper:
            total = math.fsum(mixing["weights"]) + mixing["broadcast"]
            expect(min(weights) >= 0 and abs(total - 1) < 1e-6, f"weights {weights} sum to {total}: say 'Improper.'")
    if not proper:
        return
    if mixing_a["model"] is not None:
        models_agree = equal(mixing_a["model"], mixing_b["model"], close=True)
        expect(models_agree, "with the clients in another order it gives another model")
        return
    mixings = (order, mixing_a), (second_order, mixing_b)
    by_client = [dict(zip(clients, mixing["weights"], strict=True)) for clients, mixing in mixings]
    close = all(math.isclose(by_client[0][k], by_client[1][k], rel_tol=1e-4, abs_tol=1e-7) for k in order)
    expect(close, f"with the clients in another order the weights are others: {by_client[0]}, {by_client[1]}")


def rows_of_finite_weights(kind: str, name: str) -> None:
    """W is (m', m) in float64 on the CPU, finite, with weights in each row; the inner products stay as they are."""
    rows, makes = _call_preaggregator(member(kind, name)), getattr(entry_of(member(kind, name)), "makes", None)
    made = 7 if makes is None else ask(makes, member(kind, name), 7)
    well_formed = tuple(rows.shape) == (made, 7) and rows.dtype == torch.float64
    expect(
        well_formed, f"W is {tuple(rows.shape)} {rows.dtype}, not ({made}, 7) torch.float64: `makes` of its entry says"
    )
    expect(bool(rows.isfinite().all()), "a row is not finite")
    gram = torch.eye(7, dtype=torch.float64)
    member(kind, name)(gram, generator(0, "preaggregate"))
    expect(torch.equal(gram, torch.eye(7, dtype=torch.float64)), "the inner products that came are changed in place")


def _flat(model: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in model.values() if value.is_floating_point()])


def a_gradient_for_every_weight(kind: str, name: str) -> None:
    """The loss is a finite scalar whose gradient reaches all parameters; correct is one bool for each example."""
    model, loss, correct = _step(member(kind, name), Passes())
    expect(loss.shape == () and bool(loss.isfinite()), f"the loss is {loss.detach()}, not one finite number")
    expect(correct.shape == (8,) and correct.dtype == torch.bool, f"correct is {tuple(correct.shape)} {correct.dtype}")
    # an inner attack differentiates with respect to images only
    expect(all(weight.grad is None for weight in model.parameters()), "gradients are left behind in the parameters")
    expect(loss.requires_grad, "the loss has no gradient")
    loss.backward()
    dead = [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    if dead and (network := own_network(member(kind, name))) is not None:  # with a layer that its output leaves out
        network(small_problem().images[:8] / 255).sum().backward()
        dead = [key for key in dead if network.get_parameter(key).grad is not None]
    expect(not dead, f"no gradient reaches {', '.join(dead)}")
    expect(any(bool(weight.grad.abs().max() > 0) for weight in model.parameters() if weight.grad is not None),
           "the gradient is zero everywhere")  # fmt: skip


class Passes:
    """Counts image passes through networks: forward by a hook, backward by a hook on the logits."""

    def __init__(self) -> None:
        self.forward = self.backward = 0

    def watch(self, model: nn.Module) -> nn.Module:
        """Count the model's passes from now on; returns the model."""
        model.register_forward_hook(self._count)
        return model

    def _count(self, module: nn.Module, inputs: Any, logits: Tensor) -> None:
        demand_logits(logits)
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
    """A network, with an objective's loss and correct predictions on eight images."""
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
    """Image passes are those that its entry states, which `fatbench plan` adds up."""
    if _is_foreign(kind, name):
        return  # what a package's attack passes depends on how many images survive
    call = calls.check(kind, spec(kind, name))
    bound, counter = calls.build(kind, call), Passes()
    if kind == "Attack":
        x, y = torch.rand(8, *SHAPE, generator=generator(0, "x")), torch.arange(8) % CLASSES
        requested = requested_arguments(bound, {"index": lambda: torch.arange(8)})
        bound(counter.watch((own_network(bound) or _network()).eval()), x, y, generator(0, "step"), **requested)
    else:
        _step(bound, counter)[1].backward()
    declared = passes(call.bound)
    forward, backward = counter.forward / 8, counter.backward / 8
    message = f"{forward:g} forward and {backward:g} backward passes an image, declared are {declared.forward:g} and"
    expect(
        (forward, backward) == (declared.forward, declared.backward),
        f"{message} {declared.backward:g} (`passes` of its entry)",
    )


def _is_foreign(kind: str, name: str) -> bool:
    return bool(calls.packages(signatures.describe(kind, name)))


def inside_ball_and_box(kind: str, name: str) -> None:
    """Adversarial images keep their shape, stay in [0, 1], and within eps where the function has one."""
    bound = member(kind, name)
    x = small_problem().images[:6] / 255
    x_adv = _call_attack(bound)
    expect(x_adv.shape == x.shape and x_adv.dtype == x.dtype, f"images become {tuple(x_adv.shape)} {x_adv.dtype}")
    expect(bool(x_adv.isfinite().all()), "an image is not finite")
    expect(float(x_adv.min()) >= 0 and float(x_adv.max()) <= 1, "an image leaves [0, 1]")
    if (eps := bound.keywords.get("eps")) is not None and facts.role({"name": name}) == "attack":
        change = (x_adv - x).flatten(1)
        distances = change.norm(dim=1) if bound.keywords.get("norm") == "L2" else change.abs().amax(1)
        largest = float(distances.max())
        expect(largest <= eps + 1e-6, f"an image is moved by {largest:.4g}, and eps is {eps:.4g}")


def disjoint_shards(kind: str, name: str) -> None:
    """Every client has int64 indices of examples that exist, and no example is dealt twice."""
    shards = list(_call_partition(member(kind, name)).values())
    indices = torch.cat(shards)
    well_formed = all(shard.dtype == torch.int64 and len(shard) for shard in shards)
    expect(well_formed, "a client has no example, or no int64 index")
    expect(len(indices.unique()) == len(indices), "an example is dealt twice")
    expect(int(indices.min()) >= 0 and int(indices.max()) < 60, "an index is not in the data")


def images_stay_images(kind: str, name: str) -> None:
    """Images keep shape and type and stay in [0, 1]; the input is not changed in place."""
    bound = member(kind, name)
    x = small_problem().images / 255
    original = x.clone()
    y = bound(x, generator(0, "augment"))
    expect(y.shape == x.shape and y.dtype == x.dtype, f"images {tuple(x.shape)} become {tuple(y.shape)} {y.dtype}")
    expect(float(y.min()) >= 0 and float(y.max()) <= 1, "an image leaves [0, 1]")
    expect(torch.equal(x, original), "the images that came are changed in place")


def the_honest_stay_honest(kind: str, name: str) -> None:
    """An adversary changes what its clients send, in the same shapes, and nothing that other clients send."""
    bound = member(kind, name)
    honest_models = {update.client: update.model for update in _call_adversary(bound, malicious=False)}
    attacked_models = {update.client: update.model for update in _call_adversary(bound)}
    for k in (0, 2, 4):
        expect(equal(honest_models[k], attacked_models[k]), f"client {k} is honest and sends something else")
    same_shapes = all(value.shape == attacked_models[1][key].shape for key, value in honest_models[1].items())
    expect(same_shapes, "what it sends has other shapes")
    distance = float((_flat(honest_models[1]) - _flat(attacked_models[1])).norm())
    # not "distance > 1e-6", which is false for an upload of NaN
    expect(not distance <= 1e-6, "it sends what an honest client sends")


def its_training_resumes_with_the_same_bytes(kind: str, name: str) -> None:
    """Under each aggregator of its plug-in, four rounds equal two, a checkpoint and two more."""
    bound, plugin = member(kind, name), signatures.describe(kind, name).plugin
    known = signatures.known_functions("Aggregator") if plugin is not None else {}
    own = [aggregator for aggregator, signature in known.items() if signature.plugin == plugin]
    for aggregator in (*own, "centred_clipping"):
        problem, trained = _among_adversaries(bound)
        rule = functools.partial(
            ALGORITHMS["fedavg"], rounds=4, local=trained, aggregator=member("Aggregator", aggregator)
        )
        uninterrupted = rounds(problem, rule, malicious=problem.malicious)
        for done in (2, 1):
            resumed = rounds(problem, rule, _stored(uninterrupted[done - 1][0].state), malicious=problem.malicious)
            same = equal([vars(result) for result, _ in uninterrupted[done:]], [vars(result) for result, _ in resumed])
            expect(same, f"under {aggregator}, after an interruption in round {done} training ends elsewhere: what it "
                   "remembers, it returns (`memory`)")  # fmt: skip


def resumes_with_the_same_bytes(kind: str, name: str) -> None:
    """Two rounds equal one round, a checkpoint and one more: what an algorithm remembers is in its state."""
    if signatures.describe(kind, name).by_name["rounds"].default is not signatures.REQUIRED:
        return
    bound = member(kind, name, rounds=2)
    uninterrupted = _call_algorithm(bound)
    resumed = _call_algorithm(bound, _stored(uninterrupted[0]["state"]))
    expect(len(resumed) == 1 and equal(uninterrupted[1], resumed[0]), "after an interruption it ends elsewhere")


def adversaries_see_the_others(kind: str, name: str) -> None:
    """A malicious client is in one call of `train_cohort` with honest ones, whom its adversary may ask for."""
    bound = member(kind, name)
    if not getattr(entry_of(bound), "aggregates", True):
        return  # no adversary reaches what its clients send
    refused = []
    for client in range(3):  # those of one group may have a call for themselves
        try:
            _call_algorithm(bound, malicious=Malicious(str(client), ADVERSARIES["ipm"]))
        except NoHonestClient as error:
            refused.append(str(error))
        else:
            return
    raise Broken(refused[0])


def its_memory_goes_through_a_checkpoint(kind: str, name: str) -> None:
    """With what is stored of its memory it goes on as with the memory itself, also among other clients."""
    bound = member(kind, name)
    problem = small_problem(own_network(bound) or "small_cnn", clients=4)
    theta, memory = initial_state(problem).model, dict[str, Any]()
    for round, cohort in enumerate(((2, 0, 1), (3, 1, 2), (0, 3, 2))):
        updates = train_cohort(problem, theta, cohort, round, local(), aggregator=bound)
        stored = _stored(State(round, theta, {"aggregator": memory} if memory else {}))
        uninterrupted, resumed = (
            aggregate(bound, updates, Context(round, 3, problem, theta, kept, 0.05))
            for kept in (memory, stored.server.get("aggregator", {}))
        )
        message = "after an interruption it gives another result: something is remembered outside what is stored"
        expect(equal(uninterrupted, resumed), message)
        memory = uninterrupted.memory
    _stored(State(3, theta, {"aggregator": memory}))


def _stored(state: State) -> State:
    """The state as a checkpoint gives it back. Raises SpecError for what none can store."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        checkpoints.demand_tensors(state)
        checkpoints.save_state(file, state)
        return checkpoints.load_state(file, "cpu")


def remembers_nothing_outside_its_state(kind: str, name: str) -> None:
    """Later calls give what the first gave: memory in a module leaks into other cells, and no checkpoint has it."""
    results = [CALLERS[kind](member(kind, name)) for _ in range(4)]
    message = "a later call gives another result from the same streams: something is remembered outside the state"
    expect(all(equal(results[0], result) for result in results[1:]), message)


def logits_and_parameters_as_declared(kind: str, name: str) -> None:
    """Logits are (B, classes) with a gradient, and the trainable parameters are as many as its entry states."""
    call = calls.check(kind, spec(kind, name))
    network = calls.build(kind, call)((3, 16, 16), CLASSES)
    for training in (False, True):  # some return more in training
        logits = demand_logits(network.train(training)(torch.rand(2, 3, 16, 16, generator=generator(0, "x"))))
        well_formed = logits.shape == (2, CLASSES) and logits.requires_grad
        expect(well_formed, f"2 images give logits {tuple(logits.shape)}, not (2, 4)")
    entry = calls.entry(call.signature)
    formula = entry.parameters if isinstance(entry, ModelEntry) else None
    declared = None if formula is None else ask(formula, call.bound, (3, 16, 16), CLASSES)
    count = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    expect(declared is None or declared == count, f"{count} parameters, declared are {declared}")


def digest(value: Any) -> str:
    """SHA-256 of a result; equal where `equal` finds two results equal to the last bit."""
    sha = hashlib.sha256()

    def take(value: Any) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            value = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, Mapping):
            value = [item for key in sorted(value, key=repr) for item in (repr(key), value[key])]
        if isinstance(value, list | tuple):
            sha.update(f"[{len(value)}".encode())
            for item in value:
                take(item)
        elif isinstance(value, Tensor):
            sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:  # of other objects the type alone: their repr has an address, which differs between processes
            plain = isinstance(value, str | int | float | complex | bytes | type(None))
            sha.update(repr(value if plain else type(value)).encode())

    take(value)
    return sha.hexdigest()


def digests(functions: Sequence[tuple[str, str]]) -> list[str]:
    """SHA-256 of each function's result after a call in another cell; of one that raises, the error as text."""
    torch.set_num_threads(1)
    results = []
    for kind, name in functions:
        try:
            token = CELL_SEED.set(1)  # another cell first: what it leaves in a module must not change the next
            try:
                CALLERS[kind](member(kind, name))
            finally:
                CELL_SEED.reset(token)
            results.append(digest(CALLERS[kind](member(kind, name))))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def in_a_fresh_process(functions: Sequence[tuple[str, str]]) -> list[str]:
    """The `digests` of another process with the same plug-ins. Broken: that process fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digests.json"  # a file: plug-ins may print to stdout
        request = json.dumps([[str(plugin) for plugin in signatures.plugins()], list(functions), str(file)])
        command = [sys.executable, "-c", "from fatbench import testing; testing._write_digests()"]
        path = os.pathsep.join(filter(None, sys.path))  # as here: plug-ins may import modules beside them
        environment = {**os.environ, "PYTHONPATH": path}
        process = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
        last_line = next(iter(process.stderr.strip().splitlines()[::-1]), "")
        expect(process.returncode == 0, f"a fresh process ends with code {process.returncode}: {last_line}")
        results: list[str] = json.loads(file.read_text())
        return results


def _write_digests() -> None:
    """The main function of the process that `in_a_fresh_process` starts; reads its request from stdin."""
    plugins, functions, file = json.load(sys.stdin)
    for plugin in plugins:
        signatures.add_plugin(Path(plugin))
    Path(file).write_text(json.dumps(digests(functions)))


def _differences_in_a_fresh_process(functions: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(kind, name) -> the reason, for functions whose result is another in a fresh process after another cell."""
    if not functions:
        return {}
    try:
        fresh_digests = in_a_fresh_process(functions)
    except Broken as error:
        return dict.fromkeys(functions, str(error))
    message = "it gives another result than here: something is remembered outside the state"
    digests_here = {function: digest(CALLERS[function[0]](member(*function))) for function in functions}
    pairs = zip(functions, fresh_digests, strict=True)
    return {function: message for function, fresh in pairs if digests_here[function] != fresh}


Property = Callable[[str, str], None]  # (kind, name); raises Broken
_ALL: tuple[Property, ...] = (same_bytes_under_another_name, nothing_from_the_global_generators)
_STATELESS = (*_ALL, remembers_nothing_outside_its_state)
PROPERTIES: dict[str, tuple[Property, ...]] = {
    "Aggregator": (*_STATELESS, its_memory_goes_through_a_checkpoint, weights_go_with_the_client),
    "PreAggregator": (*_STATELESS, rows_of_finite_weights),
    "Objective": (*_ALL, a_gradient_for_every_weight, passes_as_declared),
    "Proximal": _ALL,
    "Attack": (*_ALL, inside_ball_and_box, passes_as_declared),
    "Augment": (*_ALL, images_stay_images),
    "Partition": (*_ALL, disjoint_shards),
    "Adversary": (*_STATELESS, the_honest_stay_honest, its_training_resumes_with_the_same_bytes),
    "Defence": _ALL,
    "Inversion": _ALL,
    "Diagnostic": _ALL,
    "Algorithm": (*_STATELESS, resumes_with_the_same_bytes, adversaries_see_the_others),
    "Model": (*_ALL, logits_and_parameters_as_declared),
}


def check(file: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Test every function of a plug-in: its kind, its name, the properties that hold, and violations in words.

    Both lists are empty for a kind without properties, such as a data set.
    """
    torch.set_num_threads(1)  # for networks of a few numbers, threads only wait for one another
    results = list(_check_in_process(file))
    sound = [(kind, name) for kind, name, kept_properties, violations in results if kept_properties and not violations]
    differences = _differences_in_a_fresh_process(sound)
    for kind, name, kept_properties, violations in results:
        property_name = "same in a fresh process after another cell"
        if (kind, name) in sound:
            if difference := differences.get((kind, name)):
                violations = [f"{property_name}: {difference}"]
            else:
                kept_properties = [*kept_properties, property_name]
        yield kind.lower(), name, kept_properties, violations


def _check_in_process(file: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """As `check`, without a fresh process; kinds as the tables name them, "Aggregator"."""
    for kind in [*PROPERTIES, *(table for table in signatures.TABLES if table not in PROPERTIES)]:
        for name in signatures.names(kind):
            if signatures.describe(kind, name).plugin != file:
                continue
            kept_properties, violations = [], []
            for property in PROPERTIES.get(kind, ()):
                property_name = property.__name__.replace("_", " ")
                try:
                    property(kind, name)
                    kept_properties.append(property_name)
                except Broken as error:
                    violations.append(f"{property_name}: {error}")
                except Exception as error:
                    message = "; ".join([*str(error).splitlines()[:1], *getattr(error, "__notes__", ())])
                    frames = traceback.extract_tb(error.__traceback__)
                    line_numbers = [frame.lineno for frame in frames if Path(frame.filename) == file]
                    position = f" ({file.name}, line {line_numbers[-1]})" if line_numbers else ""
                    violations.append(f"{property_name}: {type(error).__name__}: {message}{position}")
            yield kind, name, kept_properties, violations
