"""Writes small data sets in the layouts in which they are published."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def pixels(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    """(n, *shape) random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


# --- CIFAR --------------------------------------------------------------------------------------------------------


def text(string: str) -> bytes:
    """A Python 2 str in algorithm 2."""
    return b"U" + bytes([len(string)]) + string.encode("ascii")


def array(values: np.ndarray, dtype: str = "u1") -> bytes:
    """A numpy array as Python 2's numpy pickled it: multiarray._reconstruct, then its state."""
    shape = b"".join(b"J" + struct.pack("<i", size) for size in values.shape) + b"\x86"
    described = b"cnumpy\ndtype\n" + text(dtype) + b"K\x00K\x01\x87R(K\x03" + text("|")
    described += b"NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\x00tb"
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R"
    raw = values.tobytes()
    return head + b"(K\x01" + shape + described + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"


def cifar_batch(images: np.ndarray, labels: Sequence[int], key: str = "labels") -> bytes:
    """One CIFAR batch in the bytes that Python 2 wrote; images (N, 3072)."""
    body = text("batch_label") + text("training batch 1 of 5")
    if key == "fine_labels":
        body += text("coarse_labels") + b"](" + b"K\x00" * len(labels) + b"e"
    body += text(key) + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    body += text("data") + array(images)
    body += text("filenames") + b"](" + b"".join(text(f"image_{i}.png") for i in range(len(labels))) + b"e"
    return b"\x80\x02}(" + body + b"u."


def write_cifar10(root: Path, n: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Five batches and a test batch of n images each. Returns the images (6n, 3072) and labels (6n,)."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = pixels(6 * n, 3072), np.arange(6 * n) % 10
    for i, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        part = slice(i * n, (i + 1) * n)
        (folder / name).write_bytes(cifar_batch(images[part], labels[part].tolist()))
    return images, labels


def write_cifar100(root: Path, n: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """A training and a test file of n images each."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    images, labels = pixels(2 * n, 3072, seed=1), np.arange(2 * n) % 100
    for i, name in enumerate(("train", "test")):
        part = slice(i * n, (i + 1) * n)
        (folder / name).write_bytes(cifar_batch(images[part], labels[part].tolist(), "fine_labels"))
    return images, labels


def tar_folder(archive: Path, folder: Path, inside: str) -> None:
    """Pack a folder as `inside`/... into a .tar.gz, and remove it."""
    with tarfile.open(archive, "w:gz") as tar:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                tar.add(file, str(Path(inside, file.relative_to(folder))))
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    folder.rmdir()


def tar_add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """One file of the given name and content."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


# --- MNIST, SVHN --------------------------------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    """An idx file of unsigned bytes."""
    return struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()


def write_mnist(root: Path, folder: str = "MNIST", n: int = 20, packed: bool = True) -> np.ndarray:
    """n training and n test images, packed or not. Returns the images (2n, 28, 28); the labels are i % 10."""
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    images, labels = pixels(2 * n, 28, 28, seed=2), (np.arange(2 * n) % 10).astype(np.uint8)
    for i, split in enumerate(("train", "t10k")):
        part = slice(i * n, (i + 1) * n)
        for name, values in (("images-idx3", images[part]), ("labels-idx1", labels[part])):
            if packed:
                (raw / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(values), mtime=0))
            else:
                (raw / f"{split}-{name}-ubyte").write_bytes(idx(values))
    return images


def write_svhn(folder: Path, n: int = 20) -> np.ndarray:
    """Two .mat files of n images, labels 1..10 in turn. Returns X of the training file, (32, 32, 3, n)."""
    import scipy.io

    folder.mkdir(parents=True, exist_ok=True)
    labels = (np.arange(n) % 10 + 1).astype(np.uint8).reshape(-1, 1)
    for i, split in enumerate(("train", "test")):
        x = np.asfortranarray(np.moveaxis(pixels(n, 32, 32, 3, seed=3 + i), 0, 3))
        scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": x, "y": labels}, do_compression=True)
    return np.moveaxis(pixels(n, 32, 32, 3, seed=3), 0, 3)


# --- folders of images --------------------------------------------------------------------------------------------


def save(file: Path, size: tuple[int, int], colour: Any, mode: str = "RGB") -> None:
    """One image of a single colour; size is (width, height)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)


def write_cinic(root: Path, n: int = 2) -> Path:
    """n images for each class and split; red is 10 * class + split (0, 1, 2), green the image's number."""
    folder = root / "CINIC-10"
    for s, split in enumerate(("train", "valid", "test")):
        for c, name in enumerate(CLASSES):
            for i in range(n):
                save(folder / split / name / f"{split}-{i}.png", (32, 32), (10 * c + s, i, 0))
    return folder


def write_image_folder(folder: Path, n: int = 3) -> Path:
    """Classes ant and bee, n training images and one test image (blue 1) each: 12x12 PNG, red 10 and 200."""
    for name, red in (("ant", 10), ("bee", 200)):
        for i in range(n):
            save(folder / "train" / name / f"{i}.png", (12, 12), (red, i, 0))
        save(folder / "test" / name / "t.png", (12, 12), (red, 0, 1))
    return folder


# --- CelebA -------------------------------------------------------------------------------------------------------


def write_celeba(root: Path, sizes: Mapping[int, int], images: bool = True) -> Path:
    """The two lists and the aligned images (178x218 JPEG) of celebrities with the given numbers of images.

    Image i (from 1) is 00000i.jpg, smiles where i is even, and has grey value i.
    """
    base = root / "celeba"
    base.mkdir(parents=True)
    owners = [celebrity for celebrity, count in sizes.items() for _ in range(count)]
    names = [f"{i:06d}.jpg" for i in range(1, len(owners) + 1)]
    lines = [f"{name} {owner}" for name, owner in zip(names, owners, strict=True)]
    (base / "identity_CelebA.txt").write_text("\n".join(lines) + "\n")
    rows = [f"{name} -1 {1 if i % 2 == 0 else -1:2d}" for i, name in enumerate(names, 1)]
    (base / "list_attr_celeba.txt").write_text("\n".join([str(len(names)), "Bald Smiling ", *rows]) + "\n")
    if images:
        for i, name in enumerate(names, 1):
            save(base / "img_align_celeba" / name, (178, 218), (i, i, i))
    return base


def zip_images(base: Path) -> None:
    """Put the folder of aligned images into the published zip, and remove it."""
    folder = base / "img_align_celeba"
    with zipfile.ZipFile(base / "img_align_celeba.zip", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"img_align_celeba/{file.name}")
            file.unlink()
    folder.rmdir()


def write_leaf(file: Path, users: Mapping[str, Sequence[tuple[str, float]]]) -> None:
    """One of LEAF's json files: {user: [(file name, label), ...]}."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "users": list(users),
        "num_samples": [len(shots) for shots in users.values()],
        "user_data": {
            user: {"x": [name for name, _ in shots], "y": [label for _, label in shots]}
            for user, shots in users.items()
        },
    }
    file.write_text(json.dumps(data))
