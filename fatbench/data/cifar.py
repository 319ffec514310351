"""CIFAR-10 and CIFAR-100: the published pickles, read without executing anything.

A pickle may name any importable function and have it called. The unpickler here knows three names, which lead not to
numpy but to the inert classes below: numpy's `dtype.__setstate__` can be told that raw bytes are Python objects.
"""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fatbench.data import catalogue
from fatbench.data.common import Check, DamagedData, Images, Labels, Loaded, as_labels, md5, parsing, read_bytes, unpack

PIXELS = 3 * 32 * 32
LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}


class UnsafePickle(DamagedData):
    """A pickle names something that no CIFAR file needs."""


def load(name: str, root: Path) -> Loaded:
    """The arrays of `name` ("cifar10" or "cifar100"); if only the archive is there, it is unpacked first."""
    facts, files = catalogue.dataset_facts(name), catalogue.files(name)
    assert facts.classes is not None
    members = {tuple(file.path.split("/")) for file in files}
    folder = unpack(name, root, lambda parts: parts[1:] if parts in members else None)
    paths = [root / file.path for file in files]
    with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
        batches = list(pool.map(lambda path: read_batch(path, LABELS[name]), paths))
    images, labels, sums = zip(*batches, strict=True)
    return Loaded(
        where=folder,
        train_images=np.concatenate(images[:-1]).reshape(-1, 3, 32, 32),  # the last file is the test set
        train_labels=np.concatenate(labels[:-1]),
        test_images=np.concatenate(images[-1:]).reshape(-1, 3, 32, 32),
        test_labels=np.concatenate(labels[-1:]),
        classes=facts.classes,
        checks=tuple(Check(path, file.md5, digest) for path, file, digest in zip(paths, files, sums, strict=True)),
        whole=True,
    )


def read_batch(path: Path, key: str) -> tuple[Images, Labels, str]:
    """One file: images (N, 3072) uint8, red, green and blue planes in turn; labels (N,) int64; the file's md5.

    Raises DamagedData if it is missing, truncated or no CIFAR batch, and UnsafePickle if it would execute something.
    """
    data = read_bytes(path)
    with parsing(path, "a CIFAR batch"):
        batch = _Unpickler(data, path).load()
        if not isinstance(batch, dict):
            raise ValueError("no dictionary")
        entry = {k.decode() if isinstance(k, bytes) else k: v for k, v in batch.items()}
        images, labels = _array(entry["data"]), as_labels(entry[key])
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, {len(labels)} labels")
    return images, labels, md5(data)


class _Array:
    """Stands for a numpy array: remembers the state that the pickle gives it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dtype:
    """Stands for a numpy dtype: remembers its code."""

    def __init__(self, code: Any, *flags: Any):
        self.code = code.decode() if isinstance(code, bytes) else code

    def __setstate__(self, state: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, path: Path):
        super().__init__(io.BytesIO(data), encoding="bytes")
        self.path = path
        # New classes for each call, so that no file can leave an attribute behind for the next.
        array, dtype = type("Array", (_Array,), {}), type("Dtype", (_Dtype,), {})
        self.known = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *arguments: array(),
            ("numpy._core.multiarray", "_reconstruct"): lambda *arguments: array(),
            ("numpy", "ndarray"): array,
            ("numpy", "dtype"): dtype,
        }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.known[module, name]
        except KeyError:
            raise UnsafePickle(
                f"{self.path}: refusing to execute {module}.{name}; a published CIFAR file holds only numpy arrays"
            ) from None


def _array(stand_in: Any) -> Images:
    """The (N, 3072) uint8 array that a stand-in remembers. Raises ValueError for anything else."""
    match stand_in:
        case _Array(
            state=(int(), (int() as n, int() as columns), _Dtype() as dtype, bool() as by_column, bytes() as raw)
        ):
            if dtype.code in ("u1", "|u1", "uint8") and columns == PIXELS and len(raw) == n * columns:
                return np.frombuffer(raw, np.uint8).reshape((n, columns), order="F" if by_column else "C")
    raise ValueError(f"no uint8 array of {PIXELS} columns")
