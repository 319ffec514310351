"""FLTrust: the server trains on a few held-out images, and trusts updates that point in its direction.

| paper | here | what |
|---|---|---|
| D_0 | problem.held_out, the first `root` | the server's images, which no client has |
| g_i, g_0 | u_k = theta_k - theta^t, u_0 | update of client k, and of the server |
| TS_i | scores[k] | trust score |

    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD from theta^t on the objective;  the server: theta_0, in the same way, on D_0
        TS_k = max(0, cos(u_k, u_0))
        theta^{t+1} <- theta^t + sum_k TS_k (|u_0| / |u_k|) u_k / sum_k TS_k

Cao et al. 2021, algorithm 2, with a server's learning rate of 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining, trainable
from fatbench.engine.malicious import finite_updates
from fatbench.engine.mixing import mix
from fatbench.engine.rounds import Context, Metrics, Mixing, Problem, Round, State, Tensors, Update
from fatbench.methods.algorithms.work import clients_train, models_cross
from fatbench.suite.entry import AlgorithmEntry, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, Fraction, Local


def fltrust(
    problem: Problem, state: State, *, rounds: Count, local: Local, root: Count = 100, participation: Fraction = 1.0
) -> Iterator[Round]:
    """FLTrust; the server has the first `root` of the images that the cell's `validation` holds out.

    It trains as the clients do, adversarially if they do. N_k is not used; running averages of batch normalisation are
    plain means. An update of length 0 is not trusted. If none is trusted, theta^t stays (FLPoison uses the plain mean),
    and a doubt counts such rounds. Metric: trusted, the fraction of clients with a score above 0. The server's images
    are among those on which a checkpoint is chosen by validation. Raises ValueError if too few images are held out.

    Source: Cao et al. 2021 (arXiv 2012.13995).
    """
    images, labels = problem.held_out or (problem.images[:0], problem.labels[:0])
    if len(images) < root:
        raise ValueError(f"fltrust: root: {len(images)} images are held out, fewer than {root}")
    clients = len(problem.shards)
    shards = [*(torch.empty(0) for _ in range(clients)), torch.arange(root, device=problem.device)]
    server = replace(problem, images=images[:root], labels=labels[:root], shards=shards, malicious=None)
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        (server_update,) = train_cohort(server, state.model, [clients], t, local_t)
        context = Context(t, rounds, problem, state.model, {}, local_t.lr)
        combine = functools.partial(trusted_mean, server_model=server_update.model)
        updates = finite_updates(
            train_cohort(problem, state.model, cohort, t, local_t, context=context, server=combine)
        )
        mixing = trust([update.model for update in updates], server_update.model, state.model, trainable(problem.model))
        trusted = sum(mixing.weights) > 0
        next_state = State(t + 1, combine(updates, context))
        metrics: Metrics = {"trusted": sum(weight > 0 for weight in mixing.weights) / len(updates)}
        metrics |= {} if trusted else {"doubt_no_update_was_trusted": 1.0}
        spent, server_passes = cost(updates, local_t, state.model), root * local_t.epochs * passes(local_t.objective)
        spent = replace(
            spent,
            gradient_steps=spent.gradient_steps + server_update.stats.steps,
            forward=spent.forward + server_passes.forward,
            backward=spent.backward + server_passes.backward,
        )
        yield Round(t, state.model, updates, mixing, next_state, spent, metrics=metrics)
        del updates, mixing, server_update  # frees the memory before the next round needs as much
        state = next_state


def trusted_mean(updates: Sequence[Update], context: Context, *, server_model: Tensors) -> Tensors:
    """The next model, theta^t if no update is trusted; running averages of batch normalisation are plain means."""
    network, theta = context.problem.model, context.broadcast
    mixing = trust([update.model for update in updates], server_model, theta, trainable(network))
    return (
        mix([replace(update, n=1) for update in updates], mixing, theta, network) if sum(mixing.weights) > 0 else theta
    )


def work(cell: Facts, *, rounds: int, local: LocalTraining, root: int) -> Work:
    """The clients' work, and the server's, which trains like a client with `root` images."""
    root_share = root / cell.client_images
    server = replace(clients_train(cell, local, rounds, cohort=1), disk=0.0) * root_share
    steps = sum(local.epochs_in(t) for t in range(rounds)) * math.ceil(root / local.batch)
    training = clients_train(cell, local, rounds) + replace(server, gradient_steps=steps)
    return training + models_cross(cell, rounds)


def enough_held_out(cell: Facts, *, root: int) -> str | None:
    """Refuse cells that hold out fewer images than the server needs."""
    if root > cell.validation:
        reason = f"the server needs {root} images of its own"
        return f"root: {reason}, and 'validation' holds out {cell.validation}"
    return None


def trust(models: Sequence[Tensors], server_model: Tensors, broadcast: Tensors, names: Sequence[str]) -> Mixing:
    """The weights of the clients' models from the tensors `names`; `broadcast` gets the remainder to 1."""

    def update(model: Tensors) -> Tensor:
        return torch.cat([(model[name] - broadcast[name]).flatten() for name in names]).double()

    root = update(server_model)
    lengths, cosines = [], []
    for model in models:
        u = update(model)
        lengths.append(float(u.norm()))
        cosines.append(float(u @ root / (u.norm() * root.norm())) if lengths[-1] > 0 and root.norm() > 0 else 0.0)
    scores = [max(cosine, 0.0) for cosine in cosines]
    total = sum(scores)
    weights = [
        score / total * float(root.norm()) / length if score > 0 else 0.0
        for score, length in zip(scores, lengths, strict=True)
    ]
    return Mixing(weights, broadcast=1 - sum(weights))


FLTRUST = AlgorithmEntry(
    fltrust,
    foreseeable=True,
    work=work,
    refuse=(enough_held_out,),
    fractions=("trusted",),
    example={"root": 5},
    cites=("cao2021",),
)
