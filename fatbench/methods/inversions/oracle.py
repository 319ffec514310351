"""No attack but an upper bound: every solver of an attack at every strength, the best of which the truth picks.

Judges a defence apart from the solver that met it: what no choice of regularisation recovers, the system does not hold.
An attacker has no truth to pick with, so its numbers stand beside those of an attack and never in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.april import april
from fatbench.methods.inversions.patch_ls import averaged, determined, filtered, latent_all
from fatbench.methods.inversions.upload import (
    Observation,
    as_reconstructions,
    bilinear,
    geometry,
    rows,
    to_images,
    too_few_equations,
    too_large_a_prior,
    upsampled,
)
from fatbench.suite.facts import Facts
from fatbench.suite.types import Count

STRENGTHS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
CUTS = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def oracle(
    observed: Sequence[Observation],
    model: nn.Module,
    shape: tuple[int, int, int],
    generator: Generator,
    *,
    of: Literal["patch_ls", "april"] = "patch_ls",
    latent: Count = 32,
) -> Tensor:
    """All that an attack that does not adapt would answer, over its solvers and strengths: (V, P, C, H, W) in [0, 1].

    patch_ls: ridge, tsvd and upsample at seven strengths each, relative to the
    largest eigenvalue; april: seven cut-offs of the singular values. Every measure takes the best of the P
    reconstructions.
    ValueError: as the attack.
    """
    if of == "april":
        return torch.cat([april(observed, model, shape, generator, cut=cut) for cut in CUTS], 1)
    embedding_geometry = geometry(observed[0], shape, "oracle")
    A, M = averaged(observed, embedding_geometry, "oracle")
    determined(embedding_geometry, None, "oracle")
    determined(embedding_geometry, latent, "oracle")
    u = rows(bilinear(shape[1], latent, A), embedding_geometry)
    patches = [filtered(A, M, solver, strength)[0] for solver in ("ridge", "tsvd") for strength in STRENGTHS]
    patches += [upsampled(z, u) for z in latent_all(A, M, u, STRENGTHS)]
    return torch.cat([as_reconstructions(to_images(x, embedding_geometry), model) for x in patches], 1)


def patches_if_read(cell: Facts, *, of: str) -> str | None:
    return too_few_equations(cell) if of != "april" else None


def prior_if_read(cell: Facts, *, of: str, latent: int) -> str | None:
    return too_large_a_prior(cell, latent) if of != "april" else None
