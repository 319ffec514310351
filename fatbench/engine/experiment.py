"""Runs a cell from a state to its last round: the algorithm yields rounds, and each of them is measured."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fatbench.engine import measures
from fatbench.engine.accuracy import accuracy, models_of, most_frequent, natural
from fatbench.engine.cohort import TooFewClients
from fatbench.engine.local import pixels
from fatbench.engine.malicious import AdversaryMemory, finite
from fatbench.engine.mixing import completed
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Cost, Number, Problem, Round, State, Tensors
from fatbench.engine.setup import Setup
from fatbench.errors import SpecError, shown
from fatbench.suite.entry import AlgorithmEntry, Entry, ask, entry_of
from fatbench.suite.types import (
    Algorithm,
    Attack,
    Augment,
    Availability,
    Count,
    Data,
    Diagnostic,
    Malicious,
    Model,
    Natural,
    NonNegative,
    Partition,
    Probability,
)


class Diverged(ArithmeticError):
    """Training gave a model that is not finite."""


def experiment(
    ready: Setup,
    state: State,
    *,
    seed: Natural,
    data: Data,
    partition: Partition,
    model: Model,
    algorithm: Algorithm,
    train: Count | None = None,
    train_from: Natural = 0,
    test: Count | None = None,
    validation: Natural = 0,
    client_holdout: Probability = 0.0,
    unseen: NonNegative = 0.0,
    monitor: Attack | None = None,
    monitor_every: Count = 1,
    monitor_n: Count | None = None,
    size: Count | None = None,
    augment: Augment | None = None,
    auxiliary: Data | None = None,
    auxiliary_n: Count | None = None,
    per_class: bool = False,
    diagnostic: Diagnostic | None = None,
    diagnostic_every: Count | None = None,
    malicious: Malicious | None = None,
    availability: Availability | None = None,
) -> Iterator[tuple[Round, list[Number]]]:
    """Train a cell from `state` on; yield each round with its numbers.

    train, test: only the first N images; train_from: skip the first N training images, so that cells need not share
    images; validation: N training images held out for the checkpoint best-val; client_holdout: fraction of each
    client's examples held out for its accuracy, under the monitor and clean; unseen: so many clients, or a fraction of
    them, never train; monitor: the attack run on the first
    `monitor_n` test (and validation) images every `monitor_every` rounds; size: side in pixels to resize images to, on
    the device, before augmentation and attacks; augment: what training does to a batch; auxiliary: a data set whose
    first `auxiliary_n` training images the server has, unlabelled; per_class: also accuracies by class; diagnostic: a
    further measurement when the monitor runs; diagnostic_every: only in multiples of this round, and in the last;
    malicious: clients that deviate; availability: clients that are away.

    A number that is not finite is left out; the metric `doubt_..._is_not_finite` says so. Raises Diverged if a training
    loss is not finite and no more is the model. With malicious clients, divergence is a result: see `_is_broken`.
    """
    settings = algorithm.keywords  # type: ignore[attr-defined]
    rounds = settings["rounds"]
    _refuse_clients_without_images(ready.problem, algorithm)
    _refuse_batches_of_one(ready.problem, algorithm)
    # before there are uploads in memory: counting takes a pass of three images
    first_round_numbers = [] if state.round else list(measures.constant_numbers(ready, settings, per_class))
    start_time = time.perf_counter()
    last_round: tuple[Round, list[Number]] | None = None
    # what adversaries remember is no part of the state that an algorithm makes anew in every round
    memory = AdversaryMemory(state.server.get("adversary", {}))
    engines = {"adversary"} if availability is None else {"adversary", DEPLOYED}
    own_state = replace(state, server={name: kept for name, kept in state.server.items() if name not in engines})
    own = {} if availability is None else {int(k): tensors for k, tensors in state.server.get(DEPLOYED, {}).items()}
    for algorithm_round in _rounds(algorithm, replace(ready.problem, adversary=memory), own_state, own):
        # measures look at whole models, as they were trained
        trained = [replace(update, sent=None) for update in algorithm_round.updates]
        result = replace(algorithm_round, updates=completed(trained, algorithm_round.broadcast))
        if memory.kept:
            server = {**result.state.server, "adversary": memory.kept}
            result = replace(result, state=replace(result.state, server=server))
        if availability is not None and result.own:  # a round without clients has the models of the one before
            server = {**result.state.server, DEPLOYED: {str(k): tensors for k, tensors in result.own.items()}}
            result = replace(result, state=replace(result.state, server=server))
        count = result.index + 1
        if malicious is None:
            _demand_finite(result)
        seconds = time.perf_counter() - start_time
        numbers = [
            *measures.training(result, ready.problem),
            *measures.metric_numbers(count, result.metrics),
            *measures.metric_numbers(count, result.mixing.metrics if result.mixing else {}),
            *(Number(name, spent, count) for name, spent in vars(result.cost).items()),
            Number("seconds", seconds, count),
        ]
        if count == 1:
            numbers += first_round_numbers
        is_last = result.last or count == rounds
        if monitor is not None and (count % monitor_every == 0 or is_last):
            numbers += measures.monitored(ready, result, count, monitor, monitor_n, per_class)
            if diagnostic is not None and (diagnostic_every is None or count % diagnostic_every == 0 or is_last):
                noise = generator(seed, "probe", count, device=ready.problem.device)
                diagnostics = diagnostic(ready.problem, result, *ready.test, monitor, noise)
                tensors = {name: value for name, value in diagnostics.items() if isinstance(value, Tensor)}
                numbers += measures.metric_numbers(
                    count, {name: diagnostics[name] for name in diagnostics if name not in tensors}
                )
                result = replace(result, artifacts={**result.artifacts, **tensors})
        if malicious is not None and _is_broken(ready, result, numbers, is_last, malicious.numbers, monitor_n):
            # counted as the last round, so that every evaluation of it is answered
            yield replace(result, index=rounds - 1), _diverged(ready, count, rounds, monitor is not None, monitor_n)
            return
        numbers = _left_out(numbers, count)
        if availability is not None:
            numbers.append(Number("took_part", len(result.updates), count))
            if not result.updates:
                numbers.append(Number("doubt_too_few_clients_took_part", 1.0, count))
        refused = max((update.refused for update in result.updates), default=0)
        if refused or malicious is not None:
            numbers.append(Number("uploads_refused", refused, count))
        if malicious is not None:
            numbers.append(Number("malicious", memory.malicious, count))
        if result.last and count < rounds:  # in one step, so that no interruption comes between
            numbers += _numbers_after_end(ready, result, numbers, rounds, monitor, monitor_n, per_class)
            yield replace(result, index=rounds - 1), numbers
            return
        yield result, numbers
        last_round = replace(result, broadcast={}, updates=[], mixing=None, artifacts={}), numbers
        del algorithm_round, result  # frees the uploads before those of the next round are made
        start_time = time.perf_counter()  # what the caller does with a round is not training
    if last_round is None and state.round < rounds:
        if not state.round or (getattr(entry_of(algorithm), "deploys", False) and not own):
            raise SpecError(
                f"the algorithm yields no round after round {state.round} of {rounds}; one that ends earlier says so "
                "in its Round: last=True"
            )
        last_round = Round(state.round - 1, {}, [], None, state, Cost(), own=own), []  # cut after what was its last
    if last_round is not None and last_round[0].index + 1 < rounds:
        yield (
            replace(last_round[0], index=rounds - 1),
            _numbers_after_end(ready, *last_round, rounds, monitor, monitor_n, per_class),
        )


def _rounds(algorithm: Algorithm, problem: Problem, state: State, own: dict[int, Tensors]) -> Iterator[Round]:
    """The algorithm's rounds. One with too few clients keeps all that there is, and the algorithm goes on after it."""
    rounds = algorithm.keywords["rounds"]  # type: ignore[attr-defined]
    while state.round < rounds:
        try:
            for result in algorithm(problem, state):
                state, own = result.state, result.own
                yield result
                del result  # frees the uploads
            return
        except TooFewClients:
            start, state, problem.adversary.malicious = state.model, replace(state, round=state.round + 1), 0
            yield Round(state.round - 1, start, [], None, state, Cost(), own=own)


DEPLOYED = "deployed"  # in a state: `Round.own`
COSTS = ("forward", "backward", "gradient_steps", "bytes_up", "bytes_down", "seconds")


def _numbers_after_end(
    ready: Setup,
    last_round: Round,
    last_numbers: list[Number],
    rounds: int,
    monitor: Attack | None,
    n: int | None,
    per_class: bool,
) -> list[Number]:
    """The numbers of round `rounds` if the algorithm ended in an earlier one: its numbers again, at no cost.

    The metric `ended` holds the round in which it ended.
    """
    count = last_round.index + 1
    numbers = [Number(name, 0.0, rounds) for name in COSTS] + [Number("ended", count, rounds)]
    numbers += [
        replace(number, round=rounds) for number in last_numbers if number.metric not in (*COSTS, "uploads_refused")
    ]
    if monitor is not None and not any(number.metric == "natural" for number in last_numbers):
        numbers += measures.monitored(ready, last_round, rounds, monitor, n, per_class)
    return numbers


def _refuse_clients_without_images(problem: Problem, algorithm: Any) -> None:
    """Raise SpecError if a client has no images and the algorithm needs everybody in every round."""
    empty = [k for k, shard in enumerate(problem.shards) if not len(shard)]
    while algorithm is not None and "participation" not in algorithm.keywords:
        inner = (value for value in algorithm.keywords.values() if "rounds" in getattr(value, "keywords", {}))
        algorithm = next(inner, None)
    if empty and (algorithm is None or len(empty) == len(problem.shards)):
        raise SpecError(f"partition: clients {shown(empty)} have no training images, and all train in every round")


def _refuse_batches_of_one(problem: Problem, algorithm: Callable[..., Any]) -> None:
    """Raise SpecError if a client's last batch has one example and the network cannot train on one."""
    entry, batch = entry_of(algorithm), getattr(algorithm.keywords.get("local"), "batch", None)  # type: ignore[attr-defined]
    # 1 % batch: with batches of one, every batch is one
    sizes = {k: len(shard) for k, shard in enumerate(problem.shards) if len(shard)}
    affected_clients = [k for k, size in sizes.items() if batch and size % batch == 1 % batch]
    if isinstance(entry, AlgorithmEntry) and entry.last_batch is not None:  # clients do not train on shards
        affected_clients, batch = [0] if ask(entry.last_batch, algorithm) == 1 else [], batch or 1
    if not affected_clients:
        return
    network = copy.deepcopy(problem.model).train()  # the pass would change running statistics
    try:
        with torch.no_grad(), forked(0, "one", device=problem.device):
            network(pixels(problem, problem.images[problem.shards[affected_clients[0]][:1]]))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):  # torch's words of batch normalisation
            raise
        clients = (
            f"client {affected_clients[0]}"
            if len(affected_clients) == 1
            else f"{len(affected_clients)} clients, such as {affected_clients[0]},"
        )
        raise SpecError(
            f"local.batch: {batch}: the last batch of {clients} has one example, and batch normalisation needs two: "
            "change 'batch', 'train' or the number of clients"
        ) from None


def _demand_finite(result: Round) -> None:
    """Raise Diverged if a client's training loss is not finite, and neither is a model of the round."""
    losses = {update.client: update.stats.loss for update in result.updates}
    client = next((client for client, loss in losses.items() if not math.isfinite(loss)), None)
    if client is not None and not all(map(finite, models_of(result.state.model, result.own).values())):
        raise Diverged(f"round {result.index + 1}: training loss of client {client} is {losses[client]}")


def _is_broken(
    ready: Setup, result: Round, numbers: list[Number], last: bool, malicious: Collection[int], n: int | None
) -> bool:
    """Whether training among `malicious` clients has diverged: the model is not finite, or its loss is not a number.

    The loss is that on the first `n` clean test images. With models of clients, all of honest ones must be so. What one
    client sends, or measures, decides nothing.
    """
    models = models_of(result.state.model, result.own)
    honest_models = [model for k, model in models.items() if k not in malicious] or list(models.values())
    metrics = {number.metric for number in numbers}
    is_unknown = "natural_loss" not in metrics and (last or "natural" in metrics)
    images, labels = ready.test[0][:n], ready.test[1][:n]

    def breaks(model: Tensors) -> bool:
        if not finite(model):
            return True
        key = ("diverged", result.index)
        return is_unknown and math.isnan(accuracy(ready.problem, model, images, labels, natural, key)[1])

    return all(map(breaks, honest_models))


def _left_out(numbers: Sequence[Number], count: int) -> list[Number]:
    """The numbers of round `count` without those that are not finite, and a doubt for each metric of these."""
    finite_numbers = [number for number in numbers if math.isfinite(number.value)]
    metrics = dict.fromkeys(number.metric for number in numbers if not math.isfinite(number.value))
    return [*finite_numbers, *(Number(f"doubt_{metric}_is_not_finite", 1.0, count) for metric in metrics)]


def _diverged(ready: Setup, round: int, rounds: int, monitored: bool, n: int | None) -> list[Number]:
    """The numbers of the last round of a training that malicious clients made diverge in `round`: chance.

    Under every attack its model is taken to answer with the most frequent class of the test images
    (`accuracy.most_frequent`). The metric `diverged` holds the round.
    """
    numbers = [*(Number(name, 0.0, rounds) for name in COSTS), Number("diverged", round, rounds)]
    for prefix, held_out in (("", ready.test), ("val_", ready.validation)):
        if monitored and held_out is not None:
            correct = most_frequent(held_out[1][:n])
            value = float(correct.double().mean())
            numbers += [Number(prefix + metric, value, rounds, n=len(correct)) for metric in ("natural", "monitor")]
    return numbers


EXPERIMENTS = {
    "cell": Entry(
        experiment,
        fractions=(
            "train_accuracy", "holdout_accuracy", "holdout_natural", "holdout_gap", "natural", "monitor", "val_natural",
            "val_monitor", "natural_class", "monitor_class", "val_natural_class", "val_monitor_class", "edge_natural",
        ),
    )
}  # fmt: skip
