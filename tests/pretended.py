"""A GPU that is not there: tensors that say they are on `cuda:0` and are computed on the CPU.

    with pretended.gpu() as device:             device.waits: what the host would have waited for, and where
        x = torch.rand(4, 3, 8, 8, device="cuda")

What it finds: an operation on tensors of two devices, a generator of another device than what it draws, and every
place where a program would wait for the device. Torch's own `FakeTensorMode` finds the first two, and stops where a
value or a shape follows from data, which is in half of what is walked; here the values are real. `test_gpu.py` holds
the aggregator of devices against that mode's.

Not found: what only a kernel knows, such as a type that it does not take, and memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fatbench

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROGRAM = f"{Path(fatbench.__file__).parent}/"
aten = torch.ops.aten

# These take an index, or what is copied, from the host too.
FROM_THE_HOST = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten.copy_}
# The host has to know a value, or a size that follows from values, before it goes on.
WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
    aten.masked_select, aten.equal, aten.is_nonzero, aten.allclose, aten.repeat_interleave,
}  # fmt: skip


class MixedDevices(RuntimeError):
    """An operation on tensors, or a draw by a generator, of two devices."""


class OnGpu(Tensor):
    """A tensor that says it is on the GPU; `inner` is the one on the CPU that it stands for."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner.detach()
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> OnGpu:
        if id(self) not in memo:
            copy = OnGpu(self.inner.clone()).requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copy._is_param = True  # type: ignore[attr-defined]
            memo[id(self)] = copy
        return memo[id(self)]

    def __repr__(self) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` on the CPU; what it gives is on the GPU."""
        tensors: list[Tensor] = []
        given = _inner(args, tensors), _inner(kwargs or {}, tensors)
        _one_device(func, args, tensors)
        if func.overloadpacket in WAITS or _by_places(func, args):
            Pretended.now.wait(str(func.overloadpacket))
        known = {id(t.inner): t for t in tensors if isinstance(t, OnGpu)}
        return _outer(func(*given[0], **given[1]), known)


def _inner(value: Any, tensors: list[Tensor]) -> Any:
    """Arguments as the CPU takes them; the tensors among them are noted."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.inner if isinstance(value, OnGpu) else value
    if isinstance(value, (list, tuple)):
        return type(value)(_inner(one, tensors) for one in value)
    return {key: _inner(one, tensors) for key, one in value.items()} if isinstance(value, dict) else value


def _outer(value: Any, known: dict[int, OnGpu]) -> Any:
    """What an operation gave, on the GPU: what it wrote into is what it was given."""
    if isinstance(value, Tensor):
        return known.get(id(value)) if id(value) in known else OnGpu(value)
    return type(value)(_outer(one, known) for one in value) if isinstance(value, (list, tuple)) else value


def _first(value: Any) -> Tensor | None:
    """The first tensor among arguments."""
    if isinstance(value, (list, tuple)):
        return next((found for one in value if (found := _first(one)) is not None), None)
    return value if isinstance(value, Tensor) else None


def _one_device(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """MixedDevices: a tensor of the CPU that is more than a number, where the GPU computes."""
    host = [t for t in tensors if not isinstance(t, OnGpu) and t.dim() > 0]
    if host and not (func.overloadpacket in FROM_THE_HOST and isinstance(args[0], OnGpu)):
        if func.overloadpacket is aten.copy_:
            return
        # the zeros that torch 2.11 makes in the backward of sort, by the options of a gradient that is truly on the CPU
        if func.overloadpacket is aten.scatter and len(host) == 1 and args[0] is host[0] and not host[0].any():
            return
        shape = tuple(host[0].shape)
        raise MixedDevices(f"{func}: a tensor on the GPU and one of shape {shape} on the CPU, {_where()}")


def _by_places(func: Any, args: Any) -> bool:
    """Whether an index has to be looked at, or fetched from the host, before its size is known."""
    if func.overloadpacket not in FROM_THE_HOST or func.overloadpacket is aten.copy_:
        return func.overloadpacket is aten.copy_ and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu)
    chosen = [t for t in args[1] if t is not None]
    by_mask = [t for t in chosen if t.dtype in (torch.bool, torch.uint8)]
    put = func.overloadpacket not in (aten.index, aten._unsafe_index)
    filled = put and all(t.dim() == 0 for t in args[2:3])  # with one number: `masked_fill`, which waits for nothing
    return any(not isinstance(t, OnGpu) for t in chosen) or (bool(by_mask) and not filled)


def _where() -> str:
    """The innermost line of the program that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(PROGRAM):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(PROGRAM)}:{frame.f_lineno}"


class _Move(torch.autograd.Function):
    """From one device to the other, and the gradient back."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.inner.clone() if isinstance(x, OnGpu) else OnGpu(x.detach().clone())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return _Move.apply(gradient)


class Generator(torch.Generator):
    """A generator of the CPU that says it is on `device`."""

    where: torch.device

    def __new__(cls, device: Any = CPU) -> Generator:
        made = super().__new__(cls)
        made.where = _known(device)
        return made

    def __init__(self, device: Any = CPU) -> None:
        pass

    device = property(lambda self: self.where)  # type: ignore[assignment]


def _known(device: Any) -> torch.device:
    """`device` with its number."""
    device = torch.device(device)
    return CUDA if device.type == "cuda" else device


class Pretended(TorchFunctionMode):
    """What programs call of torch, where it names a device."""

    now: Pretended

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def wait(self, what: str) -> None:
        self.waits[f"{what} at {_where()}"] += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SPECIAL:
            return SPECIAL[func](self, *args, **kwargs)
        given = kwargs.get("device")
        generator = kwargs.get("generator")
        if given is None and generator is None:
            return func(*args, **kwargs)
        first = _first(args)
        where = _known(given) if given is not None else _of(first) if first is not None else CPU
        if generator is not None and generator.device.type != where.type:
            raise MixedDevices(f"{func.__name__}: a generator on {generator.device} draws for {where}, {_where()}")
        if given is None:
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            result = func(*args, **{**kwargs, "device": CPU})
            if where.type == "cuda":
                self.wait(f"{func.__name__} from the host")
        else:
            result = func(*args, **{**kwargs, "device": CPU})
        if where.type == "cuda" and not isinstance(result, OnGpu):
            leaf = result.requires_grad
            result = OnGpu(result.detach()).requires_grad_(leaf)
        return result


def _of(tensor: Tensor) -> torch.device:
    """The device that a tensor says it is on, under vmap too."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return CUDA if isinstance(tensor, OnGpu) else CPU


def _to(mode: Pretended, x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    if args and isinstance(args[0], Tensor):
        wanted, dtype, layout = _of(args[0]), args[0].dtype, None
    elif isinstance(kwargs.get("other"), Tensor):
        wanted, dtype, layout = _of(kwargs["other"]), kwargs["other"].dtype, None
    else:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        wanted = _of(x) if device is None else _known(device)
    if wanted.type != _of(x).type:
        mode.wait(f"to {wanted.type}")
        x = _Move.apply(x)
    if dtype is not None and dtype != x.dtype:
        x = torch.Tensor.type(x, dtype)
    return x if layout is None else x.contiguous(memory_format=layout)


def _cpu(mode: Pretended, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _to(mode, x, CPU)


def _cuda(mode: Pretended, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _to(mode, x, CUDA)


def _tolist(mode: Pretended, x: Tensor) -> Any:
    if isinstance(x, OnGpu):
        mode.wait("tolist")
        x = x.inner
    return x.tolist()


def _numpy(mode: Pretended, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, OnGpu):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
    return x.numpy(*args, **kwargs)


def _array(mode: Pretended, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, OnGpu):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
    return x.__array__(*args, **kwargs)


def _new_tensor(mode: Pretended, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.setdefault("device", _of(x))
    kwargs.setdefault("dtype", x.dtype)
    return torch.tensor(*args, **kwargs)


def _pad_sequence(mode: Pretended, tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
    # makes its result like the first of the tensors, without asking the tensor
    inner = [x.inner if isinstance(x, OnGpu) else x for x in tensors]
    padded = torch._C._nn.pad_sequence(inner, *args, **kwargs)
    return OnGpu(padded) if isinstance(tensors[0], OnGpu) else padded


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch._C._nn.pad_sequence: _pad_sequence,
    Tensor.to: _to,
    Tensor.cpu: _cpu,
    Tensor.cuda: _cuda,
    Tensor.tolist: _tolist,
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.new_tensor: _new_tensor,
    Tensor.device.__get__: lambda mode, x: _of(x),  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda mode, x: _of(x).type == "cuda",  # type: ignore[attr-defined]
}


def _moved(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to`: parameters on the other device are others, as nothing of a wrapper can be exchanged."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and device is not None and _of(parameter).type != _known(device).type:
                made = parameter.detach().to(device)
                module._parameters[name] = nn.Parameter(made, parameter.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and device is not None:
                module._buffers[name] = buffer.to(device)
    assert dtype is None or dtype == torch.float32, "nothing here has another type"
    return model


def _set_device(device: Any) -> None:
    if torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")


@contextlib.contextmanager
def gpu() -> Iterator[Pretended]:
    """A GPU in this process: `torch.device("cuda")` for whatever is called inside."""
    real_autocast, real_enabled = torch.autocast, torch.is_autocast_enabled

    free = 8 << 30
    quiet: dict[str, Any] = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "device": lambda device: contextlib.nullcontext(),
        "set_device": _set_device,
        "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (free, free),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    with pytest.MonkeyPatch.context() as patch, Pretended() as mode:
        Pretended.now = mode
        for name, stand_in in quiet.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: mode.wait("synchronize"))
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(nn.Module, "to", _moved)
        on_cpu = {"cuda": "cpu"}
        patch.setattr(torch, "autocast", lambda kind, *a, **k: real_autocast(on_cpu.get(kind, kind), *a, **k))
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": real_enabled("cpu" if kind == "cuda" else kind))
        yield mode
