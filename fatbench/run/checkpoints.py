"""States and models on disk: immutable files named by their round, written whole or not at all.

The database says which of them count; a file it does not name is left over from an interrupted run and is removed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from fatbench.engine.rounds import State, Tensors
from fatbench.errors import MachineError


def save_state(file: Path, state: State) -> None:
    """Write a protocol's state. MachineError: disk full or folder not writable."""
    tensors = {f"model/{name}": value for name, value in state.model.items()}
    tensors |= {f"server/{name}": value for name, value in state.server.items()}
    for k, own in state.clients.items():
        tensors |= {f"clients/{k}/{name}": value for name, value in own.items()}
    _write(file, tensors, {"round": state.round})


def load_state(file: Path, device: str) -> State:
    """Read a state written by `save_state`. MachineError: missing or damaged."""
    tensors, header = _read(file, device)
    model: Tensors = {}
    server: Tensors = {}
    clients: dict[int, Tensors] = {}
    for name, value in tensors.items():
        part, rest = name.split("/", 1)
        if part == "clients":
            k, rest = rest.split("/", 1)
            clients.setdefault(int(k), {})[rest] = value
        else:
            (model if part == "model" else server)[rest] = value
    return State(int(header["round"]), model, server, clients)


def save_model(file: Path, model: Tensors, own: Mapping[int, Tensors], **header: str) -> None:
    """Write a model's state_dict, and the tensors that single clients have of their own, with text about them."""
    tensors = {f"own/{k}/{name}": value for k, part in own.items() for name, value in part.items()}
    _write(file, {**model, **tensors}, header)


def load_model(file: Path, device: str) -> tuple[Tensors, dict[int, Tensors], dict[str, str]]:
    """(state_dict, per client its own tensors, header) of a file written by `save_model`."""
    tensors, header = _read(file, device)
    model: Tensors = {}
    own: dict[int, Tensors] = {}
    for name, value in tensors.items():
        if name.startswith("own/"):
            _, k, rest = name.split("/", 2)
            own.setdefault(int(k), {})[rest] = value
        else:
            model[name] = value
    return model, own, header


def save_artifacts(file: Path, artifacts: Tensors) -> None:
    """Write what a round wants kept beside its numbers. MachineError: disk full or folder not writable.

    `fatbench.report.artifacts.load` reads it, without torch.
    """
    _write(file, artifacts, {})


def sweep(folder: Path, keep: Iterable[str]) -> None:
    """Remove checkpoint files of a cell that the database does not name."""
    kept = set(keep)
    for file in folder.glob("*.safetensors*"):
        if file.name not in kept:
            file.unlink(missing_ok=True)


def _write(file: Path, tensors: Tensors, header: Mapping[str, object]) -> None:
    from safetensors.torch import save

    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = save(
            {name: value.detach().cpu().contiguous() for name, value in tensors.items()},
            metadata={"fatbench": json.dumps(header)},
        )
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise MachineError(f"cannot write the checkpoint {file}: {reason}") from None


def _read(file: Path, device: str) -> tuple[Tensors, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=device) as handle:
            header = json.loads((handle.metadata() or {}).get("fatbench", "{}"))
            return {name: handle.get_tensor(name) for name in handle.keys()}, header  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise MachineError(f"{file}: no such checkpoint") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise MachineError(f"{file}: damaged, or not a checkpoint of ours ({error})") from None
