"""SV-CCA against scikit-learn's CCA and closed forms; activations against a loop over the blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.cross_decomposition import CCA
from test_transformers import SMALL, small

from fatbench.engine import microbatch
from fatbench.methods.svcca import activations, leading_directions, svcca


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_against_scikit_learn() -> None:
    """All directions kept: the mean of the correlations of the variates that scikit-learn finds by iteration."""
    shared = data(300, 3)
    a = shared @ data(3, 5, seed=1) + data(300, 5, seed=2)
    b = shared @ data(3, 4, seed=3) + data(300, 4, seed=4)
    cca = CCA(n_components=4, max_iter=20_000, tol=1e-12).fit(a.numpy(), b.numpy())
    variates = cca.transform(a.numpy(), b.numpy())
    theirs = [np.corrcoef(x, y)[0, 1] for x, y in zip(variates[0].T, variates[1].T, strict=True)]
    assert 0.3 < np.mean(theirs) < 0.9
    assert svcca(a, b, variance=1.0) == pytest.approx(np.mean(theirs), abs=1e-6)


def test_one_dimension_is_the_absolute_correlation() -> None:
    a, b = data(50, 1), data(50, 1, seed=1) - data(50, 1)
    assert svcca(a, b) == pytest.approx(abs(np.corrcoef(a[:, 0], b[:, 0])[0, 1]), rel=1e-12)


def test_identical_rotated_scaled_and_shifted_are_one() -> None:
    a = data(200, 6) @ torch.diag(torch.tensor([9.0, 5, 3, 2, 1, 1], dtype=torch.float64))
    rotation = torch.linalg.qr(data(6, 6, seed=1)).Q
    for other in (a, a @ rotation, 1e4 * a + 7, (a @ rotation).float()):
        assert svcca(a, other) == pytest.approx(1, abs=1e-6)


def test_independent_is_small() -> None:
    """4000 images, 5 and 5 dimensions: squared correlations of the order of p / n."""
    assert svcca(data(4000, 5), data(4000, 5, seed=1)) < 0.05


def test_half_shared_is_a_half() -> None:
    """Two of four dimensions in common, two independent, 20000 images: (1 + 1 + 0 + 0) / 4."""
    a, b = data(20_000, 4), data(20_000, 4, seed=1)
    b[:, :2] = a[:, :2]
    assert svcca(a, b, variance=1.0) == pytest.approx(0.5, abs=0.01)


def test_the_variance_that_is_kept() -> None:
    """Orthogonal columns with 90, 9 and 1 per cent of the variance: one, two and three directions."""
    basis = torch.linalg.qr(torch.cat([torch.ones(40, 1, dtype=torch.float64), data(40, 3)], 1)).Q[:, 1:]
    a = basis * torch.tensor([90.0, 9.0, 1.0], dtype=torch.float64).sqrt() + 5
    for variance, kept in [(0.85, 1), (0.91, 2), (0.98, 2), (0.995, 3)]:
        directions = leading_directions(a, variance)
        torch.testing.assert_close(directions.abs(), basis[:, :kept].abs())


def test_a_different_number_of_dimensions() -> None:
    """The mean is over the smaller number: a subspace of a is wholly correlated with a."""
    a = data(100, 5)
    assert svcca(a, a[:, :2]) == pytest.approx(1)
    assert svcca(a[:, :2], a) == pytest.approx(1)


@pytest.mark.parametrize("broken", [torch.full((100, 3), 0.3), torch.full((100, 3), math.nan), data(100, 3) * math.inf])
def test_what_has_no_correlation_is_nan(broken: torch.Tensor) -> None:
    assert math.isnan(svcca(broken, data(100, 3)))
    assert math.isnan(svcca(data(100, 3), broken))


def test_refused() -> None:
    with pytest.raises(ValueError, match=r"svcca: expected \(n, p\) and \(n, q\), got \(5, 2\) and \(4, 2\)"):
        svcca(data(5, 2), data(4, 2))
    message = "svcca: 12 images are too few to compare 6 with 6 dimensions; more than 12 needed"
    with pytest.raises(ValueError, match=message):
        svcca(data(12, 6), data(12, 6, seed=1), variance=1.0)


@pytest.mark.parametrize("name", SMALL)
def test_activations(name: str) -> None:
    """After the last block: the mean of what the last LayerNorm is given, the class token left out."""
    model = small(name)
    x = torch.rand(4, 3, 16, 16)
    found = [activations(model, x, block) for block in (1, 2, 3)]
    assert all(a.shape == (4, 16) and not a.requires_grad for a in found)
    assert not torch.allclose(found[0], found[1])
    seen = []
    handle = model.backbone.norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    model(x)
    handle.remove()
    torch.testing.assert_close(found[2], seen[0][:, 1:].mean(1))
    assert not any(module._forward_hooks for module in model.modules())


def test_activations_of_a_bounded_batch() -> None:
    model, x = small("vit"), torch.rand(5, 3, 16, 16)
    whole = activations(model, x, 2)
    microbatch.bound(model, 2)
    torch.testing.assert_close(activations(model, x, 2), whole)


def test_activations_leave_batch_normalisation_alone() -> None:
    model = small("vit", head="cls_vis").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    activations(model, torch.rand(4, 3, 16, 16), 1)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
