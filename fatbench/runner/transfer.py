"""Transfer attacks: they are computed on the model of another cell or client, and judged on this one.

For another cell, its model is that of the last round, whichever checkpoint is judged. As long as that cell is not
trained, the stage does not begin and its cell waits; `fatbench.runner.start` returns to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.engine.rounds import Problem, Round, Tensors
from fatbench.errors import MachineError, SpecError
from fatbench.runner import checkpoints
from fatbench.store.stage_names import parsed
from fatbench.suite import calls, weights

if TYPE_CHECKING:
    from fatbench.engine.setup import Setup
    from fatbench.runner.jobs import Job, Machine
    from fatbench.store.stages import StageRow, Store
    from fatbench.suite.cells import TransferOrigin

    Origins = tuple[Problem, dict[int, Tensors]]  # (a problem with the origin's network, client -> model)


@dataclass(frozen=True)
class TrainedModel:
    """A file of models that an attack is computed on."""

    cell: str
    round: int
    file: str  # in the cell's folder
    digest: str | None  # None if the file was never on this machine


@dataclass(frozen=True)
class ModelPair:
    """A model, and the one that the attacks on it are computed on."""

    client: int  # whose model it is; -1 for a global one
    judged: Tensors
    origin: tuple[Problem, Tensors] | None = None  # None: attacks are computed on `judged` itself

    @property
    def key(self) -> tuple[int, ...]:
        """The client's part of the key of a random stream; empty for a global model."""
        return (self.client,) if self.client >= 0 else ()


def trained_model(cell: str, store: Store) -> TrainedModel | None:
    """The last model of a cell; None if the cell is not trained."""
    return last_model(cell, store.stages([cell]).get((cell, "train")))


def last_model(cell: str, row: StageRow | None) -> TrainedModel | None:
    """The last model of a cell, given its training stage; None if it is not trained."""
    if row is None or row.status != "done":
        return None
    round = int(row.record["last"]["round"]) if "last" in row.record else row.round
    file = checkpoints.model_file(round)
    return TrainedModel(cell, round, file, row.record.get("sha256", {}).get(file))


def of_former_model(row: StageRow, train: StageRow) -> bool:
    """Whether an evaluation attacked a model that has been replaced since by a new training (`train`) of its cell."""
    digest = train.record.get("sha256", {}).get(checkpoints.model_file(parsed(row.stage).round))
    return digest is not None and row.record.get("model", digest) != digest


def model_of(cell: str, store: Store, machine: Machine) -> Path:
    """The file of a trained cell's last model. MachineError: it is missing or damaged."""
    origin_model = trained_model(cell, store)
    file = Path(machine.files) / cell / (origin_model.file if origin_model is not None else "")
    if origin_model is None or not file.is_file():
        raise MachineError(f"the model of cell {cell} is not here ({file}): its results were imported")
    try:
        checkpoints.check(file, origin_model.digest or "none")
    except checkpoints.DamagedCheckpoint as error:
        raise MachineError(f"{error}; fatbench run {cell} trains it again") from None
    return file


def clients_wanted(job: Job, record: Mapping[str, Any], round: int) -> int:
    """How many clients' models of a round the job's transfer attacks need, as far as is known at its end."""
    attacked_rounds = {int(job.spec["algorithm"]["rounds"])} if "last" in job.checkpoints else set()
    attacked_rounds |= {int(record[name]["round"]) for name in job.checkpoints if name != "last" and name in record}
    client_counts = (item.origin.clients for item in job.evaluations if item.origin is not None)
    return max(client_counts, default=0) if round in attacked_rounds else 0


def client_models(result: Round, client_count: int) -> dict[int, Tensors]:
    """The models of a round's first clients before averaging, on the CPU; {} if the clients train none."""
    models = {}
    for position, update in enumerate(sorted(result.updates, key=lambda update: update.client)[:client_count]):
        model = update.model
        if not model and update.client in result.own:
            model = {**result.state.model, **result.own[update.client]}
        if not model:
            return {}
        models[position] = {name: value.detach().cpu().clone() for name, value in model.items()}
    return models


def pairs(
    origin: TransferOrigin, source: TrainedModel, models: Mapping[int, Tensors], origins: Origins
) -> list[ModelPair]:
    """Pair each model with the one that its attack is computed on. models: client -> model, {-1: the global model}.

    Where both cells have a model for each client, clients are matched by their number; where one has, each of its
    models meets the only one of the other. SpecError: no pair.
    """
    problem, origin_models = origins
    if not origin.cell:
        if origin.client not in origin_models or len(origin_models) < origin.clients:
            raise SpecError(f"{origin.clients} clients: only {len(origin_models)} took part in round {source.round}")
        return [ModelPair(k, origin_models[k], (problem, origin_models[origin.client])) for k in range(origin.clients)]
    clients = sorted({*models, *origin_models} - {-1})
    keys = [k for k in clients if {k, -1} & models.keys() and {k, -1} & origin_models.keys()]
    if not keys and not (models.keys() == origin_models.keys() == {-1}):
        raise SpecError(f"no client has a model both here and in cell {source.cell}")
    return [
        ModelPair(k, models[k if k in models else -1], (problem, origin_models[k if k in origin_models else -1]))
        for k in keys or [-1]
    ]


def read_origins(origin: TransferOrigin, source: TrainedModel, ready: Setup, machine: Machine) -> Origins:
    """Load the models that attacks are computed on. MachineError: a file is missing or damaged."""
    import torch

    from fatbench.engine.accuracy import models_of
    from fatbench.engine.setup import Runtime, network_of

    file = Path(machine.files) / source.cell / source.file
    if not origin.cell and source.digest is None:
        raise MachineError(
            f"the clients' models of round {source.round} were not kept (the transfer between clients was added after"
            f" the training, or the clients train no models): run fatbench delete {source.cell}; the next run "
            "keeps them"
        )
    if not file.is_file():
        raise MachineError(f"the model of cell {source.cell} is not here ({file}): its results were imported")
    try:
        model, client_tensors, _ = checkpoints.load_model(
            file, machine.device, source.digest, source.cell, source.round
        )
    except checkpoints.DamagedCheckpoint as error:
        raise MachineError(f"{error}; fatbench run {source.cell} trains it again") from None
    if not origin.cell:
        return replace(ready.problem, model=copy.deepcopy(ready.problem.model)), client_tensors
    build = calls.build("Model", weights.with_path(weights.untrained(origin.spec), Path(machine.data))["model"])
    runtime = Runtime(Path(machine.data), torch.device(machine.device), microbatch=machine.microbatch)
    channels, height, width = ready.test[0].shape[1:]
    size = ready.problem.size
    shape = (channels, size or height, size or width)
    network = network_of(runtime, origin.spec["seed"], build, shape, ready.classes)
    return replace(ready.problem, model=network), models_of(model, client_tensors)
