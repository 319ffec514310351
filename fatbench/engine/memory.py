"""Memory: that a process has had from the system stays with it, and the many words for too little.

The C library gives large blocks back as soon as they are free. The activations of every pass are such blocks, so every
pass has their pages mapped and zeroed anew: on a virtual machine a tenth of a pass of 32 images through NIN, a third of
one of 100.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

# Of <malloc.h>, with what the GNU library begins with; it moves both thresholds up to these as it meets large blocks.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST = {TRIM_THRESHOLD: 64 << 20, MMAP_THRESHOLD: 32 << 20}


def keep_freed_memory(enabled: bool = True) -> None:
    """Keep what is freed; with False, give back as the library does of itself. Nothing where it is not the GNU one."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        for option, size in LARGEST.items():
            library.mallopt(option, 1 << 30 if enabled else size)
        if not enabled:
            library.malloc_trim(0)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory of the host or of a device was not enough."""
    if isinstance(error, MemoryError):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)  # torch's word for the host's
