"""Malicious clients: who they are, and where what they do enters a round.

| first parameter | the adversary changes | where |
|---|---|---|
| images, labels | what the client trains on | `deal`, when its data are dealt |
| loss | what its training descends; the loss that it reports stays what it was | `training` |
| update | what it sends: a vector (P,), its trained parameters less those that it received | `accepted_updates` |

An adversary is a pure function and sees what its further parameters name (`fatbench.suite.signatures`), nothing else:
they are its threat model. Whatever comes after, aggregation, drift, logs, transfers, sees what was sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.inject import asks, requested_arguments
from fatbench.engine.local import LocalTraining, trainable
from fatbench.engine.mapped import in_memory
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Problem, Tensors, Update
from fatbench.models import logit_parameters
from fatbench.suite.entry import AggregatorEntry, ask, entry_of
from fatbench.suite.types import Adversary, Clients, Objective


@dataclass(frozen=True)
class Malicious:
    """Malicious clients, the same in every round, and the attack that they make.

    clients: how many, counted from client 0, or which, such as "3,7". then: a second attack, on what the first leaves,
    such as a scaled upload after training on poisoned data.
    """

    clients: Clients
    attack: Adversary
    then: Adversary | None = None

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the malicious clients."""
        if isinstance(self.clients, int):
            return frozenset(range(self.clients))
        return frozenset(map(int, self.clients.split(",")))

    def acting(self, target: str) -> list[Callable[..., Any]]:
        """The adversaries that change what this parameter names: "images", "loss" or "update"."""
        return [
            adversary for adversary in (self.attack, self.then) if adversary is not None and asks(adversary, target)
        ]


def deal(
    malicious: Malicious, shards: Sequence[Tensor], images: Tensor, labels: Tensor, classes: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The training images (N, C, H, W) uint8 and labels (N,) with those of malicious clients changed, as copies.

    An adversary is called with a client's own (N_k, C, H, W) and (N_k,). It may ask for `classes` and `generator`.
    ValueError: there is no such client.
    """
    if strangers := [k for k in malicious.numbers if k >= len(shards)]:
        raise ValueError(f"malicious: there is no client {min(strangers)}, there are {len(shards)}")
    if malicious.acting("images"):
        images = in_memory(images)
    for adversary in malicious.acting("images"):
        for k in sorted(malicious.numbers):
            client_images, client_labels = images[shards[k]], labels[shards[k]]
            noise = functools.partial(generator, seed, "adversary", k, device=images.device)
            changed = adversary(
                client_images,
                client_labels,
                **requested_arguments(adversary, {"classes": lambda: classes, "generator": noise}),
            )
            x, y = _like(changed, client_images, client_labels)
            images = images if x is client_images else images.index_put((shards[k],), x)
            labels = labels.index_put((shards[k],), y)
    return images, labels


def training(problem: Problem, cohort: Sequence[int], locals: Mapping[int, LocalTraining]) -> dict[int, LocalTraining]:
    """What each client of the cohort does in the round, where malicious ones descend another loss."""
    settings = dict(locals)
    for adversary in problem.malicious.acting("loss") if problem.malicious is not None else ():
        for k in problem.malicious.numbers & set(cohort):
            objective = functools.partial(_descending, objective=settings[k].objective, adversary=adversary)
            settings[k] = replace(settings[k], objective=objective)
    return settings


def _descending(
    model: nn.Module, x: Tensor, y: Tensor, generator: Generator, *, objective: Objective, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """An objective with the adversary's gradient, and its own value."""
    loss, correct = objective(model, x, y, generator)
    (adversarial_loss,) = _like((adversary(loss),), loss)
    return adversarial_loss + (loss - adversarial_loss).detach(), correct


def bears(aggregator: Callable[..., Any] | None, cohort: int) -> bool:
    """Whether an aggregator with its settings says, in its entry, that it bears a malicious client."""
    if aggregator is None:
        return False
    entry = entry_of(aggregator)
    bears = entry.bears if isinstance(entry, AggregatorEntry) else None
    return bears is not None and ask(bears, aggregator, SimpleNamespace(cohort=cohort)) > 0


def accepted_updates(
    problem: Problem, starts: Mapping[int, Tensors], updates: Sequence[Update], round: int, robust: bool = False
) -> list[Update]:
    """What the server accepts: malicious clients' trained parameters replaced, uploads that are not finite left out.

    These are left out where clients are malicious, or the aggregator is `robust`, which says that it bears some. If
    none is finite, all are kept: training diverges. starts: the model that each client received. An adversary may
    ask for `others` (n, P), the updates of the round's honest clients; `broadcast` (P,), the parameters that the client
    received; `last_layer` (P,) bool, those of layers that emit logits; `malicious`, the number of malicious clients in
    the round; `round`, from 0; `generator`. If there is no other, one that asks for `others` sends what is honest.
    """
    malicious, names = problem.malicious, trainable(problem.model)
    if malicious is None:
        return _finite(updates) if robust else list(updates)
    liars = malicious.numbers & {update.client for update in updates}

    def flat(tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in names])

    def offers(k: int) -> dict[str, Callable[[], Any]]:
        last_layers = logit_parameters(problem.model)
        return {
            "others": lambda: torch.stack(
                [flat(u.model) - flat(starts[u.client]) for u in updates if u.client not in liars]
            ),
            "broadcast": lambda: flat(starts[k]),
            "last_layer": lambda: flat(
                {n: torch.full_like(starts[k][n], n in last_layers, dtype=torch.bool) for n in names}
            ),
            "malicious": lambda: len(liars),
            "round": lambda: round,
            "generator": lambda: generator(problem.seed, "adversary", round, k, device=problem.device),
        }

    def tampered(update: Update) -> Update:
        start = flat(starts[update.client])
        change = flat(update.model) - start
        for adversary in malicious.acting("update"):
            if len(liars) < len(updates) or not asks(adversary, "others"):
                (change,) = _like((adversary(change, **requested_arguments(adversary, offers(update.client))),), change)
        pieces = (start + change).split([update.model[name].numel() for name in names])
        trained = [(name, update.model[name]) for name in names]
        changed_tensors = {
            name: values.view_as(like).to(like.dtype) for (name, like), values in zip(trained, pieces, strict=True)
        }
        return replace(update, model={**update.model, **changed_tensors})

    if malicious.acting("update"):
        with torch.no_grad():
            updates = [tampered(update) if update.client in liars else update for update in updates]
    return _finite(updates)


def _finite(updates: Sequence[Update]) -> list[Update]:
    finite_updates = [update for update in updates if finite(update.model)] or list(updates)
    return [replace(update, refused=len(updates) - len(finite_updates)) for update in finite_updates]


def _like(result: Any, *expected: Tensor) -> Sequence[Tensor]:
    """What an adversary gives in place of tensors. ValueError: other than as many of the same shapes."""
    results = result if isinstance(result, tuple) else (result,)
    if [getattr(tensor, "shape", None) for tensor in results] != [tensor.shape for tensor in expected]:
        returned_shapes, expected_shapes = (
            " and ".join(
                str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in tensors
            )
            for tensors in (results, expected)
        )
        raise ValueError(f"the adversary returns {returned_shapes}, in place of {expected_shapes}")
    return results


def finite(tensors: Tensors) -> bool:
    """Whether every number of a model is finite."""
    return all(bool(torch.isfinite(value).all()) for value in tensors.values())
