"""What the readers share: three ways a file can be wrong, checksums, unpacking, the last check of the arrays."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatbench.data import Dataset, catalogue
from fatbench.errors import FatbenchError, MachineError, SpecError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class Missing(MachineError):
    """Nothing of the data set is below the root."""


class DamagedData(MachineError):
    """A file that is truncated, incomplete, unreadable or not in its format."""


class Differs(MachineError):
    """Whole files that are not the published ones, while no variant is named."""


@dataclass(frozen=True)
class Check:
    """The published md5 of one file and the one found; of idx files and digits, the md5 of the uncompressed content."""

    file: Path
    expected: str
    found: str


@dataclass(frozen=True)
class Loaded:
    """Arrays as read, before it is decided whether they may be used.

    Images are (N, C, H, W) uint8, labels (N,) int64, writers (N,) int64 or None. `whole` says that the checks cover
    every byte that was read, so that files that pass them are the published data set.
    """

    where: Path
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    checks: tuple[Check, ...] = ()
    whole: bool = False
    writers: Labels | None = None
    test_writers: Labels | None = None

    @property
    def wrong(self) -> list[Check]:
        return [check for check in self.checks if check.found != check.expected]

    @property
    def n(self) -> int:
        return len(self.train_labels) + len(self.test_labels)


def md5(data: bytes) -> str:
    """The md5 of bytes in memory, as 32 hexadecimal digits."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5_of(file: Path) -> str:
    """The md5 of a file too large to hold in memory."""
    with reading(file), file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn a file that cannot be opened or read into one message."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedData(f"{file} is missing") from None
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


def read(file: Path) -> bytes:
    """The bytes of a file. DamagedData: it is missing; MachineError: it cannot be read."""
    with reading(file):
        return file.read_bytes()


@contextmanager
def parsing(file: Path, what: str) -> Iterator[None]:
    """Turn whatever a parser says of a broken file into one message that names the file.

    Every exception is caught: the parsers are other people's (scipy, Pillow, zlib) and promise no list of them.
    """
    try:
        yield
    except FatbenchError:
        raise
    except Exception as error:
        raise DamagedData(f"{file} is truncated or damaged, not {what} ({reason(error)})") from None


def reason(error: Exception) -> str:
    """The first line of an exception's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def missing(name: str, root: Path, *looked: Path) -> Missing:
    """The error for a set of which nothing is there."""
    places = " or ".join(str(place) for place in looked)
    return Missing(
        f"{catalogue.dataset_facts(name).title} is not in {root} (looked for {places}): "
        f"run 'fatbench data prepare {name}', or put the published files there"
    )


def finish(name: str, variant: str | None, loaded: Loaded, counts: tuple[int, int] | None = None) -> Dataset:
    """Decide whether what was loaded may be used under this name, and seal it with its fingerprint.

    Without a variant every checksum must be the published one and, where `counts` is given, so must the numbers of
    training and test images. With a variant the checksums may differ, everything else is checked all the same.
    Differs: other files than the published ones; DamagedData: labels or shapes that cannot be right; MachineError: a
    variant is named, but these are the published files; SpecError: an empty name.
    """
    if variant is not None and not variant.strip():
        raise SpecError("variant: expected a name, got an empty string")
    _consistent(name, loaded)
    how = f"to use them under a name of their own: data: {{name: {name}, variant: NAME}}"
    if variant is None:
        if wrong := loaded.wrong:
            others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise Differs(
                f"{wrong[0].file}{others} is not the published file: the md5 of its content should be "
                f"{wrong[0].expected}, it is {wrong[0].found}; {how}"
            )
        found = (len(loaded.train_labels), len(loaded.test_labels))
        if counts is not None and found != counts:
            raise Differs(
                f"{loaded.where} holds {found[0]:,} training and {found[1]:,} test images, "
                f"{counts[0]:,} and {counts[1]:,} are published; {how}"
            )
    elif loaded.whole and not loaded.wrong:
        raise MachineError(
            f"data: {{name: {name}, variant: {variant}}}, but the files in {loaded.where} are the published ones: "
            "remove 'variant'"
        )
    return Dataset(
        train_images=loaded.train_images,
        train_labels=loaded.train_labels,
        test_images=loaded.test_images,
        test_labels=loaded.test_labels,
        classes=loaded.classes,
        writers=loaded.writers,
        test_writers=loaded.test_writers,
        name=name,
        variant=variant,
        fingerprint=fingerprint(loaded),
    )


def fingerprint(loaded: Loaded) -> str:
    """SHA-256 over all arrays (dtype, shape and bytes of each): the same images in any file format give the same."""
    digest = hashlib.sha256()
    for array in (
        loaded.train_images,
        loaded.train_labels,
        loaded.writers,
        loaded.test_images,
        loaded.test_labels,
        loaded.test_writers,
    ):
        if array is None:
            digest.update(b"none;")
            continue
        digest.update(f"{array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _consistent(name: str, loaded: Loaded) -> None:
    shape = catalogue.CATALOGUE[name].shape if name in catalogue.CATALOGUE else None  # a plug-in's is in no catalogue
    for split, images, labels, writers in (
        ("training", loaded.train_images, loaded.train_labels, loaded.writers),
        ("test", loaded.test_images, loaded.test_labels, loaded.test_writers),
    ):
        if not len(images):
            raise DamagedData(f"{loaded.where} holds no {split} images")
        if len(images) != len(labels) or (writers is not None and len(writers) != len(labels)):
            raise DamagedData(f"{loaded.where}: {len(images)} {split} images, but {len(labels)} labels")
        if shape is not None and images.shape[1:] != shape:
            raise DamagedData(f"{loaded.where}: {split} images have shape {images.shape[1:]}, {shape} is published")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= loaded.classes:
            raise DamagedData(f"{loaded.where}: {split} labels run from {low} to {high}, not 0 to {loaded.classes - 1}")


# --- archives -----------------------------------------------------------------------------------------------------


def unpacked(name: str, root: Path, place: Callable[[tuple[str, ...]], tuple[str, ...] | None]) -> Path:
    """The folder of a set published as one archive; the archive is unpacked first where only it is there.

    `place` maps the parts of a member's path to its place inside the folder, or to None where it is not wanted: an
    archive can write nothing else. The folder appears whole or not at all, so that several workers may start at once.
    Missing: neither is there; DamagedData: not a whole archive; MachineError: the root cannot be written to.
    """
    folder = root / catalogue.dataset_facts(name).folder
    published = catalogue.archive(name)
    assert published is not None
    packed = root / published.path
    if folder.is_dir():
        return folder
    if not packed.is_file():
        raise missing(name, root, folder, packed)
    count = 0
    staging: Path | None = None
    try:
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        staging.chmod(0o755)  # mkdtemp's 0700 would lock out other users of a shared root
        with tarfile.open(packed, "r|*") as tar:
            for member in tar:
                parts = place(PurePosixPath(member.name).parts) if member.isfile() else None
                source = tar.extractfile(member) if parts else None
                if parts is None or source is None:
                    continue
                target = staging.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as handle:
                    shutil.copyfileobj(source, handle)
                count += 1
        if not count:
            raise DamagedData(f"{packed} holds none of the files of {catalogue.dataset_facts(name).title}")
        try:
            os.rename(staging, folder)
        except OSError:
            if not folder.is_dir():  # else another worker was first
                raise
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DamagedData(f"{packed} is truncated or damaged, not a whole archive ({error})") from None
    except OSError as error:
        raise MachineError(f"cannot unpack {packed} into {root}: {error.strerror or error}") from None
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def as_labels(values: Any) -> Labels:
    """Whole numbers as an (N,) int64 array. ValueError: anything else."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("labels are not a list of whole numbers")
    return array.astype(np.int64)
