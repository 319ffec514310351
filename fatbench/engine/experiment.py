"""A cell from start to end: data, shards, model, protocol, and what is measured every round.

Numbers of a round (stage `train`; `client` is set where it says per client):

| metric | what |
|---|---|
| train_loss | mean training loss over the last local epoch, clients weighted by examples; also per client |
| train_accuracy | accuracy on the training inputs (adversarial under AT), running over the round; also per client |
| holdout_accuracy | per client: accuracy under the monitor on the client's held-out share (client_holdout > 0) |
| holdout_gap | per client that took part: train_accuracy minus holdout_accuracy |
| weight | per client: the weight w_k |
| selected | per client: 1 where the rule singled the client out, else 0 |
| last_layer_cosine | per client: cosine between the layers of logits of theta^t and theta_k (P000 Eq. 3) |
| fedwavg_weight | per client: the weight of Eq. 3 at q = 1, whether the rule uses it or not |
| drift_post, drift_pre | mean L2 distance of the clients' parameters from the new, and from the broadcast model |
| grad_var | (1/m) sum_k ||g_k - mean g||^2 with g_k = theta^t - theta_k |
| natural, monitor | test accuracy, clean and under the monitor (every `monitor_every` rounds, and the last) |
| natural_loss, monitor_loss | mean cross-entropy on the same images |
| natural_class, monitor_class | accuracy by class, the class in place of a client (per_class) |
| val_natural, val_monitor, ... | the same on the validation images |
| edge_natural | clean test accuracy of the small device's own classifier, mean over devices, where a model has one |
| label_clients | round 1, the class in place of a client: how many clients hold examples of it (per_class) |
| edge_parameters, edge_flops, edge_step_flops, edge_memory | round 1: what training costs a client (`footprint`) |
| gradient_steps, forward, backward | what the round cost: optimiser steps, image passes of training |
| bytes_up, bytes_down, seconds | bytes on the wire, wall time of training |

and whatever the protocol, its rule and the probe measure besides. Where a protocol has no single global model,
accuracies are means over the clients' models, and also per client.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fatbench.engine import memory, microbatch
from fatbench.engine.accuracy import accuracy, edge_accuracy, models_of, of_client
from fatbench.engine.footprint import footprint
from fatbench.engine.local import trainable
from fatbench.engine.precision import exact
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Number, Problem, Round, State
from fatbench.engine.splits import auxiliary_images, split
from fatbench.methods.rules import last_layer_cosines
from fatbench.models import logit_parameters
from fatbench.suite.types import Attack, Augment, Count, Data, Model, Natural, Partition, Probability, Probe, Protocol

if TYPE_CHECKING:
    from fatbench.engine.fast.cells import Seat


@dataclass(frozen=True)
class Place:
    """Where a cell runs: not part of what it is."""

    data: Path
    device: torch.device
    precision: Literal["fp32", "bf16"] = "fp32"
    path: Literal["loop", "fast", "stacked"] = "fast"
    microbatch: int | None = None
    together: Seat | None = None


@dataclass(frozen=True)
class Setup:
    """A cell made ready: the problem, its initial state, the images to measure on."""

    problem: Problem
    initial: State
    test: tuple[Tensor, Tensor]  # (n, C, H, W) uint8, (n,) int64
    validation: tuple[Tensor, Tensor] | None
    held: list[Tensor]  # per client: indices of its held-out share
    classes: int
    data: dict[str, Any]  # name, variant, fingerprint: goes into the provenance


class Diverged(ArithmeticError):
    """Training produced a loss that is not a number."""


def setup(
    place: Place,
    *,
    seed: int,
    data: Callable[..., Any],
    partition: Callable[..., Any],
    model: Callable[..., Any],
    train: int | None = None,
    test: int | None = None,
    validation: int = 0,
    client_holdout: float = 0.0,
    size: int | None = None,
    augment: Callable[..., Any] | None = None,
    auxiliary: Callable[..., Any] | None = None,
    auxiliary_n: int | None = None,
    **_: Any,
) -> Setup:
    """Read the data, hold out, partition, initialise.

    MachineError: data missing or damaged; SpecError: auxiliary images that cannot be used; ValueError: no split.
    """
    exact(place.device, place.precision)
    if place.device.type == "cpu":
        memory.keep()
    dataset = data(place.data)
    chosen = split(dataset, seed, partition, train, validation, client_holdout)

    def tensors(part: str, images: Any, labels: Any, indices: Any) -> tuple[Tensor, Tensor]:
        def make() -> tuple[Tensor, Tensor]:
            chosen = torch.from_numpy(images[indices]), torch.from_numpy(labels[indices])
            return chosen[0].to(place.device), chosen[1].to(place.device, torch.int64)

        if place.together is None:
            return make()
        return place.together.shared((dataset.fingerprint, part, train, test, validation), make)

    def on_device(shards: list[Any]) -> list[Tensor]:
        return [torch.from_numpy(shard).to(place.device, torch.int64) for shard in shards]

    images, labels = tensors("train", dataset.train_images, dataset.train_labels, chosen.train)
    with forked(seed, "model"):
        network = model(dataset.shape if size is None else (dataset.shape[0], size, size), dataset.classes)
    if place.microbatch is not None:
        microbatch.bound(network, place.microbatch)
    network.to(place.device)
    unlabelled = None
    if auxiliary is not None:
        other = dataset if _same(auxiliary, data) else auxiliary(place.data)
        unlabelled = torch.from_numpy(auxiliary_images(dataset, other, train, auxiliary_n)).to(place.device)
    problem = Problem(
        network, images, labels, on_device(chosen.shards), dataset.classes, seed, place.device, place.precision,
        place.path, size, augment, unlabelled, place.together,
    )  # fmt: skip
    start = {name: value.detach().clone() for name, value in network.state_dict().items()}
    return Setup(
        problem=problem,
        initial=State(0, start),
        test=tensors("test", dataset.test_images, dataset.test_labels, slice(test)),
        validation=(
            tensors("validation", dataset.train_images, dataset.train_labels, chosen.validation) if validation else None
        ),
        held=on_device(chosen.held),
        classes=dataset.classes,
        data={"name": dataset.name, "variant": dataset.variant, "fingerprint": dataset.fingerprint},
    )


def _same(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """Whether two bound readers read the same data set."""
    return (a.func, a.keywords) == (b.func, b.keywords)  # type: ignore[attr-defined]


def experiment(
    ready: Setup,
    state: State,
    passes: tuple[float, float],
    *,
    seed: Natural,
    data: Data,
    partition: Partition,
    model: Model,
    protocol: Protocol,
    train: Count | None = None,
    test: Count | None = None,
    validation: Natural = 0,
    client_holdout: Probability = 0.0,
    monitor: Attack | None = None,
    monitor_every: Count = 1,
    monitor_n: Count | None = None,
    size: Count | None = None,
    augment: Augment | None = None,
    auxiliary: Data | None = None,
    auxiliary_n: Count | None = None,
    per_class: bool = False,
    probe: Probe | None = None,
    probe_every: Count | None = None,
) -> Iterator[tuple[Round, list[Number]]]:
    """Train a cell from `state` on: each round with its numbers. Diverged: a training loss is not finite.

    train, test: only the first N images; validation: N training images held out for the checkpoint best-val;
    client_holdout: share of each client's examples held out for per-client accuracy; monitor: the attack run on the
    first `monitor_n` test (and validation) images every `monitor_every` rounds; size: side in pixels to resize images
    to, on the device, before augmentation and attacks; augment: what training does to a batch; auxiliary: a data set
    whose first `auxiliary_n` training images the server has, unlabelled; per_class: accuracies by class too; probe:
    what else is measured when the monitor runs; probe_every: of these rounds only its multiples, and the last. `passes`
    are forward and backward image passes per training image of one local epoch.
    """
    settings = protocol.keywords  # type: ignore[attr-defined]
    rounds = settings["rounds"]
    begin = time.perf_counter()
    for result in protocol(ready.problem, state):
        for update in result.updates:
            if not math.isfinite(update.stats.loss):
                raise Diverged(
                    f"round {result.index + 1}: training loss of client {update.client} is {update.stats.loss}"
                )
        count = result.index + 1
        seconds = time.perf_counter() - begin
        numbers = [
            *_training(result, ready.problem),
            *_named(count, result.metrics),
            *_named(count, result.mixing.metrics if result.mixing else {}),
            Number("gradient_steps", result.cost.gradient_steps, count),
            Number("forward", result.cost.forward * passes[0], count),
            Number("backward", result.cost.backward * passes[1], count),
            Number("bytes_up", result.cost.bytes_up, count),
            Number("bytes_down", result.cost.bytes_down, count),
            Number("seconds", seconds, count),
        ]
        if count == 1:
            numbers += _once(ready, settings, per_class)
        if monitor is not None and (count % monitor_every == 0 or count == rounds):
            numbers += _monitor(ready, result, count, monitor, monitor_n, per_class)
            if probe is not None and (probe_every is None or count % probe_every == 0 or count == rounds):
                noise = generator(seed, "probe", count, device=ready.problem.device)
                numbers += _named(count, probe(ready.problem, result, *ready.test, monitor, noise))
        yield result, numbers
        del result  # FedGKT's features, before those of the next round are made
        begin = time.perf_counter()


def _named(count: int, metrics: Mapping[str, float | dict[int, float]]) -> Iterator[Number]:
    """Metrics as numbers of a round."""
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from (Number(name, one, count, client=k) for k, one in value.items())
        else:
            yield Number(name, value, count)


def _once(ready: Setup, settings: Mapping[str, Any], per_class: bool) -> Iterator[Number]:
    """What does not change from round to round."""
    problem = ready.problem
    adaptive = settings.get("optimiser") in ("adam", "adamw")
    moments = 2 if adaptive else int(settings.get("momentum", 0) > 0)
    yield from _named(1, footprint(problem, settings["batch"], moments=moments))
    if per_class:
        held = torch.stack([problem.labels[shard].bincount(minlength=ready.classes) > 0 for shard in problem.shards])
        yield from _named(1, {"label_clients": dict(enumerate(held.sum(0).double().tolist()))})


def _training(result: Round, problem: Problem) -> Iterator[Number]:
    """The numbers that the round itself holds."""
    count, updates = result.index + 1, result.updates
    if not updates:
        return
    total = sum(u.n for u in updates)
    yield Number("train_loss", sum(u.n * u.stats.loss for u in updates) / total, count, n=total)
    yield Number("train_accuracy", sum(u.n * u.stats.accuracy for u in updates) / total, count, n=total)
    for position, update in enumerate(updates):
        yield Number("train_loss", update.stats.loss, count, update.n, update.client)
        yield Number("train_accuracy", update.stats.accuracy, count, update.n, update.client)
        if result.mixing is not None:
            yield Number("weight", result.mixing.weights[position], count, client=update.client)
            yield Number("selected", float(position in result.mixing.selected), count, client=update.client)
    if not all(update.model for update in updates):
        return  # no client sent a model, so there is no drift
    cosines = last_layer_cosines(updates, result.broadcast, logit_parameters(problem.model))
    exponents = [math.exp(cosine) for cosine in cosines]
    for update, cosine, exponent in zip(updates, cosines, exponents, strict=True):
        yield Number("last_layer_cosine", cosine, count, client=update.client)
        yield Number("fedwavg_weight", exponent / sum(exponents), count, client=update.client)
    names = trainable(problem.model)
    before = [result.broadcast[name] for name in names]
    after = [result.state.model[name] for name in names]
    clients = [[u.model[name] for name in names] for u in updates]
    mean = [torch.stack(parts).mean(0) for parts in zip(*clients, strict=True)]
    yield Number("drift_post", sum(_distance(c, after) for c in clients) / len(clients), count)
    yield Number("drift_pre", sum(_distance(c, before) for c in clients) / len(clients), count)
    yield Number("grad_var", sum(_distance(c, mean) ** 2 for c in clients) / len(clients), count)


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """L2 distance of two lists of tensors, flattened."""
    return float(torch.stack(torch._foreach_norm(torch._foreach_sub(a, b))).double().norm())


def _monitor(ready: Setup, result: Round, count: int, monitor: Any, n: int | None, per_class: bool) -> Iterator[Number]:
    """Accuracies and losses on test and validation images, and on what clients hold out."""
    from fatbench.methods.attacks import natural

    problem = ready.problem
    models = models_of(result.state.model, result.own)
    clean_only = getattr(monitor, "func", monitor) is natural
    for prefix, held_out in (("", ready.test), ("val_", ready.validation)):
        if held_out is None:
            continue
        images, labels = held_out[0][:n], held_out[1][:n]
        found: dict[str, list[tuple[Tensor, float]]] = {}
        for metric, attack in (("natural", natural), ("monitor", monitor)):
            if metric == "monitor" and clean_only:
                found[metric] = found["natural"]
                continue
            found[metric] = [
                accuracy(problem, model, images, labels, attack, ("monitor", prefix + metric, count, *of_client(k)))
                for k, model in models.items()
            ]
        for metric, results in found.items():
            bits = torch.stack([right for right, _ in results]).double()
            yield Number(prefix + metric, float(bits.mean()), count, n=len(labels))
            yield Number(f"{prefix}{metric}_loss", sum(x for _, x in results) / len(results), count, n=len(labels))
            if result.own:
                yield from (
                    Number(prefix + metric, float(one.mean()), count, len(labels), k)
                    for k, one in zip(models, bits, strict=True)
                )
            if per_class:
                for c in range(ready.classes):
                    of_class = labels.cpu() == c
                    if here := int(of_class.sum()):
                        yield Number(f"{prefix}{metric}_class", float(bits[:, of_class].mean()), count, here, c)
    if hasattr(problem.model, "edge_logits"):
        images, labels = ready.test[0][:n], ready.test[1][:n]
        edges = [edge_accuracy(problem, model, images, labels) for model in models.values()]
        yield Number("edge_natural", sum(edges) / len(edges), count, n=len(labels))
    trained = {update.client: update.stats.accuracy for update in result.updates}
    for k, held in enumerate(ready.held):
        if len(held):
            images, labels = problem.images[held], problem.labels[held]
            model = models.get(k, result.state.model)
            right, _ = accuracy(problem, model, images, labels, monitor, ("monitor", "holdout", count, k))
            value = float(right.double().mean())
            yield Number("holdout_accuracy", value, count, n=len(held), client=k)
            if k in trained:
                yield Number("holdout_gap", trained[k] - value, count, n=len(held), client=k)


EXPERIMENTS = {"cell": experiment}
