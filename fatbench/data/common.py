"""What the readers share: errors of files, checksums, unpacking, 8-bit images, checks of all arrays."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import re
import shutil
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fatbench import packed
from fatbench.data import Dataset, catalogue
from fatbench.errors import FatbenchError, MachineError, SpecError

if TYPE_CHECKING:
    from PIL import Image

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

NAMED = 5  # files that a message names
FULL = 100  # entries of a folder that is not listed


class Missing(MachineError):
    """The data set is not below the root."""


class DamagedData(MachineError):
    """A file is truncated, incomplete, unreadable or not in its format."""


class Differs(MachineError):
    """Complete files are not the published ones, and no variant is named."""


@dataclass(frozen=True)
class Check:
    """The published md5 of a file and the actual one; for idx files and digits, those of the uncompressed content."""

    file: Path
    expected: str
    found: str


@dataclass(frozen=True)
class Loaded:
    """Arrays as read, before `finish` checks them.

    Images are (N, C, H, W) uint8, labels (N,) int64, writers (N,) int64 or None. `whole`: the checks cover every byte
    that was read, so that files which pass are the published data set. `gaps`: the number of classes was given, so a
    class may have no training images.
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
    gaps: bool = False
    counts: tuple[int, int] | None = None  # all training and test images, if not all were read
    sha256: str | None = None  # the fingerprint, if it is not that of the arrays
    decoded: Any = None  # the `decoded.Decoded` that holds its images
    unread: Sequence[Path] = ()  # files of its class folders that are not read

    @property
    def mismatches(self) -> list[Check]:
        return [check for check in self.checks if check.found != check.expected]

    @property
    def n(self) -> int:
        return len(self.train_labels) + len(self.test_labels)


def md5(data: bytes) -> str:
    """The md5 of bytes in memory, as 32 hexadecimal digits."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5_of(file: Path) -> str:
    """The md5 of a file, without reading it into memory at once."""
    with reading(file), file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise one clear message if a file cannot be opened or read."""
    try:
        yield
    except FileNotFoundError:
        if file.is_symlink():
            raise DamagedData(f"{file} is a link to {file.readlink()}, which is missing") from None
        raise DamagedData("; ".join([f"{file} is missing", *holdings(file.parent)])) from None
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


def read_bytes(file: Path) -> bytes:
    """The bytes of a file. Raises DamagedData if it is missing, MachineError if it cannot be read."""
    with reading(file):
        return file.read_bytes()


@contextmanager
def parsing(file: Path, format_name: str) -> Iterator[None]:
    """Raise one clear message, with the file's name, for any error of a parser.

    Every exception is caught: the parsers (scipy, Pillow, zlib) do not document which ones they raise.
    """
    try:
        yield
    except FatbenchError:
        raise
    except Exception as error:
        raise damage(file, format_name, error) from None


def damage(file: Path, format_name: str, error: Exception) -> DamagedData:
    """The error for a file that its parser refuses, with what lies there in its place."""
    kind = packed.kind_of(file)
    if kind and kind != format_name:
        return DamagedData(f"{file} is {kind}, not {format_name}")
    return DamagedData(f"{file} is truncated or damaged, not {format_name} ({reason(error)})")


def holdings(*folders: Path) -> list[str]:
    """What lies in each of the folders, in words; nothing of one that is full, not there or cannot be read."""
    found = []
    for folder in dict.fromkeys(folders):
        with suppress(OSError), os.scandir(folder) as entries:
            names = sorted(entry.name for entry in itertools.islice(entries, FULL) if not entry.name.startswith("."))
            if len(names) < FULL:
                found.append(f"{folder} holds {listed(names)}" if names else f"{folder} is empty")
    return found


def reason(error: Exception) -> str:
    """The first line of an exception's message, or its type without one; without addresses of memory."""
    text = re.sub(r" <_io\.\w+ object at 0x\w+>| at 0x[0-9a-fA-F]{6,}", "", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[0]


def missing_error(name: str, root: Path, *searched: Path) -> Missing:
    """The error for a data set that is not there, with what lies there in its place."""
    folder_names = " or ".join(str(place) for place in searched)
    # of each place, the lowest folder that exists, not above the root
    nearest = [next((p for p in (place, *place.parents) if p.is_dir()), root) for place in searched]
    found = holdings(*(folder for folder in nearest if folder.is_relative_to(root) or folder in searched))
    found += [] if root.is_dir() else [f"{root} does not exist"]
    published = catalogue.archive(name) or catalogue.files(name)[0]
    return Missing(
        f"{catalogue.dataset_facts(name).title} is not in {root} ({'; '.join([f'searched {folder_names}', *found])}): "
        f"run 'fatbench fetch {name}', or put the published files there ({Path(published.path).name}"
        f"{'' if catalogue.archive(name) else ', ...'})"
    )


def finish(name: str, variant: str | None, loaded: Loaded, counts: tuple[int, int] | None = None) -> Dataset:
    """Check that the loaded data may be used under this name, and return them with their fingerprint.

    Without a variant, every checksum must be the published one and, if `counts` is given, so must the numbers of
    training and test images. With a variant, checksums may differ, but everything else is checked. Raises Differs for
    other files than the published ones, DamagedData for impossible labels or shapes, MachineError if a variant is named
    but these are the published files, and SpecError for an empty name.
    """
    if variant is not None and not variant.strip():
        raise SpecError("variant: expected a name, got an empty string")
    published = catalogue.CATALOGUE.get(name)  # a plug-in's data set is in no catalogue
    earlier_doubts = None if loaded.decoded is None else loaded.decoded.doubts(loaded.sha256)
    doubts = find_doubts(loaded.where, loaded, published.shape if published else None, loaded.gaps, earlier_doubts)
    if loaded.decoded is not None:
        loaded.decoded.keep(loaded.sha256, doubts)
    if loaded.unread:
        doubts = {**doubts, "files are not read": float(len(loaded.unread))}
    advice = f"to use them under another name: data: {{name: {name}, variant: NAME}}"
    if variant is None:
        if differing := loaded.mismatches:
            further_files = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise Differs(
                f"{differing[0].file}{further_files} is not the published file: the md5 of its content is "
                f"{differing[0].found}, not {differing[0].expected}; {advice}"
            )
        found_counts = loaded.counts or (len(loaded.train_labels), len(loaded.test_labels))
        if counts is not None and found_counts != counts:
            raise Differs(
                f"{loaded.where} holds {found_counts[0]:,} training and {found_counts[1]:,} test images, "
                f"not the published {counts[0]:,} and {counts[1]:,}; {advice}"
            )
    elif loaded.whole and not loaded.mismatches:
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
        fingerprint=loaded.sha256 or fingerprint(loaded),
        doubts=doubts,
        note=_unread_note(loaded),
    )


def listed(names: Sequence[str]) -> str:
    """Some names in words: "a, b and 3 more"."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _unread_note(loaded: Loaded) -> str:
    """The files that were not read, by name, in a sentence; empty if all were."""
    if not loaded.unread:
        return ""
    folder = os.path.commonpath([file.parent for file in loaded.unread])
    names = listed([str(file.relative_to(folder)) for file in loaded.unread])
    files = "1 file is" if len(loaded.unread) == 1 else f"{len(loaded.unread)} files are"
    return f"{folder}: {files} not read, because of suffix or folder: {names}"


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


# --- checks of every data set -------------------------------------------------------------------------------------

LEAKED = 0.5  # of the test images: with more of them among the training images, there is no test set
SHARED = 0.01  # of the test images: more can move an accuracy by a percentage point
SAMPLED = 256  # bytes of an image that are compared first
CONTRAST = 0.25  # of the pixel range: in less, a radius of 8/255 is an eighth of the contrast or more
FACTOR = 2.0  # between the brightness of training and of test images
FEW = 30  # images whose mean may differ by chance
RANGED = 1 << 22  # pixels of a part that tell its range


def find_doubts(
    source: Path | str,
    data: Loaded | Dataset,
    shape: tuple[int, int, int] | None = None,
    gaps: bool = True,
    earlier_doubts: Mapping[str, float] | None = None,
) -> Mapping[str, float]:
    """{doubt about the arrays: how many}, whichever reader they came from.

    shape: the published (C, H, W). gaps: a class may have no training images. earlier_doubts: an earlier result, so
    that not all pixels need to be read again. Raises DamagedData for what cannot be right, such as labels beyond the
    classes, channels in the last axis, or test images that are training images.
    """
    splits = (
        ("training", data.train_images, data.train_labels, data.writers),
        ("test", data.test_images, data.test_labels, data.test_writers),
    )
    for split, images, labels, writers in splits:
        if not images.size:
            raise DamagedData(f"{source} holds no {split} images")
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DamagedData(f"{source}: {split} images are {images.dtype} {images.shape}, not uint8 (N, C, H, W)")
        if len(images) != len(labels) or (writers is not None and len(writers) != len(labels)):
            raise DamagedData(f"{source}: {len(images)} {split} images, but {len(labels)} labels")
        if shape is not None and images.shape[1:] != shape:
            raise DamagedData(f"{source}: {split} images have shape {images.shape[1:]}, {shape} is published")
        if images.shape[1:] != data.train_images.shape[1:]:
            sizes = ["x".join(map(str, array.shape[1:])) for array in (data.train_images, images)]
            raise DamagedData(f"{source}: training images of {sizes[0]}, test images of {sizes[1]}")
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise DamagedData(f"{source}: {split} labels are {labels.dtype} {labels.shape}, not integers (N,)")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= data.classes:
            raise DamagedData(f"{source}: {split} labels run from {low} to {high}, not 0 to {data.classes - 1}")
        if shape is None and earlier_doubts is None and (problem := _layout_problem(images)):
            raise DamagedData(f"{source}: {split} images {problem}")
    class_counts = np.bincount(data.train_labels, minlength=data.classes)
    if not gaps and (empty_classes := np.flatnonzero(class_counts == 0).tolist()):
        class_list = ", ".join(map(str, empty_classes[:5])) + (", ..." if len(empty_classes) > 5 else "")
        raise DamagedData(
            f"{source}: no training image is of class {class_list}: labels must be 0, 1, 2, ... without gaps "
            "(unless a plug-in sets fatbench.dataset(..., classes=N))"
        )
    if earlier_doubts is not None:
        return earlier_doubts
    count, n = shared_images(data.train_images, data.test_images), len(data.test_images)
    if count >= LEAKED * n:
        raise DamagedData(f"{source}: {count:,} of {n:,} test images are training images, so there is no test set")
    doubts = {"test images are training images": float(count)} if count > SHARED * n else {}
    # a single training image stands in for a set that is not read
    whole_splits = [split for split in splits if split[0] == "test" or len(split[1]) > 1]
    for split, images, labels, _ in whole_splits:
        if (count := contradicted(images, labels)) > SHARED * len(images):
            doubts[f"{split} images are in two classes"] = float(count)
    ranges = {split: _ranges(images) for split, images, _, _ in whole_splits}
    doubts |= {
        f"{split} images have few grey levels": found["contrast"] + 1
        for split, found in ranges.items()
        if found["contrast"] < CONTRAST * 255
    }
    if len(ranges) == 2:
        a, b = ranges.values()
        factor = max(max(a[key], b[key]) / max(min(a[key], b[key]), 1) for key in a.keys() & b.keys())
        if factor >= FACTOR:
            doubts["training and test images differ in brightness"] = factor
    return doubts


def _ranges(images: Images) -> dict[str, float]:
    """The brightest pixel and the contrast of images, both without the outermost 0.1 % of the pixels, and the mean.

    Of few images there is no mean. Of many, enough are taken, at equal distances.
    """
    sample = images[:: -(-images.size // RANGED)]
    low, high = (float(value) for value in np.quantile(sample, (0.001, 0.999), method="nearest"))
    mean = {"mean": float(sample.mean())} if len(sample) >= FEW else {}
    return {"brightest": high, "contrast": high - low, **mean}


def _layout_problem(images: Images) -> str | None:
    """The reason why images (N, C, H, W) of a set without published facts look wrong, or None."""
    channels, height, width = images.shape[1:]
    size = f"{channels} channels of {height}x{width}"
    if width < channels and (channels == height or width <= 4 < min(channels, height)):
        return f"have {size}: are the channels last? (N, C, H, W) is needed, or (N, H, W, C) with 1 or 3 channels"
    if channels == 4 and (images[:, 3] == images[0, 3].flat[0]).all():
        return f"have {size}, the last one the same everywhere: leave the alpha channel of RGBA out"
    if images.max() == 1:
        return "have no pixel above 1 of 255: floats in [0, 1] are given as floats"
    return None


def shared_images(train: Images, test: Images) -> int:
    """The number of test images that are also training images, byte for byte."""
    train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    stride = -(-train.shape[1] // SAMPLED)  # most images differ in these bytes already
    test_samples = {row.tobytes() for row in test[:, ::stride]}
    candidates = [i for i, row in enumerate(train[:, ::stride]) if row.tobytes() in test_samples]
    train_images = {train[i].tobytes() for i in candidates}
    return sum(row.tobytes() in train_images for row in test) if train_images else 0


def contradicted(images: Images, labels: NDArray[Any]) -> int:
    """The number of images that no network can have right: others, byte for byte the same, have another label.

    Of each group of equal images, those of its most frequent class are not counted.
    """
    flat = images.reshape(len(images), -1)
    rows_by_sample: dict[bytes, list[int]] = {}
    for i, row in enumerate(flat[:, :: -(-flat.shape[1] // SAMPLED)]):
        rows_by_sample.setdefault(row.tobytes(), []).append(i)
    classes_by_image: dict[bytes, Counter[int]] = {}
    for rows in rows_by_sample.values():
        if len(rows) > 1 and (labels[rows] != labels[rows[0]]).any():
            for i in rows:
                classes_by_image.setdefault(flat[i].tobytes(), Counter())[int(labels[i])] += 1
    return sum(classes.total() - max(classes.values()) for classes in classes_by_image.values())


# --- images of other programs -------------------------------------------------------------------------------------


def eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """An image in `mode`, "RGB" or "L"; 16 bits of grey are scaled. Raises ValueError for an unknown range."""
    from PIL import Image

    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # Pillow warns of another way
    if image.mode in ("La", "RGBa"):  # colours times their opacity
        image = image.convert(image.mode.upper())
    # Pillow's convert() clips 16 bits at 255. A PGM, and in older versions a PNG, has its 16 bits in mode I.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(f"pixels are 32-bit {kind} of unknown range; 8 or 16 bits are needed")
    return image.convert(mode)


def fair_order(labels: Labels) -> NDArray[np.int64] | None:
    """An order in which the first n are a fair sample, if the labels (N,) are sorted by class; else None.

    Sorted means that less than half as many neighbours differ as would in a random order. The new order is that of a
    hash of the position, the same on every machine.
    """
    n = len(labels)
    fractions = np.unique(labels, return_counts=True)[1] / max(n, 1)
    if (labels[1:] != labels[:-1]).sum() >= 0.5 * (n - 1) * (1 - (fractions**2).sum()):
        return None
    return np.array(sorted(range(n), key=lambda i: hashlib.blake2b(str(i).encode(), digest_size=8).digest()), np.int64)


# --- archives -----------------------------------------------------------------------------------------------------


def unpack(name: str, root: Path, target_of: Callable[[tuple[str, ...]], tuple[str, ...] | None]) -> Path:
    """The folder of a set that is published as one archive, which is unpacked if the folder is missing.

    `target_of` maps the parts of a member's path to its place inside the folder, or to None to skip it: an archive can
    write nowhere else. The folder appears complete or not at all, so several workers may start at once. Raises Missing
    if there is neither, DamagedData for a damaged archive, and MachineError if the root cannot be written to.
    """
    folder = root / catalogue.dataset_facts(name).folder
    published = catalogue.archive(name)
    assert published is not None
    archive = root / published.path
    if folder.is_dir():
        return folder
    if not archive.is_file():
        raise missing_error(name, root, folder, archive)
    count = 0
    try:
        with (
            tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=root) as temporary,
            tarfile.open(archive, "r|*") as tar,
        ):
            staging = Path(temporary, folder.name)  # with the umask's permissions: other users may share the root
            for member in tar:
                target_parts = target_of(PurePosixPath(member.name).parts) if member.isfile() else None
                source = tar.extractfile(member) if target_parts else None
                if target_parts is None or source is None:
                    continue
                target = staging.joinpath(*target_parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as handle:
                    shutil.copyfileobj(source, handle)
                count += 1
            if not count:
                raise DamagedData(f"{archive} has none of the files of {catalogue.dataset_facts(name).title}")
            try:
                os.rename(staging, folder)
            except OSError:
                if not folder.is_dir():  # else another worker was first
                    raise
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damage(archive, "a tar archive", error) from None
    except OSError as error:
        raise MachineError(f"cannot unpack {archive} into {root}: {error.strerror or error}") from None
    return folder


def as_labels(values: Any) -> Labels:
    """Integers as an (N,) int64 array. Raises ValueError for anything else."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("labels are not a list of integers")
    return array.astype(np.int64)
