"""Optimisation-based APRIL: gradient matching, with the direction of the position embedding's gradient on top.

    min over x of  |grad(x, y) - g|^2 / |g|^2 + alpha (1 - cos(grad_pos(x, y), g_pos)) + tv TV(x)

Works on an ordinary ViT and on batches, of clients in eval mode. It needs
second derivatives of the model, so a step costs about six forward passes.

Lu et al. 2022 (APRIL), section 4.2. Its optimizer, rate, alpha and number of steps are not in our sources; here: Adam.
paper: the squared distance / here: relative to |g|^2, so that alpha means the same at any scale of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fatbench.methods.inversions.upload import POSITION, Observation, Tensors, differentiable, find
from fatbench.suite.entry import Passes
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count, NonNegative, Rate


def april_opt(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    steps: Count = 2000,
    lr: Rate = 0.1,
    alpha: NonNegative = 0.5,
    tv: NonNegative = 0.0,
    zeros: Literal["as_sent", "ignored"] = "as_sent",
    latent: Count | None = None,
) -> Tensor:
    """Images whose gradient is close to the one that was sent, by Adam from noise: (V, B, C, H, W) in [0, 1].

    B is the number of labels of an upload (Observation.labels: known or recovered); the distances of several rounds are
    added. All gradients of the upload are matched. `zeros`: withheld entries are matched as zeros, or ignored (an
    attacker who knows the mask). `latent`: search `latent` x `latent` images, upsampled bilinearly. Raises ValueError
    without learned positions.
    """
    model.eval()
    for s in observed:
        find(s.weights, POSITION, "april_opt", "learned positions")
    side = (latent, latent) if latent else shape[1:]

    def reconstruct(v: int) -> Tensor:
        targets = [{name: g[v] for name, g in s.gradient.items()} for s in observed]
        masks = [
            {name: m[v].to(t[name]) for name, m in (s.mask or {}).items() if name in t} if zeros == "ignored" else {}
            for s, t in zip(observed, targets, strict=True)
        ]
        labels = observed[0].labels[v]
        sample = next(iter(targets[0].values()))
        guess = torch.randn(len(labels), shape[0], *side, generator=generator, device=generator.device).to(sample)
        z = (0.5 + 0.1 * guess).requires_grad_(True)
        optimizer = torch.optim.Adam([z], lr=lr)

        def reconstruction() -> Tensor:
            return F.interpolate(z, size=shape[1:], mode="bilinear") if latent else z

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
            for _ in range(steps):
                x = reconstruction()
                guessed_gradients = (
                    differentiable(model, s.weights, x, labels, t) for s, t in zip(observed, targets, strict=True)
                )
                loss = sum(
                    distance(*gradient_pair, alpha)
                    for gradient_pair in zip(guessed_gradients, targets, masks, strict=True)
                )
                if tv:
                    loss = loss + tv * ((x.diff(dim=-1).abs()).mean() + (x.diff(dim=-2).abs()).mean())
                (z.grad,) = torch.autograd.grad(loss, z)  # type: ignore[arg-type]
                optimizer.step()
        return reconstruction().detach().clamp(0, 1).float()

    return torch.stack([reconstruct(v) for v in range(len(observed[0].labels))])


def every_step(observed_rounds: int, *, steps: int) -> Passes:
    """For each observed round: a forward pass, the gradient by the weights, and the gradient of that by the image."""
    return observed_rounds * steps * Passes(1, 2)


def distance(gradient: Tensors, target: Tensors, mask: Tensors, alpha: float) -> Tensor:
    """The squared distance of two gradients, relative to the target's square, plus alpha times (1 - cosine)."""
    masked_gradient = {name: g * mask[name] if name in mask else g for name, g in gradient.items()}
    gap = torch.stack([(masked_gradient[name] - target[name]).square().sum() for name in target]).sum()
    size = torch.stack([g.square().sum() for g in target.values()]).sum().clamp(min=1e-30)
    position = find(target, POSITION, "april_opt", "the gradient of the positions")
    similar = F.cosine_similarity(masked_gradient[position].flatten(), target[position].flatten(), dim=0)
    return gap / size + alpha * (1 - similar)


def eval_mode(cell: Facts) -> str | None:
    """Refuse clients in train mode."""
    return "april_opt simulates eval mode: take matching" if cell.algorithm.get("mode") == "train" else None
