"""States and models on disk: immutable files named by their round, written whole or not at all.

The database names the files that count and has the SHA-256 of each: writing returns it, reading checks it. A file that
has changed raises `DamagedCheckpoint` and is never used. A file that the database does not name was left by an
interrupted run and is removed.
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
    """A file is missing, has changed since it was written, or is not a checkpoint."""


def save_state(file: Path, state: State, cell: str = "") -> str:
    """Write an algorithm's state and return the file's SHA-256. Unavailable: the file cannot be written."""
    return _write(file, flatten(_tree(state)), {"cell": cell, "round": state.round, "names": list(state.model)})


def _tree(state: State) -> dict[str, Any]:
    return {"model": state.model, "server": state.server, "clients": {str(k): v for k, v in state.clients.items()}}


def demand_tensors(state: State) -> None:
    """Raise SpecError for a state with a value that a checkpoint cannot store, and name it."""
    import torch

    def look(tree: Mapping[Any, Any], path: str) -> None:
        for name, value in tree.items():
            if not isinstance(name, str):
                raise SpecError(f"{path}: the key {name!r} is not a string; a checkpoint stores tensors by name")
            if isinstance(value, Mapping):
                look(value, f"{path}[{name!r}]")
            elif not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise SpecError(
                    f"{path}[{name!r}] is of type {kind}; a checkpoint stores only tensors: use torch.tensor(...)"
                )

    for name, tree in _tree(state).items():
        if name != "clients":
            look(tree, f"state.{name}")
            continue
        for k, client_tree in tree.items():
            look(client_tree, f"state.clients[{k}]")


def is_state_dict(file: Path) -> bool:
    """Whether a file of tensors has no header of ours: another program wrote it. A damaged file is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as tensors:
            return "fatbench" not in (tensors.metadata() or {})
    except (OSError, SafetensorError):
        return False


def load_state(
    file: Path, device: str, sha256: str | None = None, cell: str | None = None, round: int | None = None
) -> State:
    """Read a state written by `save_state`, and check its digest, its cell and its round where given.

    DamagedCheckpoint: the file is missing or does not match. MachineError: it cannot be opened.
    """
    tensors, header = _read_tensors(file, sha256, cell, round)
    try:
        tree = _ordered(unflatten(_to_device(tensors, device)), header.get("names", []))
        clients = {int(k): client_tensors for k, client_tensors in tree["clients"].items()}
        return State(int(header["round"]), tree["model"], tree["server"], clients)
    except (KeyError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{file}: damaged, or not a checkpoint of fatbench ({error})") from None


def _ordered(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Sort the names in a tree's mappings into this order, the network's; safetensors sorts them by its own."""
    position = {name: i for i, name in enumerate(names)}
    return {
        name: _ordered(tree[name], names) if isinstance(tree[name], Mapping) else tree[name]
        for name in sorted(tree, key=lambda name: position.get(name, len(names)))
    }


def save_model(file: Path, model: Tensors, client_tensors: Mapping[int, Tensors], **header: str) -> str:
    """Write a model's state_dict, the tensors that clients have of their own, and a header of strings.

    Returns the file's SHA-256. Unavailable: the file cannot be written.
    """
    tensors = {
        f"own/{k}/{name}": value for k, own_tensors in client_tensors.items() for name, value in own_tensors.items()
    }
    return _write(file, {**model, **tensors}, header)


def load_model(
    file: Path, device: str, sha256: str | None = None, cell: str | None = None, round: int | None = None
) -> tuple[Tensors, dict[int, Tensors], dict[str, str]]:
    """Read (state_dict, {client: its own tensors}, header) as `save_model` wrote them; checks as in `load_state`."""
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
    """The name of the file with the clients' models of a round before averaging."""
    return f"clients-{round:06d}.safetensors"


def save_artifacts(file: Path, artifacts: Tensors, cell: str, round: int) -> str:
    """Write the tensors that a round keeps beside its numbers, and return the file's SHA-256.

    `fatbench.report.figures.artifacts.load` reads them without torch. Unavailable: the file cannot be written.
    """
    return _write(file, artifacts, {"cell": cell, "round": str(round)})


def check(file: Path, sha256: str) -> None:
    """Raise DamagedCheckpoint if the file is missing or has changed, and MachineError if it cannot be opened."""
    with _opening(file), file.open("rb") as handle:
        digest_found = hashlib.file_digest(handle, "sha256").hexdigest()
    _demand(file, digest_found, sha256)


def sweep(folder: Path, keep: Iterable[str]) -> None:
    """Remove a cell's checkpoint files except those to keep."""
    kept_names = set(keep)
    for file in folder.glob("*.safetensors*"):
        if file.name not in kept_names:
            file.unlink(missing_ok=True)


# --- nested names as paths ----------------------------------------------------------------------------------------


def flatten(tree: Mapping[str, Any]) -> Tensors:
    """Flatten nested dictionaries of tensors: {"a": {"b": t}} -> {"a/b": t}.

    In a name, "~" becomes "~0" and "/" becomes "~1" (RFC 6901). An empty dictionary becomes an empty tensor whose path
    ends in "/".
    """
    import torch

    flat: Tensors = {}
    for name, value in tree.items():
        if not name:
            raise ValueError("a tensor or dictionary of a state has no name")
        path = name.replace("~", "~0").replace("/", "~1")
        if isinstance(value, Mapping):
            flat |= {f"{path}/{inner_path}": inner for inner_path, inner in flatten(value).items()}
            if not value:  # an empty mapping is part of the state, too
                flat[f"{path}/"] = torch.empty(0)
        else:
            flat[path] = value
    return flat


def unflatten(flat: Tensors) -> dict[str, Any]:
    """Undo `flatten`. ValueError: a path leads through a tensor."""
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


# safetensors sorts tensors by this order of types, and those of one type by name
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
    """Yield the bytes of `safetensors.torch.save` tensor by tensor, since all of them are as large as the state."""
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
    head += b" " * (-len(head) % 8)  # the format's alignment, which the digest covers
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


def _read_tensors(
    file: Path, sha256: str | None, cell: str | None, round: int | None
) -> tuple[Tensors, dict[str, str]]:
    """Read (tensors on the CPU, header), and check digest, cell and round where given."""
    from safetensors.torch import load

    with _opening(file):
        data = file.read_bytes()
    if sha256 is not None:
        _demand(file, hashlib.sha256(data).hexdigest(), sha256)
    try:
        tensors = load(data)
        # safetensors: 8 bytes with the length of the JSON header, the header, the tensors
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fatbench"])
        file_identity = header["cell"], int(header["round"])
    except MemoryError:
        raise  # the file is not at fault
    except Exception as error:  # safetensors, json and torch raise errors of their own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedCheckpoint(f"{file}: damaged, or not a checkpoint of fatbench ({reason})") from None
    if cell is not None and file_identity[0] != cell:
        raise DamagedCheckpoint(f"{file}: is of cell {file_identity[0]}, not of {cell}")
    if round is not None and file_identity[1] != round:
        raise DamagedCheckpoint(f"{file}: is of round {file_identity[1]}, not of {round}")
    return tensors, header
