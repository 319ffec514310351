"""What is freed stays with the process; how many images are taken at once is what fits."""

from __future__ import annotations

import subprocess
import sys

import pretended
import pytest
import torch
from torch import nn

from fatbench.engine import gradients

PROGRAM = """
import resource, sys, torch
from fatbench.engine import memory
memory.keep_freed_memory(sys.argv[1] == "keep")
def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 24)  # 64 MB, in pages of 4 kB: 16,384
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library")
@pytest.mark.nightly
def test_memory_that_was_freed_is_not_mapped_anew() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    )
    assert kept < given_back / 2


# --- what fits ----------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A linear classifier on a device that holds `room` images."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.room, self.sizes = room, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x.flatten(1))


def test_out_of_memory_halves_and_goes_on() -> None:
    """16, 8, 4 images and no more than these from then on; the gradient is that of the whole batch."""
    model, x, y = Small(20), torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    whole = gradients.gradient_of(model, gradients.cross_entropy, x.clone(), y, 20)
    model.room = 5
    model.sizes.clear()
    parts = gradients.gradient_of(model, gradients.cross_entropy, x.clone(), y, 16)
    assert model.sizes == [16, 8, 4, 4, 4, 4, 4]
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)
    model.sizes.clear()
    torch.testing.assert_close(gradients.logits_of(model, x), whole[0].detach())
    assert model.sizes == [4] * 5


def test_one_image_that_does_not_fit_is_an_error() -> None:
    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(torch.OutOfMemoryError):
        gradients.gradient_of(Small(0), gradients.cross_entropy, x, y, 4)
    with pytest.raises(torch.OutOfMemoryError):  # the batch of several clients is not to be divided
        gradients.gradient_of(Small(3), gradients.cross_entropy, x, y, None)


def test_on_a_gpu_what_fits_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 images take 32 GB and 8 GiB are free: three quarters of it take 6 images, so 4; 32 are taken unasked."""
    with pretended.gpu():
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 32 * 10**9)
        model = Small(100).to("cuda")
        x = torch.rand(100, 1, 2, 2).to("cuda")
        assert gradients.part_of(x[:32], model) == 32
        assert not model.sizes
        assert [gradients.part_of(x, model) for _ in range(2)] == [4, 4]
        assert model.sizes == [32]
        assert gradients.part_of(x.cpu(), model) == 32 * 3 * 32 * 32 // 4
