"""Loads published weights into a model's backbone, from timm's hub or from a file; never a silent random start.

    load_pretrained("vit", model, "timm", "vit_small_patch16_224", position="pos_embed")
    load_pretrained("t2t", model, "81.5_T2T_ViT_14.pth.tar", None, position="pos_embed")

A published state has the backbone's names and a classifier called `head`; otherwise the model gives a function that
renames it. Model files of fatbench (`model-000015.safetensors`) are read, too, so that cells of one suite can start
where those of another ended.
"""

from __future__ import annotations

import argparse
import hashlib
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fatbench.errors import MachineError, SpecError
from fatbench.suite import weights as naming
from fatbench.suite.weights import digest as digest_of

CLASSIFIER = ("head.weight", "head.bias")
SHOWN = 3  # mismatching tensors named in a message


class Pretrainable(Protocol):
    """A model that can be initialised with published weights."""

    backbone: nn.Module
    pretrained: dict[str, str] | None

    @property
    def classifier(self) -> nn.Linear | None:
        """The layer for a published classifier with the same number of classes; None: always random."""


def load_pretrained(
    name: str,
    model: Pretrainable,
    weights: str,
    timm_name: str | None,
    *,
    position: str | None = None,
    renamed: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Overwrite the backbone of `model` with published weights: "timm", "timm/TAG@sha256:...", or the path of a file.

    The position table `position` is interpolated (bicubic, timm's `resample_abs_pos_embed`; the class token's entry is
    kept) if the grid of patches has another size. `renamed` maps a state to the backbone's names. The model's
    `classifier` is loaded if the number of classes agrees, else it stays random.

    Raises ValueError if timm has no such weights or they belong to another architecture (with the first tensors that
    differ), and MachineError if they cannot be fetched or read, or their digest is not the given one.
    """
    tag, wanted_digest = naming.split_tag(weights)
    if tag is not None or weights == naming.HUB:
        timm_name = tag or timm_name
        if timm_name is None:
            raise ValueError(
                f"{name}: timm has no weights for these settings; give `weights` the path of a file, FILE@sha256:DIGEST"
            )
        source, state = f"timm's {timm_name}", from_timm(name, timm_name)
        digest = digest_of_tensors(state)
        if wanted_digest not in (None, digest):
            raise MachineError(f"{name}: {source} is {digest}, not {wanted_digest} as stated in the suite")
    else:
        source, state = weights, from_file(name, Path(weights))
        digest = digest_of(Path(weights))
    model.pretrained = {"source": Path(source).name, "digest": digest}
    state = renamed(state)
    classifier = {key: state.pop(key) for key in CLASSIFIER if key in state}  # of ImageNet's classes, as a rule
    backbone_state = model.backbone.state_dict()
    if position is not None and position in state and position in backbone_state:
        state[position] = resize_positions(state[position], backbone_state[position])
    if differences := mismatches(state, backbone_state):
        remainder = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise ValueError(
            f"{name}: {source} does not fit the architecture of these settings: "
            f"{'; '.join(differences[:SHOWN])}{remainder}"
        )
    model.backbone.load_state_dict(state)
    layer = model.classifier
    if layer is not None and [v.shape for v in classifier.values()] == [layer.weight.shape, layer.bias.shape]:
        layer.load_state_dict({key.removeprefix("head."): value for key, value in classifier.items()})


def digest_of_tensors(state: Mapping[str, Tensor]) -> str:
    """ "sha256:<hex>" of the tensors' names and contents, in the order of the names."""
    sha256 = hashlib.sha256()
    for key in sorted(state):
        value = state[key].detach().cpu().contiguous()  # the memory format is no part of the digest
        sha256.update(f"{key} {value.dtype} {shape(value)}\n".encode())
        sha256.update(value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return f"sha256:{sha256.hexdigest()}"


def resize_positions(table: Tensor, target: Tensor) -> Tensor:
    """A position table (1, 1 + n * n, D) resized to the tokens of `target`; any other form is returned unchanged."""
    old_side, new_side = (round((t.shape[1] - 1) ** 0.5) if t.dim() == 3 else 0 for t in (table, target))
    if old_side == new_side or not old_side or table.shape != (1, old_side * old_side + 1, target.shape[2]):
        return table
    from timm.layers.pos_embed import resample_abs_pos_embed

    return resample_abs_pos_embed(table, new_size=[new_side, new_side], old_size=[old_side, old_side])


def mismatches(state: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> list[str]:
    """The differences that keep `state` from being loaded: the model's tensors in order, then extra ones."""
    differences = []
    for key, value in needed.items():
        if key not in state:
            differences.append(f"{key} is missing, {shape(value)} needed")
        elif state[key].shape != value.shape:
            differences.append(f"{key} is {shape(state[key])}, {shape(value)} needed")
    return differences + [f"{key} is {shape(value)}, none needed" for key, value in state.items() if key not in needed]


def shape(tensor: Tensor) -> str:
    """ "768x3x16x16"."""
    return "x".join(map(str, tensor.shape)) or "a number"


def from_timm(name: str, timm_name: str) -> dict[str, Tensor]:
    """The weights that timm publishes as `timm_name`. Raises MachineError without a network or a cached copy."""
    import timm

    try:
        return dict(timm.create_model(timm_name, pretrained=True).state_dict())
    except Exception as error:  # whatever the hub's client of the day raises
        raise MachineError(
            f"{name}: cannot get timm's {timm_name}: {first_line(error)}. Where the hub cannot be reached, "
            "give `weights` the path of a .safetensors or .pth file with these weights, FILE@sha256:DIGEST"
        ) from error


AVERAGES = ("state_dict_ema", "model_ema", "ema")
ENTRIES = ("state_dict", "model_state_dict", "model", "net")  # of a training script's file


def from_file(name: str, path: Path) -> dict[str, Tensor]:
    """The state stored in a .safetensors file or a torch checkpoint, exponential moving average first, as published."""
    return read_state(name, path, order=(*AVERAGES, *ENTRIES))[0]


def read_state(
    name: str, path: Path, entry: str | None = None, order: Sequence[str] = (*ENTRIES, *AVERAGES)
) -> tuple[dict[str, Tensor], list[str]]:
    """(the state stored in a file, the names of its entries that are states, the one that was read first).

    The list is empty if the file itself is a state. entry: the one to read; None: the first of `order` that it has. The
    tensors of fatbench's model files, which are marked as such, are renamed as they are published. Raises MachineError
    if the file cannot be read or holds no named tensors, and SpecError if it holds code or lacks the entry.
    """
    if not path.is_file():
        raise MachineError(f"{name}: weights: no file {path}")
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a TorchScript program, which is refused below
            with torch.serialization.safe_globals([argparse.Namespace]):  # training scripts also store their arguments
                content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, KeyError) as error:  # KeyError: an opcode that torch does not know
        if "GLOBAL" not in str(error):  # torch's word for a file that names code, which is not executed
            raise MachineError(f"{name}: weights: cannot read {path}: not a file that torch.save wrote") from None
        raise SpecError(
            f"{path} holds pickled Python objects, not a state dict: torch.save(model.state_dict(), FILE)"
        ) from None
    except Exception as error:  # torch and pickle do not document what a damaged file raises
        if "TorchScript" in str(error):
            raise SpecError(
                f"{path} holds a TorchScript program, not a state dict: torch.save(model.state_dict(), FILE)"
            ) from None
        raise MachineError(f"{name}: weights: cannot read {path}: {first_line(error)}") from error
    state_entries = [key for key in order if isinstance(content, Mapping) and isinstance(content.get(key), Mapping)]
    if entry is not None and entry not in state_entries:
        raise SpecError(f"{path} has no entry '{entry}' (it has {', '.join(state_entries) or 'none'})")
    state_entries.sort(key=lambda key: key != entry)
    state = content[state_entries[0]] if state_entries else content
    if not (isinstance(state, Mapping) and state and all(isinstance(value, Tensor) for value in state.values())):
        raise MachineError(f"{name}: weights: {path} holds no state of named tensors")
    # nn.DataParallel puts "module." before every name
    return {str(key).removeprefix("module."): value for key, value in state.items()}, state_entries


def _safetensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        is_ours = "fatbench" in (file.metadata() or {})
    state = load_file(path)
    return {published_name(key): value for key, value in state.items() if not is_new_head(key)} if is_ours else state


def published_name(key: str) -> str:
    """A tensor's name in a published state; fatbench's models keep it in `backbone`, and the classifier in `head`."""
    return f"head.{key.removeprefix('head.fc.')}" if key.startswith("head.fc.") else key.removeprefix("backbone.")


def is_new_head(key: str) -> bool:
    """Whether a tensor belongs to a head that no published state has, so that it starts at random."""
    return key.startswith("head.") and not key.startswith("head.fc.") and key not in CLASSIFIER


def first_line(error: Exception) -> str:
    """The first line of an error without its full stop; its class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
