"""Clients that differ within a round: tensors and settings of their own."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import tape
import torch
from test_inject import PGD

from fatbench.engine import graphs
from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.malicious import AdversaryMemory, Malicious
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context, Tensors
from fatbench.errors import SpecError
from fatbench.methods.aggregators import AGGREGATORS, samples
from fatbench.methods.objectives import at
from fatbench.testing import equal, initial_state, local, small_problem

ROBUST = functools.partial(at, attack=PGD)


def statistics(theta: Tensors, k: int) -> Tensors:
    """The batch normalisation of client k, as FedBN keeps it."""
    kept = [name for name, value in theta.items() if "batchnorm" in name and value.is_floating_point()]
    return {name: theta[name] + 0.1 * (k + 1) for name in kept}


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


HEAD = ["fc2.weight", "fc2.bias"]


@pytest.mark.parametrize("path", ["reference", "loop", "graphs"])
def test_a_frozen_layer_costs_no_byte_and_moves_by_0(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1 trains its last layer alone; the others are as without it, also where steps are recorded."""
    if path == "graphs":
        monkeypatch.setattr(graphs, "capture", lambda function, generators, pool: tape.capture(function, generators))
    on = small_problem("small_cnn", path, images_per_client=40)
    on = replace(on, recordings=graphs.Recordings() if path == "graphs" else None)
    theta, names = initial_state(on).model, {name for name, _ in on.model.named_parameters()}
    assert names > {*HEAD}
    as_before = train_cohort(on, theta, [0, 1, 2], 0, local(momentum=0.9))
    found = train_cohort(on, theta, [0, 1, 2], 0, local(momentum=0.9), only={1: HEAD})
    assert equal(as_before[::2], found[::2]) and found[0].sent is None
    part = found[1]
    moved = {name for name in names if not torch.equal(part.model[name], theta[name])}
    assert moved == {*HEAD} and part.sent == theta.keys() - (names - {*HEAD})
    assert part.stats.loss != as_before[1].stats.loss
    again = train_cohort(on, theta, [1, 0, 2], 0, local(momentum=0.9), only={1: HEAD})
    assert equal([again[1], again[0], again[2]], found)  # recordings of parts and of wholes do not mix
    whole, of_part = (cost([update], local(), theta).bytes_up for update in (found[0], part))
    frozen = sum(theta[name].numel() for name in names - {*HEAD})
    assert whole - of_part == 4 * frozen


def test_what_is_to_train_alone_exists_and_trains() -> None:
    on = small_problem("small_cnn")
    theta = initial_state(on).model
    with pytest.raises(SpecError, match=r"client 1 is to train fc2\.wieght \(did you mean 'fc2\.weight'\?\)"):
        train_cohort(on, theta, [1], 0, local(), only={1: ["fc2.wieght"]})
    with pytest.raises(SpecError, match="client 1 is to train nothing"):
        train_cohort(on, theta, [1], 0, local(), only={1: []})
    on.model.fc2.requires_grad_(False)
    with pytest.raises(SpecError, match=r"client 1 is to train fc2\.bias"):
        train_cohort(on, theta, [1], 0, local(), only={1: HEAD})


def test_the_server_sees_what_was_sent_and_no_more() -> None:
    """What a client keeps is theta^t to a mean, a median, a distance and an adversary, and stays so to the bit."""
    on = small_problem("small_cnn", clients=4, images_per_client=8)
    theta = initial_state(on).model
    body = [name for name in theta if name not in HEAD]
    told: list[int] = []

    def curious(updates, others, last_layer, aggregate):  # type: ignore[no-untyped-def]
        told.extend([updates.shape[1], int(last_layer.sum()), aggregate(updates).numel()])
        return -updates

    liar = replace(on, malicious=Malicious("1", curious))
    now = Context(0, 1, on, theta, {}, 0.05)
    how = {"aggregator": AGGREGATORS["samples"], "sent": dict.fromkeys(range(4), body), "context": now}
    updates = train_cohort(liar, theta, [0, 1, 2, 3], 0, local(), **how)
    trained = sum(p.numel() for name, p in on.model.named_parameters() if name in body)
    assert told == [trained, 0, trained]
    honest = train_cohort(on, theta, [1], 0, local())[0].model
    assert all(torch.equal(updates[1].model[name], honest[name]) for name in HEAD)  # it keeps what it trained
    assert not torch.equal(updates[0].model[HEAD[0]], theta[HEAD[0]])

    def distances(updates, context):  # type: ignore[no-untyped-def]
        assert all(torch.equal(update.model[name], theta[name]) for update in updates for name in HEAD)
        return samples(updates, context)

    for rule in (distances, AGGREGATORS["coordinate_median"], AGGREGATORS["geometric_median"]):
        mixed = mix(updates, aggregate(rule, updates, now), theta, on.model)
        assert all(torch.equal(mixed[name], theta[name]) for name in HEAD)
        assert not torch.equal(mixed["block1_conv1.weight"], theta["block1_conv1.weight"])


def test_a_call_that_sends_nothing_arms_nobody() -> None:
    """Heads that stay with their clients may train in a call of their own, also under an adversary with a memory."""
    on = small_problem("small_cnn", clients=3, images_per_client=8)
    theta = initial_state(on).model

    def remembering(updates, others, memory):  # type: ignore[no-untyped-def]
        return -updates, {"seen": others.mean(0)}

    liar = replace(on, malicious=Malicious("0", remembering), adversary=AdversaryMemory())
    nothing = dict.fromkeys(range(3), ())
    heads = train_cohort(liar, theta, [0], 0, local(), only={0: HEAD}, sent=nothing)
    assert equal(heads, train_cohort(on, theta, [0], 0, local(), only={0: HEAD}, sent=nothing))
    assert cost(heads, local(), theta).bytes_up == 0 and not heads[0].upload
    train_cohort(liar, theta, [0, 1, 2], 0, local())
    assert liar.adversary.kept["attack"]["seen"].numel()
