"""Common corruptions, CIFAR-10-C from its files, and how often a backdoor works."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn
from updates import client, problem

from fatbench.engine.rounds import Round, State
from fatbench.errors import MachineError
from fatbench.methods.corruptions import CORRUPTIONS, SEVERITIES
from fatbench.methods.diagnostics import DIAGNOSTICS
from fatbench.methods.evasion import ATTACKS

NOBODY = nn.Identity()  # a corruption looks at no model


def corrupted(kind: str, x: Tensor, severity: int, seed: int = 0) -> Tensor:
    y = torch.zeros(len(x), dtype=torch.int64)
    return ATTACKS["corruption"](NOBODY, x, y, torch.Generator().manual_seed(seed), kind=kind, severity=severity)


def photos(channels: int = 3) -> Tensor:
    """Smooth images of 32 x 32 in [0.2, 0.8] with eight bits."""
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(4, channels, 5, 5, generator=g)
    smooth = nn.functional.interpolate(coarse, size=32, mode="bilinear")
    return ((0.2 + 0.6 * smooth) * 255).round() / 255


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_worse_with_each_severity_in_the_box_and_by_the_generator_alone(kind: str, channels: int) -> None:
    x = photos(channels)
    before = x.clone()
    far = []
    for severity in range(1, 6):
        found = corrupted(kind, x, severity)
        assert found.shape == x.shape and found.dtype == x.dtype and 0 <= float(found.min()) <= float(found.max()) <= 1
        assert torch.equal(found, corrupted(kind, x, severity))
        far.append(float((found - x).square().mean()))
    assert 0 < far[0] < far[-1] and (far == sorted(far) or kind == "pixelate")  # blocks may fit smooth images
    assert torch.equal(x, before)
    draws = kind in ("gaussian_noise", "shot_noise", "impulse_noise")
    assert torch.equal(corrupted(kind, x, 1), corrupted(kind, x, 1, seed=1)) != draws
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(corrupted(kind, last, 3), corrupted(kind, x, 3))


def test_strengths_by_hand() -> None:
    """Contrast halves the distance from the mean; brightness adds to the largest channel; noise has its deviation."""
    x = torch.tensor([0.2, 0.6]).view(1, 1, 1, 2)
    assert corrupted("contrast", x, 2).flatten().tolist() == pytest.approx([0.3, 0.5])
    constant = torch.full((1, 3, 8, 8), 0.4)
    torch.testing.assert_close(corrupted("contrast", constant, 5), constant)
    colour = torch.tensor([0.2, 0.4, 0.0]).view(1, 3, 1, 1)
    assert corrupted("brightness", colour, 4).flatten().tolist() == pytest.approx([0.3, 0.6, 0.0])
    assert corrupted("brightness", torch.zeros(1, 3, 1, 1), 2).flatten().tolist() == pytest.approx([0.1] * 3)
    grey = torch.full((8, 1, 64, 64), 0.5)
    assert float(corrupted("gaussian_noise", grey, 1).std()) == pytest.approx(0.04, rel=0.03)
    assert float(corrupted("shot_noise", grey, 1).std()) == pytest.approx((0.5 / 500) ** 0.5, rel=0.03)
    salt = corrupted("impulse_noise", grey, 5)
    assert float((salt == 1).double().mean()) == pytest.approx(0.035, abs=0.004)
    assert float((salt == 0).double().mean()) == pytest.approx(0.035, abs=0.004)
    assert SEVERITIES.keys() == CORRUPTIONS.keys()


def test_cifar10_c_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image i at severity s is row 10,000 (s - 1) + i of the file; a missing file is said before it is read."""
    monkeypatch.setenv("FATBENCH_DATA", str(tmp_path))
    x, y, index = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.int64), torch.tensor([3, 9_999])

    def read(**settings: object) -> Tensor:
        return ATTACKS["cifar10_c"](NOBODY, x, y, torch.Generator(), index, **settings)

    with pytest.raises(MachineError, match=r"fog\.npy.*CIFAR-10-C is at https"):
        read(kind="fog")
    (tmp_path / "CIFAR-10-C").mkdir()
    file, shape = tmp_path / "CIFAR-10-C" / "fog.npy", (50_000, 32, 32, 3)
    stored = numpy.lib.format.open_memmap(file, mode="w+", dtype=numpy.uint8, shape=shape)
    stored[20_003, 1, 2] = (255, 0, 51)
    stored[29_999] = 102
    stored.flush()
    found = read(kind="fog", severity=3)
    assert found[0, :, 1, 2].tolist() == pytest.approx([1.0, 0.0, 0.2])
    assert torch.equal(found[1], torch.full((3, 32, 32), 0.4))
    numpy.save(tmp_path / "CIFAR-10-C" / "snow.npy", numpy.zeros((5, 32, 32, 3), numpy.uint8))
    with pytest.raises(MachineError, match=r"expected 50,000 images of 32 x 32, found an array \(5, 32, 32, 3\)"):
        read(kind="snow")


class Corner(nn.Module):
    """Class 2 where the pixel at the bottom right is white, else class 1."""

    def __init__(self, always: int | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        said = torch.where(x[:, 0, -1, -1] >= 1, 2, 1) if self.always is None else torch.full((len(x),), self.always)
        return nn.functional.one_hot(said, 3).float() + self.w


@pytest.mark.parametrize(
    ("always", "success", "none"), [(None, 1.0, 0.25), (2, 1.0, 1.0), (1, 0.0, 0.0)], ids=["backdoor", "ever", "never"]
)
def test_success_of_a_backdoor_counts_the_other_classes(always: int | None, success: float, none: float) -> None:
    """Six images, two of the target's class, which do not count; one of the others has a white corner by itself."""
    images = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    images[0, 0, 1, 1] = 255
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    model = Corner(always)
    on = problem(3, model, size=None)
    state = State(1, {"w": torch.zeros(())})
    result = Round(0, state.model, [client(0, model=state.model)], None, state, None)  # type: ignore[arg-type]
    found = DIAGNOSTICS["backdoor"](on, result, images, labels, None, torch.Generator(), target=2, size=1)
    assert found == {"backdoor_success": success, "backdoor_none": none}
    with pytest.raises(ValueError, match="every test image is of class 2"):
        DIAGNOSTICS["backdoor"](on, result, images[4:], labels[4:], None, torch.Generator(), target=2)
