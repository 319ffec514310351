"""DSGD with momentum at the clients: in each step every client sends one batch's gradient, added to what it remembers.

| Karimireddy et al. 2021 | here | what |
|---|---|---|
| g_k | | gradient of client k's next batch at theta^t |
| m_k | state.clients[k]["momentum"] | client k's momentum, starts at 0 |
| beta | momentum | share of m_k that stays |
| eta | lr | learning rate |

    for t = 0, 1, 2, ...:
        each: m_k <- beta m_k + (1 - beta) g_k
        theta^{t+1} <- theta^t - eta (AGG(m_1, .., m_K) + weight_decay theta^t)

Karimireddy et al. 2021, algorithm 2 (momentum at the workers, then a robust aggregator); ByzFL's DSGD adds the weight
decay. An update is theta^t - eta m_k, so a radius of an aggregator in updates is eta times one in gradients. The step
is one of local training of rate (1 - beta) eta on the gradient g_k + beta / (1 - beta) m_k. A client goes through its
images in a new order in each epoch; the last batch of one may have fewer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining, trainable
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Cost, Memory, Problem, Round, State, Tensors
from fatbench.methods.algorithms.fedsgd import epoch_batches
from fatbench.methods.algorithms.work import models_cross
from fatbench.suite.entry import AlgorithmEntry, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Momentum, NonNegative, Objective, Rate


def dsgd(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    batch: Count,
    lr: Rate,
    objective: Objective,
    aggregator: Aggregator,
    steps: Count = 1,
    momentum: Momentum = 0.0,
    weight_decay: NonNegative = 0.0,
) -> Iterator[Round]:
    """One gradient of each client in a step, with the client's momentum, under an aggregator.

    `steps`: steps of a round; its numbers of clients are those of the last one. To adversaries, a step is a round. What
    a malicious client remembers is what it sent. Of a client, others see its batch alone, also its counts of classes.
    """
    names = trainable(problem.model)
    # a client's epoch is drawn once, not in each of its steps
    batches_of = functools.lru_cache(maxsize=len(problem.shards))(functools.partial(epoch_batches, problem))
    local = LocalTraining(batch=batch, lr=lr * (1 - momentum), objective=objective)
    for t in range(state.round, rounds):
        theta, memory, clients, spent = state.model, state.server.get("aggregator", {}), dict(state.clients), Cost()
        for step in range(t * steps, (t + 1) * steps):
            sent_model = theta
            batches = [_batch(shard, k, step, batch, batches_of) for k, shard in enumerate(problem.shards)]
            cut = replace(problem, shards=batches)
            cohort = draw_cohort(cut, step, 1.0)
            context = Context(step, rounds * steps, cut, theta, memory, lr)
            updates = train_cohort(
                cut, theta, cohort, step, local, aggregator=aggregator, context=context,
                gradient_shift=_shifts(clients, cohort, theta, names, momentum),
            )  # fmt: skip
            mixing = aggregate(aggregator, updates, context)
            memory, spent = mixing.memory, spent + cost(updates, local, theta)
            mixed = mix(updates, mixing, theta, problem.model)
            theta = {**mixed, **{name: mixed[name] - lr * weight_decay * theta[name] for name in names if weight_decay}}
            if momentum:
                clients |= {u.client: {"momentum": _gradient(sent_model, u.model, lr, names)} for u in updates}
        next_state = State(t + 1, theta, {"aggregator": memory}, clients)
        yield Round(t, sent_model, updates, mixing, next_state, spent)
        del updates, mixing  # frees the memory before the next round needs as much
        state = next_state


def _batch(shard: Tensor, k: int, step: int, batch: int, batches_of: Callable[..., Sequence[Tensor]]) -> Tensor:
    """Client k's batch of a step: indices (b,) into problem.images. batches_of: (k, epoch, batch) -> an epoch's."""
    if not len(shard):
        return shard
    epoch, number = divmod(step, -(-len(shard) // batch))
    return batches_of(k, epoch, batch)[number]


def _shifts(
    clients: Mapping[int, Memory], cohort: Sequence[int], theta: Tensors, names: Sequence[str], momentum: float
) -> dict[int, Tensors]:
    """beta / (1 - beta) m_k by client, which is added to its gradient; empty in the first step."""
    if not (clients and momentum):
        return {}
    zero = {name: torch.zeros_like(theta[name]) for name in names}
    kept = {k: clients.get(k, {}).get("momentum", zero) for k in cohort}
    factor = momentum / (1 - momentum)
    return {k: {name: factor * m[name] for name in names} for k, m in kept.items()}


def _gradient(theta: Tensors, sent: Tensors, lr: float, names: Sequence[str]) -> Tensors:
    """The gradient with which a step of rate `lr` leads from theta to what was sent."""
    return {name: (theta[name] - sent[name]) / lr for name in names}


def work(
    cell: Facts, *, rounds: int, batch: int, steps: int, objective: Objective, aggregator: Aggregator, momentum: float
) -> Work:
    """A batch's gradient of each client in a step, of average size; the momentum of each is stored."""
    taken, each = rounds * steps, passes(objective)
    images = taken * cell.cohort * cell.client_images / math.ceil(cell.client_images / batch)
    computed = Work(taken * cell.cohort, images * each.forward, images * each.backward)
    return computed + models_cross(cell, taken) + Work(disk=cell.size * (1 + (momentum > 0) * cell.cohort))


DSGD = AlgorithmEntry(dsgd, foreseeable=True, work=work, cites=("karimireddy2021",))
