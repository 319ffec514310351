"""What tests of algorithms share: settings written flat, as tests vary them one by one, and states compared."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import ServerTraining

LOCAL = {field.name for field in fields(LocalTraining)}
SERVER = {f"server_{field.name}" for field in fields(ServerTraining)}


def nested(**flat: Any) -> dict[str, Any]:
    """`batch`, `lr`, ... of LocalTraining under `local`, the rest as it is.

    Where there is a `server_epochs`, it and `server_batch`, ... of ServerTraining stand under `server`.
    """
    local = {name: value for name, value in flat.items() if name in LOCAL}
    rest = {name: value for name, value in flat.items() if name not in LOCAL}
    if "server_epochs" in rest:
        server = {name.removeprefix("server_"): value for name, value in rest.items() if name in SERVER}
        rest = {name: value for name, value in rest.items() if name not in SERVER}
        rest["server"] = ServerTraining(**server)
    return {"local": LocalTraining(**local), **rest}


def same(a: Any, b: Any) -> bool:
    """Whether two states, or what is in them, are equal to the last bit: nested dictionaries of tensors."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
