"""FedGKT: group knowledge transfer between small devices and a large server.

| paper | here | what |
|---|---|---|
| W_e^k, W_c^k | clients[k] "extractor.*", "classifier.*" | client k's edge; never averaged |
| W_s | state.model "server.*" | the server's network |
| H_i, z_c, y_i | transferred.read(rows), transferred.logits, .labels | what an edge uploads of its examples |
| z_s | taught | the server's logits, matched by example |
| E_c, E_s | local.epochs, server.epochs | |
| T, alpha | temperature, alpha | of the divergence KD, see `fatbench.methods.algorithms.distillation` |

    for t = 0 .. T-1:
        each client k:  E_c epochs of  CE(edge(x), y) + alpha KD(edge(x), z_s)      (no KD in the first round)
                        H_i, z_i <- edge, once, for all own examples
        server:         E_s epochs of  CE(server(H), y) + alpha KD(server(H), z_c)
                        z_s <- server(H);  each client gets those of its examples

He, Annavaram and Avestimehr 2020, algorithm 1. Options reproduce differences of the released code (FedML):
`server_alpha`, `server_distillation`, `server_shuffle`, `server_logits` (differences: fedgkt-release). Left out: logits
matched by batch number, edges that start pretrained or are never trained, and a rate that falls with test accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch.nn import functional as F

from fatbench.engine.local import LocalTraining, copy_state, gradients_of, load, precision_context, trainable
from fatbench.engine.optimizers import ServerTraining, packed, step, unpacked
from fatbench.engine.randomness import forked
from fatbench.engine.rounds import Cost, Problem, Round, State
from fatbench.methods.algorithms.distillation import (
    Filter,
    Inputs,
    check_model,
    clean_pass,
    divergence,
    honest_features,
    knowledge,
    own_starts,
    server_batches,
    server_work,
    taught_clients,
    train_edge,
    transfer,
    updates_of,
    uploads,
    wire,
    without_outliers,
)
from fatbench.methods.algorithms.work import distillation, edge_and_server, nothing_is_broadcast
from fatbench.suite.entry import AlgorithmEntry, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Attack, Count, Local, NonNegative, Positive, Server


def fedgkt(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    local: Local,
    server: Server,
    temperature: Positive = 3.0,
    alpha: NonNegative = 1.0,
    server_alpha: Literal["distillation", "labels"] = "distillation",
    server_distillation: bool = True,
    server_attack: Attack | None = None,
    server_shuffle: bool = True,
    server_logits: Literal["clean", "released"] = "clean",
    features: Literal["float32", "bfloat16", "recompute"] = "float32",
    start: Literal["common", "own"] = "common",
    server_filter: Filter = "none",
) -> Iterator[Round]:
    """Group knowledge transfer. The model consists of an edge and a server; all clients take part in every round.

    Optimizers keep their moments between rounds, also on the edges; both sides of the authors' code use Adam.
    `server_alpha: labels` is the release, where alpha multiplies the cross-entropy on the server; `server_distillation:
    false` is its default, cross-entropy alone. `server_shuffle: false` visits one client after the other, as in the
    release. `server_logits: released` sends the logits of the last epoch, computed in train mode while the weights
    move, so that the first client's are older than the last's. `server_attack`: the server trains on features of images
    that it and their edges have attacked together, see `fatbench.methods.algorithms.distillation.Inputs` (ours; in no
    paper). `features` as in `fatbench.methods.algorithms.distillation.transfer`.
    `server_filter: median` leaves out, for a round, clients on whose rows the server's loss is too high (ours).
    `start: own`: each edge begins with weights of its own (ours), which no decoder for the common ones reads.
    The numbers server_forward, server_backward and server_steps count the server's work, the others the edges'. Bytes
    are those of Update.extra (a label is an int64) and of the logits down; test images are not sent. Raises ValueError
    for a model without an edge and a server.
    """
    check_model("fedgkt", problem.model)
    names = [name for name in trainable(problem.model) if name.startswith("server.")]
    if start == "own" and not state.round:
        state = own_starts(problem, state)
    for t in range(state.round, rounds):
        local_t = local.at(t)
        trained = {
            k: train_edge(problem, state, k, t, local_t, temperature=temperature, alpha=alpha)
            for k in range(len(problem.shards))
        }
        edges = {k: client_state["edge"] for k, (client_state, _) in trained.items()}
        transferred = transfer(problem, state, edges, server.batch, features)
        transferred = without_outliers(problem, state.model, transferred, server.batch, server_filter)
        inputs = Inputs(problem, edges, transferred, server_attack, t)

        model = load(problem, state.model)  # after the edges, which were loaded into the same module
        network = model.get_submodule("server").train()
        weights = [model.get_parameter(name) for name in names]
        moments = unpacked(state.server.get("optimizer", {}), names)
        descent = server.descent(t)
        taught = torch.empty_like(transferred.logits)  # the last epoch visits every row
        label_weight = alpha if server_alpha == "labels" and server_distillation else 1.0
        edge_weight = (1.0 if server_alpha == "labels" else alpha) if server_distillation else 0.0
        steps, losses = 0, []
        with forked(problem.seed, "server", t, device=problem.device):
            for epoch, rows in server_batches(
                problem, t, transferred.owned, server.epochs, server.batch, server_shuffle
            ):
                with precision_context(problem):
                    z = network(inputs(rows)).float()
                loss = label_weight * F.cross_entropy(z, transferred.labels[rows.device])
                if edge_weight:
                    loss = loss + edge_weight * divergence(z, transferred.logits[rows.device], temperature)
                moments = step(weights, gradients_of(problem, loss, weights), moments, descent)
                steps += 1
                if epoch == server.epochs - 1:
                    taught[rows.device] = z.detach()
                    losses.append(loss.detach() * len(rows.host))
        if server_logits == "clean":
            taught = clean_pass(problem, transferred, server.batch)

        extra = uploads(transferred, logits=transferred.logits)
        bytes_up, bytes_down = wire(transferred, extra, taught, inputs)
        next_state = State(
            round=t + 1,
            model={**state.model, **copy_state(model, "server.")},
            server={"optimizer": packed(moments, names)},
            clients=taught_clients(trained, state, {k: knowledge(transferred, k, taught) for k in extra}),
        )
        examples, example_passes = sum(map(len, problem.shards)), passes(local_t.objective)
        yield Round(
            t,
            state.model,
            updates_of(problem, trained, extra),
            None,
            next_state,
            Cost(
                sum(stats.steps for _, stats in trained.values()),
                examples * (local_t.epochs * example_passes.forward + 1),  # one more pass computes what is sent
                examples * local_t.epochs * example_passes.backward,
                bytes_up,
                bytes_down,
            ),
            own=edges,
            metrics=server_work(losses, steps, transferred, server.epochs, server_logits == "clean", inputs.images),
        )
        state = next_state
        del transferred, extra, inputs  # frees the features before the next round computes its own


def work(
    cell: Facts,
    *,
    rounds: int,
    local: LocalTraining,
    server: ServerTraining,
    server_attack: Attack | None,
    server_logits: str,
    features: str,
    server_filter: str,
) -> Work:
    """Distillation in which an edge uploads logits."""
    further = (server_logits == "clean") + (server_filter != "none")
    answer = 4 * cell.classes
    return distillation(cell, rounds, local, server, server_attack, further=further, features=features, answer=answer)


FEDGKT = AlgorithmEntry(
    fedgkt,
    work=work,
    refuse=(nothing_is_broadcast, honest_features, edge_and_server),
    deploys=True,
    aggregates=False,
    parts=("edge", "server"),
    cites=("he2020",),
)
