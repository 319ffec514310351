"""Adversaries that know the aggregator, and what the engine offers them: closed forms, memory, clients of a round."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from algorithm_runs import same
from test_robust_aggregators import Vector
from torch import Tensor
from updates import client, context, problem

from fatbench import testing
from fatbench.engine import randomness
from fatbench.engine.cohort import cost, train_cohort
from fatbench.engine.malicious import Malicious
from fatbench.engine.mixing import mix
from fatbench.engine.randomness import generator
from fatbench.engine.rounds import Problem
from fatbench.methods.adversaries import ADVERSARIES
from fatbench.methods.aggregators import AGGREGATORS, uniform
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.methods.algorithms.fedbn import normalisation
from fatbench.methods.evasion import fgsm
from fatbench.methods.knowing_adversaries import _best, _line_search
from fatbench.methods.objectives import at, standard
from fatbench.suite import calls, signatures
from fatbench.testing import equal, initial_state, local, rounds, small_problem

H = torch.tensor([[1.0, 0.0], [3.0, 2.0], [2.0, 4.0]])
U = torch.tensor([1.0, -2.0])


def adversary(name: str, **settings: Any) -> Callable[..., Any]:
    return functools.partial(ADVERSARIES[name], **settings)


def under(how: str, others: Tensor, **settings: Any) -> Callable[[Tensor], Tensor]:
    """The server as a function of what the malicious clients send, who come after the honest ones."""
    bound = calls.build("Aggregator", calls.check("Aggregator", {"name": how, **settings}))
    zeros = torch.zeros_like(others[0])
    at = context(on=problem(1, Vector(len(zeros))), broadcast={"w": zeros})

    def aggregated(uploads: Tensor) -> Tensor:
        updates = [client(k, model={"w": row}) for k, row in enumerate((*others, *uploads))]
        return mix(updates, bound(updates, at), at.broadcast, at.problem.model)["w"]

    return aggregated


# --- closed forms -------------------------------------------------------------------------------------------------


def test_optimal_ipm_goes_as_far_as_the_aggregator_lets_it() -> None:
    """Under the mean the largest t of the grid; under the median of H every t >= 0 gives sqrt(1.25), so t is 0."""
    one, far = torch.zeros(1, 2), pytest.approx(math.sqrt(1.25))
    sent = ADVERSARIES["optimal_ipm"](one, H, under("uniform", H))
    torch.testing.assert_close(sent, torch.tensor([[-2000.0, -2000.0]]))
    median = under("coordinate_median", H)
    sent = ADVERSARIES["optimal_ipm"](one, H, median)
    assert sent.tolist() == [[0, 0]] and float((median(sent) - 2).norm()) == far
    line = torch.arange(5.0).unsqueeze(1)
    sent = ADVERSARIES["optimal_ipm"](torch.zeros(2, 1), line, under("coordinate_median", line))
    assert float(under("coordinate_median", line)(sent)) == 1  # the mean is 2
    # ALIE looks on either side
    assert float((median(ADVERSARIES["optimal_alie"](one, H, median)) - 2).norm()) == far
    three = torch.tensor([[0.0], [0.0], [3.0]])  # mean 1; a median with an upload far up is 1.5, far down 0
    sent = ADVERSARIES["optimal_alie"](torch.zeros(1, 1), three, under("coordinate_median", three))
    assert sent.item() <= 0 and float(under("coordinate_median", three)(sent)) == 0


def test_the_grid_finds_what_the_line_search_steps_over() -> None:
    def peak(t: float) -> float:
        return 1 - abs(t - 0.3) if t < 1.3 else 0.0

    assert _line_search(peak) == pytest.approx(0.8**19 * 10 + 0.0, abs=0.9)
    assert _best(peak, "grid") == pytest.approx(0.3, abs=0.05)
    assert _best(lambda t: 1.0, "grid") == 0
    assert _best(lambda t: math.nan if t else 0.0, "grid") == 0
    assert _best(lambda t: -abs(t + 20), "grid", both=True) == pytest.approx(-20, abs=2)
    calls_: list[float] = []
    _best(lambda t: calls_.append(t) or t, "grid")  # type: ignore[func-returns-value]
    assert len(calls_) == 40


def test_min_sum() -> None:
    assert ADVERSARIES["min_sum"](U, H).tolist() == pytest.approx([1, 0], abs=1e-6)
    three = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0]])
    assert ADVERSARIES["min_max"](U, three).tolist() == pytest.approx([0, 0], abs=0.02)
    assert ADVERSARIES["min_sum"](U, three).tolist() == pytest.approx([-1, 0], abs=1e-6)
    assert torch.equal(ADVERSARIES["min_sum"](U, H[:1]), H[0])


def test_mimic_copies_the_one_farthest_along_the_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "normal", lambda x, generator: torch.tensor([1.0, 0.0]))
    updates, honest = torch.zeros(2, 2), torch.tensor([4, 7, 9])
    sent, memory = ADVERSARIES["mimic"](updates, H, honest, {}, generator(0, "m"), warmup=2)
    torch.testing.assert_close(memory["direction"], torch.full((2,), math.sqrt(0.5)))
    assert sent.tolist() == [[2, 4], [2, 4]] and int(memory["client"]) == 9
    moved = H.flip(1)  # the warm-up goes on: mu is the mean of both means, z leans on
    _, memory = ADVERSARIES["mimic"](updates, moved, honest, memory, generator(0, "m"), warmup=2)
    torch.testing.assert_close(memory["mean"], torch.tensor([2.0, 2.0]))
    kept = int(memory["client"])
    for here, others in ((torch.tensor([kept, 20]), H[:2]), (torch.tensor([20, kept]), H[:2])):
        sent, memory = ADVERSARIES["mimic"](updates, others, here, memory, generator(0, "m"), warmup=2)
        assert torch.equal(sent[0], others[here.tolist().index(kept)])
    sent, later = ADVERSARIES["mimic"](updates, H, torch.tensor([20, 21, 22]), memory, generator(0, "m"), warmup=2)
    assert torch.equal(sent[0], H[int((H @ memory["direction"]).argmax())]) and int(later["client"]) == kept
    assert ADVERSARIES["mimic_fixed"](updates, H, client=1).tolist() == [[3, 2], [3, 2]]


def test_fang_halves_until_krum_chooses_it() -> None:
    """Five honest 1 + 3 e_k in five numbers, two malicious: from 1 on, 1/4 is the first that Krum takes."""
    others = 1 + 3 * torch.eye(5)
    sent = ADVERSARIES["fang_krum"](torch.zeros(2, 5), others, under("krum", others, byzantine=2), start=1.0)
    assert sent.tolist() == [[-0.25] * 5] * 2
    never = ADVERSARIES["fang_krum"](torch.zeros(2, 5), others, under("coordinate_median", others), start=1.0)
    assert -1e-5 < float(never.min()) < 0
    bounded = ADVERSARIES["fang_krum"](torch.zeros(2, 5), others, lambda uploads: uploads[0])
    # distances^2 are 18, so a score of 3 neighbours is 54; the longest is sqrt(20); n - 2 f - 1 = 2
    assert float(bounded.min()) == pytest.approx(-(math.sqrt(54 / 2) + math.sqrt(20)) / math.sqrt(5), rel=1e-5)


def test_fang_trimmed_lies_beyond_the_honest() -> None:
    sent = ADVERSARIES["fang_trimmed"](torch.zeros(200, 2), H, generator(0, "f"))
    assert 0.5 <= float(sent[:, 0].min()) < 0.55 and 0.95 < float(sent[:, 0].max()) <= 1 and not sent[:, 1].any()
    up = ADVERSARIES["fang_trimmed"](torch.zeros(200, 2), -H - 1, generator(0, "f"))
    assert float(up[:, 0].min()) >= -2 and float(up[:, 0].max()) <= -1  # above their maximum -2, at most half of it
    own = ADVERSARIES["fang_trimmed"](torch.zeros(200, 2), H, generator(0, "f"), partial=True)
    assert float(own[:, 0].min()) >= -2 and float(own[:, 0].max()) <= -1  # 2 - U[3, 4] times 1


def test_inject_agree_and_scaled_logits() -> None:
    update = torch.tensor([-1.0, 1.0])
    assert ADVERSARIES["inject"](update, 1, 4, rate=0.5).tolist() == [-2, 2]
    assert ADVERSARIES["inject"](update, 1, 4, rate=0.5, scale=False).tolist() == [-0.5, 0.5]
    assert ADVERSARIES["agree"](torch.tensor([[0.0, 2.0], [2.0, 0.0]])).tolist() == [[1, 1], [1, 1]]
    moved, broadcast, logits = torch.tensor([0.5, -1.0]), torch.tensor([1.0, 2.0]), torch.tensor([False, True])
    assert ADVERSARIES["scale_logits"](moved, broadcast, logits, factor=10.0).tolist() == [0.5, 8]


def test_within_honest() -> None:
    u = torch.tensor([10.0, 2.0])
    assert ADVERSARIES["within_honest"](u, H).tolist() == pytest.approx([2 + math.sqrt(5), 2])
    assert ADVERSARIES["within_honest"](u, H, reach="min_max").tolist() == pytest.approx([1 + math.sqrt(13), 2])
    near = torch.tensor([2.5, 2.0])
    assert torch.equal(ADVERSARIES["within_honest"](near, H), near)
    assert ADVERSARIES["within_honest"](near, H, stretch=True).tolist() == pytest.approx([2 + math.sqrt(5), 2])
    assert torch.equal(ADVERSARIES["within_honest"](H.mean(0), H, stretch=True), H.mean(0))


def test_aimed_takes_the_least_robust() -> None:
    """With minus the distance in place of accuracy it is the farthest; with equal accuracies nothing is sent."""
    average, two = under("uniform", H), torch.zeros(2, 2)
    farthest = ADVERSARIES["aimed"](two, H, average, lambda step: -float((step - 2).norm()))
    assert torch.equal(farthest, ADVERSARIES["optimal_ipm"](two, H, average))
    assert not ADVERSARIES["aimed"](two, H, average, lambda step: 0.5).any()
    own = ADVERSARIES["aimed"](torch.stack([U, U]), H, average, lambda step: 0.5, direction="own")
    assert torch.equal(own, torch.stack([U, U]))


def test_masking_is_a_cross_entropy_at_a_temperature() -> None:
    def teacher(x: Tensor) -> Tensor:
        return torch.tensor([[2.0, 0.0]])

    student = torch.nn.Linear(1, 2)
    torch.nn.init.zeros_(student.weight), torch.nn.init.zeros_(student.bias)
    x, y = torch.zeros(1, 1), torch.tensor([0])
    loss, correct = ADVERSARIES["masking"](
        None, student, x, y, generator(0, "x"), teacher, attack=lambda model, x, y, generator: x, temperature=2.0
    )
    assert loss.item() == pytest.approx(4 * math.log(2)) and correct.tolist() == [True]


# --- beside ByzFL ---------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "coordinate_median": ({}, "Median", {}),
    "trimmed_mean": ({"byzantine": 2}, "TrMean", {"f": 2}),
    "mda": ({"byzantine": 2}, "MDA", {"f": 2}),
    "meamed": ({"byzantine": 2}, "Meamed", {"f": 2}),
}


@pytest.mark.parametrize("nnm", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_the_line_search_is_byzfls_and_the_grid_misses_little(name: str, nnm: bool) -> None:
    """The same t in float64; the grid reaches nine tenths of the best of 400 values, where ByzFL's search does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it imports
        byzfl = pytest.importorskip("byzfl")
    ours, theirs, their_settings = PAIRS[name]
    how: dict[str, Any] = {"how": name, **ours}
    if nnm:
        how = {"how": "after", "pre": {"name": "nnm", "byzantine": 2}, "aggregator": {"name": name, **ours}}
    others = torch.randn(9, 50, dtype=torch.float64, generator=generator(0, "uploads")) + 0.3
    server = under(others=others, **how)
    two, mean = torch.zeros(2, 50, dtype=torch.float64), others.mean(0)
    rule = getattr(byzfl, theirs)(**their_settings)
    for attack, kind in (("optimal_ipm", "InnerProductManipulation"), ("optimal_alie", "ALittleIsEnough")):
        sent = ADVERSARIES[attack](two, others, server, search="byzfl")[0]
        search = getattr(byzfl, f"Optimal_{kind}")(agg=rule, pre_agg_list=[byzfl.NNM(2)] if nnm else [], f=2)
        numpy.testing.assert_allclose(sent, search(others.numpy()), rtol=1e-9, atol=1e-9)
    grid = float((server(ADVERSARIES["optimal_ipm"](two, others, server)) - mean).norm())
    fine = max(float((server((-t * mean).expand_as(two)) - mean).norm()) for t in torch.logspace(-2, 3, 60))
    assert grid >= 0.9 * fine


# --- what the engine offers ------------------------------------------------------------------------------------------


def among(on: Problem, malicious: Malicious | None, aggregator: Any = uniform, **settings: Any) -> Any:
    how = functools.partial(ALGORITHMS["fedavg"], aggregator=aggregator, **{"rounds": 2, "local": local(), **settings})
    return [result for result, _ in rounds(replace(on, malicious=malicious), how, malicious=malicious)]


def test_aggregate_is_the_server_of_the_round() -> None:
    """What it says of the uploads is where the model goes, for a mean, a median, bucketing aside and clipped memory."""
    foreseen: list[Tensor] = []

    def curious(updates, aggregate, malicious, cohort):  # type: ignore[no-untyped-def]
        assert (malicious, cohort) == (2, 5)
        foreseen.append(aggregate(-updates))
        both = aggregate(torch.stack([updates, -updates]))
        torch.testing.assert_close(both[1], foreseen[-1])
        return -updates

    for rule in ("uniform", "coordinate_median", "centred_clipping"):
        results = among(small_problem("mlp", clients=5), Malicious("1,3", curious), AGGREGATORS[rule])
        for result, step in zip(results, foreseen[-2:], strict=True):
            moved = torch.cat([
                (result.state.model[name] - result.broadcast[name]).flatten()
                for name, _ in small_problem("mlp").model.named_parameters()
            ])  # fmt: skip
            torch.testing.assert_close(moved, step)


def test_asking_what_the_server_would_do_moves_nothing() -> None:
    """Centred clipping's centre after a searched round is that after the chosen uploads alone."""

    def asking(updates, aggregate, *, times):  # type: ignore[no-untyped-def]
        for t in range(times):
            aggregate(t * updates)
        return -updates

    rule, on = AGGREGATORS["centred_clipping"], small_problem("mlp", clients=5)
    once, often = (among(on, Malicious(2, functools.partial(asking, times=n)), rule) for n in (1, 20))
    assert equal([vars(result)["state"] for result in once], [vars(result)["state"] for result in often])


def test_own_knowledge_is_of_the_malicious_clients_updates() -> None:
    seen: list[Any] = []

    def curious(updates, others, aggregate):  # type: ignore[no-untyped-def]
        seen.append((torch.equal(updates, others), aggregate(updates), updates.mean(0)))
        return updates

    on = small_problem("mlp", clients=6)
    among(on, Malicious(3, curious, knows="own"), rounds=1)
    ((equal_, foreseen, mean),) = seen
    assert equal_
    torch.testing.assert_close(foreseen, mean)  # the honest places hold each of the three once
    among(on, Malicious(3, curious), rounds=1)
    assert not seen[1][0]


@pytest.mark.parametrize("algorithm", ["scaffold", "fedgate", "fednova", "fltrust", "fedbn", "fedavg_mixed"])
def test_algorithms_that_combine_by_themselves_say_so(algorithm: str) -> None:
    """The next model is what the adversary was told: with the server's rate, its trust, weights of FedNova."""
    told: list[Tensor] = []

    def curious(updates, aggregate):  # type: ignore[no-untyped-def]
        told.append(aggregate(-2 * updates))
        return -2 * updates

    liar = Malicious("1", curious)
    on = replace(small_problem("small_cnn", clients=4, images_per_client=8), malicious=liar)
    on = replace(on, held_out=(on.images[:8], on.labels[:8]))
    more: dict[str, Any] = {"aggregator": uniform}
    more |= {"server_lr": 0.5} if algorithm in ("scaffold", "fedgate") else {}
    more = {"root": 8} if algorithm == "fltrust" else more
    more |= {"adversarial": 2, "standard": standard} if algorithm == "fedavg_mixed" else {}
    how = functools.partial(ALGORITHMS[algorithm], rounds=1, local=local(), **more)
    (result,) = [result for result, _ in rounds(on, how, malicious=liar)]
    kept = normalisation(on.model) if algorithm == "fedbn" else ()  # the server is not sent these
    names = [name for name, _ in on.model.named_parameters() if name not in kept]
    moved = torch.cat([(result.state.model[name] - result.broadcast[name]).flatten() for name in names])
    torch.testing.assert_close(moved, told[0])


def test_an_algorithm_that_does_not_say_what_its_server_does_is_refused() -> None:
    on = replace(small_problem(), malicious=Malicious(1, adversary("optimal_ipm")))
    with pytest.raises(ValueError, match="asks for 'aggregate', and the algorithm does not say what its server does"):
        train_cohort(on, initial_state(on).model, [0, 1, 2], 0, local())


def counting(updates, memory, generator):  # type: ignore[no-untyped-def]
    """Sends what it has seen so far, and a draw."""
    seen = memory.get("sum", torch.zeros_like(updates[0])) + updates.mean(0)
    return (seen + randomness.normal(seen, generator)).expand_as(updates), {"sum": seen}


def test_memory_goes_through_a_checkpoint_in_every_round() -> None:
    on, how = small_problem("mlp", clients=4), {"rounds": 4}
    for liar in (
        Malicious("0,2", counting), Malicious(2, adversary("mimic", warmup=2), counting),
        Malicious(1, counting, drawn="each_round", start=1),
    ):  # fmt: skip
        whole = among(on, liar, AGGREGATORS["centred_clipping"], **how)
        rule = functools.partial(ALGORITHMS["fedavg"], aggregator=AGGREGATORS["centred_clipping"], local=local(), **how)
        for done in (1, 2, 3):
            state = testing._stored(whole[done - 1].state)
            assert ("adversary" in state.server) == (done > liar.start)
            rest = [result for result, _ in rounds(replace(on, malicious=liar), rule, state, malicious=liar)]
            assert equal([vars(result) for result in whole[done:]], [vars(result) for result in rest])


def test_an_adversary_with_a_memory_is_asked_once_a_round() -> None:
    from fatbench.engine.malicious import AdversaryMemory

    on = replace(small_problem(clients=4), malicious=Malicious("0,2", counting), adversary=AdversaryMemory())
    train_cohort(on, initial_state(on).model, [0, 1], 0, local())
    with pytest.raises(ValueError, match="called twice in round 1, and the adversary of 'attack' has a memory"):
        train_cohort(on, initial_state(on).model, [2, 3], 0, local())

    def forgetful(updates, memory):  # type: ignore[no-untyped-def]
        return updates

    on = replace(on, malicious=Malicious("0,2", forgetful), adversary=AdversaryMemory())
    with pytest.raises(ValueError, match="asks for 'memory' returns"):
        train_cohort(on, initial_state(on).model, [0, 1, 2], 0, local())


def test_clients_drawn_anew_and_honest_first_rounds() -> None:
    on = small_problem("mlp", clients=6)
    liar = Malicious(2, adversary("sign_flip"), drawn="each_round", start=1)
    who = [liar.among(range(6), 0, t) for t in range(30)]
    assert not who[0] and all(len(one) == 2 for one in who[1:]) and len(set(who)) > 5 and liar.numbers == frozenset()
    honest, attacked = among(on, None), among(on, liar)
    equal_models = [same(a.state.model, b.state.model) for a, b in zip(honest, attacked, strict=True)]
    assert equal_models == [True, False]
    rule = functools.partial(ALGORITHMS["fedavg"], rounds=2, aggregator=uniform, local=local())
    numbers = rounds(replace(on, malicious=liar), rule, malicious=liar)
    assert [one["malicious", -1] for _, one in numbers] == [0, 2]


def test_another_objective_is_an_honest_client_of_that_objective() -> None:
    on = small_problem(images_per_client=8)
    trained = local(objective=functools.partial(at, attack=functools.partial(fgsm, eps=0.1)))
    liar = replace(on, malicious=Malicious("1", adversary("objective_of", instead=standard)))
    theta = initial_state(on).model
    ours = train_cohort(liar, theta, [0, 1, 2], 1, trained)
    theirs = train_cohort(on, theta, [0, 1, 2], 1, trained, locals={1: local()})
    assert equal(ours, theirs)  # bit for bit, what it reports and its passes, too
    spent = cost(ours, trained, theta)
    assert spent.backward < cost(train_cohort(on, theta, [0, 1, 2], 1, trained), trained, theta).backward

    def lazy(objective, model, x, y, generator, round, class_counts):  # type: ignore[no-untyped-def]
        assert round == 1 and class_counts.sum() == 8
        loss, correct = objective(model, x, y, generator)
        return 0 * loss, correct

    idle = train_cohort(replace(on, malicious=Malicious("1", lazy)), theta, [0, 1, 2], 1, trained)
    assert all(torch.equal(idle[1].model[name], theta[name]) for name, _ in on.model.named_parameters())
    assert idle[1].stats.loss == 0


def test_robust_accuracy_is_that_of_the_next_model_on_their_images() -> None:
    """One weight: bright is class 1 from its threshold on. A step of 0.1 crosses where the pixel is near to it."""
    found: list[float] = []

    def curious(updates, robust_accuracy):  # type: ignore[no-untyped-def]
        found.extend(robust_accuracy(torch.tensor([-shift])) for shift in (0.0, 0.5))
        return updates

    class Threshold(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            bright = x.flatten(1).mean(1, keepdim=True) + self.w
            return torch.cat([-bright, bright], 1)

    images = torch.tensor([10, 100, 160, 255], dtype=torch.uint8).view(4, 1, 1, 1)
    labels = torch.tensor([0, 0, 1, 1])
    shards = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    on = Problem(Threshold(), images, labels, shards, 2, 0, torch.device("cpu"), malicious=Malicious(1, curious))
    shards_of_all = replace(on, malicious=Malicious("0", curious))
    trained = local(objective=functools.partial(at, attack=functools.partial(fgsm, eps=0.2)))
    train_cohort(shards_of_all, {"w": torch.zeros(1)}, [0, 1], 0, trained)
    # 10 and 100 of 255 less the step are dark only if the threshold is 0.5: 0.039 + 0.2 and 0.392 + 0.2
    assert found == [0.0, 0.5]
    with pytest.raises(ValueError, match="training has no attack with a radius"):
        train_cohort(shards_of_all, {"w": torch.zeros(1)}, [0, 1], 0, local())


def test_a_module_that_remembers_is_found_out(tmp_path: Any, own_plugins: None) -> None:
    """Under the plug-in's own aggregator, training that is cut in two ends elsewhere."""

    (tmp_path / "mine.py").write_text(
        "SEEN = []\n\n\ndef hoarding(updates):\n    SEEN.append(updates.mean())\n"
        "    return updates * -sum(SEEN[-2:]).sign()\n\n\nADVERSARIES = {'hoarding': hoarding}\n"
    )
    signatures.add_plugin(tmp_path / "mine.py")
    with pytest.raises(testing.Broken, match=r"after an interruption in round \d training ends elsewhere"):
        testing.its_training_resumes_with_the_same_bytes("Adversary", "hoarding")
