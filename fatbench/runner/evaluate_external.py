"""Load external models, attack them, and store them as cells of the suite "evaluate"."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from sqlalchemy import select

from fatbench import settings
from fatbench.data.own import load
from fatbench.errors import ADDRESS, MachineError, SpecError, article
from fatbench.runner import worker
from fatbench.runner.executors import local
from fatbench.runner.jobs import CellStatus, Event, Job, Machine, Recovery
from fatbench.runner.run_options import RunOptions
from fatbench.store import folder
from fatbench.store.fingerprints import same_answers
from fatbench.store.replicates import SIGN
from fatbench.store.schema import CELLS
from fatbench.store.stages import Store
from fatbench.suite import calls, cells, external_models, facts, plugin_reads, source_files, standard_attacks
from fatbench.suite.cells import Evaluation, Plan
from fatbench.suite.external_models import Model
from fatbench.suite.facts import data_keys

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fatbench.engine.setup import Setup


@dataclass(frozen=True)
class EvaluationTask:
    """The images and attacks that a model is evaluated on."""

    data: Any  # a name or a mapping, as in a suite
    evaluations: tuple[Evaluation, ...]
    test: int | None = None  # first N test images of the data set
    size: int | None = None  # side in pixels that images are resized to
    seed: int = external_models.SEED  # for the attacks' random starts; the seed of the training, if there were several


@dataclass(frozen=True)
class ExternalModel:
    """A model and how to build it: `build(shape, classes)` gives the network, `state` its tensors."""

    model: Model
    build: Callable[[tuple[int, int, int], int], nn.Module]
    state: Mapping[str, Tensor]
    note: str = ""  # for the user: which of several states in the file was read


def task_like(plan: Plan, dataset: str | None = None) -> EvaluationTask:
    """The images and attacks of a suite's cells, so that a model can be compared with them.

    Attacks that only some of the cells face are included. Transfer attacks between the suite's cells are left out, and
    attacks on the clients' own images: one model has no clients. SpecError: cells differ in images or attacks, choose
    some with a filter or with the name of a data set; or no attack is left.
    """
    matching_cells = [cell for cell in plan.cells if dataset in (None, cell.spec["data"]["name"])]
    if not matching_cells:
        known_sets = ", ".join(sorted({cell.spec["data"]["name"] for cell in plan.cells}))
        raise SpecError(f"no cell is on {dataset} (preset {plan.preset} has {known_sets})", option=f"like {plan.suite}")
    data, test, size = (matching_cells[0].spec[key] for key in ("data", "test", "size"))
    attacks: dict[str, Evaluation] = {}
    for cell in matching_cells:
        cell_attacks = {item.label: item for item in cell.evaluations if item.origin is None and not item.on}
        images = (cell.spec["data"], cell.spec["test"], cell.spec["size"])
        if images != (data, test, size) or any(
            attacks.get(label, evaluation) != evaluation for label, evaluation in cell_attacks.items()
        ):
            raise SpecError(
                "its cells differ in data, size or attacks: choose some by a filter or by the data set",
                option=f"like {plan.suite}",
            )
        attacks = {**attacks, **cell_attacks}
    if not attacks and any(item.on for cell in matching_cells for item in cell.evaluations):
        raise SpecError("all its attacks are on the clients' own images", option=f"like {plan.suite}")
    return EvaluationTask(data, tuple(attacks.values()), test, size)


def task(
    plan: Plan | None,
    dataset: Any = None,
    attacks: Sequence[str | tuple[str, Any]] | None = None,
    *,
    eps: str | float = "8/255",
    n: int | None = None,
    batch: int = 500,
    size: int | None = None,
) -> EvaluationTask:
    """The images and attacks of a suite's cells or of a data set. SpecError: both are given, or neither."""
    if plan is not None:
        if attacks or n is not None or size is not None:
            raise SpecError(
                " says which images and attacks; leave out attacks, their number of images and size",
                option=f"like {plan.suite}",
            )
        return task_like(plan, dataset)
    if dataset is None:
        raise SpecError("name the data set, or a suite to go by (like)", option="dataset")
    return EvaluationTask(
        dataset, external_models.evaluations(list(attacks or standard_attacks.DEFAULT), eps, n, batch), size=size
    )


def from_file(
    file: Path, network: str, name: str | None = None, entry: str | None = None, **preprocessing: Any
) -> ExternalModel:
    """Read a state dict from a file. MachineError: it is unreadable. SpecError: there is no such network.

    network: see `external_network.full_name`. entry: which of the file's states to read, "state_dict_ema"; None for the
    network itself, not an average of it. preprocessing: mean, std, outputs, channels of `Model`.
    """
    from fatbench.models import external_network, pretrained

    if not file.is_file():
        raise MachineError(f"{file}: no such file")
    try:
        state, entries = pretrained.read_state("evaluate", file, entry)
    except MachineError as error:
        hint = "expected a state dict: torch.save(model.state_dict(), FILE), or safetensors"
        raise MachineError(f"{error} ({hint})") from None
    network = external_network.full_name(network)
    path, colon, function = network.rpartition(":")
    code = Path(path) if colon and path.endswith(".py") else None
    if code is not None and not code.is_file():
        raise SpecError(f"no such file: {code}", option="model")
    used_entry, other_entries = (entries[:1] or [""])[0], entries[1:]
    model = Model(
        name or file.name,
        _sha256(file.read_bytes()),
        (network if code is None else f"{code.name}:{function}")
        + (f", {used_entry}" if entry and other_entries else ""),
        "" if code is None else _sha256(code.read_bytes()),
        named=name is not None,
        **preprocessing,
    )
    not_read = ", ".join([*other_entries[:3], *(["..."] if len(other_entries) > 3 else [])])
    note = (
        f"{file}: read '{used_entry}', not '{not_read}' (entry of --model, in Python entry=)" if other_entries else ""
    )
    return ExternalModel(model, lambda shape, classes: external_network.network(network, shape, classes), state, note)


def from_module(
    module: nn.Module | Callable[[Tensor], Tensor], name: str | None = None, **preprocessing: Any
) -> ExternalModel:
    """A module in memory, or anything that is called with images. It is copied where that is possible."""
    import torch
    from safetensors.torch import save

    from fatbench.models.external_network import Called, name_of

    is_module = isinstance(module, torch.nn.Module)
    kind = type(module).__name__ if is_module else name_of(module)
    if not is_module:
        with suppress(Exception):  # a lock, a file, whatever the object holds
            module = copy.deepcopy(module)
    module_copy = _copy_module(module) if is_module else Called(module)
    for key, value in module_copy.state_dict().items():
        if not isinstance(value, torch.Tensor) or value.is_quantized or value.layout != torch.strided:
            content = value.dtype if isinstance(value, torch.Tensor) else article(type(value).__name__)
            raise SpecError(
                f"model: '{key}' in the state of {kind} is {content}, and no plain tensor (a quantised module?): give a"
                " function that calls it, lambda x: module(x)"
            )
    state = {key: value.detach().cpu().clone().contiguous() for key, value in module_copy.state_dict().items()}
    try:
        with source_files.PARSER:
            code = inspect.getsource(type(module)) if is_module else ""
    except (OSError, TypeError):  # its class was typed at a prompt
        code = repr(module)
    digest = _sha256(save(state))
    text = f"{code}\n{ADDRESS.sub('', repr(module))}" if is_module else kind
    model = Model(
        name or kind, digest, kind, _sha256(text.encode()),
        named=name is not None, **preprocessing,
    )  # fmt: skip
    return ExternalModel(model, lambda shape, classes: module_copy, state)


def _copy_module(module: Any) -> nn.Module:
    """Copy a module. SpecError: it cannot be copied, or has no weights yet."""
    import torch
    from torch.nn.parameter import is_lazy

    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        raise SpecError(
            "a TorchScript program cannot be copied: give the torch.nn.Module that it was made of, or one whose forward"
            " calls it"
        )
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise SpecError(f"{kind} has lazy layers without weights: call it once on images")
    try:
        # deepcopy refuses tensors that are not leaves of a graph: weights that a hook computes, as weight_norm does
        attributes = (value for submodule in module.modules() for value in vars(submodule).values())
        computed = [value for value in attributes if isinstance(value, torch.Tensor) and not value.is_leaf]
        return copy.deepcopy(module, {id(value): value.detach().clone() for value in computed})
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(
            f"{kind} cannot be copied ({str(error).splitlines()[0]}): save its state dict, and give the file and"
            " network='FILE.py:FUNCTION'"
        ) from None


@plugin_reads.watching()
def evaluate(
    external: ExternalModel,
    task: EvaluationTask,
    options: RunOptions,
    notify: Callable[[Event], None] = lambda event: None,
) -> tuple[str, CellStatus]:
    """Attack a model, store every outcome, and return (its cell, how it ended). Stored outcomes are not repeated.

    A model is identified by its weights and its network's outputs: another network with the same weights is another
    cell, but the same network with edited code is not. options: only device, precision, db and data are used.
    notify: also receives an event if the model is stored under another name than the one chosen, or files of the data
    set were not read.

    SpecError: the file belongs to another network, or the network does not fit the images or classes. MachineError: no
    such device, data missing, file unreadable.
    """
    spec = external_models.cell(external.model, task.data, task.test, task.size, task.seed)
    for evaluation in task.evaluations:
        attack = calls.call("Attack", evaluation.attack)
        facts.refuse(attack, {"partition": {}, "train": None, "validation": 0, **spec}, evaluation.label)
        calls.demand_installed(attack, evaluation.label)
    url = settings.database(options.db)
    device = local.slots(options.device, 1)[0]
    machine = Machine(
        db=url,
        files=str(settings.files_folder(url).absolute()),
        data=str(settings.data_folder(str(options.data) if options.data else None).absolute()),
        device=device,
        precision=settings.evaluation_precision(options.precision, [device]),
        path="reference",  # contiguous images: not every network takes channels_last
        # a single model: always computed with today's inputs
        recovery=Recovery(retry_failed=True, rerun_changed=True),
    )
    ready, changes = _setup_of(external, spec, machine)
    if changes:
        notify(Event("", "cell", "start", message=changes))
    answers = _outputs_of(ready)
    with folder.opened(
        url, Path(machine.files), lambda text: notify(Event("", "cell", "start", message=text))
    ) as store:
        store.record_data({data_keys(spec)["data"]: ready.data["data"]["fingerprint"]})
        spec = _stored_spec(spec, answers, ready.data["data"]["fingerprint"], store)
        job = Job(
            cells.identity(spec), spec, list(task.evaluations), ["last"], external_models.SUITE, "paper",
            answers=answers,
        )  # fmt: skip
        if ready.note:
            notify(Event(job.cell, "cell", "start", message=ready.note))
        if external.model.named and spec["evaluated"]["name"] != external.model.name:
            message = (
                f"this network is stored as '{spec['evaluated']['name']}', and keeps that name instead of"
                f" '{external.model.name}': fatbench delete {job.cell} deletes its numbers"
            )
            notify(Event(job.cell, "cell", "start", message=message))
        with settings.data_in(Path(machine.data)):
            return job.cell, worker.evaluate(job, machine, store, ready, notify)


def _outputs_of(ready: Setup) -> dict[str, Any]:
    """The network's outputs for the first test images, in float32."""
    from fatbench.engine.answers import IMAGES, answers
    from fatbench.engine.local import load as with_state
    from fatbench.engine.local import pixels
    from fatbench.engine.precision import ieee

    images, labels = ready.test[0][:IMAGES], ready.test[1][:IMAGES]
    with ieee(ready.problem.device):
        return answers(with_state(ready.problem, ready.initial.model), pixels(ready.problem, images), labels)


def _stored_spec(spec: dict[str, Any], answers: Mapping[str, Any], fingerprint: str, store: Store) -> dict[str, Any]:
    """The spec under which a network with these outputs is stored, or else a spec that no other network has.

    fingerprint: that of the data set. Outputs for other images are not compared.
    """
    identity = _identity_without_code(spec)
    with store.database.reading() as connection:  # only the cells with these weights, out of thousands
        query = select(CELLS.c.id, CELLS.c.spec).where(CELLS.c.spec.contains(spec["evaluated"]["sha256"]))
        weights = {row.id: json.loads(row.spec) for row in connection.execute(query) if SIGN not in row.id}
    stored_specs = {
        id: stored_spec
        for id, stored_spec in weights.items()
        if "evaluated" in stored_spec and _identity_without_code(stored_spec) == identity
    }
    answers_by_cell: dict[str, list[Any]] = {cell: [] for cell in stored_specs}
    for run in store.runs(list(stored_specs)) if stored_specs else ():
        same_images = (run.get("data") or {}).get("fingerprint") in (None, fingerprint)
        if "answers" in run and same_images and not run.get("dropped"):
            answers_by_cell[run["cell"]].append(run["answers"])
    own_cell = cells.identity(spec)
    for cell in sorted(stored_specs, key=lambda cell: cell != own_cell):
        if (
            answers_by_cell[cell]
            and "logits" in answers
            and all(same_answers(stored_answers, answers) for stored_answers in answers_by_cell[cell])
        ):
            return stored_specs[cell]
    if own_cell in stored_specs and any(
        not same_answers(stored_answers, answers) for stored_answers in answers_by_cell[own_cell]
    ):
        code = _sha256(f"{spec['evaluated']['code']}\n{json.dumps(answers, sort_keys=True)}".encode())
        return {**spec, "evaluated": {**spec["evaluated"], "code": code}}
    return stored_specs.get(own_cell, spec)


def _identity_without_code(spec: Mapping[str, Any]) -> str:
    """A digest of a spec's weights, preprocessing and images, leaving out the code of its network."""
    return cells.identity({**spec, "evaluated": {**spec["evaluated"], "network": "", "code": ""}, "model": {}})


def _setup_of(external: ExternalModel, spec: Mapping[str, Any], machine: Machine) -> tuple[Setup, str]:
    """Read the data, build the network with its state, and check it on one image; what made the state fit, in words."""
    import torch

    from fatbench.engine.setup import Runtime, setup
    from fatbench.models import external_network as networks

    description, changes = external.model, list[str]()

    def model(shape: tuple[int, int, int], classes: int) -> nn.Module:
        network = external.build(shape, classes)
        changes.append(networks.load(network, description.name, external.state))
        return networks.Preprocessed(
            network, description.mean, description.std, description.outputs, description.channels
        )

    def one_client(labels: Any, rng: Any, writers: Any) -> Sequence[Any]:
        return [numpy.arange(len(labels))]

    assert machine.path != "auto" and machine.precision != "auto"
    runtime = Runtime(Path(machine.data), torch.device(machine.device), machine.precision, machine.path)
    ready = setup(
        runtime, seed=spec["seed"], data=functools.partial(load, spec["data"]), partition=one_client, model=model,
        train=1, test=spec["test"], size=spec["size"],
    )  # fmt: skip
    _check_network(ready, description)
    return ready, changes[0]


def _check_network(ready: Setup, description: Model) -> None:
    """Raise SpecError unless the network takes an image of the data set and gives one number for each class."""
    import torch

    from fatbench.engine.local import pixels

    x = pixels(ready.problem, ready.test[0][:1])
    shape = "x".join(map(str, x.shape[1:]))
    try:
        with torch.no_grad():
            logits = ready.problem.model.eval()(x)
    except SpecError:  # says what the network returns
        raise
    except Exception as error:  # any error of the network's own code
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecError(f"{description.network} does not take images of {shape} (see size, mean): {line}") from None
    if logits.shape != (1, ready.classes):
        output_shape = "x".join(map(str, logits.shape[1:])) or "one number"
        raise SpecError(
            f"{description.network} gives {output_shape} for an image instead of {ready.classes} numbers, one per class"
        )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
