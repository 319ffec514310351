"""Reads files of torch.save and pickle.dump without executing anything of them.

    content = read(Path("net.pt"))     {"state_dict": {"fc.weight": Tensor, ...}, "args": Unbuilt, "epoch": 3}

A pickle names functions and has them called. Here every name, torch's own too, leads to an inert class that remembers
what it was given; tensors and numpy arrays are then made of what is remembered. Everything else stays unbuilt, so that
no file is refused for what lies beside its weights.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fatbench import packed
from fatbench.errors import SpecError

ADVICE = "torch.save(model.state_dict(), FILE)"
DEPTH = 6  # of mappings and lists in each other, below which nothing is looked for
MAGIC = 0x1950A86A20F9469CFC6C  # the number with which torch.save began before version 1.6
DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Untyped": torch.uint8,
    "QInt8": torch.int8, "QUInt8": torch.uint8, "QInt32": torch.int32,
}  # fmt: skip
TENSOR = re.compile(r"torch\._utils\._rebuild_tensor(_v2|_v3)?")
AROUND = re.compile(r"torch\._utils\._rebuild_(parameter|device_tensor|xla_tensor)\w*")  # a tensor, the first argument
SUBCLASS = re.compile(r"torch\._tensor\._rebuild_from_type(_v2)?")
PLAIN = {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
OTHER = {
    "sparse": "a sparse matrix: save it as tensor.to_dense()", "qtensor": "quantised: save it as tensor.dequantize()",
    "meta": "without numbers (on the device 'meta')", "": "a tensor of a kind that is not read",
}  # fmt: skip
NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")  # numpy's codes of what torch has, too


class Unbuilt:
    """Stands for an object of a pickle, or for one of its classes: remembers what it is given, and calls nothing."""

    name = ""  # "pathlib.PosixPath"
    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __new__(cls, /, *arguments: Any, **keywords: Any) -> Unbuilt:
        # an object may stand for a class, too: getattr(Outer, "Inner")
        made = object.__new__(cls if isinstance(cls, type) else type(cls))
        made.arguments, made.state, made.items = arguments, None, {}
        return made

    def __init__(self, /, *arguments: Any, **keywords: Any) -> None:
        pass

    def __repr__(self) -> str:
        return self.name  # and no address of memory, in messages

    def __call__(self, *arguments: Any) -> Unbuilt:
        return Unbuilt(*arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, item: Any) -> None:
        """Forget an item of a list or set of its own kind."""

    extend = add = append

    @property
    def tensor_kind(self) -> str:
        """What it is, in words, if it stands for a tensor; empty for anything else."""
        is_tensor = self.name.startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_"))
        return next(words for part, words in OTHER.items() if part in self.name) if is_tensor else ""


@dataclass(frozen=True, slots=True)
class _Storage:
    """The numbers of tensors: where they are in the file."""

    dtype: torch.dtype
    key: str
    start: int  # of a view, in numbers


class _Unpickler(pickle._Unpickler):
    """Python's own, in Python: the one in C reserves as much memory as the file asks for."""

    dispatch: ClassVar = {  # without extension codes, which lead past `find_class`
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4)
    }

    def __init__(self, stream: io.BytesIO):
        super().__init__(stream, encoding="utf-8")
        self.stored: dict[str, torch.dtype] = {}

    def find_class(self, module: str, name: str) -> type[Unbuilt]:
        return type("Unbuilt", (Unbuilt,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        kind, made_by, *rest = pid
        if kind == "module":  # a class, of which old files have the text
            return made_by
        key, _, _, *view = rest
        dtype = DTYPES[made_by.name.rpartition(".")[2].removesuffix("Storage")]
        return _Storage(self.stored.setdefault(str(key), dtype), str(key), int(view[0][1]) if view and view[0] else 0)

    def load_bytearray(self: Any) -> None:
        size = int.from_bytes(self.read(8), "little")
        self.append(bytearray(self.read(size)))  # no longer than the file

    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray


def read(path: Path) -> Any:
    """The content of a file: mappings as dicts, lists and tuples as lists, tensors on the CPU, arrays.

    Optimisers, and lists and mappings deeper than DEPTH, are None. Raises SpecError for a TorchScript
    program, and any other Exception for a file that is damaged or of another kind.
    """
    data = path.read_bytes()
    if data.startswith((*packed.MAGIC,)):
        raise ValueError("it is compressed: unpack it first")
    file = _File(data, path)
    return file.plain(file.content, DEPTH)


class _File:
    """What a file holds, and the bytes of its storages."""

    def __init__(self, data: bytes, path: Path):
        self.path = path
        self.bytes_by_key: dict[str, Tensor] = {}  # of the storages that were read
        self.archive: zipfile.ZipFile | None = None
        if data.startswith(b"PK"):
            self._open_zip(data)
        else:
            self._open_stream(io.BytesIO(data))

    def _open_zip(self, data: bytes) -> None:
        self.archive = zipfile.ZipFile(io.BytesIO(data))
        self.members = {name.partition("/")[2]: name for name in self.archive.namelist()}
        # before its size: of a program, its text is compressed
        if "constants.pkl" in self.members:
            raise SpecError(f"{self.path} holds a TorchScript program, not a state dict: {ADVICE}")
        if sum(member.file_size for member in self.archive.infolist()) > len(data):
            raise ValueError("it is compressed, which torch.save never does")
        if "byteorder" in self.members and self.archive.read(self.members["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        if "data.pkl" not in self.members:
            raise ValueError(f"it is a zip file of {', '.join(self.archive.namelist()[:3]) or 'nothing'}")
        self.content = _Unpickler(io.BytesIO(self.archive.read(self.members["data.pkl"]))).load()

    def _open_stream(self, stream: io.BytesIO) -> None:
        """A pickle; torch's files were five of them before version 1.6, and then the storages."""
        try:
            self.content = _Unpickler(stream).load()
        except KeyError:  # no such instruction, of which the message would be the number
            raise ValueError("it is no pickle") from None
        if type(self.content) is not int or self.content != MAGIC:
            return
        _Unpickler(stream).load()  # the version
        if not _Unpickler(stream).load()["little_endian"]:
            raise ValueError("its numbers are big-endian")
        objects = _Unpickler(stream)
        self.content = objects.load()
        for key in _Unpickler(stream).load():
            size = int.from_bytes(stream.read(8), "little") * objects.stored[key].itemsize
            self.bytes_by_key[key] = _bytes(stream.read(size))

    def plain(self, value: Any, depth: int) -> Any:
        """A value with tensors, arrays, dicts and lists in place of what stands for them."""
        if isinstance(value, Unbuilt):
            numbers = self._array(value) if value.name.startswith("numpy.") else self._tensor(value)
            if numbers is not None:
                return numbers
            if not value.items:
                return value
            value = value.items  # of an OrderedDict, a defaultdict, ...
        if not isinstance(value, dict | list | tuple):
            return value
        if not depth or "param_groups" in value:
            return None
        if isinstance(value, dict):
            return {key: self.plain(item, depth - 1) for key, item in value.items()}
        return [self.plain(item, depth - 1) for item in value]

    def _tensor(self, value: Unbuilt) -> Tensor | None:
        """The tensor that a value stands for; None if it is not a plain one. Raises an Exception if it is damaged."""
        if AROUND.fullmatch(value.name):
            inside = self.plain(value.arguments[0], 0)
            return inside if isinstance(inside, Tensor) else None
        if SUBCLASS.fullmatch(value.name):
            rebuild, kind, arguments = value.arguments[:3]
            return self._tensor(rebuild(*arguments)) if kind.name in PLAIN else None
        if not TENSOR.fullmatch(value.name):
            return None
        storage, offset, size, stride, *rest = value.arguments
        dtype = None
        if value.name.endswith("_v3"):  # of types that storages do not name
            dtype = getattr(torch, rest.pop(2).name.removeprefix("torch."))
        if any(rest[2:]):  # a conjugate, or a negative, that is still to be computed
            return None
        numbers, start = self._numbers(storage, dtype)
        return numbers.as_strided(size, stride, start + offset)

    def _numbers(self, storage: Any, dtype: torch.dtype | None) -> tuple[Tensor, int]:
        """(the numbers of a storage, where its view begins)."""
        if isinstance(storage, Unbuilt) and storage.name == "torch.storage._load_from_bytes":  # in a plain pickle
            inner = _File(_raw(storage.arguments[0]), self.path)
            return inner._numbers(inner.content, dtype)
        if self.archive is not None and storage.key not in self.bytes_by_key:
            self.bytes_by_key[storage.key] = _bytes(self.archive.read(self.members[f"data/{storage.key}"]))
        return self.bytes_by_key[storage.key].view(dtype or storage.dtype), storage.start

    def _array(self, value: Unbuilt) -> np.ndarray | None:
        """The array of numbers that a value stands for; None for any other object of numpy."""
        function = value.name.rpartition(".")[2]
        if function == "_reconstruct" and value.state:
            _, shape, kind, by_column, content = value.state
        elif function == "_frombuffer":
            content, kind, shape, order = value.arguments
            by_column = order == "F"
        else:
            return None
        if not (isinstance(kind, Unbuilt) and kind.arguments and NUMBERS.fullmatch(str(kind.arguments[0]))):
            return None
        dtype = np.dtype(str(kind.arguments[0]))
        stored = dtype.newbyteorder(kind.state[1]) if kind.state else dtype
        array = np.frombuffer(_raw(content), stored).reshape(shape, order="F" if by_column else "C")
        return array.astype(dtype, order="C")


def _raw(content: Any) -> bytes:
    """Bytes, which old pickles hold as text."""
    if isinstance(content, Unbuilt):
        return str(content.arguments[0]).encode("latin1")
    if not isinstance(content, bytes | bytearray):  # bytes(10**12) is as long as that
        raise ValueError("an array without its bytes")
    return bytes(content)


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
