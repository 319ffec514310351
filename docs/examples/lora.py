"""LoRA with personal heads: a frozen network, low-rank changes that are averaged, a last layer that stays at home.

| symbol | here | what |
|---|---|---|
| W | `original` of each linear layer | frozen, the same for all, never sent |
| B A | `0.b`, `0.a` beside it | rank x in and out x rank: trained, sent, averaged |
| h_k | state.clients[k]["head"] | client k's last layer |

    W + B A in place of W; B = 0 at the start
    for t = 0 .. T-1:
        each of m clients: trains A, B and its h_k
        the server averages A and B

Hu et al. 2022 (LoRA); heads of clients as in Collins et al. 2021. The mean of A_k and that of B_k do not multiply to
the mean of B_k A_k: an approximation of averaging the changes. A suite begins with a trained network by

    plugins: [lora.py]
    base: {model: {name: lora, rank: 2, base: {name: vit, weights: {suite: NAME}}}, algorithm: {name: lora_heads}}
"""

import math

import torch
from torch import nn
from torch.nn.utils import parametrize

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Round, State
from fatbench.methods.algorithms.work import clients_train, models_cross
from fatbench.models import logit_parameters
from fatbench.suite.entry import AlgorithmEntry, ModelEntry, Work
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Model


class LowRank(nn.Module):
    """A weight plus the product of two narrow matrices."""

    def __init__(self, weight, rank):
        super().__init__()
        out, into = weight.shape
        self.a = nn.Parameter(torch.randn(rank, into) / math.sqrt(into))
        self.b = nn.Parameter(torch.zeros(out, rank))

    def forward(self, weight):
        return weight + self.b @ self.a


def lora(shape, classes, *, base: Model, rank: Count = 4):
    """A network whose linear layers train changes of low rank, and whose last layer trains whole."""
    network = base(shape, classes)
    heads = logit_parameters(network)
    layers = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in heads)
    for name, layer in layers.items():
        if f"{name}.weight" not in heads:
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    network.logit_layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in heads))
    return network


def parameters(shape, classes, *, base, rank):
    """What trains in a `vit`: two matrices beside those of attention (3 dim and dim wide) and of the MLP; the head."""
    how = {"dim": 384, "depth": 12, "mlp": 4, **base.keywords}
    return how["depth"] * rank * how["dim"] * (4 + 2 + 2 * (1 + how["mlp"])) + (how["dim"] + 1) * classes


def lora_heads(problem, state, *, rounds: Count, aggregator: Aggregator, local: Local, participation: Fraction = 1.0):
    """Averages what trains but the last layer, which every client keeps."""
    head = logit_parameters(problem.model)
    frozen = [name for name, parameter in problem.model.named_parameters() if not parameter.requires_grad]
    shared = state.model.keys() - {*head, *frozen}
    for t in range(state.round, rounds):
        cohort, now = draw_cohort(problem, t, participation), local.at(t)
        own = {k: state.clients[k]["head"] for k in state.clients}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), now.lr)
        updates = train_cohort(
            problem, state.model, cohort, t, now, aggregator=aggregator, context=context, tensors_by_client=own,
            sent=dict.fromkeys(cohort, shared),
        )  # fmt: skip
        mixing = aggregate(aggregator, updates, context)
        own |= {u.client: {name: u.model[name] for name in head} for u in updates}
        model = mix(updates, mixing, state.model, problem.model)
        after = State(t + 1, model, {"aggregator": mixing.memory}, {k: {"head": kept} for k, kept in own.items()})
        yield Round(t, state.model, updates, mixing, after, cost(updates, now, state.model), own=own)
        del updates, mixing
        state = after


def work(cell, *, rounds, local):
    """Everybody trains; what is not the head crosses; the state has every client's head."""
    share = 1 - cell.head / cell.parameters
    return (
        clients_train(cell, local, rounds)
        + models_cross(cell, rounds, part=share)
        + Work(disk=4 * cell.head * cell.clients)
    )


VIT = {"name": "vit", "patch": 4, "dim": 16, "depth": 1, "heads": 2}
MODELS = {"lora": ModelEntry(lora, parameters=parameters, example={"base": VIT, "rank": 2})}
ALGORITHMS = {
    "lora_heads": AlgorithmEntry(
        lora_heads, work=work, deploys=True, foreseeable=True, example={"model": {"name": "lora", "base": VIT}}
    )
}
