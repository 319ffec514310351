"""What a GPU may do to float32, which is nothing that a number of a table does not say."""

from __future__ import annotations

import os
from typing import Literal

import torch
import torch.utils.deterministic


def exact(device: torch.device, precision: Literal["fp32", "bf16"]) -> None:
    """Have `device`, from now on this thread's, compute float32 as IEEE 754 has it; under fp32 the same bits each time.

    By default cuDNN rounds what a float32 convolution multiplies to TF32, whose mantissa has 10 bits: a success of an
    attack that only such a convolution sees would pass for one that float32 confirms. Deterministic kernels are chosen
    under fp32 only, because they cost time, and where there is none torch warns. Holds for the whole process; a CPU has
    nothing to set.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    if precision == "bf16":
        if torch.are_deterministic_algorithms_enabled():  # asking for the opposite imports torch's compiler
            torch.use_deterministic_algorithms(False)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True, warn_only=True)
        # for debugging, and a kernel more for every new tensor
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
