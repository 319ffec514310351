"""Floating-point precision on a GPU: float32, TF32 or bfloat16, and which kernels are deterministic.

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
    """Make this thread use `device`, with float32 as IEEE 754 defines it and the same bits in every run.

    By default, cuDNN rounds the factors of float32 convolutions to TF32, with 10 bits of mantissa. An attack that
    succeeds only there would pass as confirmed in float32. bf16 is for speed: its kernels need not be deterministic,
    and cuDNN picks the fastest. Otherwise, if an operation has no deterministic kernel, torch raises
    (`without_kernel`) or, with `strict` False, uses another. Holds for the whole process; a CPU needs no settings.
    Raises MachineError if this machine has no TF32.
    """
    if precision == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise MachineError(" tf32 needs an NVIDIA GPU (Ampere or newer); use fp32 or bf16", option="precision")
    if device.type != "cuda":
        return
    if device.index is not None:  # plain "cuda" is the current device already
        torch.cuda.set_device(device)
    _tf32(False)
    torch.backends.cudnn.benchmark = precision == "bf16"
    if precision == "bf16":
        if torch.are_deterministic_algorithms_enabled():  # switching off what is off would import torch's compiler
            torch.use_deterministic_algorithms(False)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        # a debugging aid that costs one more kernel for every new tensor
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def without_kernel(error: BaseException) -> str | None:
    """The operation without a deterministic kernel, if that is what the error is about."""
    match = re.search(r"(\S+(?: CUDA)?) does not have a deterministic implementation", str(error))
    return match[1] if match else None


@contextlib.contextmanager
def forward(device: torch.device, precision: Precision) -> Iterator[None]:
    """A context in which networks and attacks compute in `precision`; `ieee` confirms an attack's success."""
    if precision == "bf16":
        with torch.autocast(device.type, torch.bfloat16):
            yield
    else:
        with backward(precision):
            yield


@contextlib.contextmanager
def backward(precision: Precision) -> Iterator[None]:
    """A context for the gradient of what `forward` computed. Under autocast, the tensors' types decide."""
    previous = reduced_to_tf32()
    if precision == "tf32":
        _tf32(True)
    try:
        yield
    finally:
        _tf32(previous)


@contextlib.contextmanager
def ieee(device: torch.device) -> Iterator[None]:
    """A context in which float32 is exact whatever surrounds it, for outcomes."""
    previous = reduced_to_tf32()
    _tf32(False)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _tf32(previous)


def reduced(device: torch.device) -> bool:
    """Whether computations currently have fewer bits than float32."""
    return torch.is_autocast_enabled(device.type) or reduced_to_tf32()


def reduced_to_tf32() -> bool:
    """Whether products of float32 are currently rounded to TF32."""
    return torch.backends.cuda.matmul.allow_tf32


def _tf32(enabled: bool) -> None:
    if (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) != (enabled, enabled):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = enabled
