"""SCAFFOLD as the SFAT release implements it (update.py:221-347, SFAT.py:83-154), which differs from the paper.

| release | here | what |
|---|---|---|
| lr * (c, c_k) | state.server, state.clients | variates in units of displacement per step: S, S_k |
| y <- y - lr (c - c_k) | weight_shift | the correction is applied to the weights after the optimizer's step |

    client:  each step  y <- SGD(y, grad);  y <- y - (S - S_k)
             S_k+ = S_k - S + (theta^t - y) / tau_k
    server:  theta^{t+1} = sum_k w_k y_k;   S <- S + (1/m) sum_k (S_k+ - S_k)       (m participants, not K)

The constant 1e-4 the release multiplies and divides by cancels, so it does not appear. Its variates start as copies of
the initial model in the release; `copy_start` restores that (it cancels after the first round of full participation).
paper: variates on every state_dict entry / here: on trainable parameters, because shifting BatchNorm's running variance
makes it negative; `buffers: true` restores the release.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fatbench.engine.cohort import cost, draw_cohort, train_cohort
from fatbench.engine.local import trainable
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Problem, Round, State
from fatbench.methods.algorithms.scaffold import work as scaffold_work
from fatbench.suite.entry import AlgorithmEntry
from fatbench.suite.types import Aggregator, Count, Fraction, Local


def scaffold_sfat(
    problem: Problem,
    state: State,
    *,
    rounds: Count,
    aggregator: Aggregator,
    local: Local,
    participation: Fraction = 1.0,
    copy_start: bool = False,
    buffers: bool = False,
) -> Iterator[Round]:
    """The released SCAFFOLD variant: weight-space correction, variates divided by the number of participants."""
    floats = [name for name, value in state.model.items() if value.is_floating_point()]
    names = floats if buffers else trainable(problem.model)
    # released: S = lr * (initial model) with lr = 1e-4, so in units of displacement the copy is the model times 1e-4
    start = {name: (1e-4 * state.model[name] if copy_start else torch.zeros_like(state.model[name])) for name in names}
    if "start" in state.server:
        start = state.server["start"]
    s = state.server.get("s", start)
    start_state = {"start": dict(start)} if copy_start else {}
    for t in range(state.round, rounds):
        cohort = draw_cohort(problem, t, participation)
        local_t = local.at(t)
        client_variates = {k: state.clients.get(k, start) for k in cohort}
        shift = {k: {name: s[name] - client_variates[k][name] for name in names} for k in cohort}
        context = Context(t, rounds, problem, state.model, state.server.get("aggregator", {}), local_t.lr)
        trained = train_cohort(
            problem, state.model, cohort, t, local_t, aggregator=aggregator, weight_shift=shift, context=context
        )
        updates = [
            replace(u, extra={n: (state.model[n] - u.model[n]) / u.stats.steps - s[n] for n in names}) for u in trained
        ]
        mixing = aggregate(aggregator, updates, context)
        new_variates = {u.client: {n: client_variates[u.client][n] + u.extra[n] for n in names} for u in updates}
        s = {n: s[n] + sum(u.extra[n] for u in updates) / len(updates) for n in names}
        next_state = State(
            round=t + 1,
            model=mix(updates, mixing, state.model, problem.model),
            server={"aggregator": mixing.memory, **start_state, "s": dict(s)},
            clients={**state.clients, **new_variates},
        )
        yield Round(
            t, state.model, updates, mixing, next_state, cost(updates, local_t, state.model, models_up=2, models_down=2)
        )
        del trained, updates, mixing, shift  # frees the memory before the next round needs as much
        state = next_state


SCAFFOLD_SFAT = AlgorithmEntry(scaffold_sfat, foreseeable=True, work=scaffold_work)
