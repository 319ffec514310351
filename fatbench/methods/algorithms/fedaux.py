"""FedAUX: federated averaging, then distillation of the clients' certainty-weighted ensemble on auxiliary images.

| paper | here | what |
|---|---|---|
| theta^t, theta_k | state.model, update.model | global model; client k's after local training |
| h_0 | represent(model before the first round) | frozen features, from SimCLR if pretrain_epochs > 0 |
| D_d, D_- | distil, negatives | auxiliary images, 80 to 20 |
| s_k(x) | scores[k] | certainty of client k on D_d, see `fatbench.methods.algorithms.auxiliary.certainty` |
| f_k(x) | ensemble | client k's logits |

    once:  h_0 <- SimCLR on the auxiliary images (optional);  each client k: s_k(x) for all x in D_d
    for t = 0 .. T-1:
        draw m clients
        each: theta_k <- E epochs of SGD from theta^t on the objective
        theta <- sum_k w_k theta_k
        theta^{t+1} <- distillation_epochs of Adam from theta on KL(softmax(sum_k s_k f_k / sum_k s_k) || softmax(f(x)))
                       over D_d

Sattler et al. 2021, algorithm 1; the released code (fedl-repo/fedaux). paper and release: clients train with Adam /
here: with SGD as in FedAvg, so that the two differ only in the distillation. The release predicts, distils and is
evaluated in train mode, with the statistics of each batch: `predictions: released` for the first two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import LocalTraining, copy_state, gradients_of, load, pixels, precision_context, trainable
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.optimizers import Descent, packed, step, unpacked
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Context, Metrics, Problem, Round, State, Update
from fatbench.methods.algorithms.auxiliary import certainty, divide, pretrain, represent
from fatbench.methods.algorithms.distillation import divergence
from fatbench.methods.algorithms.work import federated, server_trains
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.facts import Facts
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Natural, Positive, Rate


def fedaux(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
    pretrain_epochs: Natural = 0,
    pretrain_batch: Count = 256,
    pretrain_lr: Rate = 0.001,
    distillation_epochs: Natural = 1,
    distillation_batch: Count = 128,
    distillation_lr: Rate = 0.00005,
    regularisation: Positive = 0.01,
    privacy: Literal["calibrated", "released", "none"] = "calibrated",
    epsilon: Fraction = 0.1,
    delta: Fraction = 0.00001,
    predictions: Literal["eval", "released"] = "eval",
) -> Iterator[Round]:
    """FedAUX under an aggregator. The cell names unlabelled images, `auxiliary`.

    Local training is that of `fedavg`. pretrain_*: SimCLR before the first round. distillation_epochs 0 is FedAvg from
    the same initial network, the fair comparison. Certainty scores: L2 weight `regularisation`, and `privacy` with
    (epsilon, delta) as in `fatbench.methods.algorithms.auxiliary.certainty`. In eval mode, batch normalisation distils
    with the clients' averaged statistics and does not update them. Adam's moments are kept between rounds, as in the
    release. The numbers server_forward, server_backward and server_steps count the server's work (SimCLR in round 1,
    too), the others the clients'. Bytes count models and, once, all scores; the auxiliary images are public and not
    counted. Raises ValueError if the auxiliary images are missing, too few, or of another shape than the training
    images.
    """
    distil, negatives = divide(problem, "fedaux")
    # an H100 refused to record a client's step, perhaps for nodes of the weights that the server's training left
    clients_problem = replace(problem, path="loop") if problem.path == "graphs" else problem
    names = trainable(problem.model)
    metrics: Metrics = {}
    if state.round == 0:
        if pretrain_epochs:
            start, metrics["pretrain_loss"] = pretrain(
                problem, state.model, pretrain_epochs, pretrain_batch, pretrain_lr
            )
            state = replace(state, model=start)
        model = load(problem, state.model)
        h_negatives, h_distil = (represent(problem, model, x, distillation_batch) for x in (negatives, distil))
        scored = [
            certainty(
                represent(problem, model, problem.images[shard], distillation_batch),
                h_negatives,
                h_distil,
                regularisation=regularisation,
                privacy=privacy,
                epsilon=epsilon,
                delta=delta,
                draws=generator(problem.seed, "certainty", k),
            )
            for k, shard in enumerate(problem.shards)
        ]
        state = replace(state, server={"scores": torch.stack(scored).to(problem.device)})
    scores = state.server["scores"]
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        updates = train_cohort(clients_problem, state.model, cohort, t, local_t, aggregator=aggregator, context=context)
        mixing = aggregate(aggregator, updates, context)
        theta = mix(updates, mixing, state.model, problem.model)

        moments = unpacked(state.server.get("optimizer", {}), names)
        losses: list[Tensor] = []
        if distillation_epochs:
            teacher = ensemble(problem, updates, scores, distil, distillation_batch, predictions == "released")
            model = load(problem, theta).train(predictions == "released")
            weights = [model.get_parameter(name) for name in names]
            descent = Descent("adam", distillation_lr)
            order = generator(problem.seed, "distillation_order", t)
            with forked(problem.seed, "distillation", t, device=problem.device):
                for _ in range(distillation_epochs):
                    for rows in (
                        torch.randperm(len(distil), generator=order).to(distil.device).split(distillation_batch)
                    ):
                        with precision_context(problem):
                            z = model(pixels(problem, distil[rows])).float()
                        loss = divergence(z, teacher[rows], 1.0)
                        moments = step(weights, gradients_of(problem, loss, weights), moments, descent)
                        losses.append(loss.detach())
            theta = copy_state(model)
            metrics["distillation_loss"] = float(torch.stack(losses).mean())
        taught, public, is_first = len(distil) * distillation_epochs, len(distil) + len(negatives), float(t == 0)
        simclr = is_first * pretrain_epochs * 2 * public
        represented = is_first * (public + sum(map(len, problem.shards)))
        teacher_passes = len(distil) * len(updates) if taught else 0  # of the clients' models
        metrics["server_steps"] = len(losses) + is_first * pretrain_epochs * -(-public // pretrain_batch)
        metrics["server_forward"] = taught + teacher_passes + simclr + represented
        metrics["server_backward"] = taught + simclr

        spent = cost(updates, local_t, state.model)
        if t == 0:
            updates = [replace(u, extra={"scores": scores[u.client]}) for u in updates]
            spent = replace(spent, bytes_up=spent.bytes_up + scores.numel() * scores.element_size())
        server = {"aggregator": mixing.memory, "scores": scores, "optimizer": packed(moments, names)}
        next_state = replace(state, round=t + 1, model=theta, server=server)
        yield Round(t, state.model, updates, mixing, next_state, spent, metrics=metrics)
        del updates, mixing  # frees the memory before the next round needs as much
        state, metrics = next_state, {}


def work(
    cell: Facts,
    *,
    rounds: int,
    aggregator: Aggregator,
    local: LocalTraining,
    pretrain_epochs: int,
    pretrain_batch: int,
    distillation_epochs: int,
    distillation_batch: int,
) -> Work:
    """SimCLR on two views of every image before the first round; then clients' training and distillation.

    The features of the clients' and of the auxiliary images are computed once, for the scores.
    """
    images = cell.auxiliary_images
    distil = 0.8 * images
    pretrained = server_trains(images, pretrain_epochs, pretrain_batch, 1)
    pretrained = replace(pretrained, forward=2 * pretrained.forward, backward=2 * pretrained.backward)
    scored = Work(forward=images + cell.clients * cell.client_images, bytes_up=4 * cell.clients * distil)
    taught = server_trains(distil, distillation_epochs, distillation_batch, rounds)
    taught += Work(forward=rounds * cell.cohort * distil * bool(distillation_epochs))
    stored = Work(disk=2 * cell.size * bool(distillation_epochs) + 4 * cell.clients * distil)
    clients = federated(cell, rounds=rounds, local=local, aggregator=aggregator)
    return clients + pretrained + scored + taught + stored


def auxiliary_images(cell: Facts) -> str | None:
    """Refuse cells without auxiliary images."""
    return None if cell.auxiliary else "auxiliary: fedaux needs unlabelled images: name a data set"


def everybody(cell: Facts) -> str | None:
    """Refuse clients that are away."""
    reason = "availability: fedaux needs the scores of all clients at its start"
    return reason if cell.spec.get("availability") else None


def ensemble(
    problem: Problem, updates: Sequence[Update], scores: Tensor, images: Tensor, batch: int, batch_statistics: bool
) -> Tensor:
    """sum_k s_k(x) f_k(x) / sum_k s_k(x): the clients' logits (n, classes) on stored images, weighted by certainty."""
    total = torch.zeros(len(images), problem.classes, device=problem.device)
    for update in updates:
        model = load(problem, update.model).train(batch_statistics)
        with torch.no_grad(), forked(problem.seed, "ensemble", update.client, device=problem.device):
            logits = torch.cat([model(pixels(problem, chunk)).float() for chunk in images.split(batch)])
        total += scores[update.client].unsqueeze(1) * logits
    return total / sum(scores[update.client] for update in updates).unsqueeze(1)  # type: ignore[union-attr]


FEDAUX = AlgorithmEntry(
    fedaux,
    foreseeable=True,
    work=work,
    refuse=(auxiliary_images, everybody),
    example={"distillation_batch": 8},
    cites=("sattler2021",),
)
