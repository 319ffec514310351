"""Clients that differ within a round: tensors and settings of their own."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from test_inject import PGD

from fatbench.engine.cohort import train_cohort
from fatbench.engine.rounds import Tensors
from fatbench.methods.objectives import at
from fatbench.testing import equal, initial_state, local, small_problem

ROBUST = functools.partial(at, attack=PGD)


def statistics(theta: Tensors, k: int) -> Tensors:
    """The batch normalisation of client k, as FedBN keeps it."""
    return {
        name: value + 0.1 * (k + 1)
        for name, value in theta.items()
        if "batchnorm" in name and value.is_floating_point()
    }


@pytest.mark.parametrize("path", ["reference", "loop"])
def test_each_client_begins_with_its_own_tensors(path: str) -> None:
    """As if it had been sent the broadcast with its own in place, alone."""
    on = small_problem("small_cnn", path, images_per_client=8)
    theta = initial_state(on).model
    own = {k: statistics(theta, k) for k in (0, 2)}  # client 1 takes what it is sent
    assert own[0]
    found = train_cohort(on, theta, [2, 0, 1], 1, local(), tensors_by_client=own)
    for update in found:
        sent = {**theta, **own.get(update.client, {})}
        (alone,) = train_cohort(replace(on, path="loop"), sent, [update.client], 1, local())
        assert update.stats.loss == pytest.approx(alone.stats.loss, rel=1e-4)
        torch.testing.assert_close(update.model, alone.model, rtol=1e-3, atol=1e-5)
    assert not torch.equal(found[0].model["batchnorm1_1.bias"], found[2].model["batchnorm1_1.bias"])


def test_some_clients_train_otherwise() -> None:
    """Two of four train adversarially, at another rate: each as in a cohort where all do."""
    on = small_problem("small_cnn", clients=4, images_per_client=8)
    theta = initial_state(on).model
    standard, robust = local(), local(objective=ROBUST, lr=0.01)
    found = train_cohort(on, theta, [3, 0, 2, 1], 1, standard, locals={0: robust, 2: robust})
    assert [update.client for update in found] == [3, 0, 2, 1]
    for how, clients in ((standard, [3, 1]), (robust, [0, 2])):
        alike = train_cohort(on, theta, clients, 1, how)
        assert equal([update for update in found if update.client in clients], alike)
