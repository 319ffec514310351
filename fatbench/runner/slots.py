"""How many cells a GPU takes side by side, from its free memory and from what such cells used before."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fatbench.settings import Precision

T = TypeVar("T")
FRACTION = 0.9  # of the free memory is used
CONTEXT = 600 << 20  # bytes that a process has on a GPU before its first tensor
AMPERE = 8  # the first compute capability with TF32
MOST = 8  # cells side by side; more do not make a GPU faster


def slots(free_bytes: int | None, bytes_each: float | None) -> int:
    """How many cells fit into the free bytes if each uses `bytes_each`; 1 if either number is not known."""
    if not free_bytes or not bytes_each:
        return 1
    return max(1, min(MOST, int(FRACTION * free_bytes // (bytes_each + CONTEXT))))


def largest_use(
    specs: Iterable[Mapping[str, Any]], bytes_by_kind: Mapping[str, float], kind: Callable[[Any], str]
) -> float | None:
    """The most bytes that any of these cells needs on a GPU; None if the use of one kind is not known.

    bytes_by_kind: kind of cell -> bytes that such a cell has used. kind: gives the kind of a cell's spec.
    """
    bytes_by_cell = [bytes_by_kind.get(kind(spec)) for spec in specs]
    known = [value for value in bytes_by_cell if value is not None]
    return max(known) if known and len(known) == len(bytes_by_cell) else None


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_memory(gpu: int) -> int | None:
    """Free bytes of the GPU that torch calls cuda:`gpu`; None if the driver cannot tell."""

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
        memory = _Memory()
        return None if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) else int(memory.free)

    return _ask_nvml(gpu, ask)


def gpu_name(device: str) -> str | None:
    """The driver's name of a GPU, such as "NVIDIA H200"; None if it cannot tell. device: as torch has it, "cuda:1"."""

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> str | None:
        name = ctypes.create_string_buffer(96)
        return None if library.nvmlDeviceGetName(handle, name, 96) else name.value.decode(errors="replace")

    return _ask_nvml(int(device.partition(":")[2] or 0), ask)


def has_tf32(device: str) -> bool:
    """Whether a device multiplies in TF32; False on a CPU and if the driver cannot tell. device: "cuda:1" or "cpu"."""
    if not device.startswith("cuda"):
        return False

    def ask(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        error_code = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        return None if error_code else major.value

    return (_ask_nvml(int(device.partition(":")[2] or 0), ask) or 0) >= AMPERE


def precision_for(device: str) -> Precision:
    """The precision that `--precision auto` chooses on a device for training and its monitor."""
    return "tf32" if has_tf32(device) else "fp32"


def _ask_nvml(gpu: int, ask: Callable[[ctypes.CDLL, ctypes.c_void_p], T | None]) -> T | None:
    """Ask NVIDIA's management library about a GPU; unlike torch, it needs no context, which would take GPU memory."""
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
    """The driver's index or UUID of the GPU that torch numbers `gpu`, according to CUDA_VISIBLE_DEVICES."""
    if visible is None:
        return str(gpu)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[gpu] if gpu < len(names) else None
