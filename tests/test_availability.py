"""Clients that are away, and clients without images: who takes part, and what a round without anybody leaves."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_runs import same

from fatbench.engine.cohort import Availability, TooFewClients, draw_cohort, train_cohort
from fatbench.engine.local import Client, train_client
from fatbench.engine.malicious import Malicious
from fatbench.engine.rounds import Problem, Round
from fatbench.errors import SpecError
from fatbench.methods.aggregators import AGGREGATORS, samples
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.models.dual_norm import with_dual_norm
from fatbench.suite import cells, cost, facts, file_schema
from fatbench.testing import _stored, equal, initial_state, local, member, rounds, small_problem

FEDAVG = functools.partial(ALGORITHMS["fedavg"], aggregator=samples, local=local())
OTHERS = ("fedaux", "fedavg_validated")
TAKING_PART = sorted(n for n in ALGORITHMS if "participation" in member("Algorithm", n).keywords and n not in OTHERS)


def away(clients: int = 3, **how: Any) -> Problem:
    """Small clients of whom some are away."""
    return replace(small_problem(clients=clients), availability=Availability(**how))


def run(on: Problem, algorithm: Any = FEDAVG, start: Any = None, **more: Any) -> list[tuple[Round, dict[Any, float]]]:
    how = functools.partial(algorithm, rounds=more.pop("rounds", 3))
    return rounds(on, how, start, availability=on.availability, malicious=on.malicious, **more)


def test_one_of_two_is_away_and_the_mean_is_the_model_of_the_other() -> None:
    on = away(2, late="0:1")
    (first, numbers), (_, of_both), _ = run(on)
    alone = train_client(Client(on, initial_state(on).model, 1, 0), local())
    assert [update.client for update in first.updates] == [1]
    assert same(first.state.model, alone.model)
    assert numbers["took_part", -1] == 1 and of_both["took_part", -1] == 2
    assert numbers["weight", 1] == 1 and ("weight", 0) not in numbers
    assert 2 * numbers["bytes_up", -1] == of_both["bytes_up", -1]


def test_each_client_is_away_with_the_probability_whoever_else_is_drawn() -> None:
    on = away(4, drop=0.3)
    there = [drawn(on, t, 1.0) for t in range(200)]
    share = sum(map(len, there)) / 800
    assert abs(share - 0.7) < 0.05
    halves = [drawn(on, t, 0.5) for t in range(200)]
    assert all(half <= cohort for half, cohort in zip(halves, there, strict=True))  # of those drawn, who is there
    assert {*map(len, halves)} == {0, 1, 2}


def drawn(on: Problem, t: int, participation: float) -> set[int]:
    try:
        return {*draw_cohort(on, t, participation)}
    except TooFewClients:
        return set()


def test_without_availability_nothing_is_drawn_and_nothing_changes() -> None:
    on = small_problem()
    assert draw_cohort(on, 0, 1.0) == draw_cohort(replace(on, availability=Availability()), 0, 1.0)
    plain = [result for result, _ in rounds(on, functools.partial(FEDAVG, rounds=2))]
    assert equal(plain, [result for result, _ in run(replace(on, availability=Availability()), rounds=2)])


@pytest.mark.parametrize("name", TAKING_PART)
def test_a_round_without_anybody_keeps_all_and_resumes_bit_for_bit(name: str) -> None:
    """Nobody is there in rounds 0 and 2 of 4, whatever the algorithm remembers; cut after each round."""
    on = small_problem()
    if name == "fedrbn":
        on = small_problem(with_dual_norm(copy.deepcopy(on.model)))
    on = replace(on, held_out=(on.images[:8], on.labels[:8]), availability=Sometimes())
    algorithm = member("Algorithm", name)
    whole = run(on, algorithm, rounds=4)
    assert [numbers["took_part", -1] for _, numbers in whole] == [0, 3, 0, 3]
    for t in (0, 2):
        result, numbers = whole[t]
        assert same(result.state.model, result.broadcast) and numbers["bytes_up", -1] == 0
        assert numbers["doubt_too_few_clients_took_part", -1] == 1
    assert same(dict(whole[2][0].own), dict(whole[1][0].own))
    for done in (1, 2, 3):
        rest = run(on, algorithm, _stored(whole[done - 1][0].state), rounds=4)
        assert equal(whole[done:], rest)


class Sometimes(Availability):
    """Everybody is there in every second round."""

    def present(self, clients: int, seed: int, round: int) -> list[bool]:
        return [round % 2 == 1] * clients


def test_fewer_than_the_aggregator_needs_train_nothing() -> None:
    """Krum of one liar needs five, and so does a mean without two at each end."""
    on = away(6, late="0:2,1:1")
    krum = functools.partial(AGGREGATORS["krum"], byzantine=1)
    for rule in (krum, functools.partial(AGGREGATORS["trimmed_mean"], byzantine=2)):
        with pytest.raises(TooFewClients):
            train_cohort(on, initial_state(on).model, [*range(4)], 0, local(), aggregator=rule)
        assert len(train_cohort(on, initial_state(on).model, [*range(5)], 0, local(), aggregator=rule)) == 5
    rounds = run(on, functools.partial(FEDAVG, aggregator=krum))
    assert [numbers["took_part", -1] for _, numbers in rounds] == [0, 5, 6]


def test_an_adversary_sees_who_is_there_and_remembers_over_empty_rounds() -> None:
    seen: list[int] = []

    def counting(updates, others, memory):  # type: ignore[no-untyped-def]
        seen.append(len(others))
        return -updates, {"count": memory.get("count", torch.tensor(0)) + 1}

    on = away(4, late="2:2,0:1,1:1,3:1")
    liar = Malicious("0", counting)
    results = run(replace(on, malicious=liar), rounds=3)
    assert seen == [2, 3]
    assert [numbers["malicious", -1] for _, numbers in results] == [0, 1, 1]
    assert int(results[2][0].state.server["adversary"]["attack"]["count"]) == 2


def test_clients_without_images_take_no_part() -> None:
    on = small_problem(clients=4)
    on = replace(on, shards=[*on.shards[:2], on.shards[2][:0], on.shards[3]])
    (result, _), *_ = rounds(on, functools.partial(FEDAVG, rounds=1, participation=1.0))
    assert {update.client for update in result.updates} == {0, 1, 3}
    with pytest.raises(SpecError, match=r"clients \[2\] have no training images, and all train in every round"):
        rounds(on, functools.partial(ALGORITHMS["local_only"], rounds=1, local=local()))


LOCAL = {"batch": 8, "lr": 0.1, "objective": "standard"}
CELL = {
    "seed": 0, "data": "digits", "partition": {"name": "iid", "clients": 4}, "model": "small_cnn",
    "algorithm": {"name": "fedavg", "rounds": 4, "aggregator": "samples", "local": LOCAL},
}  # fmt: skip


def test_a_cell_says_it_in_its_identity_only_where_it_does() -> None:
    plain, none = cells.canonical(CELL), cells.canonical({**CELL, "availability": None})
    assert cells.identity(plain) == cells.identity(none)
    ways = ({3: 2, 1: 1}, {"1": 1, "3": 2}, "3:2, 1:1")
    some = [cells.canonical({**CELL, "availability": {"late": late}}) for late in ways]
    assert len({cells.identity(one) for one in some}) == 1 and some[0]["availability"]["late"] == "1:1,3:2"
    assert cells.identity(some[0]) != cells.identity(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"availability": {"late": {4: 1}}}, "availability: late: no client 4: the 4 clients count from 0"),
        ({"availability": {"late": {3: 1}}, "unseen": 1}, "late: no client 3: the 3 clients that train count from 0"),
        ({"availability": {"late": 3}}, "expected clients and a round of each, such as {3: 5}, got 3"),
        ({"availability": {"drop": 1.5}}, "drop: should be less than or equal to 1"),
        ({"availability": {"drop": 0.1}, "algorithm": {"name": "local_only", "rounds": 1, "local": LOCAL}},
         "availability: local_only needs all clients in every round: no setting 'participation'"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_runs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message.replace("{", r"\{")):
        cells.canonical({**CELL, **changes})


def test_an_editor_takes_both_ways_to_write_it() -> None:
    late = file_schema.schema()["definitions"]["Availability"]["properties"]["late"]
    assert {"string", "object"} <= {*late["type"]}


def test_the_plan_counts_who_is_there_on_average() -> None:
    """A tenth away, and one of four clients for the second half only: 0.9 * 3.5 of four."""
    plain = cells.canonical(CELL)
    some = cells.canonical({**CELL, "availability": {"drop": 0.1, "late": {3: 2}}})
    assert facts.Facts(some).present == pytest.approx(0.9 * 3.5)
    before, after = cost.training(plain), cost.training(some)
    assert after.bytes_up / before.bytes_up == pytest.approx(0.9 * 3.5 / 4)
    assert after.gradient_steps / before.gradient_steps == pytest.approx(0.9 * 3.5 / 4)
