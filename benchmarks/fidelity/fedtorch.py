"""FedTorch's single-process SCAFFOLD, FedGATE, FedProx and FedAvg: its round loop, its SGD and its aggregation.

Its loop runs whole. Left out are its clocks, its logs and its schedule of rates. It reads our batches and trains the
clients in our order. Its launcher has the inner momentum off and a weight decay of 1e-4.

With momentum on, its buffers outlive the round; ours do not. So those rows are there twice: with the buffers emptied,
which has to agree, and as it is. It also drops a batch of one example, and counts its step: shards and batches here
leave none, but for the row that shows it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fidelity.measure import Row, difference, differs, equal
from benchmarks.fidelity.sources import imported, replaced
from fatbench.engine.cohort import draw_cohort
from fatbench.engine.local import LocalTraining, batches
from fatbench.engine.rounds import Problem, State, Tensors
from fatbench.methods import aggregators, objectives
from fatbench.methods.algorithms.fedavg import fedavg
from fatbench.methods.algorithms.fedgate import fedgate
from fatbench.methods.algorithms.scaffold import scaffold

ROUNDS, CLIENTS, BATCH, LR, DECAY, SEED = 4, 4, 7, 0.05, 1e-4, 6
NOT_USED: dict[str, dict[str, Any]] = {
    "six": {},
    "six.moves": {"cPickle": None},
    "fedtorch.components.dataset": {"define_dataset": None, "load_data_batch": None, "_load_data_batch": None},
}


def compare(folder: Path) -> list[Row]:
    """Every row of FedTorch's program."""
    rows = []
    released = {"divisor": "released"}
    algorithms: tuple[tuple[str, Algorithm, dict[str, Any]], ...] = (
        ("fedavg", fedavg, {}),
        ("fedprox", fedavg, {}),
        ("fedgate", fedgate, released),
        ("scaffold", scaffold, {**released, "variates": "released"}),
    )
    for kind, algorithm, settings in algorithms:
        value = one(folder, kind, algorithm, settings, 0.0)
        rows.append(equal(f"fedtorch.{kind}", said(kind), called(algorithm, settings), "run", value))
    value = one(folder, "fedavg", fedavg, {}, 0.0, batch=4)  # of nine examples one is left
    theirs, note = ", a batch of one example", "differences: single-example-batch"
    rows.append(differs("fedtorch.fedavg.single", said("fedavg") + theirs, "fedavg", "run", value, note=note))
    theirs, altered = ", momentum 0.9", "momentum emptied each round"
    for kind, algorithm, settings in algorithms:
        name, ours = f"fedtorch.{kind}.momentum", called(algorithm, settings)
        value = one(folder, kind, algorithm, settings, 0.9, emptied=True)
        rows.append(equal(name, said(kind) + theirs, ours, "run", value, altered=altered))
        value = one(folder, kind, algorithm, settings, 0.9)
        note = "differences: momentum-rounds"
        rows.append(differs(f"{name}.kept", said(kind) + theirs, ours, "run", value, note=note))
    for kind, algorithm in (("scaffold", scaffold), ("fedgate", fedgate)):
        value = one(folder, kind, algorithm, {}, 0.9, emptied=True)
        name, note = f"fedtorch.{kind}.momentum.plain", "differences: scaffold-momentum"
        row = differs(name, said(kind) + theirs, called(algorithm, {}), "run", value, note=note)
        rows.append(replace(row, altered=altered))
    return rows


Algorithm = Callable[..., Iterator[Any]]


def said(kind: str) -> str:
    """The piece of their program."""
    return f"centered/main.py, {kind}"


def called(algorithm: Algorithm, settings: dict[str, Any]) -> str:
    """Ours, with its settings."""
    return ", ".join([algorithm.__name__, *(f"{key}: {value}" for key, value in settings.items())])


def one(
    folder: Path,
    kind: str,
    algorithm: Algorithm,
    settings: dict[str, Any],
    momentum: float,
    emptied: bool = False,
    batch: int = BATCH,
) -> float:
    """The difference after four rounds from the same weights; three of four clients a round, each of another size."""
    problem, start = prepared()
    proximal: Any = functools.partial(objectives.squared, mu=0.1) if kind == "fedprox" else None
    local = LocalTraining(
        batch=batch, lr=LR, objective=objectives.standard, momentum=momentum, weight_decay=DECAY, proximal=proximal
    )  # fmt: skip
    state = State(0, start)
    arguments = {
        "rounds": ROUNDS,
        "aggregator": aggregators.AGGREGATORS["uniform"],
        "local": local,
        "participation": 0.75,
    }
    for done in algorithm(problem, state, **arguments, **settings):
        state = done.state
    return difference(state.model, federated(folder, kind, problem, start, local, emptied))


def prepared() -> tuple[Problem, Tensors]:
    """A network of one hidden layer on random images; shards of 6, 7, 9 and 12."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3))
    start = {key: value.detach().clone() for key, value in model.state_dict().items()}
    draws = torch.Generator().manual_seed(SEED)
    sizes = [6, 7, 9, 12]
    images = torch.randint(0, 256, (sum(sizes), 3, 4, 4), generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, 3, (sum(sizes),), generator=draws)
    shards = list(torch.arange(sum(sizes)).split(sizes))
    return Problem(model, images, labels, shards, 3, SEED, torch.device("cpu"), path="reference"), start


def federated(
    folder: Path, kind: str, problem: Problem, start: Tensors, local: LocalTraining, emptied: bool
) -> Tensors:
    """The server's weights after their loop; `emptied`: its clients' momentum starts anew each round, as ours does."""
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    main_name = "fedtorch.comms.trainings.federated.centered.main"
    sgd_name = "fedtorch.components.optimizers.sgd"
    cohorts = iter([draw_cohort(problem, t, 0.75) for t in range(ROUNDS)])
    with imported(folder, main_name, sgd_name, stubs=NOT_USED) as (main, sgd):
        server = node(sgd, problem, start, kind, local)
        clients = [node(sgd, problem, start, kind, local) for _ in problem.shards]
        flow = SimpleNamespace(over=False)

        class Loader:
            def __init__(self, k: int) -> None:
                self.k = k

            def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
                if emptied:
                    clients[self.k].optimizer.state.clear()
                found = list(batches(problem, self.k, server.args.rounds_comm - 1, local))
                for place, batch in enumerate(found):
                    flow.over = place == len(found) - 1
                    yield batch.x, batch.y

        for k, client in enumerate(clients):
            client.train_loader = Loader(k)

        def inferred(model: nn.Module, criterion: Any, metrics: Any, x: Tensor, y: Tensor, rnn: bool) -> Any:
            return F.cross_entropy(model(x), y), None

        with replaced(
            main,
            log=nothing, logging_load_time=nothing, logging_sync_time=nothing, logging_globally=nothing,
            define_local_training_tracker=dict, do_validate_centered=nothing, log_validation_centered=nothing,
            log_test_centered=nothing, get_current_epoch=nothing, get_current_local_step=nothing,
            adjust_learning_rate=lambda *_: local.lr, load_data_batch=lambda args, x, y, tracker: (x, y),
            is_sync_fed=lambda args: flow.over, inference=inferred,
            set_online_clients_centered=lambda args: next(cohorts),
        ):  # fmt: skip
            main.train_and_validate_federated_centered(clients, server)
        return {name: value.detach().clone() for name, value in server.model.state_dict().items()}


def node(sgd: Any, problem: Problem, start: Tensors, kind: str, local: LocalTraining) -> Any:
    """What their loop wants to see of a client or of the server."""
    model = copy.deepcopy(problem.model)
    model.load_state_dict(start)
    arguments = SimpleNamespace(
        num_comms=ROUNDS, rounds_comm=0, local_index=0, global_index=0, local_data_seen=0, quant_error=0.0,
        fed_personal=False, per_class_acc=False, federated_type=kind, arch="mlp", batch_size=local.batch,
        quantized=False, compressed=False, in_momentum=local.momentum > 0, out_momentum=False, lr_scale_at_sync=1.0,
        fedprox_mu=0.1,
        num_workers=CLIENTS, graph=SimpleNamespace(n_nodes=CLIENTS),
    )  # fmt: skip

    def zero() -> nn.Module:
        found = copy.deepcopy(model)
        for value in found.parameters():
            value.data.zero_()
        return found

    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    optimizer = sgd.SGD(
        model.parameters(), lr=local.lr, in_momentum=local.momentum, out_momentum=0, weight_decay=local.weight_decay
    )

    def cleared(set_to_none: bool = False) -> None:
        for value in model.parameters():
            value.grad = torch.zeros_like(value)

    optimizer.zero_grad = cleared  # as torch did in 2021: later aggregation adds to these tensors
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    return SimpleNamespace(
        args=arguments, model=model, optimizer=optimizer, criterion=None, metrics=None, scheduler=None,
        model_delta=zero(), model_memory=zero(), model_client_control=zero(), model_server_control=zero(),
        zero_grad=cleared, reset_tracker=nothing, local_val_tracker={}, global_val_tracker={}, global_test_tracker={},
        test_loader=[],
    )  # fmt: skip
