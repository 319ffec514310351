"""What an honest-but-curious server observes, and what the inversions share: images cut into patches and back.

| here | papers | what |
|---|---|---|
| A, (V, N, D) | d loss / d E_pos | gradient at each patch's token; the class token's row is dropped |
| M, (V, D, C p p) | d loss / d W_embed | gradient of the patch embedding: M = A^T X for one image |
| X, (V, N, C p p) | x_s | the patches, normalised as in the model |
| u, (H, l) | - | bilinear upsampling from l to H pixels, along one side |

V: independent uploads (target clients), solved together; N = (H / p)^2 patches, D the width of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.engine.inject import requested_arguments
from fatbench.engine.local import LocalTraining
from fatbench.methods.defences import Examples, Upload
from fatbench.methods.inversions.batch_statistics import buffers_of
from fatbench.suite.calls import call
from fatbench.suite.entry import Unknown
from fatbench.suite.facts import Facts

Tensors = dict[str, Tensor]
Mode = Literal["eval", "train"]  # how a client computes
PATCH, POSITION = "patch_embed.proj.weight", "pos_embed"
EMBEDDING = (PATCH, POSITION)  # what the solvers read; to be passed to `gradients` as `names`


@dataclass(frozen=True)
class Observation:
    """V uploads of one round, each of one batch of B examples, all from the same broadcast weights."""

    weights: Tensors  # what the server sent
    gradient: Tensors  # {name: (V, ...)}: what each client sent, after its defence
    labels: Tensor  # (V, B) int64: known, or recovered by `recovered_labels`
    mask: Tensors | None = None  # {name: (V, ...) bool}, False where an entry was withheld; nothing is, if missing
    local: LocalTraining | None = None  # how the clients trained; None: they sent a gradient
    secret: Tensors | None = None  # what a malicious server keeps about its change of the model
    mode: Mode = "eval"
    buffers: Tensors | None = None  # {name: (V, ...)} after the client's work; None: they are not sent
    clients: int = 1  # whose uploads were averaged; the examples of each follow each other
    own_images: Callable[[], Tensor] | None = None  # (n, C, H, W) in [0, 1] that the server has itself


def gradients(model: nn.Module, weights: Tensors, x: Tensor, y: Tensor, names: Sequence[str] | None = None) -> Tensors:
    """{name: (V, ...)}: the gradient of each of V uploads, before any defence.

    x: (V, B, C, H, W) in [0, 1], y: (V, B); cross-entropy, mean over the batch. The model is in eval mode: batch
    normalisation has its running statistics and nothing is dropped out (`trained_gradients`: train mode). `names`: only
    the parameters whose names end in one of them: `EMBEDDING` of ViT-S/16 takes 1.5 MB an upload, all take 87 MB.
    """
    model.eval()
    parameters = {n: w.detach() for n, w in weights.items() if n in dict(model.named_parameters())}
    wanted_parameters = {n: w for n, w in parameters.items() if names is None or n.endswith(tuple(names))}
    other_weights = {n: w for n, w in weights.items() if n not in wanted_parameters}

    def loss(theta: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, {**other_weights, **theta}, (images,)), labels)

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels cannot be vmapped
        result: Tensors = vmap(grad(loss), in_dims=(None, 0, 0))(wanted_parameters, x, y)
    return {name: g.detach() for name, g in result.items()}


def trained_gradients(
    model: nn.Module, weights: Tensors, x: Tensor, y: Tensor, names: Sequence[str] | None = None
) -> tuple[Tensors, Tensors]:
    """As `gradients`, of a model in train mode, and its buffers {name: (V, ...)} after the pass; `weights` stay.

    A loop: on a CPU it was 40 times as fast as vmap over batch normalisation.
    """
    model.train()
    wanted = [n for n, _ in model.named_parameters() if names is None or n.endswith(tuple(names))]
    slopes, buffers = [], []
    for images, labels in zip(x, y, strict=True):
        moving = buffers_of(model, weights)
        theta = {name: weights[name].detach().requires_grad_() for name in wanted}
        loss = F.cross_entropy(functional_call(model, {**weights, **moving, **theta}, (images,)), labels)
        slopes.append(torch.autograd.grad(loss, list(theta.values()), materialize_grads=True))
        buffers.append(moving)
    stacked = dict(zip(wanted, map(torch.stack, zip(*slopes, strict=True)), strict=True))
    return stacked, {name: torch.stack([moving[name] for moving in buffers]) for name in buffers[0]}


def differentiable(
    model: nn.Module, weights: Tensors, x: Tensor, y: Tensor, names: Iterable[str], clients: int = 1
) -> Tensors:
    """The gradient of one upload (B, C, H, W), (B,) by the parameters `names`, itself differentiable by x.

    In the model's mode; in train mode each of the `clients` of a mean has a batch of its own. Inside
    `sdpa_kernel(SDPBackend.MATH)`: the fused attention kernels have no second derivative.
    """
    theta = {name: weights[name].detach().requires_grad_() for name in names}
    if model.training:
        weights = {**weights, **buffers_of(model, weights)}
        parts = zip(x.chunk(clients), y.chunk(clients), strict=True)
        losses = [F.cross_entropy(functional_call(model, {**weights, **theta}, (part,)), of) for part, of in parts]
        loss = torch.stack(losses).mean()
    else:
        loss = F.cross_entropy(functional_call(model, {**weights, **theta}, (x,)), y)
    gradients = torch.autograd.grad(loss, list(theta.values()), create_graph=True, materialize_grads=True)
    return dict(zip(theta, gradients, strict=True))


def observe(
    weights: Tensors,
    gradient: Tensors,
    labels: Tensor,
    defence: Callable[..., Any],
    uploads: Sequence[Upload],
    examples: Callable[[int], Examples] | None = None,
) -> Observation:
    """V gradients (V, ...) after a defence, one `Upload` each; withheld entries are zero.

    examples: a function that gives client v's `Examples` to a defence that asks for them.
    """
    defended = [
        defence(
            {n: g[v] for n, g in gradient.items()},
            upload,
            **({} if examples is None else requested_arguments(defence, {"examples": functools.partial(examples, v)})),
        )
        for v, upload in enumerate(uploads)
    ]
    masks = [mask for _, mask in defended if mask is not None]
    return Observation(
        weights,
        {name: torch.stack([s[name] for s, _ in defended]) for name in gradient},
        labels,
        {name: torch.stack([m[name] for m in masks]) for name in masks[0]} if masks else None,
    )


def recovered_labels(bias_gradient: Tensor) -> Tensor:
    """(V,) int64: the label of a single example from the gradient (V, classes) of the last layer's bias.

    It is softmax - onehot, so the label's entry is the only negative one. From a batch of B: the most likely of its
    labels. Source: Zhao, Mopuri and Bilen 2020 (iDLG).
    """
    return bias_gradient.argmin(1)


# --- addresses ---------------------------------------------------------------------------------------------------


def find(tensors: Tensors, suffix: str, method: str, description: str) -> str:
    """The one name that is or ends in `suffix`. Raises ValueError if the model or the upload has no such tensor."""
    matches = [name for name in tensors if name == suffix or name.endswith("." + suffix)]
    if len(matches) != 1:
        raise ValueError(
            f"{method} needs {description}: a parameter named {suffix}; found {', '.join(matches) or 'none'}"
        )
    return matches[0]


@dataclass(frozen=True)
class Geometry:
    """How an image becomes tokens: g x g patches of C x p x p pixels after `prefix` tokens, all of width D."""

    channels: int
    grid: int
    patch: int
    prefix: int
    width: int

    @property
    def patches(self) -> int:
        return self.grid * self.grid


def geometry(observed: Observation, shape: tuple[int, int, int], method: str) -> Geometry:
    """The geometry by the weights' shapes. Raises ValueError without patch embedding, or for images of another size."""
    weight = observed.weights[find(observed.weights, PATCH, method, "a patch embedding")]
    position = observed.weights[find(observed.weights, POSITION, method, "learned positions")]
    (width, channels, patch, _), grid = weight.shape, shape[1] // weight.shape[-1]
    prefix = position.shape[-2] - grid * grid
    if prefix < 0 or channels != shape[0]:
        raise ValueError(
            f"{method}: {shape[0]} x {shape[1]} x {shape[2]} images are {grid * grid} patches of {channels} channels, "
            f"the model has {position.shape[-2]} positions"
        )
    return Geometry(channels, grid, patch, prefix, width)


def learned_positions(cell: Facts) -> str | None:
    if "patches" not in cell.model.parts:
        reason = "a transformer with a patch embedding and learned positions: {name: vit}"
        return f"{_name(cell)} needs {reason}"
    return None


def inversion_reason(cell: Facts, reason: str) -> str:
    """A refusal that begins with the name of the cell's inversion."""
    return f"{_name(cell)}: {reason}"


def _name(cell: Facts) -> str:
    """The cell's inversion, of its algorithm or of its diagnostic."""
    inversion = cell.algorithm.get("inversion") or call("Diagnostic", cell.spec["diagnostic"])["inversion"]
    return str(inversion.name)


def patches(cell: Facts) -> tuple[int, int, int]:
    """(patches of an image, width of the model, pixels of a patch in one channel)."""
    side, width = cell.model.get("patch"), cell.model.get("dim")
    if side is None or width is None:
        raise Unknown("patches")
    return (cell.side // side) ** 2, width, side**2


def too_few_equations(cell: Facts) -> str | None:
    """The reason why the patch embedding's gradient does not determine the patches, or None."""
    unknown, width, _ = patches(cell)
    if width >= unknown:
        return None
    return inversion_reason(
        cell,
        f"images of {cell.side} pixels are {unknown} unknown patches, and a model of width {width} gives a system of "
        f"rank {width}; use a wider model, larger patches, or an upsampling prior",
    )


def too_large_a_prior(cell: Facts, latent: int) -> str | None:
    """The reason why the patch embedding's gradient does not determine an upsampled image, or None."""
    unknown, width, pixels = patches(cell)
    rank = min(unknown, width) * pixels
    if latent**2 <= rank:
        return None
    return inversion_reason(
        cell, f"latent: {latent} is {latent**2} unknowns a channel, and the system has rank at most {rank}"
    )


def token_gradient(tensors: Tensors, embedding_geometry: Geometry, method: str) -> Tensor:
    """A (V, N, D) of an upload, or its mask."""
    return tensors[find(tensors, POSITION, method, "the gradient of the positions")].flatten(1, -2)[
        :, embedding_geometry.prefix :
    ]


def patch_gradient(tensors: Tensors, method: str) -> Tensor:
    """M (V, D, C p p) of an upload, or its mask."""
    return tensors[find(tensors, PATCH, method, "the gradient of the patch embedding")].flatten(2)


# --- images ------------------------------------------------------------------------------------------------------


def normalisation(model: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, std), each (1, C, 1, 1), of the normalisation inside the model; 0 and 1 without one."""
    zero, unit = like.new_zeros(1, 1, 1, 1), like.new_ones(1, 1, 1, 1)
    mean, std = getattr(model, "mean", zero), getattr(model, "std", unit)
    return mean.to(like), std.to(like)


def to_patches(images: Tensor, patch: int) -> Tensor:
    """(V, C, H, W) -> (V, N, C p p), the order of a convolution's weight."""
    return F.unfold(images, patch, stride=patch).transpose(1, 2)


def to_images(patches: Tensor, embedding_geometry: Geometry) -> Tensor:
    """(V, N, C p p) -> (V, C, H, W), the inverse of `to_patches`."""
    return F.fold(
        patches.transpose(1, 2),
        (embedding_geometry.grid * embedding_geometry.patch,) * 2,
        embedding_geometry.patch,
        stride=embedding_geometry.patch,
    )


def as_reconstructions(normalised: Tensor, model: nn.Module) -> Tensor:
    """Normalised images (V, C, H, W) as reconstructions (V, 1, C, H, W) in [0, 1], float32; NaN becomes grey."""
    mean, std = normalisation(model, normalised)
    return (normalised * std + mean).nan_to_num(0.5, 1, 0).clamp(0, 1).float().unsqueeze(1)


def bilinear(side: int, latent: int, like: Tensor) -> Tensor:
    """u (side, latent): the matrix by which F.interpolate resizes one side of an image from `latent` pixels."""
    eye = torch.eye(latent, dtype=torch.float64).view(1, 1, latent, latent)
    return F.interpolate(eye, size=(side, latent), mode="bilinear")[0, 0].to(like)


def rows_by_patch(u: Tensor, embedding_geometry: Geometry) -> Tensor:
    """u as (g, p, l): a block of its rows for each row of patches."""
    return u.unflatten(0, (embedding_geometry.grid, embedding_geometry.patch))


def upsample(latent: Tensor, u: Tensor) -> Tensor:
    """Upsample images (V, C, l, l) into patches (V, N, C p p), with u from `rows_by_patch`."""
    tall = torch.einsum("ria,vhab->vhrib", u, latent)
    return torch.einsum("vhrib,cjb->vrchij", tall, u).flatten(3).flatten(1, 2)


def downsample(patches: Tensor, u: Tensor) -> Tensor:
    """The adjoint of `upsample`: (V, N, C p p) -> (V, C, l, l)."""
    grid, patch, _ = u.shape
    x = patches.unflatten(2, (-1, patch, patch)).unflatten(1, (grid, grid))
    return torch.einsum("vrchib,ria->vhab", torch.einsum("vrchij,cjb->vrchib", x, u), u)


def normal_matrix(gram: Tensor, u: Tensor) -> Tensor:
    """up^T (gram x identity) up for one channel: (V, l l, l l) from A A^T (V, N, N); all channels share it.

    The full system, with one equation for each entry of M, is never built.
    """
    grid, _, latent = u.shape
    overlap = torch.einsum("ria,qib->rqab", u, u)
    gram = gram.view(-1, grid, grid, grid, grid)
    row_overlap = torch.einsum("vrcqd,cdbe->vrqbe", gram, overlap)
    return torch.einsum("rqaf,vrqbe->vabfe", overlap, row_overlap).reshape(-1, latent**2, latent**2)
