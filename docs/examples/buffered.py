"""A server that does not wait: it changes its model whenever enough uploads have come, however old they are.

| symbol | here | what |
|---|---|---|
| K | `buffer` | uploads that make a step of the server |
| tau_i | round - "begun" | how many rounds ago an upload was begun |
| Delta_i | "change" | what it changed in the model that it began with |

    for t = 0 .. T-1:
        m clients begin with theta^t; each will be done 0 to `slowest` rounds later
        those who are done send Delta_i; while there are K of them:
            theta <- theta + mean of Delta_i / sqrt(1 + tau_i)      (or another aggregator of them)

Nguyen et al. 2022 (FedBuff), in rounds in place of hours. What is under way is in the state, under names.
"""

import torch

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.randomness import numpy_generator
from fatbench.engine.rounds import Context, Round, State, Stats, Update
from fatbench.methods.algorithms.work import federated
from fatbench.suite.entry import AlgorithmEntry, Work
from fatbench.suite.types import Aggregator, Count, Fraction, Local, Natural


def buffered(
    problem,
    state,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 0.5,
    buffer: Count = 2,
    slowest: Natural = 2,
):
    """Aggregates `buffer` uploads at a time, the older the shorter; uploads come up to `slowest` rounds late."""
    for t in range(state.round, rounds):
        cohort, now = draw_cohort(problem, t, participation), local.at(t)
        begun = train_cohort(problem, state.model, cohort, t, now, aggregator=aggregator)
        delays = numpy_generator(problem.seed, "delays", t).integers(0, slowest + 1, len(problem.shards))
        pending = dict(state.server.get("pending", {}))
        for u in begun:
            change = {name: v - state.model[name] for name, v in u.model.items() if v.is_floating_point()}
            about = {"client": u.client, "n": u.n, "begun": t, "due": t + delays[u.client], "loss": u.stats.loss}
            numbers = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in about.items()}
            pending[f"{t:06d}-{u.client:06d}"] = {"change": change, **numbers}

        arrived = sorted((float(p["due"]), key) for key, p in pending.items() if float(p["due"]) <= t)
        model, memory, steps, ages = state.model, state.server.get("aggregator", {}), 0, []
        while len(arrived) >= buffer:
            taken, arrived = [pending.pop(key) for _, key in arrived[:buffer]], arrived[buffer:]
            context = Context(t, rounds, problem, model, memory, now.lr)
            updates = [_from_now(p, model, t) for p in taken]
            mixing = aggregate(aggregator, updates, context)
            model, memory, steps = mix(updates, mixing, model, problem.model), mixing.memory, steps + 1
            ages += [t - float(p["begun"]) for p in taken]
        after = State(t + 1, model, {"aggregator": memory, "pending": pending})
        metrics = {"server_steps": steps, "staleness": sum(ages) / max(1, len(ages)), "under_way": len(pending)}
        yield Round(t, state.model, begun, None, after, cost(begun, now, state.model), metrics=metrics)
        del begun
        state = after


def _from_now(pending, model, t):
    """An old upload as if its client had begun with the present model, shorter with its age."""
    length = (1 + t - float(pending["begun"])) ** -0.5
    weights = {name: v + length * pending["change"].get(name, 0) for name, v in model.items()}
    weights = {name: v.to(model[name].dtype) for name, v in weights.items()}
    loss = float(pending["loss"])
    return Update(int(pending["client"]), int(pending["n"]), weights, Stats(loss, loss, 0.0, 1, 1.0, 1))


def work(cell, *, rounds, local, aggregator, slowest):
    """FedAvg's; the state has the changes that are under way, of an average age of half the slowest."""
    return federated(cell, rounds=rounds, local=local, aggregator=aggregator) + Work(
        disk=cell.size * cell.cohort * slowest / 2
    )


ALGORITHMS = {"buffered": AlgorithmEntry(buffered, work=work)}
