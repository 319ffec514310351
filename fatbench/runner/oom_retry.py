"""Recover from running out of memory: repeat the work with fewer images in the network at once."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fatbench.engine.memory import out_of_memory
from fatbench.errors import FatbenchError

if TYPE_CHECKING:
    from fatbench.runner.jobs import CellStatus, Machine

log = logging.getLogger("fatbench")


class OutOfMemory(FatbenchError):
    """The device's memory is not enough, even with smaller batches."""

    exit_code = 1


def with_oom_retry(
    attempt: Callable[[Machine], CellStatus],
    machine: Machine,
    batch: int,
    describe: Callable[[Mapping[str, Any]], None],
) -> CellStatus:
    """Call `attempt`; if memory runs out, call it once more with a quarter of the images in the network at once.

    The gradients are the same up to rounding. fatbench's own attacks split what does not fit by themselves
    (`fatbench.engine.gradients.in_parts`), so this is for training and for attacks of other packages.

    batch: images of a step. describe: adds to the run's provenance. Raises OutOfMemory if memory runs out again, or if
    the network needs the whole batch.
    """
    try:
        return attempt(machine)
    except Exception as error:
        if not out_of_memory(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    free_memory()  # outside `except`, where the error no longer keeps the tensors of its frames alive
    images_before = min(machine.microbatch or batch, batch)
    images_at_once = max(1, images_before // 4)
    if images_at_once == images_before:
        raise OutOfMemory(f"{reason}; the network already gets one image at a time")
    log.warning(
        "out of memory (%s): trying again with at most %d images in the network at once", reason, images_at_once
    )
    describe({"microbatch": images_at_once, "out_of_memory": reason, "path": "loop"})  # recordings take whole batches
    try:
        return attempt(replace(machine, microbatch=images_at_once, path="loop"))
    except Exception as error:
        if out_of_memory(error):
            raise OutOfMemory(f"{reason}; even with {images_at_once} images in the network at once") from None
        if isinstance(error, ValueError) and "needs the whole batch" in str(error):
            raise OutOfMemory(
                f"{reason}; fewer images at once would change the gradients, because batch"
                " normalisation in this model needs the whole batch"
            ) from None
        raise


def free_memory() -> None:
    """Give memory that is no longer used back to the GPU."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def gpu_memory(device: str) -> int:
    """The most bytes that this process has reserved on a GPU since the last call; 0 on a CPU."""
    if not device.startswith("cuda"):
        return 0
    import torch

    peak = int(torch.cuda.max_memory_reserved(device))
    torch.cuda.reset_peak_memory_stats(device)
    return peak
