"""A function is the same under another name, and is given what the names of its parameters ask for, and no more."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import members
import pytest
import torch
from algorithm_runs import nested, same
from torch import Tensor, nn
from torch.nn import functional as F

from fatbench.engine.cohort import train_cohort
from fatbench.engine.gradients import predict
from fatbench.engine.inject import asks, requested_arguments
from fatbench.engine.local import LocalTraining
from fatbench.engine.mixing import aggregate
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Context, Mixing, Problem, Round, State, Update
from fatbench.methods.aggregators import AGGREGATORS
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.defences import DEFENCES
from fatbench.methods.evasion import ATTACKS
from fatbench.methods.inversions import INVERSIONS, reads_of
from fatbench.methods.inversions.april import without_block0_norm
from fatbench.methods.objectives import PROXIMALS, standard
from fatbench.suite.types import Aggregator, Objective, Proximal
from fatbench.testing import equal, initial_state, local, renamed_copy, small_problem

CPU = torch.device("cpu")
PGD = functools.partial(ATTACKS["pgd"], eps=8 / 255, step=4 / 255, steps=2)


def pair(table: dict[str, Callable[..., Any]], kind: str, name: str) -> Iterator[Callable[..., Any]]:
    """The member and the same under another name, with settings that the types of its settings allow."""
    chosen = members.arguments(kind, name)
    if kind == "Partition":
        chosen["clients"] = 3
    for function in (table[name], renamed_copy(table[name])):
        yield functools.partial(function, **chosen)


# --- asking -------------------------------------------------------------------------------------------------------


def test_a_function_is_given_what_it_names_before_its_settings() -> None:
    def aggregator(updates: object, context: object, losses: object, *, scores: object = None) -> None: ...

    bound = functools.partial(aggregator, scores=1)
    assert asks(aggregator, "losses") and asks(bound, "losses")
    assert not asks(aggregator, "scores")  # a setting, whatever the engine offers under that name
    computed = []
    offers = {name: functools.partial(lambda n: computed.append(n) or n, name) for name in ("losses", "scores", "more")}
    assert requested_arguments(bound, offers) == {"losses": "losses"} and computed == ["losses"]


def around(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, inner: Objective, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """An objective around another, which it calls without knowing what that asks for."""
    loss, correct = inner(model, x, y, generator)
    return factor * loss, correct


def kept(updates: object, context: object, *, inner: Aggregator) -> Mixing:
    """An aggregator around another."""
    return inner(updates, context)


@pytest.mark.parametrize("asking", ["balanced", "near_broadcast", "adjusted_and_near", "by_client"])
def test_an_objective_around_one_that_asks(asking: str) -> None:
    """Two wrappers deep the same bytes."""
    inner = globals()[asking]
    outer = functools.partial(around, inner=functools.partial(around, inner=inner))
    on = small_problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    found = [train_cohort(on, initial_state(on).model, [0, 2, 1], 1, local(objective=one)) for one in (inner, outer)]
    assert equal(*found)


def test_an_aggregator_around_one_that_asks() -> None:
    """The clients measure the losses for AFL inside; its memory comes through."""
    on = small_problem()
    theta = initial_state(on).model
    found = []
    for aggregator in (AGGREGATORS["afl"], functools.partial(kept, inner=AGGREGATORS["afl"])):
        updates = train_cohort(on, theta, [2, 0, 1], 1, local(), aggregator=aggregator)
        found.append(aggregate(aggregator, updates, Context(1, 3, on, theta, {}, 0.05)))
    assert found[0].weights == found[1].weights and same(found[0].memory, found[1].memory)


def test_a_setting_is_given_only_what_its_kind_may_ask_for() -> None:
    """The `broadcast` of a proximal term is the weights that it is called with, not the model for objectives."""

    def pulled(
        model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, term: Proximal, inner: Objective
    ) -> tuple[Tensor, Tensor]:
        assert term([torch.ones(1)], [torch.zeros(1)], 0) == [torch.ones(1)]
        return inner(model, x, y, generator)

    on = small_problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    term = functools.partial(PROXIMALS["squared"], mu=1.0)
    objective = functools.partial(pulled, term=term, inner=near_broadcast)
    theta = initial_state(on).model
    assert equal(*(train_cohort(on, theta, [0], 1, local(objective=one)) for one in (near_broadcast, objective)))


# --- every member under another name ------------------------------------------------------------------------------


def watched(defence: Callable[..., Any], inversion: Callable[..., Any]) -> Round:
    on = small_problem("vit")
    settings = {"rounds": 1, "target_clients": 2, "candidates": 4, "objective": standard, "block0": "bare"}
    settings |= {"defence": defence, "inversion": inversion}
    (result,) = ALGORITHMS["gradient_inversion"](on, initial_state(on), **settings)
    return result


@pytest.mark.parametrize("name", [name for name in DEFENCES if name != "fixed_position"])
def test_every_defence_observed(name: str) -> None:
    """The norm that `gaussian` cuts is that of the whole gradient, under any name: the same PSNR."""
    ours, theirs = (watched(defence, INVERSIONS["patch_ls"]) for defence in pair(DEFENCES, "Defence", name))
    assert ours.metrics == theirs.metrics and same(ours.artifacts, theirs.artifacts)


def test_a_defence_that_names_the_whole_gradient_is_given_it() -> None:
    """And one that names a part only what the inversion reads, with the last bias: three tensors of the network's."""
    seen: dict[str, set[str]] = {}

    def whole(gradient: dict[str, Tensor], at: object) -> tuple[dict[str, Tensor], None]:
        seen["whole"] = set(gradient)
        return gradient, None

    def some(part: dict[str, Tensor], at: object) -> tuple[dict[str, Tensor], None]:
        seen["part"] = set(part)
        return part, None

    for defence in (whole, some):
        watched(defence, INVERSIONS["patch_ls"])
    bare = without_block0_norm(small_problem("vit").model)
    assert seen["whole"] == {name for name, _ in bare.named_parameters()}
    assert seen["part"] == {"backbone.patch_embed.proj.weight", "backbone.pos_embed", "head.fc.bias"}
    functions = {name: getattr(defence, "function", defence) for name, defence in DEFENCES.items()}
    assert {name for name in functions if asks(functions[name], "gradient")} == {"gaussian", "laplace", "dpsgd"}


def test_an_inversion_that_does_not_say_what_it_reads_is_given_everything() -> None:
    ours, _ = pair(INVERSIONS, "Inversion", "patch_ls")

    @functools.wraps(ours.func)
    def plain(*given: object, **settings: object) -> object:
        return ours.func(*given, **settings)

    theirs = functools.partial(plain, **ours.keywords)
    assert reads_of(ours) and reads_of(theirs) is None
    assert watched(DEFENCES["none"], theirs).metrics == watched(DEFENCES["none"], ours).metrics


# --- what an objective may ask for --------------------------------------------------------------------------------


def balanced(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor
) -> tuple[Tensor, Tensor]:
    """CE(f(x) + log n, y) with n_c the client's examples of class c (logit adjustment)."""
    model.train()
    logits = predict(model, x)
    return F.cross_entropy(logits + class_counts.log(), y), logits.argmax(1) == y


def near_broadcast(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, broadcast: nn.Module
) -> tuple[Tensor, Tensor]:
    """KL(p of theta^t || p): nothing in the first step of a round, without dropout or batch normalisation."""
    model.train()
    logits, before = predict(model, x), predict(broadcast, x).detach()
    p = before.log_softmax(1)
    return (p.exp() * (p - logits.log_softmax(1))).sum(1).mean(), logits.argmax(1) == y


def adjusted_and_near(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor, broadcast: nn.Module
) -> tuple[Tensor, Tensor]:
    """Both; counts plus one, so that a class that a client does not have is possible."""
    adjusted, correct = balanced(model, x, y, generator, class_counts + 1)
    return adjusted + near_broadcast(model, x, y, generator, broadcast)[0], correct


def by_client(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, client: int) -> tuple[Tensor, Tensor]:
    """The loss times one more than the client's number."""
    loss, correct = standard(model, x, y, generator)
    return (client + 1) * loss, correct


class Zeros(nn.Linear):
    """Two logits that are a bias, and begin at zero."""

    def __init__(self) -> None:
        super().__init__(1, 2)
        nn.init.zeros_(self.weight), nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 1, 1) -> (B, 2)."""
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("path", ["reference", "loop"])
def test_class_counts_are_the_clients_own(path: str) -> None:
    """Client 0 has 90 examples of class 0 and 10 of class 1, client 1 the other way round; all logits are 0. An example
    of the frequent class costs -log 0.9 = 0.10536, one of the other -log 0.1 = 2.30259; the mean over a client's own is
    0.9 * 0.10536 + 0.1 * 2.30259. The gradient by the biases is (0.9, 0.1) less the client's shares, which is nothing.
    """
    labels = torch.cat([torch.zeros(90), torch.ones(10), torch.ones(90), torch.zeros(10)]).long()
    images = torch.zeros(200, 1, 1, 1, dtype=torch.uint8)
    on = Problem(Zeros(), images, labels, list(torch.arange(200).split(100)), 2, 0, CPU, path=path)
    x, counts = torch.zeros(1, 1, 1, 1), torch.tensor([[90.0, 10.0]])
    costs = (balanced(on.model, x, torch.tensor([c]), generator(0, "n"), counts)[0] for c in (0, 1))
    losses = [float(loss.detach()) for loss in costs]
    assert losses == pytest.approx([0.10536, 2.30259], abs=1e-5)
    updates = train_cohort(on, initial_state(on).model, [1, 0], 0, local(batch=100, objective=balanced))
    for update in updates:
        assert update.stats.loss == pytest.approx(0.9 * 0.10536 + 0.1 * 2.30259, abs=1e-5)
        torch.testing.assert_close(update.model["bias"], torch.zeros(2), atol=1e-6, rtol=0)


@pytest.mark.parametrize("path", ["reference", "loop"])
def test_the_broadcast_model_stays_what_it_was(path: str) -> None:
    """One step: the divergence of theta^t from itself is 0 and so is its gradient. With the cross-entropy beside it,
    weights move, and the second step is told the divergence from where the round began."""
    on = small_problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)), path)
    theta = initial_state(on).model
    for update in train_cohort(on, theta, [0, 1], 0, local(objective=near_broadcast)):
        assert update.stats.loss == pytest.approx(0.0, abs=1e-6)
        torch.testing.assert_close(update.model, theta, atol=1e-6, rtol=0)
    one, two = (train_cohort(on, theta, [0, 1], 0, local(objective=adjusted_and_near, epochs=e)) for e in (1, 2))
    alone = train_cohort(on, theta, [0, 1], 0, local(objective=adjusted, epochs=2))
    for first, second, without in zip(one, two, alone, strict=True):
        assert second.stats.loss < first.stats.loss
        assert second.stats.loss > without.stats.loss + 1e-4  # by the divergence


def adjusted(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor
) -> tuple[Tensor, Tensor]:
    return balanced(model, x, y, generator, class_counts + 1)


def test_an_objective_may_ask_for_the_client() -> None:
    """Client k's loss counts k + 1 times: a step of rate r is that of rate (k + 1) r."""
    on = small_problem()
    theta = initial_state(on).model
    for update in train_cohort(on, theta, [0, 1], 0, local(objective=by_client)):
        alone = train_cohort(on, theta, [update.client], 0, local(lr=0.05 * (update.client + 1)))
        assert update.stats.loss == pytest.approx((update.client + 1) * alone[0].stats.loss)
        for name, _ in on.model.named_parameters():
            torch.testing.assert_close(update.model[name], alone[0].model[name], rtol=1e-5, atol=1e-6)


def test_fedsgd_gives_an_objective_what_it_asks_for() -> None:
    on = small_problem(nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    how = {"rounds": 1, "batch": 5, "lr": 0.1, "defence": DEFENCES["none"]}
    (still,) = ALGORITHMS["fedsgd"](on, initial_state(on), objective=near_broadcast, **how)
    # every step begins at theta
    torch.testing.assert_close(still.state.model, initial_state(on).model, atol=1e-6, rtol=0)
    plain, scaled = (
        next(iter(ALGORITHMS["fedsgd"](on, initial_state(on), objective=objective, **how))).updates
        for objective in (standard, by_client)
    )
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close((a.client + 1) * a.extra["gradient"]["1.weight"], b.extra["gradient"]["1.weight"])


def test_where_no_model_is_broadcast_an_objective_cannot_ask_for_it() -> None:
    on = small_problem("edge_resnet8")
    settings = nested(rounds=1, batch=4, lr=0.1, objective=near_broadcast, server_epochs=1, server_lr=0.1)
    with pytest.raises(ValueError, match="needs the broadcast model"):
        list(ALGORITHMS["fedgkt"](on, initial_state(on), **settings))
    pull = functools.partial(PROXIMALS["squared"], mu=0.1)
    settings["local"] = replace(settings["local"], objective=standard, proximal=pull)
    with pytest.raises(ValueError, match="local: proximal: no edge receives"):
        list(ALGORITHMS["fedgkt"](on, initial_state(on), **settings))


def median(updates: list[Update], context: Context) -> Mixing:
    """The coordinate-wise median of the clients' models."""
    middle = {}
    for name, value in context.broadcast.items():
        stacked = torch.stack([update.model[name] for update in updates])
        middle[name] = stacked.median(0).values if value.is_floating_point() else stacked[0]
    return Mixing([1 / len(updates)] * len(updates), model=middle)


def one_pixel(values: tuple[int, ...]) -> Problem:
    """A weight for every client to pull to its pixel; a step of rate 1 takes it there."""
    images = torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    shards = list(torch.arange(len(values)).split(1))
    return Problem(One(), images, torch.zeros(len(values), dtype=torch.int64), shards, 2, 0, CPU, path="reference")


class One(nn.Module):
    """A model that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 2)


def towards_the_pixel(model: Any, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return 0.5 * (model.w - x.flatten(1)).square().mean(), torch.ones(len(x), dtype=torch.bool)


MEDIAN = {"aggregator": median, "local": LocalTraining(batch=1, lr=1.0, objective=towards_the_pixel)}


@pytest.mark.parametrize(("name", "rate"), [("fedavg", 1.0), ("scaffold", 1.0), ("scaffold", 0.5), ("fedgate", 0.5)])
def test_a_aggregator_may_give_the_next_model_itself(name: str, rate: float) -> None:
    """Clients end at 0.2, 0.4 and 1: the median is 0.4, the mean 0.53. From theta 0 half of the way is 0.2."""
    settings = {"server_lr": rate} if name != "fedavg" else {}
    first, second = ALGORITHMS[name](one_pixel((51, 102, 255)), State(0, {"w": torch.zeros(1)}), rounds=2, **settings,
                                    **MEDIAN)  # fmt: skip
    assert first.state.model["w"].tolist() == pytest.approx([0.4 * rate])
    assert first.mixing.weights == pytest.approx([rate / 3] * 3)
    if name == "fedavg":  # a step of rate 1 forgets where it began
        assert second.state.model["w"].tolist() == pytest.approx([0.4])


def remembers(updates: list[Update], context: Context) -> Mixing:
    """An aggregator that keeps what an algorithm might call its own: "c", and a count of the rounds."""
    before = context.memory.get("c", {"w": torch.zeros(1)})["w"]
    memory = {"c": {"w": before + 100}, "clients": torch.tensor(float(context.round))}
    return Mixing([1 / len(updates)] * len(updates), memory=memory)


@pytest.mark.parametrize("name", ["fedavg", "fedavg_validated", "scaffold", "scaffold_sfat", "fedgate", "fednova"])
def test_a_aggregators_memory_and_a_algorithms_state_cannot_meet(name: str) -> None:
    """Both call something "c"; each goes on with its own, and the model is that of an aggregator that keeps nothing."""
    settings = {"local": MEDIAN["local"], "rounds": 3, **({"validators": 1} if name == "fedavg_validated" else {})}
    settings["local"] = replace(settings["local"], lr=0.25)
    on, theta = one_pixel((51, 102, 255)), State(0, {"w": torch.zeros(1)})
    kept, plain = (
        list(ALGORITHMS[name](on, theta, aggregator=aggregator, **settings))
        for aggregator in (remembers, AGGREGATORS["uniform"])
    )
    for count, (a, b) in enumerate(zip(kept, plain, strict=True), start=1):
        assert same(a.state.model, b.state.model) and same(a.state.clients, b.state.clients)
        assert a.state.server["aggregator"]["c"]["w"].item() == 100 * count
        assert a.state.server.keys() - {"aggregator"} == b.state.server.keys() - {"aggregator"}
        for key in b.state.server.keys() - {"aggregator"}:
            assert same(a.state.server[key], b.state.server[key])
    if name == "scaffold":
        assert not math.isclose(float(kept[-1].state.server["c"]["w"]), 300)
