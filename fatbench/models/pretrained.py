"""Loads published weights into a model's backbone, from timm's hub or from a file; never a silent random start.

    load_pretrained("vit", model, "timm", "vit_small_patch16_224", position="pos_embed")
    load_pretrained("t2t", model, "81.5_T2T_ViT_14.pth.tar", None, position="pos_embed")

A published state has the backbone's names and a classifier called `head`; otherwise the model gives a function that
renames it. Model files of fatbench (`model-000015.safetensors`) are read, too, so that cells of one suite can start
where those of another ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fatbench import packed
from fatbench.errors import FatbenchError, MachineError, SpecError, did_you_mean
from fatbench.models import torch_files
from fatbench.models.torch_files import Unbuilt
from fatbench.suite import weights as naming
from fatbench.suite.weights import digest as digest_of

CLASSIFIER = ("head.weight", "head.bias")
SHOWN = 3  # mismatching tensors named in a message
LISTED = 8  # states of a file named in a message


class Pretrainable(Protocol):
    """A model that can be initialised with published weights."""

    pretrained: dict[str, str] | None

    @property
    def backbone(self) -> nn.Module:
        """What the weights fill."""

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
        source, state = weights, without_start(from_file(name, Path(weights)))[0]
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


def fitted(state: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """(a state under the names that a network needs, what was changed, in words); nearly so where nothing makes it fit.

    A start that all names have too many, or need, is taken off or put before them, and words of wrappers are left out.
    Counters that are missing are taken from `needed`; numbers that count something else are left out.
    """
    result, changes = dict(state), list[str]()
    for bare in (str, _unwrapped):
        theirs, own = {bare(key): key for key in state}, {bare(key): key for key in needed}
        wanted = [name for name in own if not name.endswith(COUNTER)]
        if len(theirs) < len(state) or len(own) < len(needed) or not wanted:
            continue  # two names would be one
        starts, missing_starts = prefixes(theirs, wanted), list[str]()
        if not starts:
            stored = [name for name, key in theirs.items() if not _counts(state[key])]
            missing_starts = prefixes(own, stored) if len(stored) == len(wanted) else []
        if len(starts or missing_starts) != 1:
            continue
        (start,), (missing_start,) = starts or [""], missing_starts or [""]
        words = sorted({part for key in (*state, *needed) for part in key.split(".")} & WRAPPERS)
        changes += [f"names without '{' and '.join(words)}' in them"] if bare is _unwrapped else []
        changes += [f"names without '{start}' before them"] if start else []
        changes += [f"names with '{missing_start}' before them"] if missing_start else []
        result = {}
        for name, key in theirs.items():
            fits = name.startswith(start) and missing_start + name.removeprefix(start) in own
            result[own[missing_start + name.removeprefix(start)] if fits else key] = state[key]
        break
    else:  # so that what differs is said of names that look alike
        inside, start = without_start(state)
        if inside.keys() & needed.keys() and not state.keys() & needed.keys():
            result, changes = inside, [f"names without '{start}' before them"]
    if left := [key for key, value in result.items() if key not in needed and _counts(value)]:
        changes.append(f"left out: {', '.join(left[:SHOWN])}")
        result = {key: value for key, value in result.items() if key not in left}
    if counters := {key: needed[key] for key in needed if key.endswith(COUNTER) and key not in result}:
        changes.append(f"no {COUNTER} in it, on which no answer depends")
        result |= counters
    return result, changes


def prefixes(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """The texts, "model." or none at all, with which every wanted name is one of the names; [""] if it needs none."""
    starts = [name.removesuffix(wanted[0]) for name in names if name.endswith(wanted[0])] if wanted else []
    fitting = [start for start in starts if start[-1:] in ("", ".") and {start + name for name in wanted} <= {*names}]
    return [""] if "" in fitting else fitting


def without_start(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """(a published state without what all its names begin with, that start); a network's own names have several."""
    start = ""
    while len(parts := {key.partition(".")[0] for key, value in state.items() if not _counts(value)}) == 1:
        part = f"{parts.pop()}."
        inside = {key.removeprefix(part): value for key, value in state.items() if key.startswith(part)}
        if not inside:
            break
        state, start = inside, start + part
    return dict(state), start


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _counts(value: Tensor) -> bool:
    """Whether a tensor is one whole number, which is no weight."""
    return value.numel() == 1 and not value.is_floating_point() and not value.is_complex()


def other_numbers(state: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> list[str]:
    """The tensors whose numbers a network's tensors cannot hold, in words; all are there, in the right shape."""
    differences = []
    for key, value in needed.items():
        given = state[key]
        if value.is_complex() or key.endswith(COUNTER):
            continue
        if value.is_floating_point():
            holds = given.is_floating_point()
        else:
            holds = not given.is_complex() and torch.equal(given.to(value.dtype).to(given.dtype), given)
        if not holds:
            differences.append(f"{key} is {_type(given)}, {_type(value)} needed")
    return differences


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
WHOLE = "."  # the entry of a file that is a state itself
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
COUNTER = "num_batches_tracked"  # of batch norm, which old files have not and no answer depends on


def from_file(name: str, path: Path) -> dict[str, Tensor]:
    """The state stored in a .safetensors file or a torch checkpoint, exponential moving average first, as published."""
    return read_state(name, path, order=(*AVERAGES, *ENTRIES))[0]


def read_state(
    name: str, path: Path, entry: str | None = None, order: Sequence[str] = (*ENTRIES, *AVERAGES)
) -> tuple[dict[str, Tensor], list[str]]:
    """(a state stored in a file, the names of all states in it, the one that was read first).

    The list is empty if the file is one state and nothing else. A name is the way to a mapping of tensors, such as
    "model.state_dict", or the start of tensors' names, such as "student". entry: the one to read; None: the only one,
    or the first of `order`. The tensors of fatbench's model files, which are marked as such, are renamed as they are
    published. Nothing in the file is executed. Raises MachineError if it cannot be read or holds no named tensors, and
    SpecError if it is a program, lacks the entry, or has several and none was named.
    """
    if not path.is_file():
        raise MachineError(f"{name}: weights: no file {path}")
    try:
        with path.open("rb") as stream:  # safetensors begin with the length of a JSON text, whatever their name is
            is_safetensors = stream.read(9)[8:] == b"{"
        content = _safetensors(path) if is_safetensors else torch_files.read(path)
    except FatbenchError:
        raise
    except Exception as error:  # of a damaged file, or one of another kind
        kind = packed.kind_of(path)
        what = first_line(error) if kind in ("", "a zip file") else f"it is {kind}"
        raise MachineError(
            f"{name}: weights: cannot read {path}: not a file that torch.save or safetensors wrote, or damaged: {what}"
        ) from error
    # arrays beside a state of tensors are curves, as a rule
    states = dict(_states(content, _is_tensor)) or dict(_states(content, lambda value: isinstance(value, np.ndarray)))
    if not states and _has_unbuilt(content):
        raise SpecError(f"{path} holds pickled Python objects, not a state dict: {torch_files.ADVICE}")
    if not states:
        raise MachineError(f"{name}: weights: {path} holds no state of named tensors")
    if entry is None:
        chosen = next((one for word in order if len(named := _ending(states, word)) == 1 for one in named), None)
        if chosen is None and len(states) > 1:
            raise SpecError(f"{path} holds {len(states)} states, choose one with entry: {_listed(states)}")
        chosen = chosen or next(iter(states))
        state = states[chosen]
    else:
        chosen, state = entry, states.get(entry) or _below(states, entry)
    if not state:
        raise SpecError(f"{path} has no entry '{entry}' (it has {_listed(states)}){did_you_mean(entry or '', states)}")
    for key, value in state.items():
        if isinstance(value, Unbuilt):
            raise SpecError(f"{path}: {key} is {value.tensor_kind}")
    return state, [] if [*states] == [WHOLE] else [chosen, *(other for other in states if other != chosen)]


def _states(content: Any, is_number: Callable[[Any], bool], way: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each mapping of tensors with the way to it. Counters, states of random generators and metrics are none."""
    if not isinstance(content, dict | list):
        return
    items = content.items() if isinstance(content, dict) else enumerate(content)
    inside = [found for key, value in items for found in _states(value, is_number, f"{way}{key}.")]
    if isinstance(content, dict):
        tensors = {
            str(key): torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for key, value in content.items()
            if is_number(value)
        }
        is_state = any(isinstance(v, Unbuilt) or (v.dim() and v.dtype != torch.uint8) for v in tensors.values())
        # tensors beside a state, such as a mean, are none by themselves; names of a network's tensors have parts
        if is_state and (not inside or any("." in key for key in tensors)):
            yield way.removesuffix(".") or WHOLE, tensors
    yield from inside


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, Unbuilt) and bool(value.tensor_kind))


def _has_unbuilt(content: Any) -> bool:
    """Whether there are objects besides numbers, texts, tensors and lists of them."""
    items = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return isinstance(content, Unbuilt) or any(map(_has_unbuilt, items))


def _ending(names: Iterable[str], word: str) -> list[str]:
    """The name that is a word, else those whose last part it is."""
    return [word] if word in names else [name for name in names if name.endswith(f".{word}")]


def _below(states: Mapping[str, Mapping[str, Any]], entry: str) -> dict[str, Any]:
    """The tensors whose names start with an entry, or with what follows a state's name in it; without that start."""
    for name, state in states.items():
        start = entry.removeprefix(f"{name}.") + "."
        if found := {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}:
            return found
    return {}


def _listed(states: Mapping[str, Mapping[str, Any]]) -> str:
    """ "best (8 tensors), last (8 tensors)"."""
    listed = [f"{name} ({len(state)} tensor{'s' * (len(state) != 1)})" for name, state in states.items()]
    return ", ".join(listed[:LISTED]) + (f", and {len(listed) - LISTED} more" if len(listed) > LISTED else "")


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
