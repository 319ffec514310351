"""Facts about each data set before it is read: classes, shape, counts, files, checksums, sizes, licence.

Imports neither torch nor numpy, so `fatbench plan` can count images. Checksums and addresses are literals, which a test
compares with torchvision's; CINIC-10 and the checksums of uncompressed MNIST files are not in torchvision.

    dataset_facts("cifar10").train        50000
    files("cifar10")                      what the reader opens, with the published md5
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite.weights import WEIGHTS


@dataclass(frozen=True)
class DatasetFacts:
    """One data set: numbers of images in `train` and `test`, `shape` (C, H, W); None if only the files tell."""

    title: str
    classes: int | None
    shape: tuple[int, int, int] | None
    train: int | None
    test: int | None
    folder: str  # of the published files, below the root
    download: int  # bytes to fetch
    home: str
    licence: str
    exact: bool = True  # False: `train` and `test` are approximate (a random sample of the published images)
    package: str | None = None  # folder of a system package (Debian, Ubuntu)
    balanced: bool = False  # whether the test set has equally many images of each class
    split_here: bool = False  # whether fatbench chooses the test images, because the publisher does not

    @property
    def memory(self) -> int | None:
        """Bytes of the images once loaded as uint8."""
        if self.shape is None or self.train is None or self.test is None:
            return None
        channels, height, width = self.shape
        return (self.train + self.test) * channels * height * width


_KRIZ = "https://www.cs.toronto.edu/~kriz/cifar.html"

CATALOGUE = {
    "cifar10": DatasetFacts(
        "CIFAR-10", 10, (3, 32, 32), 50_000, 10_000, "cifar-10-batches-py", 170_498_071, _KRIZ,
        "none stated; cite Krizhevsky 2009", balanced=True,
    ),
    "cifar100": DatasetFacts(
        "CIFAR-100", 100, (3, 32, 32), 50_000, 10_000, "cifar-100-python", 169_001_437, _KRIZ,
        "none stated; cite Krizhevsky 2009", balanced=True,
    ),
    "svhn": DatasetFacts(
        "SVHN", 10, (3, 32, 32), 73_257, 26_032, "svhn", 246_316_178, "http://ufldl.stanford.edu/housenumbers/",
        "non-commercial use only",
    ),
    # Counts of the default sample: 5 % of the 200,288 images of celebrities with at least 5; the seed picks them.
    "celeba": DatasetFacts(
        "CelebA", 2, (3, 84, 84), 8_802, 1_212, "celeba", 1_473_636_322,
        "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "non-commercial research only", exact=False,
        split_here=True,
    ),
    "mnist": DatasetFacts(
        "MNIST", 10, (1, 28, 28), 60_000, 10_000, "MNIST/raw", 11_594_722, "http://yann.lecun.com/exdb/mnist/",
        "CC BY-SA 3.0",
    ),
    "fashion_mnist": DatasetFacts(
        "Fashion-MNIST", 10, (1, 28, 28), 60_000, 10_000, "FashionMNIST/raw", 30_878_645,
        "https://github.com/zalandoresearch/fashion-mnist", "MIT", package="/usr/share/datasets/fashion-mnist",
        balanced=True,
    ),
    "cinic10": DatasetFacts(
        "CINIC-10", 10, (3, 32, 32), 90_000, 90_000, "CINIC-10", 687_544_992, "https://doi.org/10.7488/ds/2448",
        "CC BY 4.0; the images keep the terms of ImageNet and CIFAR-10", balanced=True,
    ),
    "image_folder": DatasetFacts("image folder", None, None, None, None, "", 0, "", "yours"),
    "torchvision": DatasetFacts("a class of torchvision", None, None, None, None, "", 0, "", "its own"),
    "huggingface": DatasetFacts("a Hugging Face data set", None, None, None, None, "", 0, "", "its own"),
    "digits": DatasetFacts(
        "scikit-learn's digits", 10, (1, 8, 8), 1_442, 355, "", 0,
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits", "CC BY 4.0",
        split_here=True,
    ),
    "plane": DatasetFacts(
        "points in the plane", 2, (2, 1, 1), 800, 200, "", 0, "", "none needed: made by a formula", balanced=True,
    ),
}  # fmt: skip

NAMED_BY_SUITES = ("image_folder", "torchvision", "huggingface")  # their settings name the files
CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CELEBA_IMAGES = 202_599

IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif",
)  # fmt: skip
SYSTEM_FILES = ("thumbs.db", "desktop.ini")  # which Windows puts beside images


def dataset_facts(name: str) -> DatasetFacts:
    """The facts of the set `name` with default settings. Raises SpecError for an unknown name."""
    if name not in CATALOGUE:
        raise SpecError(f"no data is named '{name}'{did_you_mean(name, [*CATALOGUE, *WEIGHTS])}")
    return CATALOGUE[name]


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class folder below `folder`, classes and files in the order of their names."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return {
        class_folder.name: sorted(
            file
            for file in class_folder.iterdir()
            if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
        )
        for class_folder in classes
    }


def unread_files(folder: Path, read: Iterable[Path]) -> list[Path]:
    """The files below a folder of class folders, at any depth, without those `read`, hidden ones and text."""
    names_read, found = {os.fspath(file) for file in read}, []
    for entry in sorted(folder.iterdir()):
        places = os.walk(entry) if entry.is_dir() else [(os.fspath(folder), [], [entry.name])]
        for place, folders, names in places if not entry.name.startswith(".") else ():
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [
                Path(place, name)
                for name in sorted(names)
                if not name.startswith(".")
                and name.lower() not in SYSTEM_FILES
                and os.path.join(place, name) not in names_read
            ]
    return [file for file in found if file.is_file() and not _is_text(file)]


def _is_text(file: Path) -> bool:
    try:
        with file.open("rb") as handle:
            head = handle.read(512)
        codecs.getincrementaldecoder("utf-8")().decode(head)  # its last character may be cut
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in head


# --- published files and their checksums --------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A published file: its path below the root, its md5 (empty: checked in another way), and its addresses.

    `content` is the md5 of a compressed file's content, which does not depend on the compression.
    """

    path: str
    md5: str
    urls: tuple[str, ...] = ()
    content: str | None = None


def _cifar(folder: str, sums: Mapping[str, str]) -> tuple[File, ...]:
    return tuple(File(f"{folder}/{name}", md5) for name, md5 in sums.items())


def _svhn(name: str, md5: str) -> File:
    return File(f"svhn/{name}", md5, (f"http://ufldl.stanford.edu/housenumbers/{name}",))


def _celeba(name: str, md5: str, drive: str) -> File:
    return File(f"celeba/{name}", md5, (f"https://drive.google.com/file/d/{drive}/view",))


def _idx(folder: str, mirrors: tuple[str, ...], sums: Mapping[str, tuple[str, str]]) -> tuple[File, ...]:
    return tuple(
        File(f"{folder}/raw/{name}.gz", md5, tuple(f"{mirror}{name}.gz" for mirror in mirrors), content)
        for name, (md5, content) in sums.items()
    )


_ARCHIVES = {
    "cifar10": File(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
    ),
    "cifar100": File(
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
    ),
    "cinic10": File(
        "CINIC-10.tar.gz",
        "6ee4d0c996905fe93221de577967a372",
        ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
    ),
}

_FILES = {
    "cifar10": _cifar("cifar-10-batches-py", {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }),
    "cifar100": _cifar("cifar-100-python", {
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    }),
    "svhn": (
        _svhn("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        _svhn("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
    "celeba": (
        _celeba("identity_CelebA.txt", "32bd1bd63d3c78cd57e08160ec5ed1e2", "1_ee_0u7vcNLOfNLegJRHmolfH5ICW-XS"),
        _celeba("list_attr_celeba.txt", "75e246fa4810816ffd6ee81facbd244c", "0B7EVK8r0v71pblRyaVFSWGxPY0U"),
        _celeba("img_align_celeba.zip", "00d2c5bc6d35e252742224ab0c1e8fcb", "0B7EVK8r0v71pZjFTYXZWM3FlRnM"),
    ),
    "mnist": _idx("MNIST", ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"), {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    }),
    "fashion_mnist": _idx("FashionMNIST", ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",), {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    }),
}  # fmt: skip


def archive(name: str) -> File | None:
    """The published archive with all files of the set; None if files are published one by one."""
    return _ARCHIVES.get(name)


def files(name: str) -> tuple[File, ...]:
    """The published files that the reader of `name` checks, in reading order: training first, then test."""
    return _FILES.get(name, ())
