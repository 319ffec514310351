"""FedVKD: knowledge distillation between shallow ResNets on the edges and a vision transformer on the server.

| paper | here | what |
|---|---|---|
| W_e^k, W_c^k | clients[k] "extractor.*", "classifier.*" | client k's edge; never averaged |
| W_t | state.model "server.*" | the server's transformer, with a class head and a distillation head |
| H_i, y_hat_i, y_i | transferred.read(rows), answers, transferred.labels | what an edge uploads of its examples |
| z_t | taught | the server's logits, the mean of both heads, matched by example |
| E_c, E_s | local.epochs, server.epochs | |
| T | temperature | of the divergence KD, see `fatbench.methods.algorithms.distillation` |

    for t = 0 .. T-1:
        each client k:  E_c epochs of  CE(edge(x), y) + alpha KD(edge(x), z_t)      (no KD in the first round)
                        H_i, y_hat_i = argmax edge(x_i), once, for all own examples
        server:         E_s epochs of  CE(class head(H), y) + CE(distillation head(H), y_hat)
                        z_t <- mean of both heads;  each client gets those of its examples

Tao et al. 2022, equations 13 to 18. paper: equation 7 has halves and a divergence from a hard label / here: equations
13 and 15, whose terms have weight 1. paper: equation 6 has T^2, equation 14 has not / here: T^2, as in FedGKT's code,
on which the paper builds; alpha 1/9 at T 3 is equation 14 as printed. paper: does not say from which head z_t comes /
here: the mean of both, the transformer's own prediction (differences: fedvkd-losses). Settings: differences:
fedvkd-settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

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
from fatbench.methods.algorithms.work import INT64, distillation, edge_and_server, nothing_is_broadcast
from fatbench.suite.entry import AlgorithmEntry, Work, passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Attack, Count, Local, NonNegative, Positive, Server


def fedvkd(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    local: Local,
    server: Server,
    temperature: Positive = 3.0,
    alpha: NonNegative = 1.0,
    server_attack: Attack | None = None,
    server_shuffle: bool = True,
    server_logits: Literal["clean", "released"] = "clean",
    features: Literal["float32", "bfloat16", "recompute"] = "float32",
    start: Literal["common", "own"] = "common",
    server_filter: Filter = "none",
) -> Iterator[Round]:
    """FedVKD. The model is `edge_vit`; all clients take part in every round.

    Settings, counted work and bytes as in `fedgkt`, except that an edge uploads its predictions (int64) in place of
    logits and that the weight decay of the server is AdamW's. Raises ValueError for a model without an edge and a
    server, or without a distillation head.
    """
    check_model("fedvkd", problem.model)
    if not hasattr(problem.model.get_submodule("server"), "head_dist"):
        raise ValueError("fedvkd needs a server with a distillation head: model edge_vit")
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
        answers = transferred.logits.argmax(1)

        model = load(problem, state.model)  # after the edges, which were loaded into the same module
        network: Any = model.get_submodule("server").train()
        weights = [model.get_parameter(name) for name in names]
        moments = unpacked(state.server.get("optimizer", {}), names)
        descent = server.descent(t)
        taught = torch.empty_like(transferred.logits)  # the last epoch visits every row
        steps, losses = 0, []
        with forked(problem.seed, "server", t, device=problem.device):
            for epoch, rows in server_batches(
                problem, t, transferred.owned, server.epochs, server.batch, server_shuffle
            ):
                with precision_context(problem):
                    tokens = network.forward_features(inputs(rows))
                    class_logits, distillation_logits = (
                        network.head(tokens[:, 0]).float(),
                        network.head_dist(tokens[:, 1]).float(),
                    )
                loss = F.cross_entropy(class_logits, transferred.labels[rows.device]) + F.cross_entropy(
                    distillation_logits, answers[rows.device]
                )
                moments = step(weights, gradients_of(problem, loss, weights), moments, descent)
                steps += 1
                if epoch == server.epochs - 1:
                    taught[rows.device] = (class_logits + distillation_logits).detach() / 2
                    losses.append(loss.detach() * len(rows.host))
        if server_logits == "clean":
            taught = clean_pass(problem, transferred, server.batch)

        extra = uploads(transferred, answers=answers)
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
    """Distillation in which an edge uploads a class."""
    further = (server_logits == "clean") + (server_filter != "none")
    return distillation(cell, rounds, local, server, server_attack, further=further, features=features, answer=INT64)


def distillation_head(cell: Facts) -> str | None:
    """Refuse servers without a distillation head."""
    if "distillation head" not in cell.model.parts:
        return "fedvkd needs a server with a distillation head: edge_vit"
    return None


FEDVKD = AlgorithmEntry(
    fedvkd,
    work=work,
    refuse=(nothing_is_broadcast, honest_features, edge_and_server, distillation_head),
    deploys=True,
    aggregates=False,
    parts=("edge", "server", "distillation head"),
    cites=("tao2022",),
)
