"""Steps recorded and replayed (the path graphs), by a tape on the CPU: each number is that of loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tape
import torch
from path_runs import TRAINED_WHOLE, local, problem, train
from torch import Generator, Tensor, nn

from fatbench.engine import graphs
from fatbench.engine.cohort import train_cohort
from fatbench.engine.rounds import Problem, Update
from fatbench.methods import aggregators, augmentations, objectives
from fatbench.suite.entry import Entry

SHARDS = (58, 58, 38, 7)  # in batches of four and a rest of two or three


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Recording by a tape; how many operations each recording has."""
    sizes: list[int] = []

    def capture(function, generators, pool):  # type: ignore[no-untyped-def]
        graph, result = tape.capture(function, generators)
        assert (pool is None) == (not sizes)  # the graphs of a step share their memory
        sizes.append(len(graph.operations))
        return graph, result

    monkeypatch.setattr(graphs, "capture", capture)
    return sizes


def on(model: str | nn.Module, path: str, **changes: object) -> Problem:
    return replace(problem(model, "loop", SHARDS), path=path, recordings=graphs.Recordings(), **changes)


def equal(ours: list[Update], theirs: list[Update]) -> None:
    """To the last bit: what is replayed are the same kernels on the same numbers."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.stats == other.stats
        assert all(torch.equal(one.model[name], value) for name, value in other.model.items())


# A network of each kind: convolutions, batch norm, attention, both. The others' own operations run in test_local.
KINDS = ("nin", "small_cnn", "resnet18", "mlp", "vit", "whole_edge")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in KINDS else pytest.mark.nightly) for name in TRAINED_WHOLE]
)
def test_a_replayed_step_is_the_step(model: str, taped: list[int]) -> None:
    """Draws of dropout and attack, statistics of batch norm, momentum, counts; one recording for four clients."""
    equal(*(train(on(model, path), local(), (0, 1, 2, 3)) for path in ("graphs", "loop")))
    assert len(taped) == 1 and taped[0] > 50


def test_a_recording_stays_for_the_rounds_to_come(taped: list[int]) -> None:
    problems = {path: on("small_cnn", path) for path in ("graphs", "loop")}
    start = {name: value.clone() for name, value in problems["loop"].model.state_dict().items()}
    how = local()
    for round in range(4):
        equal(*(train_cohort(own, start, [0, 3], round, how) for own in problems.values()))
    assert len(taped) == 3  # batches of four, and the rests of two and of three


@pytest.mark.parametrize("name", [name for name in objectives.OBJECTIVES if name != "at"])
def test_every_objective(name: str, taped: list[int]) -> None:
    equal(*(train(on("small_cnn", path), local(name), (0, 1)) for path in ("graphs", "loop")))
    assert len(taped) == 1


@pytest.mark.parametrize("model", ["small_cnn", pytest.param("vit", marks=pytest.mark.nightly)])
def test_all_that_an_algorithm_asks_and_several_epochs(model: str, taped: list[int]) -> None:
    """Clipping, a proximal term, shifts, the loss of theta^t, augmentation, in bf16: from one recording a shape."""
    results = []
    for path in ("graphs", "loop"):
        own = on(model, path, augment=functools.partial(augmentations.crop_flip, padding=1), precision="bf16")
        floats = {name: value for name, value in own.model.state_dict().items() if value.is_floating_point()}
        shifts = {k: {name: 1e-3 * (k + 1) * torch.ones_like(v) for name, v in floats.items()} for k in range(4)}
        pull = functools.partial(objectives.PROXIMALS["squared"], mu=0.1)
        how = replace(local("trades", epochs=2, clip=0.5), proximal=pull)
        more = {"gradient_shift": shifts, "weight_shift": shifts, "aggregator": aggregators.AGGREGATORS["afl"]}
        results.append(train(own, how, (0, 1, 2, 3), **more))
    equal(*results)
    assert len(taped) == 2  # batches of four, and the rests of two, in two epochs


def mine(*given: Any) -> Any:
    return objectives.standard(*given)


@pytest.mark.parametrize("changes", [{"optimizer": "adam"}, {"objective": mine}, {"objective": Entry(mine)}])
def test_what_the_host_has_a_part_in_is_not_recorded(changes: dict[str, Any], taped: list[int]) -> None:
    equal(*(train(on("mlp", path), replace(local(), **changes), (0, 1)) for path in ("graphs", "loop")))
    assert not taped


def test_a_recording_that_is_not_the_step_is_not_used(taped: list[int], monkeypatch: Any, caplog: Any) -> None:
    """As if a replay drew other noise: it is found before a number comes of it."""
    replay = tape.Tape.replay

    def careless(self: tape.Tape) -> None:
        for generator in own.recordings.streams.values():
            generator.manual_seed(0)
        replay(self)

    monkeypatch.setattr(tape.Tape, "replay", careless)
    own = on("small_cnn", "graphs")
    equal(train(own, local(), (0, 1, 2, 3)), train(on("small_cnn", "loop"), local(), (0, 1, 2, 3)))
    assert len(taped) == 1 and "steps are not recorded" in caplog.text


def test_what_comes_seldom_is_not_recorded(taped: list[int]) -> None:
    train(replace(problem("nin", "loop", (11,)), path="graphs"), local(), (0,))  # two batches of four, one of three
    assert not taped


def test_the_tape_refuses_what_a_capture_refuses() -> None:
    """Else nothing above would say anything of a GPU."""
    x, stranger = torch.ones(3), Generator()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        tape.capture(lambda: x if x.sum() > 2 else -x, [])
    with pytest.raises(RuntimeError, match="the graph does not know"):
        tape.capture(lambda: torch.rand(3, generator=stranger), [])


def test_a_tape_computes_nothing_when_it_records_and_draws_anew_when_it_replays() -> None:
    w, noise = torch.zeros(3), Generator().manual_seed(1)

    def step() -> Tensor:
        w.add_(torch.rand(3, generator=noise))
        return 2 * w

    graph, result = tape.capture(step, [noise])
    assert not w.any()
    graph.replay()
    first = w.clone()
    graph.replay()
    fresh = Generator().manual_seed(1)
    drawn = [torch.rand(3, generator=fresh) for _ in range(2)]
    torch.testing.assert_close(first, drawn[0])
    torch.testing.assert_close(result, 2 * (drawn[0] + drawn[1]))


def test_a_replay_reads_the_batch_it_is_given_and_gives_a_result_that_stays(taped: list[int]) -> None:
    total = torch.zeros(1)
    recorded = graphs.record(lambda batch: total.add_(batch.float().mean()).clone(), [], [total])
    losses = [recorded(torch.tensor([n, n])) for n in range(6)]
    assert [float(loss) for loss in losses] == [0, 1, 3, 6, 10, 15] and len(taped) == 1


def test_the_capture_of_a_gpu_names_every_generator_and_records_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Graph:
        def register_generator_state(self, generator: Generator) -> None:
            calls.append(generator)

        def replay(self) -> None:
            calls.append("replay")

    @contextlib.contextmanager
    def recording(graph: Graph, pool: object) -> Iterator[None]:
        calls.extend([pool, "begin"])
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    noise = Generator()
    graph, result = graphs.capture(lambda: calls.append("step") or torch.ones(1), [noise], "of another")
    graph.replay()
    assert calls == [noise, "of another", "begin", "step", "end", "replay"] and float(result) == 1


def test_what_cannot_be_recorded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits() -> Tensor:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors ...")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: contextlib.nullcontext())
    with pytest.raises(graphs.NotRecorded, match=r"\(.* is capturing\)$"):
        graphs.capture(waits, [], None)
