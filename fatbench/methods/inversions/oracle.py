"""An upper bound, not an attack: every solver of an attack at every strength, the best picked with the truth.

It judges a defence independently of the solver: what no regularisation recovers is not in the system. A real attacker
does not know the truth, so its numbers accompany those of an attack and never replace them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from fatbench.methods.inversions.april import april
from fatbench.methods.inversions.patch_ls import check_determined, latent_all, mean_system, solve_filtered
from fatbench.methods.inversions.upload import (
    Observation,
    as_reconstructions,
    bilinear,
    geometry,
    rows_by_patch,
    to_images,
    too_few_equations,
    too_large_a_prior,
    upsample,
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
    """All results of an attack that does not adapt, over its solvers and strengths: (V, P, C, H, W) in [0, 1].

    patch_ls: ridge, tsvd and upsample at seven strengths each, relative to the largest eigenvalue; april: seven
    cut-offs of the singular values. Every measure picks the best of the P reconstructions. Raises the attack's
    ValueErrors.
    """
    if of == "april":
        return torch.cat([april(observed, model, shape, generator, cut=cut) for cut in CUTS], 1)
    embedding_geometry = geometry(observed[0], shape, "oracle")
    A, M = mean_system(observed, embedding_geometry, "oracle")
    check_determined(embedding_geometry, None, "oracle")
    check_determined(embedding_geometry, latent, "oracle")
    u = rows_by_patch(bilinear(shape[1], latent, A), embedding_geometry)
    patches = [solve_filtered(A, M, solver, strength)[0] for solver in ("ridge", "tsvd") for strength in STRENGTHS]
    patches += [upsample(z, u) for z in latent_all(A, M, u, STRENGTHS)]
    return torch.cat([as_reconstructions(to_images(x, embedding_geometry), model) for x in patches], 1)


def patches_if_read(cell: Facts, *, of: str) -> str | None:
    return too_few_equations(cell) if of != "april" else None


def prior_if_read(cell: Facts, *, of: str, latent: int) -> str | None:
    return too_large_a_prior(cell, latent) if of != "april" else None
