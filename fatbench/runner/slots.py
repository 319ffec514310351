"""How many cells a GPU takes side by side: as many as fit into its free memory, by what such cells have used before."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fatbench.settings import Precision

T = TypeVar("T")
FRACTION = 0.9  # of the free memory that is dealt out
CONTEXT = 600 << 20  # bytes that a process has on a GPU before its first tensor
AMPERE = 8  # the first compute capability with TF32
MOST = 8  # cells side by side; more do not make a GPU faster


def slots(free_bytes: int | None, bytes_each: float | None) -> int:
    """Cells that fit into `free_bytes` bytes if each uses `largest_use`; 1 where either is not known."""
    if not free_bytes or not bytes_each:
        return 1
    return max(1, min(MOST, int(FRACTION * free_bytes // (bytes_each + CONTEXT))))


def largest_use(
    specs: Iterable[Mapping[str, Any]], bytes_by_kind: Mapping[str, float], kind: Callable[[Any], str]
) -> float | None:
    """The most bytes that a cell of these has used on a GPU before, from `known` by kind; None: one is not known."""
    bytes_by_cell = [bytes_by_kind.get(kind(spec)) for spec in specs]
    return (
        None
        if not bytes_by_cell or None in bytes_by_cell
        else max(value for value in bytes_by_cell if value is not None)
    )


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_memory(gpu: int) -> int | None:
    """Free bytes of the GPU that torch calls cuda:`gpu`; None: its driver does not say."""

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
        memory = _Memory()
        return None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory.free)

    return _ask_nvml(gpu, ask)


def gpu_name(device: str) -> str | None:
    """What its driver calls a GPU that torch calls "cuda:1", such as "NVIDIA H200"; None: it does not say."""

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> str | None:
        name = ctypes.create_string_buffer(96)
        return None if library.nvmlDeviceGetName(handle, name, 96) else name.value.decode(errors="replace")

    return _ask_nvml(int(device.partition(":")[2] or 0), ask)


def has_tf32(device: str) -> bool:
    """Whether a GPU that torch calls "cuda:1" multiplies in TF32; False: a CPU, or its driver does not say."""
    if not device.startswith("cuda"):
        return False

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        error_code = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        return None if error_code else major.value

    return (_ask_nvml(int(device.partition(":")[2] or 0), ask) or 0) >= AMPERE


def precision_for(device: str) -> Precision:
    """What `--precision auto` trains in there, and looks at the model while it trains."""
    return "tf32" if has_tf32(device) else "fp32"


def _ask_nvml(gpu: int, ask: Callable[[ctypes.CDLL, ctypes.c_void_p], T | None]) -> T | None:
    """What NVIDIA's management library says of a GPU. Asking it takes no memory there, as a context would."""
    name = driver_name(gpu, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if name is None:
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            handle = ctypes.c_void_p()
            if name.isdecimal():
                error_code = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            else:
                error_code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            return None if error_code else ask(library, handle)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one of another make
        return None


def driver_name(gpu: int, visible: str | None) -> str | None:
    """What the driver calls a GPU, an index or a UUID, where CUDA_VISIBLE_DEVICES renames those that torch sees."""
    if visible is None:
        return str(gpu)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[gpu] if gpu < len(names) else None
