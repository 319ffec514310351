"""The clients of a round: who takes part, what they send, what it costs. All training goes through `train_cohort`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fatbench.engine import malicious
from fatbench.engine.filed import keeper
from fatbench.engine.inject import asks
from fatbench.engine.local import Client, LocalTraining, broadcast_loss, train_client
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.randomness import numpy_generator
from fatbench.engine.rounds import Context, Cost, Mixing, Problem, Tensors, Update
from fatbench.suite.entry import Passes, Unknown, ask, entry_of, passes
from fatbench.suite.types import ClientRounds, Probability, client_rounds, rounded_down


@dataclass(frozen=True)
class Availability:
    """Clients that are away: they neither train nor send anything in a round.

    drop: each client of a round is away with this probability, before it trains. late: the first round of clients that
    come later, counted from 0, such as {3: 5}. A round with no client, or with fewer than the aggregator needs, keeps
    the model.
    """

    drop: Probability = 0.0
    late: ClientRounds | None = None

    def present(self, clients: int, seed: int, round: int) -> list[bool]:
        """Whether each of the clients is there in a round."""
        dropped = numpy_generator(seed, "availability", round).random(clients) < self.drop
        late = client_rounds(self.late)
        return [not dropped[k] and round >= late.get(k, 0) for k in range(clients)]


class TooFewClients(Exception):
    """A round has no client, or fewer than the aggregator needs: the engine keeps the model, and goes on after it."""


class Drawn(list[int]):
    """The clients that take part in a round, all of them."""


def draw_cohort(problem: Problem, round: int, participation: float) -> Drawn:
    """m = max(1, floor(C K)) clients in random order, less those that are away or have no images.

    The released SFAT depends on the order, so it is always drawn. Raises TooFewClients if nobody is left.
    """
    clients = len(problem.shards)
    m = max(1, rounded_down(participation * clients))
    cohort = Drawn(numpy_generator(problem.seed, "cohort", round).permutation(clients)[:m].tolist())
    away = problem.availability
    present = [True] * clients if away is None else away.present(clients, problem.seed, round)
    cohort[:] = [k for k in cohort if present[k] and len(problem.shards[k])]
    if not cohort:
        raise TooFewClients
    return cohort


def train_cohort(
    problem: Problem,
    broadcast: Tensors,
    cohort: Sequence[int],
    round: int,
    local: LocalTraining,
    *,
    aggregator: Callable[..., Any] | None = None,
    gradient_shift: Mapping[int, Tensors] | None = None,
    weight_shift: Mapping[int, Tensors] | None = None,
    tensors_by_client: Mapping[int, Tensors] | None = None,
    locals: Mapping[int, LocalTraining] | None = None,
    only: Mapping[int, Collection[str]] | None = None,
    sent: Mapping[int, Collection[str]] | None = None,
    context: Context | None = None,
    server: malicious.Server | None = None,
) -> list[Update]:
    """Train every client of the cohort from `broadcast`; return their updates in the order of the cohort.

    If the `aggregator` asks for `broadcast_losses`, every client first measures theta^t on its own data (in Stats).
    gradient_shift[k] is added to every gradient of client k (SCAFFOLD: c - c_k); weight_shift[k] is subtracted from
    its weights after every step (the released SCAFFOLD). For clients that differ, tensors_by_client[k] replaces
    tensors of `broadcast` (as in `Round.own`), locals[k] replaces `local`, only[k] names the parameters that client k
    trains, and sent[k] the tensors that it uploads: all but frozen parameters, unless said. Malicious clients' updates
    are what they send, not what they trained. context: what the aggregator will be told, for adversaries that know it;
    server: what is done with the updates if not `mix` with the aggregator's weights, (updates, context) -> the next
    model, without changing anything. Models that together take much of the host's memory lie in a file (`filed`).

    Raises NoHonestClient for malicious clients alone, unless chance drew them, if their adversary is to see the others:
    what is sent in a round comes from one call.
    """
    if problem.availability is not None and aggregator is not None and _needs_more(aggregator, len(cohort)):
        raise TooFewClients
    if not isinstance(cohort, Drawn) and any((sent or {}).get(k, "all") for k in cohort):
        malicious.demand_honest_client(problem, cohort, round)
    measures_broadcast = aggregator is not None and asks(aggregator, "broadcast_losses")
    shifts = {k: (gradient_shift[k] if gradient_shift else {}, weight_shift[k] if weight_shift else {}) for k in cohort}
    start_models = {
        k: {**broadcast, **tensors_by_client[k]} if tensors_by_client and k in tensors_by_client else broadcast
        for k in cohort
    }
    settings = malicious.local_settings(problem, cohort, round, {k: (locals or {}).get(k, local) for k in cohort})
    keep = keeper(broadcast, len(cohort))
    updates: list[Update] = []
    for k in cohort:
        client = Client(problem, start_models[k], k, round, *shifts[k], (only or {}).get(k), (sent or {}).get(k))
        loss = broadcast_loss(client, settings[k]) if measures_broadcast else None  # before training changes the model
        update = train_client(client, settings[k])
        stats = replace(update.stats, broadcast_loss=loss)
        updates.append(replace(update, model=keep(update.model), stats=stats, passes=passes(settings[k].objective)))
    if server is None and aggregator is not None:
        server = functools.partial(_mixed, aggregator)
    return malicious.accepted_updates(
        problem, start_models, updates, round, robust=malicious.tolerates_one(aggregator, len(cohort)),
        objective=local.objective, server=server, context=context,
    )  # fmt: skip


def _needs_more(aggregator: Callable[..., Any], clients: int) -> bool:
    """Whether an aggregator, or one inside it, refuses cells with so many clients in a round."""
    cell: Any = _OfCohort(clients)
    for refuse in entry_of(aggregator).refuse:
        with contextlib.suppress(Unknown):
            if ask(refuse, aggregator, cell) is not None:
                return True
    inner = getattr(aggregator, "keywords", {}).values()
    return any(_needs_more(function, clients) for function in inner if callable(function))


class _OfCohort:
    """What is known of a cell by the clients of a round alone."""

    def __init__(self, clients: int) -> None:
        self.cohort = clients

    def __getattr__(self, name: str) -> Any:
        raise Unknown(name)


def _mixed(aggregator: Callable[..., Mixing], updates: list[Update], context: Context) -> Tensors:
    """What a server does that only aggregates."""
    return mix(updates, aggregate(aggregator, updates, context), context.broadcast, context.problem.model)


def step_divisors(updates: Sequence[Update], lr: float, divisor: str) -> list[float]:
    """S_k of SCAFFOLD and FedGATE for each update.

    lr ||a_k||_1, which counts momentum; with "literal" lr tau_k, which does not; with "released" lr tau of the last
    client of the round for all, as FedTorch has it.
    """
    if divisor == "momentum":
        return [lr * update.stats.momentum_steps for update in updates]
    return [lr * (updates[-1] if divisor == "released" else update).stats.steps for update in updates]


def cost(
    updates: Sequence[Update],
    local: LocalTraining,
    broadcast: Tensors,
    models_up: int = 1,
    models_down: int = 1,
    locals: Mapping[int, LocalTraining] | None = None,
) -> Cost:
    """The cost of a round; `models_up` and `models_down` count the models that each participant sends and receives.

    A client receives the tensors that it sends, and has the others. locals: the settings of clients that differ from
    `local`.
    """
    trained, measuring = Passes(), Passes()
    for update in updates:
        example_passes = update.passes or passes((locals or {}).get(update.client, local).objective)
        trained += update.n * local.epochs * example_passes
        if update.stats.broadcast_loss is not None:
            measuring += update.n * (example_passes + Passes(0, -1))  # the objective without its last backward pass
    sizes = {name: value.numel() * value.element_size() for name, value in broadcast.items()}
    crossed = sum(sum(sizes.values()) if u.sent is None else sum(map(sizes.__getitem__, u.sent)) for u in updates)
    return Cost(
        gradient_steps=sum(u.stats.steps for u in updates),
        forward=trained.forward + measuring.forward,
        backward=trained.backward + measuring.backward,
        bytes_up=models_up * crossed,
        bytes_down=models_down * crossed,
    )
