"""MNIST and Fashion-MNIST (idx files), SVHN (.mat files), scikit-learn's digits (a csv inside the package)."""

from __future__ import annotations

import gzip
import importlib.util
import io
import lzma
import warnings
from pathlib import Path

import numpy as np

from fatbench.data import catalogue
from fatbench.data.common import Check, Images, Labels, Loaded, as_labels, md5, missing_error, parsing, read_bytes
from fatbench.errors import MachineError

# --- MNIST, Fashion-MNIST -----------------------------------------------------------------------------------------

IDX_IMAGES, IDX_LABELS = 0x00000803, 0x00000801  # unsigned bytes, 3 and 1 dimensions


# first bytes -> what packs a file, whatever its name says
PACKED = {b"\x1f\x8b": ("a gzip file", gzip.decompress), b"\xfd7zXZ\0": ("an xz file", lzma.decompress)}


def idx_file(published: Path) -> Path:
    """The file to read for a published .gz: itself, a .xz, or the uncompressed file.

    Some programs unpack train-images-idx3-ubyte.gz as train-images.idx3-ubyte, or into a folder of that name.
    """
    name = published.stem
    choices = [
        published.parent / folder / f"{stem}{suffix}"
        for stem in (name, name.replace("-idx", ".idx"))
        for folder in ("", stem)
        for suffix in (".gz", ".xz", "")
    ]
    return next((path for path in choices if path.is_file()), published)


def idx_files(name: str, root: Path) -> list[Path]:
    """The files to read for "mnist" or "fashion_mnist": below the root, else those of a system package.

    A folder with all files is preferred. Missing files are listed with their published names. Raises Missing if no
    folder has any.
    """
    facts, published = catalogue.dataset_facts(name), catalogue.files(name)
    folders = [root / facts.folder, *([Path(facts.package)] if facts.package else [])]
    choices = [[idx_file(folder / Path(file.path).name) for file in published] for folder in folders]
    for condition in (all, any):
        for files in choices:
            if condition(path.is_file() for path in files):
                return files
    raise missing_error(name, root, *folders)


def load_idx(name: str, root: Path) -> Loaded:
    """The arrays of `name` ("mnist" or "fashion_mnist"), with checksums of the uncompressed contents."""
    facts, paths = catalogue.dataset_facts(name), idx_files(name, root)
    assert facts.classes is not None
    contents, checks = [], []
    for path, file in zip(paths, catalogue.files(name), strict=True):
        data = read_bytes(path)
        for start, (kind, decompress) in PACKED.items():
            if data.startswith(start):
                with parsing(path, kind):
                    data = decompress(data)
                break
        assert file.content is not None
        checks.append(Check(path, file.content, md5(data)))
        contents.append(data)
    train_images, train_labels, test_images, test_labels = (
        read_idx(data, path) for data, path in zip(contents, paths, strict=True)
    )
    return Loaded(
        where=paths[0].parent,
        train_images=train_images.reshape(-1, 1, *train_images.shape[1:]),
        train_labels=train_labels.astype(np.int64),
        test_images=test_images.reshape(-1, 1, *test_images.shape[1:]),
        test_labels=test_labels.astype(np.int64),
        classes=facts.classes,
        checks=tuple(checks),
        whole=True,
    )


def read_idx(data: bytes, path: Path) -> Images:
    """The uint8 array of an idx file: (N, H, W) where its name says images, else (N,).

    DamagedData: another magic number, or a size that is not what the header says.
    """
    images = "images" in path.name
    dimensions = 3 if images else 1
    header = 4 * (1 + dimensions)
    with parsing(path, "an idx file"):
        if len(data) < header:
            raise ValueError(f"{len(data)} bytes")
        magic, *shape = (int(number) for number in np.frombuffer(data, ">u4", 1 + dimensions))
        if magic != (IDX_IMAGES if images else IDX_LABELS):
            raise ValueError(f"magic number {magic:#010x}")
        expected_bytes = header + int(np.prod(shape, dtype=object))
        if len(data) != expected_bytes:
            raise ValueError(f"file has {len(data):,} bytes, header says {expected_bytes:,}: truncated?")
        return np.frombuffer(data, np.uint8, offset=header).reshape(shape).copy()  # writable


# --- SVHN ---------------------------------------------------------------------------------------------------------


def svhn_files(root: Path) -> tuple[Path, Path]:
    """The training and the test file, each in root, root/svhn or root/SVHN; where it is in none, in root/svhn."""
    train, test = (
        next((path for path in (root / name, root / "svhn" / name, root / "SVHN" / name) if path.is_file()),
             root / "svhn" / name)
        for name in (Path(file.path).name for file in catalogue.files("svhn"))
    )  # fmt: skip
    return train, test


def load_svhn(root: Path) -> Loaded:
    """The arrays of SVHN's two .mat files."""
    facts, published, paths = catalogue.dataset_facts("svhn"), catalogue.files("svhn"), svhn_files(root)
    assert facts.classes is not None
    if not any(path.is_file() for path in paths):
        raise missing_error("svhn", root, *(root / folder / paths[0].name for folder in ("", "svhn", "SVHN")))
    (train_images, train_labels, train_md5), (test_images, test_labels, test_md5) = map(read_mat, paths)
    return Loaded(
        where=paths[0].parent,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=facts.classes,
        checks=(Check(paths[0], published[0].md5, train_md5), Check(paths[1], published[1].md5, test_md5)),
        whole=True,
    )


def read_mat(path: Path) -> tuple[Images, Labels, str]:
    """One file: images (N, 3, 32, 32) uint8, labels (N,) int64 with the published 10 as 0, the file's md5."""
    import scipy.io

    data = read_bytes(path)
    with parsing(path, "an SVHN .mat file"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = scipy.io.loadmat(io.BytesIO(data), variable_names=("X", "y"))
        pixels, labels = content["X"], as_labels(content["y"].reshape(-1))
        if pixels.dtype != np.uint8 or pixels.ndim != 4:
            raise ValueError("X is not an array of bytes in four dimensions")
        if pixels.shape[3] != len(labels):
            raise ValueError(f"{pixels.shape[3]} images, {len(labels)} labels")
        labels[labels == 10] = 0
        return np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)), labels, md5(data)


# --- digits -------------------------------------------------------------------------------------------------------

DIGITS_MD5 = "a0339c30a8a5312a1b6f9e5c719dcce5"
DIGITS_WRITERS = 13


def digits_file() -> Path:
    """The file of scikit-learn's digits, found without importing scikit-learn, which takes seconds."""
    module_spec = importlib.util.find_spec("sklearn")
    if module_spec is None or not module_spec.submodule_search_locations:
        raise MachineError("scikit-learn, which contains the digits, is not installed")
    return Path(module_spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def load_digits() -> Loaded:
    """Every fifth image of each class, in file order, is a test image; v in 0..16 becomes round(255 v / 16)."""
    path = digits_file()
    data = read_bytes(path)
    with parsing(path, "a gzip file"):
        text = gzip.decompress(data)
    with parsing(path, "scikit-learn's digits"):
        table = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.int64, ndmin=2)
        if table.shape[1] != 65 or table[:, :64].min() < 0 or table[:, :64].max() > 16:
            raise ValueError("not 64 values in 0..16 and a label in each line")
    images = ((table[:, :64] * 255 + 8) // 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    labels = table[:, 64].copy()
    rank = np.empty_like(labels)  # 0, 1, 2, ... within each class
    for label in np.unique(labels):
        rank[labels == label] = np.arange(np.count_nonzero(labels == label))
    test = rank % 5 == 4
    writers = np.arange(len(labels)) * DIGITS_WRITERS // len(labels)
    return Loaded(
        where=path,
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
        classes=10,
        writers=writers[~test],
        test_writers=writers[test],
        checks=(Check(path, DIGITS_MD5, md5(text)),),  # of the text, because gzip may be repacked
    )


# --- plane --------------------------------------------------------------------------------------------------------


def load_plane() -> Loaded:
    """The points of `fatbench.data.plane`, by formula: x and y as the two channels of an image of one pixel."""
    plastic = 1.32471795724474602596  # the real root of x^3 = x + 1
    n = np.arange(1, 1601)
    points = np.stack([(0.5 + n / plastic) % 1, (0.5 + n / plastic**2) % 1], 1)
    height = points[:, 1] - (0.5 + np.sin(2 * np.pi * points[:, 0]) / 5)
    chosen_points = np.sort(np.concatenate([np.flatnonzero(height * side > 0.05)[:500] for side in (-1, 1)]))
    images = np.rint(255 * points[chosen_points]).astype(np.uint8).reshape(-1, 2, 1, 1)
    labels = (height[chosen_points] > 0).astype(np.int64)
    rank = np.where(labels == 1, np.cumsum(labels == 1), np.cumsum(labels == 0))  # 1, 2, ... within each class
    test = rank % 5 == 0
    return Loaded(
        where=Path("the formula"),
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
        classes=2,
    )
