"""Steps recorded and replayed (`--path graphs`), by a tape on the CPU: each number is that of `--path fast`.

A GPU's own part, `graphs.capture`, has run nowhere: only its calls are checked, on a pretended module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import members
import pytest
import tape
import torch
from test_fast import TRAINED_WHOLE, local, problem, same, train
from torch import Generator, Tensor, nn

from fatbench.engine.fast import clients, graphs
from fatbench.engine.local import Client
from fatbench.engine.rounds import Problem
from fatbench.errors import MachineError
from fatbench.methods import aggregators, augmentations, objectives
from fatbench.runner import start
from fatbench.runner.run_options import RunOptions

SHARDS = (58, 58, 38, 7)  # in batches of four: of all four once, of three eight times, of two five times, and rests


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Recording by a tape; how many operations each recording has."""
    sizes: list[int] = []
    busy: list[bool] = []

    def capture(function, generators, pool):  # type: ignore[no-untyped-def]
        busy.append(True)
        try:
            graph, result = tape.capture(function, generators)
        finally:
            busy.pop()
        assert (pool is None) == (not sizes)  # the graphs of a stack share their memory
        sizes.append(len(graph.operations))
        return graph, result

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "recording", lambda: bool(busy))
    yield sizes


def on(model: str | nn.Module, path: str, **changes: object) -> Problem:
    return replace(problem(model, path, SHARDS), **changes)


# A network of each kind: convolutions, batch norm, attention, both. The others' own operations test_fast runs, too.
KINDS = ("nin", "small_cnn", "resnet18", "mlp", "vit", "whole_edge")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in KINDS else pytest.mark.nightly) for name in TRAINED_WHOLE]
)
def test_a_replayed_step_is_the_step(model: str, taped: list[int]) -> None:
    """Draws of dropout and attack, statistics of batch norm, momentum, counts."""
    results = [train(on(model, path), local(), (0, 1, 2, 3)) for path in ("fast", "graphs")]
    same(results[1], results[0])
    assert len(taped) == 2 and min(taped) > 100  # batches of four of the three, and of the two larger ones


@pytest.mark.parametrize("name", [name for name in objectives.OBJECTIVES if name != "at"])
def test_every_objective(name: str, taped: list[int]) -> None:
    same(*(train(on("nin", path), local(name), (0, 1, 2, 3)) for path in ("graphs", "fast")))
    assert len(taped) == 2 or not members.stacks(name)


@pytest.mark.parametrize("model", ["small_cnn", pytest.param("vit", marks=pytest.mark.nightly)])
def test_all_that_a_algorithm_asks_and_several_epochs(model: str, taped: list[int]) -> None:
    """Clipping, a proximal term, shifts, the loss of theta^t, augmentation, in bf16: from one recording a shape."""
    results = []
    for path in ("graphs", "fast"):
        own = on(model, path, augment=functools.partial(augmentations.crop_flip, padding=1), precision="bf16")
        floats = {name: value for name, value in own.model.state_dict().items() if value.is_floating_point()}
        shifts = {k: {name: 1e-3 * (k + 1) * torch.ones_like(v) for name, v in floats.items()} for k in range(4)}
        pull = functools.partial(objectives.PROXIMALS["squared"], mu=0.1)
        how = replace(local("trades", epochs=2, clip=0.5), proximal=pull)
        results.append(
            train(
                own,
                how,
                (0, 1, 2, 3),
                gradient_shift=shifts,
                weight_shift=shifts,
                aggregator=aggregators.AGGREGATORS["afl"],
            )
        )
    same(*results)
    assert len(taped) == 2  # in two epochs


def test_what_comes_seldom_is_not_recorded(taped: list[int]) -> None:
    short = problem("nin", "graphs", (11, 11, 11))
    train(short, local(), (0, 1, 2))  # two batches of four and one of three
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
    recorded = graphs.record(lambda i, j, batch: batch.float().mean().reshape(1) + i + j, [])
    losses = [recorded(1, 2, torch.tensor([n, n])) for n in range(6)]
    assert [float(loss) for loss in losses] == [3, 4, 5, 6, 7, 8] and len(taped) == 1


def test_the_capture_of_a_gpu_names_every_generator_and_records_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Graph:
        def register_generator_state(self, generator: Generator) -> None:
            calls.append(generator)

        def replay(self) -> None:
            calls.append("replay")

    class Recording:
        def __init__(self, graph: Graph, pool: object) -> None:
            calls.append(pool)

        def __enter__(self) -> None:
            calls.append("begin")

        def __exit__(self, *error: object) -> None:
            calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    noise = Generator()
    graph, result = graphs.capture(lambda: calls.append("step") or torch.ones(1), [noise], "of another")
    graph.replay()
    assert calls == [noise, "of another", "begin", "step", "end", "replay"] and float(result) == 1


def test_on_a_cpu_it_is_refused_before_any_work() -> None:
    with pytest.raises(MachineError, match=r"--path graphs needs an NVIDIA GPU.* use --path fast"):
        start.run([], start.Observer, RunOptions(path="graphs", device="cpu"))  # type: ignore[arg-type]


def test_a_stack_that_draws_from_a_strange_generator_is_found_before_it_is_recorded(taped: list[int]) -> None:
    def careless(model: nn.Module, x: Tensor, y: Tensor, noise: Generator) -> tuple[Tensor, Tensor]:
        return objectives.standard(model, x + 0.01 * torch.rand(x.shape), y, noise)

    with pytest.raises(clients.CannotStack, match="draw from a generator shared by clients"):
        own = on("nin", "graphs")
        start_of = {name: value.clone() for name, value in own.model.state_dict().items()}
        clients.train([Client(own, start_of, k, 0) for k in (0, 1)], replace(local(), objective=careless))
    assert not taped
