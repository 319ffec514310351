"""Malicious clients: who they are, and where their attack enters a round.

| first parameter | the adversary changes | where |
|---|---|---|
| images, labels | what the client trains on | `deal`, when its data are dealt |
| loss | what its training descends; the loss that it reports stays what it was | `local_settings` |
| objective | its whole objective; what it returns is also what the client reports | `local_settings` |
| update | what it sends: a vector (P,), its trained parameters less those that it received | `accepted_updates` |
| features, answers, labels | what it sends of its examples between edge and server | `poisoned_rows` |
| updates | what all malicious clients of a round send, (f, P), in the order of their numbers: they collude | the same |

An adversary is a pure function. It sees only what its further parameters name (`fatbench.suite.signatures`): they are
its threat model. What one of `updates` remembers, the engine keeps (`AdversaryMemory`). All that comes later
(aggregation, drift, logs, transfers) sees what was sent, not what was trained.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.engine.gradients import cross_entropy, gradient_of, predict
from fatbench.engine.inject import asks, requested_arguments
from fatbench.engine.local import LocalTraining, load, pixels, trainable
from fatbench.engine.mapped import in_memory
from fatbench.engine.mixing import completed
from fatbench.engine.outcomes import ball
from fatbench.engine.randomness import generator, numpy_generator, stream
from fatbench.engine.rounds import Context, Memory, Problem, Tensors, Update
from fatbench.errors import SpecError
from fatbench.models import logit_parameters
from fatbench.suite.entry import AggregatorEntry, Entry, Passes, ask, entry_of, passes
from fatbench.suite.types import Adversary, Clients, Natural, Objective

# (the updates of a round, what the server knows) -> the state_dict of theta^{t+1}; it keeps nothing
Rows = tuple[Tensor, Tensor, Tensor]  # features, answers and labels of a client's examples
Server = Callable[[list[Update], Context], Tensors]
SEEN_IMAGES = 500  # of the malicious clients', on which they measure robust accuracy
OF_OTHERS = ("others", "honest", "malicious", "cohort", "aggregate")  # what needs the whole round


@dataclass(frozen=True)
class Malicious:
    """Malicious clients and the attack that they make.

    clients: their number, counted from client 0, or a list such as "3,7". then: a second attack, applied after the
    first, such as scaling the upload after training on poisoned data. drawn: "each_round" draws `clients` of each
    round's clients anew. start: rounds before this one, from 0, are honest. knows: "own" shows adversaries the honest
    updates of the malicious clients themselves in place of the others'.
    """

    clients: Clients
    attack: Adversary
    then: Adversary | None = None
    drawn: Literal["fixed", "each_round"] = "fixed"
    start: Natural = 0
    knows: Literal["others", "own"] = "others"

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the clients that are always malicious: none if they are drawn in each round."""
        if self.drawn == "each_round":
            return frozenset()
        if isinstance(self.clients, int):
            return frozenset(range(self.clients))
        return frozenset(map(int, self.clients.split(",")))

    def among(self, cohort: Collection[int], seed: int, round: int) -> frozenset[int]:
        """The clients of a round's cohort that are malicious."""
        if round < self.start:
            return frozenset()
        if self.drawn == "fixed":
            return self.numbers & set(cohort)
        assert isinstance(self.clients, int)
        drawn = numpy_generator(seed, "malicious", round).permutation(sorted(cohort))
        return frozenset(drawn[: self.clients].tolist())

    @property
    def adversaries(self) -> dict[str, Adversary]:
        """The adversaries, by the name of the setting."""
        both = {"attack": self.attack, "then": self.then}
        return {name: adversary for name, adversary in both.items() if adversary is not None}

    def acting(self, *targets: str) -> list[Callable[..., Any]]:
        """The adversaries that change what one of these first parameters names."""
        return [adversary for adversary in self.adversaries.values() if target_of(adversary) in targets]


@dataclass
class AdversaryMemory:
    """What adversaries remember of a training, by setting ("attack", "then"), and the round in which each was asked."""

    kept: Memory = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    malicious: int = 0  # clients of the last round


def target_of(adversary: Callable[..., Any]) -> str:
    """The first parameter of an adversary, which names what it changes."""
    function = getattr(adversary, "func", adversary)
    return next(iter(inspect.signature(function).parameters))


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
        for k in sorted(k for k in malicious.numbers if len(shards[k])):
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
    problem: Problem, cohort: Sequence[int], round: int, locals: Mapping[int, LocalTraining]
) -> dict[int, LocalTraining]:
    """Each client's local training, with the adversary's loss or objective in that of malicious clients."""
    settings, malicious = dict(locals), problem.malicious
    for adversary in malicious.acting("loss", "objective") if malicious is not None else ():
        wrap = _with_loss if target_of(adversary) == "loss" else _other_objective
        knowing = functools.partial(adversary, round=round) if asks(adversary, "round") else adversary
        for k in malicious.among(cohort, problem.seed, round):
            objective = functools.partial(wrap, objective=settings[k].objective, adversary=knowing)
            settings[k] = replace(settings[k], objective=objective)
    return settings


def _with_loss(
    model: nn.Module, x: Tensor, y: Tensor, generator: Generator, *, objective: Objective, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """The objective's value with the gradient of the adversary's loss."""
    loss, correct = objective(model, x, y, generator)
    (adversarial_loss,) = _like((adversary(loss),), loss)
    # the value of `loss`, so that reports look honest
    return adversarial_loss + (loss - adversarial_loss).detach(), correct


def _other_objective(
    model: nn.Module, x: Tensor, y: Tensor, generator: Generator, *, objective: Objective, adversary: Adversary
) -> tuple[Tensor, Tensor]:
    """What an adversary makes of the honest objective."""
    loss, correct = adversary(objective, model, x, y, generator)
    return loss, correct


def _passes_of_the_adversary(*, objective: Objective, adversary: Adversary) -> Passes:
    own = entry_of(adversary).passes
    return passes(objective) if own is None else passes(adversary)


Entry(_with_loss, passes=_passes_of_the_adversary)
Entry(_other_objective, passes=_passes_of_the_adversary)


class NoHonestClient(SpecError):
    """An adversary is to see the honest clients of a call that has none."""


def demand_honest_client(problem: Problem, cohort: Collection[int], round: int) -> None:
    """Raise NoHonestClient if only malicious clients are in a call, and what they send depends on the others."""
    malicious = problem.malicious
    if malicious is None or not cohort or len(malicious.numbers) == len(problem.shards):
        return
    if malicious.among(cohort, problem.seed, round) != set(cohort):
        return
    for adversary in malicious.acting("update", "updates"):
        if wanted := [name for name in OF_OTHERS if asks(adversary, name)]:
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
    problem: Problem,
    start_models: Mapping[int, Tensors],
    updates: Sequence[Update],
    round: int,
    *,
    robust: bool = False,
    objective: Objective | None = None,
    server: Server | None = None,
    context: Context | None = None,
) -> list[Update]:
    """The updates that the server accepts: malicious ones tampered with, those that are not finite left out.

    Updates that are not finite are left out only if some clients are malicious or the aggregator is `robust`; if none
    is finite, all are kept and training diverges. start_models: the model that each client received. objective: the
    honest one of the round. server, context: what the server will do with the updates. What an adversary may ask for is
    in docs/functions.md. Where chance draws no honest client, one that asks for others sends the honest update.
    """
    malicious = problem.malicious
    if malicious is None:
        return finite_updates(updates) if robust else list(updates)
    acting = malicious.among([update.client for update in updates], problem.seed, round)
    names = [n for n in trainable(problem.model) if any(u.sent is None or n in u.sent for u in updates)]
    memory = problem.adversary or AdversaryMemory()
    memory.malicious = len(acting)
    if acting and names and malicious.acting("update", "updates"):
        with torch.no_grad():
            upload = _Upload(problem, start_models, updates, round, acting, objective, server, context, names)
            updates = upload.sent(memory)
    return finite_updates(updates)


@dataclass(frozen=True)
class _Upload:
    """The uploads of a round, and what adversaries may know of them."""

    problem: Problem
    start_models: Mapping[int, Tensors]
    updates: Sequence[Update]
    round: int
    acting: frozenset[int]
    objective: Objective | None
    server: Server | None
    context: Context | None
    names: Sequence[str]  # of the parameters that any client sends

    def sent(self, memory: AdversaryMemory) -> list[Update]:
        """The updates after all adversaries, in their order."""
        changes = {u.client: self._change(u) for u in self.updates if u.client in self.acting}
        trained = dict(changes)
        for name, adversary in self.problem.malicious.adversaries.items():
            target, offers = target_of(adversary), self._offers(trained, memory.kept.get(name, {}))
            if target not in ("update", "updates") or (
                len(self.acting) == len(self.updates) and any(asks(adversary, name) for name in ("others", "honest"))
            ):
                continue  # without honest clients there is nothing to imitate
            if target == "update":
                for k in changes:
                    requested = requested_arguments(adversary, offers(k))
                    (changes[k],) = _like((adversary(changes[k], **requested),), changes[k])
                continue
            if asks(adversary, "memory"):
                self._demand_first(memory, name)
            stacked = torch.stack([changes[k] for k in sorted(changes)])
            result = adversary(stacked, **requested_arguments(adversary, offers(None)))
            if asks(adversary, "memory"):
                if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
                    raise ValueError(
                        "an adversary that asks for 'memory' returns ((f, P), the memory of the next round)"
                    )
                result, memory.kept = result[0], {**memory.kept, name: result[1]}
            (rows,) = _like((result,), stacked)
            changes = dict(zip(sorted(changes), rows, strict=True))
        return [self._with(u, changes[u.client]) if u.client in self.acting else u for u in self.updates]

    def _demand_first(self, memory: AdversaryMemory, name: str) -> None:
        """Raise ValueError where an adversary with a memory is asked twice in a round."""
        if memory.asked.get(name) == self.round:
            raise ValueError(
                f"train_cohort is called twice in round {self.round + 1}, and the adversary of '{name}' has a memory: "
                "call it once a round, with all clients that take part"
            )
        memory.asked[name] = self.round

    def _offers(self, trained: Mapping[int, Tensor], kept: Memory) -> Callable[[int | None], dict[str, Any]]:
        """A function: client k -> what its adversary may ask for; None -> what one of all malicious clients may."""
        problem, honest = self.problem, [u for u in self.updates if u.client not in self.acting]
        own = [trained[k] for k in sorted(trained)]

        def others(ordered: bool) -> Tensor:
            if problem.malicious.knows == "own":
                return torch.stack(own)
            rows = sorted(honest, key=lambda u: u.client) if ordered else honest
            return torch.stack([self._change(u) for u in rows])

        def of(k: int | None) -> dict[str, Any]:
            received = self.start_models[min(self.acting) if k is None else k]
            last_layers = logit_parameters(problem.model)
            key = ("adversary", self.round) if k is None else ("adversary", self.round, k)
            return {
                # an adversary of one update has always seen them in the order of the cohort
                "others": lambda: others(ordered=k is None),
                "honest": lambda: torch.tensor(sorted(u.client for u in honest)),
                "broadcast": lambda: self._flat(received),
                "last_layer": lambda: self._flat(
                    {n: torch.full_like(received[n], n in last_layers, dtype=torch.bool) for n in self.names}
                ),
                "malicious": lambda: len(self.acting),
                "cohort": lambda: len(self.updates),
                "round": lambda: self.round,
                "generator": lambda: generator(problem.seed, *key, device=problem.device),
                "aggregate": lambda: self._aggregate(own),
                "memory": lambda: kept,
                "robust_accuracy": self._robust_accuracy,
            }

        return of

    def _aggregate(self, own: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        """What theta^{t+1} - theta^t would be if the malicious clients sent (f, P): (P,), of (k, f, P) (k, P)."""
        server, context, malicious = self.server, self.context, self.problem.malicious
        if server is None or context is None:
            raise ValueError(
                "the adversary asks for 'aggregate', and the algorithm does not say what its server does: pass "
                "train_cohort its 'context', and 'server' if it combines updates by itself"
            )
        theta = self._flat(context.broadcast)
        # another stream: the adversary knows the rule, not what the server draws
        seed = stream(self.problem.seed, "adversary aggregate", self.round)
        guess = replace(context, problem=replace(context.problem, seed=seed), memory=dict(context.memory))
        updates = list(self.updates)
        if malicious.knows == "own":
            unknown = iter(itertools.cycle(own))
            imagined = {
                u.client: next(unknown) for u in sorted(updates, key=lambda u: u.client) if u.client not in self.acting
            }
            updates = [self._with(u, imagined[u.client]) if u.client in imagined else u for u in updates]

        known = {u.client for u in updates if u.client not in self.acting and finite(u.upload)}

        def aggregate(uploads: Tensor) -> Tensor:
            if uploads.ndim == 3:
                return torch.stack([aggregate(rows) for rows in uploads])
            rows = dict(zip(sorted(self.acting), uploads, strict=True))
            tried = [self._with(u, rows[u.client]) if u.client in rows else u for u in updates]
            return self._flat(server(finite_updates(tried, known), guess)) - theta

        return aggregate

    def _robust_accuracy(self) -> Callable[[Tensor], float]:
        """The accuracy of theta^t plus a vector on images of the malicious clients, under one step of full radius."""
        problem, around = self.problem, None if self.objective is None else ball(self.objective)
        if around is None:
            raise ValueError("the adversary asks for 'robust_accuracy', and training has no attack with a radius")
        shards = [problem.shards[k].tolist() for k in sorted(self.acting)]
        in_turn = [i for row in itertools.zip_longest(*shards) for i in row if i is not None][:SEEN_IMAGES]
        if not in_turn:
            raise ValueError("the adversary asks for 'robust_accuracy', and the malicious clients have no images")
        x, y = pixels(problem, problem.images[in_turn]), problem.labels[in_turn]
        start = self.start_models[min(self.acting)] if self.context is None else self.context.broadcast

        def accuracy(vector: Tensor) -> float:
            model = load(problem, {**start, **self._tensors(start, self._flat(start) + vector)}).eval()
            correct = 0.0
            for images, labels in zip(x.split(100), y.split(100), strict=True):
                _, gradient = gradient_of(model, cross_entropy, images.detach().clone(), labels, None)
                ascent = gradient.sign()
                if around.norm == "L2":
                    ascent = gradient / gradient.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
                adversarial = (images + around.eps * ascent).clamp(0, 1)
                correct += float((predict(model, adversarial).argmax(1) == labels).sum())
            return correct / len(y)

        return accuracy

    def _flat(self, tensors: Tensors) -> Tensor:
        return torch.cat([tensors[name].flatten() for name in self.names])

    def _change(self, update: Update) -> Tensor:
        start = self.start_models[update.client]
        return self._flat(completed([update], start)[0].model) - self._flat(start)

    def _with(self, update: Update, change: Tensor) -> Update:
        start = self._flat(self.start_models[update.client])
        changed = self._tensors(update.model, start + change)
        uploaded = {n: v for n, v in changed.items() if update.sent is None or n in update.sent}
        return replace(update, model={**update.model, **uploaded})

    def _tensors(self, like: Tensors, vector: Tensor) -> Tensors:
        """A vector (P,) as the trainable parameters, with the shapes and types of `like`."""
        pieces = vector.split([like[name].numel() for name in self.names])
        return {name: v.view_as(like[name]).to(like[name].dtype) for name, v in zip(self.names, pieces, strict=True)}


def poisoned_rows(
    problem: Problem, round: int, rows: Mapping[int, Rows], offers: Callable[[int], Mapping[str, Callable[[], Any]]]
) -> dict[int, Rows]:
    """{client: (features, answers, labels)} as they are sent, malicious clients' poisoned, those not finite left out.

    offers: what the adversary of client k may ask for besides.
    """
    malicious = problem.malicious
    if malicious is None or not (adversaries := malicious.acting("features")):
        return dict(rows)
    acting, sent = malicious.among(rows, problem.seed, round), dict(rows)
    for adversary, k in itertools.product(adversaries, sorted(acting)):
        noise = functools.partial(generator, problem.seed, "features", round, k, device=problem.device)
        honest = [one for client, (one, *_) in rows.items() if client not in acting]
        known: dict[str, Callable[[], Any]] = {
            "classes": lambda: problem.classes, "generator": noise, "round": lambda: round,
            "malicious": lambda: len(acting), "others": functools.partial(torch.cat, honest), **offers(k),
        }  # fmt: skip
        changed = adversary(*sent[k], **requested_arguments(adversary, known))
        features, answers, labels = _like(changed, *sent[k])
        sent[k] = features, answers, labels
    kept = {k: one for k, one in sent.items() if all(bool(torch.isfinite(part).all()) for part in one)}
    return kept or sent


def finite_updates(updates: Sequence[Update], known: Collection[int] = ()) -> list[Update]:
    """The updates that are finite, each with the number of the others; all if none is, so that training diverges.

    known: clients whose update is known to be finite.
    """
    kept_updates = [update for update in updates if update.client in known or finite(update.upload)] or list(updates)
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
