"""Inversions on small ViTs in float64: exact where theory says exact, nothing where it says nothing.

The small model: images 3 x 16 x 16, patch 4, so N = 16 patches of 48 values, width 64 >= 48 and >= 17 tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.methods.defences import DEFENCES, Upload, none
from fatbench.methods.inversions import INVERSIONS
from fatbench.methods.inversions.april import without_block0_norm
from fatbench.methods.inversions.april_opt import distance
from fatbench.methods.inversions.image_measures import best_of, correlation, psnr
from fatbench.methods.inversions.masked import covariance_of
from fatbench.methods.inversions.patch_ls import tv_denoise
from fatbench.methods.inversions.upload import (
    EMBEDDING,
    Geometry,
    Observation,
    bilinear,
    differentiable,
    downsample,
    gradients,
    normal_matrix,
    observe,
    recovered_labels,
    rows_by_patch,
    to_images,
    to_patches,
    upsample,
)

SHAPE = (3, 16, 16)


def vit(side: int = 16, dim: int = 64, seed: int = 0) -> nn.Module:
    """A small ViT on timm's blocks that normalises inside."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        small = {"patch_size": 4, "depth": 2, "num_heads": 2, "num_classes": 5}
        model = VisionTransformer(img_size=side, embed_dim=dim, **small).double()
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    model.register_buffer("mean", mean, persistent=False)
    model.register_buffer("std", std, persistent=False)
    model.register_forward_pre_hook(lambda m, args: ((args[0] - m.mean) / m.std,))
    return model.eval()


def images(count: int = 3, side: int = 16, latent: int | None = None, seed: int = 1) -> Tensor:
    size = latent or side
    draw = torch.Generator().manual_seed(seed)
    x = 0.1 + 0.8 * torch.rand(count, 3, size, size, generator=draw, dtype=torch.float64)
    return F.interpolate(x, size=(side, side), mode="bilinear") if latent else x


def look(
    model: nn.Module, x: Tensor, defence: object = none, epoch: int = 0, batch: int = 1, names: object = None
) -> Observation:
    """What is observed of the images x, `batch` to an upload."""
    x = x.unflatten(0, (-1, batch))
    y = torch.arange(x.shape[0] * batch).view(-1, batch) % 5
    weights = {n: p.detach() for n, p in model.state_dict().items()}
    uploads = [Upload(0, v, epoch) for v in range(len(x))]
    return observe(weights, gradients(model, weights, x, y, names), y, defence, uploads)


def binary(rate: float) -> object:
    return functools.partial(DEFENCES["random_binary"], mask_probability=rate)


def invert(name: str, observed: Any, model: nn.Module, shape: tuple[int, ...] = SHAPE, **settings: object) -> Tensor:
    observed = observed if isinstance(observed, list) else [observed]
    return INVERSIONS[name](observed, model, shape, torch.Generator().manual_seed(0), **settings)


def found(name: str, observed: Any, model: nn.Module, *shape: tuple[int, ...], **settings: object) -> Tensor:
    """One image for each upload."""
    return invert(name, observed, model, *shape, **settings)[:, 0].double()


# --- the parts ---------------------------------------------------------------------------------------------------


def test_gradients_of_many_uploads_are_those_of_each_alone():
    model, x = vit(), images(4)
    y = torch.tensor([[0, 1], [2, 3]])
    weights = dict(model.state_dict())
    together = gradients(model, weights, x.view(2, 2, *SHAPE), y)
    for v in range(2):
        loss = F.cross_entropy(model(x[2 * v : 2 * v + 2]), y[v])
        alone = torch.autograd.grad(loss, list(model.parameters()))
        for (name, _), g in zip(model.named_parameters(), alone, strict=True):
            torch.testing.assert_close(together[name][v], g)
    embedding = {"patch_embed.proj.weight", "pos_embed"}
    assert set(gradients(model, weights, x[:, None], y.view(4, 1), EMBEDDING)) == embedding


def test_the_gradient_of_the_patch_embedding_is_the_one_of_the_tokens_times_the_patches():
    """The label of one example is in the sign of the gradient of the last bias."""
    model, x = vit(), images(5)
    gradient = look(model, x).gradient
    A, M = gradient["pos_embed"][:, 0, 1:], gradient["patch_embed.proj.weight"].flatten(2)
    torch.testing.assert_close(M, A.transpose(1, 2) @ to_patches((x - model.mean) / model.std, 4))
    assert recovered_labels(gradient["head.bias"]).tolist() == [0, 1, 2, 3, 4]


def test_patches_upsampling_and_its_normal_equations():
    """up is F.interpolate, down its adjoint, and the normal matrix is up^T (gram x 1) up on unit vectors."""
    at = Geometry(3, 4, 4, 1, 64)
    u, x = rows_by_patch(bilinear(16, 5, torch.zeros(1, dtype=torch.float64)), at), images(2)
    assert torch.equal(to_images(to_patches(x, 4), at), x)
    z = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(to_images(upsample(z, u), at), F.interpolate(z, size=(16, 16), mode="bilinear"))
    r = torch.rand(2, 16, 48, dtype=torch.float64)
    torch.testing.assert_close((upsample(z, u) * r).sum(), (z * downsample(r, u)).sum())
    gram = torch.rand(1, 16, 16, dtype=torch.float64)
    unit = torch.eye(25, dtype=torch.float64).view(25, 1, 5, 5)
    columns = downsample(gram @ upsample(unit, u), u).flatten(1).T
    torch.testing.assert_close(normal_matrix(gram, u)[0], columns)


# --- exact where theory says exact -------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["lstsq", "ridge", "tsvd", "box"])
def test_patch_ls_is_exact_on_an_ordinary_vit(solver):
    model, x = vit(), images()
    reconstructions = invert("patch_ls", look(model, x, names=EMBEDDING), model, solver=solver)
    assert reconstructions.shape == (3, 1, *SHAPE)
    assert (psnr(reconstructions[:, 0].double(), x) > 100).all()


def test_total_variation_of_two_pixels_moves_each_by_the_weight():
    """min (w - x)^2 / 2 + t |w_1 - w_2|: both move by t towards each other until they meet in the mean."""
    x = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2)
    for weight, expected in ((0.1, [0.1, 0.9]), (0.3, [0.3, 0.7]), (2.0, [0.5, 0.5])):
        moved = tv_denoise(x, weight, iterations=2000)
        torch.testing.assert_close(moved.flatten(), torch.tensor(expected, dtype=torch.float64), atol=1e-3, rtol=0)


def test_total_variation_helps_where_the_gradient_is_noisy_and_the_reconstruction_has_areas():
    """Four areas of one colour; the weight is chosen without the truth."""
    model = vit()
    x = images(3, latent=2).unflatten(2, (2, 8))[:, :, :, :1].expand(-1, -1, -1, 8, -1).flatten(2, 3)
    x = x.unflatten(3, (2, 8))[..., :1].expand(-1, -1, -1, -1, 8).flatten(3, 4).contiguous()
    observed = look(model, x, functools.partial(DEFENCES["gaussian"], noise=1e-6, clip=1e3), names=EMBEDDING)
    plain, smooth = (psnr(found("patch_ls", observed, model, solver=s), x).mean() for s in ("lstsq", "tv"))
    assert float(smooth) > float(plain) + 0.8


def test_patch_ls_behind_the_upsampling_is_exact_for_more_patches_than_the_model_is_wide():
    """32 x 32 at patch 4: 64 patches and width 32, but 8 x 8 unknowns a channel instead of 32 x 32."""
    model, x = vit(side=32, dim=32), images(2, side=32, latent=8)
    observed = look(model, x)
    assert (psnr(found("patch_ls", observed, model, (3, 32, 32), solver="upsample", latent=8), x) > 80).all()
    with pytest.raises(ValueError, match=r"64 unknown patches, and a model of width 32 gives a system of rank 32"):
        invert("patch_ls", observed, model, (3, 32, 32))
    with pytest.raises(ValueError, match=r"latent 24 is 576 unknowns a channel, and the system has rank at most 512"):
        invert("patch_ls", observed, model, (3, 32, 32), solver="upsample", latent=24)


def test_april_is_exact_without_norm_and_residuals_and_yields_nothing_with_them():
    model, x = vit(), images()
    changed = without_block0_norm(model)
    assert (psnr(found("april", look(changed, x), changed), x) > 90).all()
    assert (psnr(found("april", look(model, x), model), x) < 12).all()
    assert "blocks.0.norm1.weight" not in changed.state_dict()
    assert "blocks.0.norm1.weight" in model.state_dict()


def test_april_on_a_narrow_model_is_the_patch_of_least_norm():
    """Width 32 < 48 values of a patch: the token is exact, the patch is its projection on the rows of the embedding."""
    model, x = vit(dim=32), images()
    changed = without_block0_norm(model)
    weight = changed.patch_embed.proj.weight.detach().flatten(1)
    patches = to_patches((x - model.mean) / model.std, 4) @ torch.linalg.pinv(weight) @ weight
    expected = to_images(patches, Geometry(3, 4, 4, 1, 32)) * model.std + model.mean
    torch.testing.assert_close(found("april", look(changed, x), changed), expected.clamp(0, 1), atol=1e-4, rtol=0)


def test_masks_at_the_same_weights_are_laid_over_each_other():
    """R = 0.3 over 12 rounds withholds 0.3^12 = 5e-7 of the entries: nothing of 4,000, so the answer is exact."""
    model, x = vit(), images(1)
    observed = [look(model, x, binary(0.3), epoch, names=EMBEDDING) for epoch in range(12)]
    assert float(psnr(found("masked", observed, model, latent=None), x)) > 90
    assert float(psnr(found("patch_ls", observed, model), x)) < 30


# --- nothing where it says nothing -------------------------------------------------------------------------------


def test_fixed_position_leaves_patch_ls_and_april_a_reconstruction_that_does_not_depend_on_the_image():
    model, x = vit(), images()
    observed = look(model, x, DEFENCES["fixed_position"])
    for name in ("patch_ls", "april"):
        reconstructions = invert(name, observed, model)
        torch.testing.assert_close(reconstructions, reconstructions[:1].expand_as(reconstructions))
    with pytest.raises(ValueError, match="no gradient of the position embedding; use patch_span"):
        invert("masked", observed, model, latent=None)


def test_fixed_position_still_gives_the_span_of_the_patches_away():
    """32 x 32 at patch 8: N = 16 patches of 192 values, and 8 x 8 x 3 unknowns behind the upsampling."""
    from timm.models.vision_transformer import VisionTransformer

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=2, num_classes=5).double()
    x = images(2, side=32, latent=8)
    observed = look(model, x, DEFENCES["fixed_position"])
    reconstructions = invert("patch_span", observed, model, (3, 32, 32), latent=8)
    assert reconstructions.shape == (2, 1, 3, 32, 32)
    # Without normalisation in the model the image itself is the eigenvector, up to its length: the correlation is 1
    # but for what the length cuts off at 0 and 1.
    assert (correlation(reconstructions[:, 0].double(), x) > 0.9).all()


def test_two_images_in_an_upload_are_a_mixture():
    model, x = vit(), images(4)
    reconstructions = invert("patch_ls", look(model, x, batch=2, names=EMBEDDING), model)
    assert reconstructions.shape == (2, 1, *SHAPE)
    for b in range(2):
        assert (psnr(reconstructions[:, 0].double(), x.unflatten(0, (2, 2))[:, b]) < 25).all()


# --- masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["patch_ls", "masked"])
def test_rate_zero_is_no_defence(name):
    model, x = vit(), images(2)
    settings = {"latent": None} if name == "masked" else {}
    free = invert(name, look(model, x, names=EMBEDDING), model, **settings)
    zero = invert(name, look(model, x, binary(0.0), names=EMBEDDING), model, **settings)
    assert torch.equal(free, zero)
    assert (psnr(zero[:, 0].double(), x) > 100).all()


@pytest.mark.parametrize(("rate", "rounds"), [(0.2, 1), (0.5, 1), (0.5, 3)])
def test_the_attacker_who_knows_the_mask_is_no_worse_than_the_one_who_does_not(rate, rounds):
    model, x = vit(), images(4, latent=6)
    observed = [look(model, x, binary(rate), epoch, names=EMBEDDING) for epoch in range(rounds)]
    plain = psnr(found("patch_ls", observed, model, solver="upsample", latent=6), x).mean()
    known = psnr(found("masked", observed, model, latent=6), x).mean()
    assert float(known) > float(plain) - 0.5


def test_one_update_without_a_third_of_its_entries_is_solved_for_what_is_missing():
    """Images of little contrast, as the prior expects: the missing entries are unknowns, not zeros, and are found."""
    model, x = vit(), 0.4 + 0.2 * images(4, latent=6)
    observed = look(model, x, binary(0.3), names=EMBEDDING)
    zeros = psnr(found("patch_ls", observed, model, solver="upsample", latent=6), x).mean()
    start, end = (psnr(found("masked", observed, model, latent=6, iterations=i), x).mean() for i in (0, 8))
    assert float(end) > float(start) > float(zeros) + 10


def test_no_choice_of_solver_beats_the_oracle():
    """On masked gradients, where the strength matters; and exact where the plain attack is."""
    model, x = vit(), images(3, latent=6)
    observed = look(model, x, binary(0.3), names=EMBEDDING)
    guesses = invert("oracle", observed, model, latent=6)
    assert guesses.shape == (3, 21, *SHAPE)
    best = best_of(psnr, guesses.double(), x[:, None])
    for settings in ({}, {"solver": "tsvd"}, {"solver": "upsample", "latent": 6}):
        assert (psnr(found("patch_ls", observed, model, **settings), x) < best + 0.3).all()
    changed = without_block0_norm(model)
    guesses = invert("oracle", look(changed, x), changed, of="april")
    assert (best_of(psnr, guesses.double(), x[:, None]) > 90).all()


def test_a_mask_that_is_not_sent_is_inferred_from_the_zeros():
    model, x = vit(), images(1, latent=6)
    observed = look(model, x, binary(0.3), names=EMBEDDING)
    hidden = Observation(observed.weights, observed.gradient, observed.labels)
    torch.testing.assert_close(invert("masked", observed, model, latent=6), invert("masked", hidden, model, latent=6))


def test_rounds_at_moving_weights_are_systems_of_their_own():
    x = images(1, latent=6)
    observed = [look(vit(seed=s), x, binary(0.3), s, names=EMBEDDING) for s in range(4)]
    one, four = (psnr(found("masked", s, vit(), latent=6), x) for s in (observed[:1], observed))
    assert float(four) > float(one)


# --- optimisation, and mistakes ----------------------------------------------------------------------------------


def test_gradient_matching_returns_the_images_of_a_batch():
    model, x = vit(), images(2)
    reconstructions = invert("april_opt", look(model, x, batch=2), model, steps=1, latent=4)
    assert reconstructions.shape == (1, 2, *SHAPE)
    assert float(reconstructions.min()) >= 0 and float(reconstructions.max()) <= 1


def test_gradient_matching_can_leave_out_what_was_withheld():
    """At the image itself the distance over the surviving entries is 0, and that to the zeros is not."""
    model, x = vit(), images(1)
    observed = look(model, x, binary(0.5))
    target = {n: g[0] for n, g in observed.gradient.items()}
    kept = {n: m[0].double() for n, m in observed.mask.items()}
    true = differentiable(model, observed.weights, x, observed.labels[0], target)
    assert distance(true, target, kept, 0.5).item() < 1e-12 and distance(true, target, {}, 0.5).item() > 0.1


def test_a_token_that_nothing_was_sent_of() -> None:
    """Pruning may withhold a whole row of A: its covariance with the others is then zero, not a failure."""
    g = torch.Generator().manual_seed(0)
    A = torch.randn(6, 2, generator=g, dtype=torch.float64) @ torch.randn(2, 40, generator=g, dtype=torch.float64)
    a = torch.ones_like(A)
    a[2] = 0
    S = covariance_of(A * a, a, 2)
    rest = [0, 1, 3, 4, 5]
    assert float(S[2, rest].abs().max()) < 1e-6
    assert torch.allclose(S[rest][:, rest], A[rest] @ A[rest].T / 40, atol=0.3)
    assert float(torch.linalg.eigvalsh(S).min()) > 0
