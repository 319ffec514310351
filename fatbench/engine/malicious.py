"""Malicious clients: who they are, and where their attack enters a round.

| first parameter | the adversary changes | where |
|---|---|---|
| images, labels | what the client trains on | `deal`, when its data are dealt |
| loss | what its training descends; the loss that it reports stays what it was | `training` |
| update | what it sends: a vector (P,), its trained parameters less those that it received | `accepted_updates` |

An adversary is a pure function. It sees only what its further parameters name (`fatbench.suite.signatures`): they are
its threat model. All that comes later (aggregation, drift, logs, transfers) sees what was sent, not what was trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
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
from fatbench.errors import SpecError
from fatbench.models import logit_parameters
from fatbench.suite.entry import AggregatorEntry, ask, entry_of
from fatbench.suite.types import Adversary, Clients, Objective


@dataclass(frozen=True)
class Malicious:
    """Malicious clients, the same in every round, and the attack that they make.

    clients: their number, counted from client 0, or a list such as "3,7". then: a second attack, applied after the
    first, such as scaling the upload after training on poisoned data.
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

    An adversary is called with one client's (N_k, C, H, W) and (N_k,). It may ask for `classes` and `generator`.
    Raises ValueError if a malicious client does not exist.
    """
    if unknown_clients := [k for k in malicious.numbers if k >= len(shards)]:
        raise ValueError(
            f"malicious: client {min(unknown_clients)} does not exist, the {len(shards)} clients count from 0"
        )
    if malicious.acting("images"):
        images = in_memory(images)
    for adversary in malicious.acting("images"):
        for k in sorted(malicious.numbers):
            client_images, client_labels = images[shards[k]], labels[shards[k]]
            # a stream a client: whom else the attack has does not change its draws
            noise = functools.partial(generator, seed, "adversary", k, device=images.device)
            changed = adversary(
                client_images,
                client_labels,
                **requested_arguments(adversary, {"classes": lambda: classes, "generator": noise}),
            )
            x, y = _like(changed, client_images, client_labels)
            # Unchanged images are not copied: they may be mapped from a file larger than the memory.
            images = images if x is client_images else images.index_put((shards[k],), x)
            labels = labels.index_put((shards[k],), y)
    return images, labels


def local_settings(
    problem: Problem, cohort: Sequence[int], locals: Mapping[int, LocalTraining]
) -> dict[int, LocalTraining]:
    """Each client's local training, with the adversary's loss in that of malicious clients."""
    settings = dict(locals)
    for adversary in problem.malicious.acting("loss") if problem.malicious is not None else ():
        for k in problem.malicious.numbers & set(cohort):
            objective = functools.partial(_adversarial_objective, objective=settings[k].objective, adversary=adversary)
            settings[k] = replace(settings[k], objective=objective)
    return settings


def _adversarial_objective(
    model: nn.Module, x: Tensor, y: Tensor, generator: Generator, *, objective: Objective, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """The objective's value with the gradient of the adversary's loss."""
    loss, correct = objective(model, x, y, generator)
    (adversarial_loss,) = _like((adversary(loss),), loss)
    # the value of `loss`, so that reports look honest
    return adversarial_loss + (loss - adversarial_loss).detach(), correct


class NoHonestClient(SpecError):
    """An adversary is to see the honest clients of a call that has none."""


def demand_honest_client(problem: Problem, cohort: Collection[int], round: int) -> None:
    """Raise NoHonestClient if only malicious clients are in a call, and what they send depends on the others."""
    malicious = problem.malicious
    honest = len(problem.shards) - len(malicious.numbers) if malicious is not None else 0
    if malicious is None or not cohort or not honest or not malicious.numbers.issuperset(cohort):
        return
    for adversary in malicious.acting("update"):
        if wanted := [name for name in ("others", "malicious") if asks(adversary, name)]:
            raise NoHonestClient(
                f"train_cohort of round {round + 1} is called with the malicious clients {list(cohort)} alone, and "
                f"their adversary {entry_of(adversary).function.__name__} asks for '{wanted[0]}', which are those of "
                "the same call: call it once a round, with all clients that take part ('locals', 'tensors_by_client', "
                "'gradient_shift' say in what one differs)"
            )


def tolerates_one(aggregator: Callable[..., Any] | None, cohort: int) -> bool:
    """Whether an aggregator's entry says that, with these settings, it tolerates at least one malicious client."""
    if aggregator is None:
        return False
    entry = entry_of(aggregator)
    tolerated = entry.bears if isinstance(entry, AggregatorEntry) else None
    return tolerated is not None and (ask(tolerated, aggregator, SimpleNamespace(cohort=cohort)) or 0) > 0


def accepted_updates(
    problem: Problem, start_models: Mapping[int, Tensors], updates: Sequence[Update], round: int, robust: bool = False
) -> list[Update]:
    """The updates that the server accepts: malicious ones tampered with, those that are not finite left out.

    Updates that are not finite are left out only if some clients are malicious or the aggregator is `robust`; if none
    is finite, all are kept and training diverges. start_models: the model that each client received. An adversary may
    ask for `others` (n, P), the updates of the round's honest clients; `broadcast` (P,), the parameters that the client
    received; `last_layer` (P,) bool, the parameters of layers that emit logits; `malicious`, the number of malicious
    clients in the round; `round`, from 0; `generator`. Where chance draws no honest client, an adversary that asks for
    `others` sends the honest update.
    """
    malicious, names = problem.malicious, trainable(problem.model)
    if malicious is None:
        return finite_updates(updates) if robust else list(updates)
    malicious_clients = malicious.numbers & {update.client for update in updates}

    def flat(tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in names])

    def offers(k: int) -> dict[str, Callable[[], Any]]:
        last_layers = logit_parameters(problem.model)
        return {
            "others": lambda: torch.stack(
                [flat(u.model) - flat(start_models[u.client]) for u in updates if u.client not in malicious_clients]
            ),
            "broadcast": lambda: flat(start_models[k]),
            "last_layer": lambda: flat(
                {n: torch.full_like(start_models[k][n], n in last_layers, dtype=torch.bool) for n in names}
            ),
            "malicious": lambda: len(malicious_clients),
            "round": lambda: round,
            "generator": lambda: generator(problem.seed, "adversary", round, k, device=problem.device),
        }

    def tampered(update: Update) -> Update:
        start = flat(start_models[update.client])
        change = flat(update.model) - start
        for adversary in malicious.acting("update"):
            # without honest clients there is nothing to imitate
            if len(malicious_clients) < len(updates) or not asks(adversary, "others"):
                (change,) = _like((adversary(change, **requested_arguments(adversary, offers(update.client))),), change)
        pieces = (start + change).split([update.model[name].numel() for name in names])
        trained = [(name, update.model[name]) for name in names]
        changed_tensors = {
            name: values.view_as(like).to(like.dtype) for (name, like), values in zip(trained, pieces, strict=True)
        }
        return replace(update, model={**update.model, **changed_tensors})

    if malicious.acting("update"):
        with torch.no_grad():
            updates = [tampered(update) if update.client in malicious_clients else update for update in updates]
    return finite_updates(updates)


def finite_updates(updates: Sequence[Update]) -> list[Update]:
    """The updates that are finite, each with the number of the others; all if none is, so that training diverges."""
    kept_updates = [update for update in updates if finite(update.model)] or list(updates)
    return [replace(update, refused=update.refused + len(updates) - len(kept_updates)) for update in kept_updates]


def _like(result: Any, *expected: Tensor) -> Sequence[Tensor]:
    """An adversary's result as a tuple. Raises ValueError unless it has the number and shapes of `expected`."""
    results = result if isinstance(result, tuple) else (result,)
    if [getattr(tensor, "shape", None) for tensor in results] != [tensor.shape for tensor in expected]:
        returned_shapes, expected_shapes = (
            " and ".join(
                str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in tensors
            )
            for tensors in (results, expected)
        )
        raise ValueError(f"the adversary returns {returned_shapes}, expected {expected_shapes}")
    return results


def finite(tensors: Tensors) -> bool:
    """Whether every number of a model is finite."""
    return all(bool(torch.isfinite(value).all()) for value in tensors.values())
