"""States and models on disk: immutable files named by their round, written whole or not at all.

The database says which of them count, and has the SHA-256 of each: writing returns it, reading is given it. A file that
is not what was written raises `DamagedCheckpoint` and is never used. A file that the database does not name is left
over from an interrupted run and is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fatbench import whole_file
from fatbench.engine.rounds import State, Tensors
from fatbench.errors import MachineError, SpecError, Unavailable

LOST = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)  # the file is gone or its disk is broken


class DamagedCheckpoint(MachineError):
    """A file that is missing, is not the one that was written, or cannot be understood."""


def save_state(file: Path, state: State, cell: str = "") -> str:
    """Write an algorithm's state and return the file's SHA-256. Unavailable: disk full or folder not writable."""
    return _write(file, flatten(_tree(state)), {"cell": cell, "round": state.round, "names": list(state.model)})


def _tree(state: State) -> dict[str, Any]:
    return {"model": state.model, "server": state.server, "clients": {str(k): v for k, v in state.clients.items()}}


def demand_tensors(state: State) -> None:
    """SpecError: the state holds what no checkpoint keeps, which is named."""
    import torch

    def look(tree: Mapping[Any, Any], path: str) -> None:
        for name, value in tree.items():
            if not isinstance(name, str):
                raise SpecError(f"{path}: the key {name!r} is no text; a checkpoint keeps tensors under names")
            if isinstance(value, Mapping):
                look(value, f"{path}[{name!r}]")
            elif not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise SpecError(f"{path}[{name!r}] is of type {kind}; a checkpoint keeps tensors: torch.tensor(...)")

    for name, tree in _tree(state).items():
        if name != "clients":
            look(tree, f"state.{name}")
            continue
        for k, client_tree in tree.items():
            look(client_tree, f"state.clients[{k}]")


def load_state(
    file: Path, device: str, sha256: str | None = None, cell: str | None = None, round: int | None = None
) -> State:
    """Read a state written by `save_state`; it must have this digest, be of this cell and of this round, where given.

    DamagedCheckpoint: it is missing or another; MachineError: it cannot be opened.
    """
    tensors, header = _read_tensors(file, sha256, cell, round)
    try:
        tree = _ordered(unflatten(_to_device(tensors, device)), header.get("names", []))
        clients = {int(k): client_tensors for k, client_tensors in tree["clients"].items()}
        return State(int(header["round"]), tree["model"], tree["server"], clients)
    except (KeyError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{file}: damaged, or not a checkpoint of fatbench ({error})") from None


def _ordered(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A tree whose mappings have these names in this order, as the network has them; safetensors has its own."""
    position = {name: i for i, name in enumerate(names)}
    return {
        name: _ordered(tree[name], names) if isinstance(tree[name], Mapping) else tree[name]
        for name in sorted(tree, key=lambda name: position.get(name, len(names)))
    }


def save_model(file: Path, model: Tensors, client_tensors: Mapping[int, Tensors], **header: str) -> str:
    """Write a model's state_dict, and the tensors that differ between clients, with text about them.

    Returns the file's SHA-256. Unavailable: disk full or folder not writable.
    """
    tensors = {
        f"own/{k}/{name}": value for k, own_tensors in client_tensors.items() for name, value in own_tensors.items()
    }
    return _write(file, {**model, **tensors}, header)


def load_model(
    file: Path, device: str, sha256: str | None = None, cell: str | None = None, round: int | None = None
) -> tuple[Tensors, dict[int, Tensors], dict[str, str]]:
    """(state_dict, per client its own tensors, header) of a file of `save_model`; checks and errors of `load_state`."""
    tensors, header = _read_tensors(file, sha256, cell, round)
    model: Tensors = {}
    client_tensors: dict[int, Tensors] = {}
    try:
        for name, value in _to_device(tensors, device).items():
            if name.startswith("own/"):
                _, k, tensor_name = name.split("/", 2)
                client_tensors.setdefault(int(k), {})[tensor_name] = value
            else:
                model[name] = value
    except ValueError as error:
        raise DamagedCheckpoint(f"{file}: damaged, or not a model of fatbench ({error})") from None
    return model, client_tensors, header


def model_file(round: int) -> str:
    """The name of the file with the model of a round."""
    return f"model-{round:06d}.safetensors"


def clients_file(round: int) -> str:
    """The name of the file with the clients' models of a round, before averaging."""
    return f"clients-{round:06d}.safetensors"


def save_artifacts(file: Path, artifacts: Tensors, cell: str, round: int) -> str:
    """Write what a round of a cell wants kept beside its numbers. Returns the file's SHA-256.

    `fatbench.report.figures.artifacts.load` reads it, without torch. Unavailable: disk full or folder not writable.
    """
    return _write(file, artifacts, {"cell": cell, "round": str(round)})


def check(file: Path, sha256: str) -> None:
    """DamagedCheckpoint: the file is missing or not the one that was written; MachineError: it cannot be opened."""
    with _opening(file), file.open("rb") as handle:
        digest_found = hashlib.file_digest(handle, "sha256").hexdigest()
    _demand(file, digest_found, sha256)


def sweep(folder: Path, keep: Iterable[str]) -> None:
    """Remove checkpoint files of a cell that the database does not name."""
    kept_names = set(keep)
    for file in folder.glob("*.safetensors*"):
        if file.name not in kept_names:
            file.unlink(missing_ok=True)


# --- nested names as paths ----------------------------------------------------------------------------------------


def flatten(tree: Mapping[str, Any]) -> Tensors:
    """The tensors of nested dictionaries by their path, "a/b/c".

    In a name, "~" becomes "~0" and "/" becomes "~1" (RFC 6901). An empty dictionary is kept as an empty tensor whose
    path ends in "/".
    """
    import torch

    flat: Tensors = {}
    for name, value in tree.items():
        if not name:
            raise ValueError("a tensor or dictionary of a state has no name")
        path = name.replace("~", "~0").replace("/", "~1")
        if isinstance(value, Mapping):
            flat |= {f"{path}/{inner_path}": inner for inner_path, inner in flatten(value).items()}
            if not value:
                flat[f"{path}/"] = torch.empty(0)
        else:
            flat[path] = value
    return flat


def unflatten(flat: Tensors) -> dict[str, Any]:
    """The nested dictionaries of which `flatten` made these tensors. ValueError: a path leads through a tensor."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, leaf = (step.replace("~1", "/").replace("~0", "~") for step in path.split("/"))
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise ValueError(f"'{path}' leads through a tensor")
        if leaf:
            branch[leaf] = value
    return tree


# --- files --------------------------------------------------------------------------------------------------------


def _to_device(tensors: Tensors, device: str) -> Tensors:
    return {name: value.to(device) for name, value in tensors.items()}


# safetensors writes tensors of wide types first, those of one type by their names
TYPES = {"int64": "I64", "float64": "F64", "float32": "F32", "int32": "I32", "bfloat16": "BF16", "float16": "F16",
         "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}  # fmt: skip


def _write(file: Path, tensors: Tensors, header: Mapping[str, object]) -> str:
    digest = hashlib.sha256()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file.replacing(file) as handle:
            for piece in _serialised(tensors, {"fatbench": json.dumps(header)}):
                handle.write(piece)
                digest.update(piece)
    except OSError as error:
        reason = "the disk is full" if error.errno in whole_file.FULL else error.strerror
        raise Unavailable(f"cannot write the checkpoint {file}: {reason}") from None
    return digest.hexdigest()


def _serialised(tensors: Tensors, metadata: dict[str, str]) -> Iterator[Any]:
    """The bytes that `safetensors.torch.save` gives, tensor by tensor: together they are as large as the state."""
    import torch

    kinds = {name: str(value.dtype).removeprefix("torch.") for name, value in tensors.items()}
    if not set(kinds.values()) <= TYPES.keys():
        from safetensors.torch import save

        yield save({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, metadata=metadata)
        return
    order = sorted(tensors, key=lambda name: (list(TYPES).index(kinds[name]), name))
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
        entries[name] = {"dtype": TYPES[kinds[name]], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    head = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for name in order:
        if tensors[name].numel():
            yield tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _opening(file: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: no such checkpoint") from None
    except OSError as error:
        problem = f"{file}: cannot be read ({error.strerror})"
        raise (DamagedCheckpoint if error.errno in LOST else MachineError)(problem) from None


def _demand(file: Path, file_digest: str, sha256: str) -> None:
    if file_digest != sha256:
        raise DamagedCheckpoint(
            f"{file}: not the file that was written: its SHA-256 is {file_digest}, {sha256} is stored"
        )


def _bytes(file: Path, sha256: str | None) -> bytes:
    """A file's bytes, which must have this digest where one is given."""
    with _opening(file):
        data = file.read_bytes()
    if sha256 is not None:
        _demand(file, hashlib.sha256(data).hexdigest(), sha256)
    return data


def _read_tensors(
    file: Path, sha256: str | None, cell: str | None, round: int | None
) -> tuple[Tensors, dict[str, str]]:
    """(tensors on the CPU, header) of a file; digest, cell and round are checked where given."""
    from safetensors.torch import load

    data = _bytes(file, sha256)
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")  # the format: length of a JSON header, the header, the tensors
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fatbench"])
        file_identity = header["cell"], int(header["round"])
    except MemoryError:
        raise
    except Exception as error:  # safetensors, json and torch each have their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedCheckpoint(f"{file}: damaged, or not a checkpoint of fatbench ({reason})") from None
    if cell is not None and file_identity[0] != cell:
        raise DamagedCheckpoint(f"{file}: is of cell {file_identity[0]}, not of {cell}")
    if round is not None and file_identity[1] != round:
        raise DamagedCheckpoint(f"{file}: is of round {file_identity[1]}, not of {round}")
    return tensors, header
