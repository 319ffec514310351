"""What a GPU may do to float32, which is nothing that a number of a table does not say.

| --precision | a forward pass and its gradient, in training and attacks | outcomes | the same bytes again |
|---|---|---|---|
| fp32 | float32 | float32 | yes |
| tf32 | float32 whose products have 10 bits of mantissa; weights and sums are float32 | float32 | yes |
| bf16 | bfloat16 under autocast; weights, the optimizer and AutoAttack are float32 | float32 | no |
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch
import torch.utils.deterministic

from fatbench.errors import MachineError
from fatbench.settings import Precision


def exact(device: torch.device, precision: Precision, strict: bool = True) -> None:
    """Have `device`, from now on this thread's, compute float32 as IEEE 754 has it, the same bits each time.

    By default cuDNN rounds what a float32 convolution multiplies to TF32, whose mantissa has 10 bits: a success of an
    attack that only such a convolution sees would pass for one that float32 confirms. Under bf16, which is for speed,
    kernels need not be deterministic. Elsewhere, without one, torch raises (`without_kernel`), or with `strict` False
    takes another; a warning would not do, it leaves the gradient of attention random where that need not be. Where the
    bytes do not matter cuDNN tries its kernels and keeps the fastest. Holds for the whole process; a CPU has nothing to
    set. MachineError: this machine has no TF32.
    """
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise MachineError("--precision tf32 needs an NVIDIA GPU (Ampere or newer); use fp32 or bf16")
    if device.type != "cuda":
        return
    if device.index is not None:  # "cuda" is the current one
        torch.cuda.set_device(device)
    _tf32(False)
    torch.backends.cudnn.benchmark = precision == "bf16"
    if precision == "bf16":
        if torch.are_deterministic_algorithms_enabled():  # asking for the opposite imports torch's compiler
            torch.use_deterministic_algorithms(False)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        # for debugging, and a kernel more for every new tensor
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def without_kernel(error: BaseException) -> str | None:
    """The operation that has no deterministic kernel, if that is what torch complains of."""
    match = re.search(r"(\S+(?: CUDA)?) does not have a deterministic implementation", str(error))
    return match[1] if match else None


@contextlib.contextmanager
def forward(device: torch.device, precision: Precision) -> Iterator[None]:
    """Inside, networks and attacks compute in `precision`; what an attack takes for a success, `ieee` confirms."""
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        with backward(precision):
            yield


@contextlib.contextmanager
def backward(precision: Precision) -> Iterator[None]:
    """Inside, the gradient of what was computed in `forward` is taken. Under autocast the tensors' types say how."""
    previous = reduced_to_tf32()
    if precision == "tf32":
        _tf32(True)
    try:
        yield
    finally:
        _tf32(previous)


@contextlib.contextmanager
def ieee(device: torch.device) -> Iterator[None]:
    """Inside, float32 is float32, whatever is around: for outcomes."""
    previous = reduced_to_tf32()
    _tf32(False)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _tf32(previous)


def reduced(device: torch.device) -> bool:
    """Whether what is computed here and now has fewer bits than float32."""
    return torch.is_autocast_enabled(device.type) or reduced_to_tf32()


def reduced_to_tf32() -> bool:
    """Whether products of float32 are rounded to TF32 here and now."""
    return torch.backends.cuda.matmul.allow_tf32


def _tf32(enabled: bool) -> None:
    if (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) != (enabled, enabled):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = enabled
