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
| drift_post, drift_pre | mean L2 distance of the clients' parameters from the new, and from the broadcast model |
| grad_var | (1/m) sum_k ||g_k - mean g||^2 with g_k = theta^t - theta_k |
| natural, monitor | test accuracy, clean and under the monitor (every `monitor_every` rounds, and the last) |
| val_natural, val_monitor | the same on the validation images |
| gradient_steps, forward, backward | what the round cost: optimiser steps, image passes of training |
| bytes_up, bytes_down, seconds | bytes on the wire, wall time of training |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fatbench.evaluation import accuracy
from fatbench.kinds import Attack, Count, Data, Model, Natural, Partition, Probability, Protocol
from fatbench.local import trainable
from fatbench.rng import forked
from fatbench.rounds import Problem, Round, State
from fatbench.splits import split
from fatbench.store import Number


@dataclass(frozen=True)
class Place:
    """Where a cell runs: not part of what it is."""

    data: Path
    device: torch.device
    precision: Literal["fp32", "bf16"] = "fp32"
    path: Literal["loop", "fast"] = "fast"


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
    **_: Any,
) -> Setup:
    """Read the data, hold out, partition, initialise. MachineError: data missing or damaged; ValueError: no split."""
    dataset = data(place.data)
    chosen = split(dataset, seed, partition, train, validation, client_holdout)

    def tensors(indices: Any) -> tuple[Tensor, Tensor]:
        return (
            torch.from_numpy(dataset.train_images[indices]).to(place.device),
            torch.from_numpy(dataset.train_labels[indices]).to(place.device, torch.int64),
        )

    def on_device(shards: list[Any]) -> list[Tensor]:
        return [torch.from_numpy(shard).to(place.device, torch.int64) for shard in shards]

    images, labels = tensors(chosen.train)
    with forked(seed, "model"):
        network = model(dataset.shape, dataset.classes)
    network.to(place.device)
    shards = on_device(chosen.shards)
    problem = Problem(network, images, labels, shards, seed, place.device, place.precision, place.path)
    start = {name: value.detach().clone() for name, value in network.state_dict().items()}
    return Setup(
        problem=problem,
        initial=State(0, start),
        test=(
            torch.from_numpy(dataset.test_images[:test]).to(place.device),
            torch.from_numpy(dataset.test_labels[:test]).to(place.device, torch.int64),
        ),
        validation=tensors(chosen.validation) if validation else None,
        held=on_device(chosen.held),
        classes=dataset.classes,
        data={"name": dataset.name, "variant": dataset.variant, "fingerprint": dataset.fingerprint},
    )


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
) -> Iterator[tuple[Round, list[Number]]]:
    """Train a cell from `state` on: each round with its numbers. Diverged: a training loss is not finite.

    train, test: only the first N images; validation: N training images held out for the checkpoint best-val;
    client_holdout: share of each client's examples held out for per-client accuracy; monitor: the attack run on the
    first `monitor_n` test (and validation) images every `monitor_every` rounds. `passes` are forward and backward
    image passes per training image of one local epoch.
    """
    rounds = protocol.keywords["rounds"]  # type: ignore[attr-defined]
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
            *_training(result, trainable(ready.problem.model)),
            Number("gradient_steps", result.cost.gradient_steps, count),
            Number("forward", result.cost.forward * passes[0], count),
            Number("backward", result.cost.backward * passes[1], count),
            Number("bytes_up", result.cost.bytes_up, count),
            Number("bytes_down", result.cost.bytes_down, count),
            Number("seconds", seconds, count),
        ]
        if monitor is not None and (count % monitor_every == 0 or count == rounds):
            numbers += _monitor(ready, result, count, monitor, monitor_n)
        yield result, numbers
        begin = time.perf_counter()


def _training(result: Round, names: list[str]) -> Iterator[Number]:
    """The numbers that the round itself holds."""
    count, updates = result.index + 1, result.updates
    total = sum(u.n for u in updates)
    yield Number("train_loss", sum(u.n * u.stats.loss for u in updates) / total, count, n=total)
    yield Number("train_accuracy", sum(u.n * u.stats.accuracy for u in updates) / total, count, n=total)
    for position, update in enumerate(updates):
        yield Number("train_loss", update.stats.loss, count, update.n, update.client)
        yield Number("train_accuracy", update.stats.accuracy, count, update.n, update.client)
        if result.mixing is not None:
            yield Number("weight", result.mixing.weights[position], count, client=update.client)
            yield Number("selected", float(position in result.mixing.selected), count, client=update.client)
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


def _monitor(ready: Setup, result: Round, count: int, monitor: Any, n: int | None) -> Iterator[Number]:
    from fatbench.attacks import natural

    model = result.state.model
    trained = {update.client: update.stats.accuracy for update in result.updates}
    for prefix, held_out in (("", ready.test), ("val_", ready.validation)):
        if held_out is None:
            continue
        images, labels = held_out[0][:n], held_out[1][:n]
        for metric, attack in (("natural", natural), ("monitor", monitor)):
            key = ("monitor", prefix + metric, count)
            value = accuracy(ready.problem, model, images, labels, attack, key)
            yield Number(prefix + metric, value, count, n=len(labels))
    for k, held in enumerate(ready.held):
        if len(held):
            images, labels = ready.problem.images[held], ready.problem.labels[held]
            value = accuracy(ready.problem, model, images, labels, monitor, ("monitor", "holdout", count, k))
            yield Number("holdout_accuracy", value, count, n=len(held), client=k)
            if k in trained:
                yield Number("holdout_gap", trained[k] - value, count, n=len(held), client=k)


EXPERIMENTS = {"cell": experiment}
