"""Keep freed memory in the process (glibc), and recognise out-of-memory errors.

The C library returns large blocks to the system as soon as they are freed. The activations of every pass are such
blocks, so the system maps and zeroes their pages again for every pass. On a virtual machine this takes a tenth of a
pass of 32 images through NIN, and a third of a pass of 100 images.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

# Options of mallopt (<malloc.h>), and the largest values to which glibc raises its thresholds by itself.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST = {TRIM_THRESHOLD: 64 << 20, MMAP_THRESHOLD: 32 << 20}


def keep_freed_memory(enabled: bool = True) -> None:
    """Keep freed memory in the process; False restores the library's default. Does nothing without glibc."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        for option, size in LARGEST.items():
            library.mallopt(option, 1 << 30 if enabled else size)
        if not enabled:
            library.malloc_trim(0)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the host or of a device has run out."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(
        error
    )  # torch's message for the host's memory
