"""`fatbench invert`: reconstruct the images behind one update from any source, by the attacks that fit a threat model.

    task = InversionTask(before, after, "after", "my.py:make", (3, 32, 32), classes=10, batch=1)
    loaded = load(task)
    answers = invert(task, loaded, fitting(task, loaded))

Everything is checked before the first attack runs: that the update belongs to this model, is finite and not zero, and
has the tensors that an attack reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fatbench.errors import MachineError, SpecError
from fatbench.suite import calls, threats

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fatbench.methods.inversions.upload import Observation

TRACKED = ("running_mean", "running_var", "num_batches_tracked")  # the buffers of batch normalisation
ONE_IMAGE = 1e-3  # an update of a single image has a smaller relative residual of the least squares
DEFAULTS: tuple[dict[str, Any], ...] = (
    {"name": "patch_ls"},
    {"name": "patch_ls", "solver": "tv"},
    {"name": "patch_ls", "decay": "corrected"},
    {"name": "patch_span"},
    {"name": "matching", "steps": 300},
    {"name": "simulated"},
)


@dataclass(frozen=True)
class InversionTask:
    """The update that is attacked, and what the attacker knows."""

    before: Path  # weights that the client received
    update: Path  # weights that it returned, or a gradient
    kind: Literal["after", "gradient"]
    network: str  # "timm/NAME" or "FILE.py:FUNCTION"
    shape: tuple[int, int, int]
    classes: int
    threat: str = "B"
    batch: int | None = None  # images behind the update
    labels: tuple[int, ...] = ()  # their labels, if the attacker knows them
    inversions: tuple[Any, ...] = ()  # as in a suite file; empty for those that fit
    preprocessing: Mapping[str, Any] = field(default_factory=dict)  # mean, std
    local: Mapping[str, Any] | None = None  # rate, epochs, batch, momentum, decay of the client
    mode: Literal["eval", "train"] = "eval"  # how batch normalisation computed at the client


@dataclass(frozen=True)
class CheckedUpdate:
    """An update that passed all checks, with its model."""

    model: nn.Module
    observed: Observation
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """The images that one attack reconstructed."""

    name: str
    threat: str
    labels: str
    images: Tensor  # (P, C, H, W) in [0, 1]


def load(task: InversionTask) -> CheckedUpdate:
    """Read and check the files. SpecError: they contradict each other or the model. MachineError: unreadable."""
    import torch
    from torch.nn.modules.dropout import _DropoutNd

    from fatbench.engine.local import LocalTraining
    from fatbench.methods.inversions.batch_statistics import layers_of, local_steps
    from fatbench.methods.inversions.labels import head_of, restored
    from fatbench.methods.inversions.upload import Observation
    from fatbench.methods.objectives import standard
    from fatbench.models import external_network, pretrained

    if task.batch is not None and task.labels and len(task.labels) != task.batch:
        raise SpecError(f"--images {task.batch} contradicts --labels, which are {len(task.labels)}")
    if task.batch is None and not task.labels:
        raise SpecError("say how many images are behind the update by --images N, or their labels by --labels 3,1")
    if bad_labels := [label for label in task.labels if not 0 <= label < task.classes]:
        raise SpecError(
            f"{bad_labels[0]} is not one of {task.classes} classes (--classes), which count from 0", option="labels"
        )
    for file in (task.before, task.update):
        if not file.is_file():
            raise MachineError(f"{file}: no such file")
    states = [pretrained.from_file("invert", file) for file in (task.before, task.update)]
    notes = []
    model = external_network.Preprocessed(
        external_network.network(task.network, task.shape, task.classes), **task.preprocessing
    )
    if changes := external_network.load(model.network, str(task.before), states[0]):
        notes.append(changes)
    parameters, needed = dict(model.network.named_parameters()), model.network.state_dict()
    of_update = {  # a gradient has no buffers
        name: value for name, value in needed.items() if any(key.endswith(name) for key in (*parameters, *states[1]))
    }
    states = [pretrained.fitted(states[0], needed)[0], pretrained.fitted(states[1], of_update)[0]]
    sent = {name: value for name, value in states[1].items() if name in states[0] and name not in parameters}
    tracked = {f"{layer}.{kind}" for layer in layers_of(model.network) for kind in TRACKED}
    buffers = {name: value for name, value in sent.items() if name in tracked} if tracked <= sent.keys() else {}
    if ignored := [name for name in sent if name not in buffers]:
        notes.append(
            f"buffers are not part of an update and ignored: {', '.join(ignored[:3])}{', ...' * (len(ignored) > 3)}"
        )
    if buffers:
        notes.append(f"the buffers tell the number of local steps: {local_steps(states[0], buffers)}")
    update_tensors = {name: value for name, value in states[1].items() if name not in sent}
    if differences := pretrained.mismatches(update_tensors, parameters):
        remainder = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise SpecError(f"{task.update} is not an update of this model: {'; '.join(differences[:3])}{remainder}")
    if half_tensor := next(
        (name for name, value in update_tensors.items() if value.dtype in (torch.float16, torch.bfloat16)), None
    ):
        notes.append(
            f"{half_tensor} has 16 bits: a small update loses digits, so attacks may find less than in float32; it is "
            "not hidden"
        )
    drops = any(isinstance(m, _DropoutNd) and m.p > 0 for m in model.modules())
    if task.mode == "train" and (drops or not tracked):
        reason = "the client's masks of dropout are unknown" if drops else "this model computes the same in both modes"
        raise SpecError(f"train: {reason}", option="mode")
    if task.mode == "eval" and (drops or tracked):
        notes.append(
            "attacks take the update as one of eval mode: with batch normalisation or dropout, training in train mode "
            "may have given away more or less than they find" + (": --mode train" if tracked and not drops else "")
        )
    finite_tensors = {**update_tensors, **buffers}
    broken = next((name for name, value in finite_tensors.items() if not bool(value.isfinite().all())), None)
    if broken is not None:
        raise SpecError(f"{task.update}: {broken} has entries that are not finite")
    similarity = _cosine(update_tensors, states[0])
    if task.kind == "gradient" and similarity > 0.9:
        raise SpecError(f"{task.update} is almost equal to {task.before}, so it holds weights: give them by --after")
    if task.kind == "after" and abs(similarity) < 0.1:
        raise SpecError(f"{task.update} does not resemble {task.before}: is it a gradient? Then give it by --gradient")
    if task.kind == "after":
        gradient = {name: states[0][name].double() - value.double() for name, value in update_tensors.items()}
    else:
        gradient = {name: value.double() for name, value in update_tensors.items()}
    if not any(bool(value.any()) for value in gradient.values()):
        reason = f"is the same as {task.before}" if task.kind == "after" else "is all zeros"
        raise SpecError(f"{task.update} {reason}: there is no update to invert")
    model.eval()
    prefix = "network."
    count = task.batch or len(task.labels)
    local = None if task.local is None else LocalTraining(objective=standard, **task.local)
    if local is not None and local.batch > count:
        raise SpecError(f"local.batch {local.batch}: the client has {count} images")
    observed = Observation(
        {name: value.detach() for name, value in model.state_dict(keep_vars=True).items()},
        {f"{prefix}{name}": value.float()[None] for name, value in gradient.items()},
        torch.tensor([task.labels or (0,) * count]),
        local=local,
        mode=task.mode,
        buffers={
            f"{prefix}{name}": (value.float() if value.is_floating_point() else value)[None]
            for name, value in buffers.items()
        }
        or None,
    )
    if not task.labels:
        bias = head_of(model)[1]
        if not bool(observed.gradient[bias].any()):
            raise SpecError(f"{task.update}: {bias} is all zeros, and labels are recovered from it: give --labels")
        # without the learning rate, the sign still gives the label of one image
        if task.kind == "after" and local is None:
            if count > 1:
                raise SpecError(
                    "labels of several images are recovered only if local.lr is known: --set local.lr, or --labels"
                )
            label_tensor = observed.gradient[bias].argmin(1, keepdim=True)
        else:
            draw = torch.Generator().manual_seed(0)
            label_tensor = restored("ilrg", observed, model, count, task.shape, draw)
        observed = replace(observed, labels=label_tensor)
    return CheckedUpdate(model, observed, tuple(notes))


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The cosine similarity between all tensors of `a` and those of the same names in `b`; nan if one is zero."""
    product, norm_a, norm_b = (
        float(sum((x[name].double() * y[name].double()).sum() for name in a)) for x, y in ((a, b), (a, a), (b, b))
    )
    return product / (norm_a * norm_b) ** 0.5 if norm_a and norm_b else float("nan")


def fitting(task: InversionTask, loaded: CheckedUpdate) -> list[calls.Call]:
    """The attacks to run. SpecError: an attack that was asked for needs more than is known or was sent."""
    from fatbench.methods.inversions import INVERSIONS, reads_of

    attack_calls = []
    for node in task.inversions or DEFAULTS:
        attack_call = calls.check("Inversion", node, "--inversion")
        name = attack_call["name"]
        reads = reads_of(INVERSIONS[name]) if name in INVERSIONS else None
        obstacle = _obstacle(task, loaded, attack_call, reads)
        if obstacle and task.inversions:
            raise SpecError(f"{obstacle}", option=f"inversion {attack_call['name']}")
        if not obstacle:
            attack_calls.append(attack_call)
    if not attack_calls:
        raise SpecError(
            f"no attack fits threat model {task.threat} and this update: try --inversion NAME for the reason"
        )
    return attack_calls


def _obstacle(task: InversionTask, loaded: CheckedUpdate, attack_call: calls.Call, reads: Sequence[str] | None) -> str:
    """The reason why an attack cannot run; empty if it can."""
    letter = threats.letter(attack_call)
    if letter is None or letter == threats.BOUND:
        return "it is not an attack: it needs the original images"
    if lacks := threats.KNOWS[letter] - threats.KNOWS[task.threat]:
        return f"it needs {' and '.join(sorted(lacks))} (threat model {letter}), and --threat is {task.threat}"
    if attack_call.get("decay") == "corrected" and not (task.local and task.local["weight_decay"]):
        return "there is no weight decay to correct: --set local.lr and local.weight_decay"
    if attack_call.get("statistics") and letter == "E" and (task.mode == "eval" or loaded.observed.buffers is None):
        return "it reads the batch's statistics: --mode train, and files with the buffers of batch normalisation"
    if attack_call["name"] == "simulated" and task.local is None:
        return "it simulates local steps: --set local.lr=..."
    if (
        attack_call["name"] == "patch_ls"
        and attack_call.get("solver") == "tv"
        and not task.inversions
        and len(loaded.observed.labels[0]) > 1
    ):
        return "the update comes from several images"
    for end in reads or ():
        matching_names = [name for name in loaded.observed.gradient if name.endswith(end)]
        if not matching_names:
            return f"it reads {end}, and the model has no such parameter: matching takes any model"
        withheld = not bool(loaded.observed.gradient[matching_names[0]].any())
        if withheld and not (attack_call["name"] == "patch_span" and end == "pos_embed"):
            return f"it reads {matching_names[0].removeprefix('network.')}, which the update withholds (all zeros)"
    if attack_call["name"] in ("april_opt", "april") and not any(
        n.endswith("pos_embed") for n in loaded.observed.gradient
    ):
        return "it needs learned positions"
    return ""


def invert(task: InversionTask, loaded: CheckedUpdate, attack_calls: Sequence[calls.Call]) -> list[Answer]:
    """Run the attacks. SpecError: an attack that was asked for, or every attack, cannot solve this update."""
    import torch

    answers = []
    for attack_call in attack_calls:
        noise = torch.Generator().manual_seed(0)
        try:
            reconstruction = calls.build("Inversion", attack_call)([loaded.observed], loaded.model, task.shape, noise)
        except ValueError as error:
            if task.inversions:
                raise SpecError(f"{error}", option=f"inversion {attack_call['name']}") from None
            continue
        labels_used = threats.uses_labels(attack_call)
        labels = ("given" if task.labels else "recovered") if labels_used else "unused"
        settings = {k: v for k, v in calls.without_defaults(attack_call).items() if k != "name"}
        name = attack_call["name"] + (f" ({', '.join(f'{k}: {v}' for k, v in settings.items())})" if settings else "")
        answers.append(Answer(name, str(threats.letter(attack_call)), labels, reconstruction[0].detach()))
    if not answers:
        raise SpecError("none of the attacks can solve this update: too few equations for each of them")
    return answers


def residual(task: InversionTask, loaded: CheckedUpdate) -> float | None:
    """|M - A^T X| / |M| of the least squares through the patch embedding; None if there are too few equations.

    It is near 0 for the update of one image and above 0.01 for a mixture of images, so it tells without the originals
    whether a reconstruction can be trusted.
    """
    from fatbench.methods.inversions.patch_ls import mean_system, solve_filtered
    from fatbench.methods.inversions.upload import geometry

    try:
        embedding = geometry(loaded.observed, task.shape, "invert")
    except ValueError:
        return None
    A, M = mean_system([loaded.observed], embedding, "invert")
    if embedding.width <= embedding.patches or not bool(A.any()):
        return None
    X, _ = solve_filtered(A, M, "ridge")
    return float((M - A.transpose(1, 2) @ X).norm() / M.norm())


def scores(answer: Answer, originals: Tensor) -> dict[str, float]:
    """PSNR and SSIM of the best pair and of all pairs matched one to one; LPIPS if its weights are installed."""
    from fatbench.methods.inversions import image_measures, lpips

    measures = {
        name: float(image_measures.best_of(measure, answer.images[None], originals[None])[0])
        for name, measure in (("psnr", image_measures.psnr), ("ssim", image_measures.ssim))
    }
    measures["psnr"] = min(measures["psnr"], 300.0)
    if perceptual := lpips.measure(originals.shape[-1]):
        measures["lpips"] = float(image_measures.least_of(perceptual, answer.images[None], originals[None])[0])
    return measures | {
        name: float(value[0]) for name, value in image_measures.matched(answer.images[None], originals[None]).items()
    }
