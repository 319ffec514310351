"""What is known of each data set before any of it is read: classes, shape, counts, files, checksums, sizes, licence.

Imports neither torch nor numpy, so `fatbench plan` can count images. Checksums and addresses are torchvision's own:
they are read from its source (importing torchvision would import torch). What torchvision lacks stands here: CINIC-10,
and the checksums of the MNIST files after gunzip.

    facts({"name": "cifar10"}).train        50000
    files("cifar10")                        what the reader opens, with the published md5
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fatbench.errors import MachineError, SpecError, did_you_mean


@dataclass(frozen=True)
class Facts:
    """One data set. `train` and `test` are numbers of images, `shape` is (C, H, W); None where only the files know."""

    title: str
    classes: int | None
    shape: tuple[int, int, int] | None
    train: int | None
    test: int | None
    folder: str  # where the published files lie, below the root
    download: int  # bytes to fetch
    home: str
    licence: str
    exact: bool = True  # False: `train` and `test` are about right (a drawn sample of the published images)

    @property
    def memory(self) -> int | None:
        """Bytes of the images once loaded as uint8."""
        if self.shape is None or self.train is None or self.test is None:
            return None
        channels, height, width = self.shape
        return (self.train + self.test) * channels * height * width


_KRIZ = "https://www.cs.toronto.edu/~kriz/cifar.html"

CATALOGUE = {
    "cifar10": Facts(
        "CIFAR-10", 10, (3, 32, 32), 50_000, 10_000, "cifar-10-batches-py", 170_498_071, _KRIZ,
        "none stated; cite Krizhevsky 2009",
    ),
    "cifar100": Facts(
        "CIFAR-100", 100, (3, 32, 32), 50_000, 10_000, "cifar-100-python", 169_001_437, _KRIZ,
        "none stated; cite Krizhevsky 2009",
    ),
    "svhn": Facts(
        "SVHN", 10, (3, 32, 32), 73_257, 26_032, "svhn", 246_316_178, "http://ufldl.stanford.edu/housenumbers/",
        "non-commercial use only",
    ),
    # Counts of the default draw (5 % of 200,288 images of celebrities with at least 5): which images, the seed decides.
    "celeba": Facts(
        "CelebA", 2, (3, 84, 84), 8_802, 1_212, "celeba", 1_473_636_322,
        "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html", "non-commercial research only", exact=False,
    ),
    "mnist": Facts(
        "MNIST", 10, (1, 28, 28), 60_000, 10_000, "MNIST/raw", 11_594_722, "http://yann.lecun.com/exdb/mnist/",
        "CC BY-SA 3.0",
    ),
    "fashion_mnist": Facts(
        "Fashion-MNIST", 10, (1, 28, 28), 60_000, 10_000, "FashionMNIST/raw", 30_878_645,
        "https://github.com/zalandoresearch/fashion-mnist", "MIT",
    ),
    "cinic10": Facts(
        "CINIC-10", 10, (3, 32, 32), 90_000, 90_000, "CINIC-10", 687_544_992, "https://doi.org/10.7488/ds/2448",
        "CC BY 4.0; the images keep the terms of ImageNet and CIFAR-10",
    ),
    "image_folder": Facts("image folder", None, None, None, None, "", 0, "", "yours"),
    "digits": Facts(
        "scikit-learn's digits", 10, (1, 8, 8), 1_442, 355, "", 0,
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits", "CC BY 4.0",
    ),
}  # fmt: skip

CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CELEBA_IMAGES = 202_599
_LEAF_IMAGES, _LEAF_CELEBRITIES = 200_288, 9_343  # of celebrities with at least 5 images (LEAF's statistics)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


def named(name: str) -> Facts:
    """The facts of the set called `name` under its default settings. SpecError: no such set."""
    if name not in CATALOGUE:
        raise SpecError(f"no data is named '{name}'{did_you_mean(name, CATALOGUE)}")
    return CATALOGUE[name]


def facts(spec: Mapping[str, Any], root: Path | None = None) -> Facts:
    """The facts of a data mapping {name: ..., setting: value}.

    The images of an `image_folder` are counted below `root` where the folder exists there; otherwise classes and
    counts stay None.
    """
    known = named(spec["name"])
    if spec["name"] == "cinic10" and spec.get("enlarge"):
        return replace(known, train=180_000)
    if spec["name"] == "celeba":
        if spec.get("split") == "json":
            return replace(known, train=None, test=None)
        share = spec.get("sample", 0.05)
        images, celebrities = share * _LEAF_IMAGES, share * _LEAF_CELEBRITIES
        test = round(0.1 * images + 0.45 * celebrities)  # each celebrity's share of 0.9 is rounded down
        return replace(known, train=round(images) - test, test=test)
    if spec["name"] == "image_folder":
        known = replace(known, shape=(3, spec["size"], spec["size"]))
        folder = Path(root or "", spec["path"]).expanduser()
        if (folder / "train").is_dir() and (folder / "test").is_dir():
            train, test = class_folders(folder / "train"), class_folders(folder / "test")
            return replace(
                known, classes=len(train), train=sum(map(len, train.values())), test=sum(map(len, test.values()))
            )
    return known


def class_folders(folder: Path) -> dict[str, list[Path]]:
    """The image files of each class folder below `folder`, classes and files in the order of their names."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return {
        each.name: sorted(
            file for file in each.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
        )
        for each in classes
    }


# --- published files and their checksums --------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A published file: its path below the root, its md5 (None: not published), the addresses that have it."""

    path: str
    md5: str | None
    urls: tuple[str, ...] = ()


# MD5 of the MNIST files after gunzip; torchvision publishes only those of the .gz files.
_GUNZIPPED = {
    "mnist": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
}

_CINIC = File(
    "CINIC-10.tar.gz",
    "6ee4d0c996905fe93221de577967a372",
    ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
)

# name -> (module, class) in torchvision.datasets
_TORCHVISION = {
    "cifar10": ("cifar", "CIFAR10"),
    "cifar100": ("cifar", "CIFAR100"),
    "svhn": ("svhn", "SVHN"),
    "celeba": ("celeba", "CelebA"),
    "mnist": ("mnist", "MNIST"),
    "fashion_mnist": ("mnist", "FashionMNIST"),
}


@functools.cache
def _torchvision_classes(module: str) -> dict[str, ast.ClassDef]:
    """The class definitions of torchvision.datasets.<module>, from its source."""
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        raise MachineError("torchvision is not installed: it holds the checksums of the published data sets")
    file = Path(found.submodule_search_locations[0], "datasets", f"{module}.py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise MachineError(f"cannot read torchvision's checksums: {error}") from None
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def torchvision_attribute(name: str, attribute: str) -> Any:
    """A literal class attribute (`url`, `tgz_md5`, `resources`, ...) of torchvision's class for the set `name`."""
    module, class_name = _TORCHVISION[name]
    definition = _torchvision_classes(module).get(class_name)
    for statement in definition.body if definition else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if (
                found == attribute and statement.value is not None
            ):
                return ast.literal_eval(statement.value)
    raise MachineError(f"this version of torchvision has no {class_name}.{attribute}: its checksums cannot be read")


def archive(name: str) -> File | None:
    """The published archive that holds all files of the set, or None where the files are published one by one."""
    if name in ("cifar10", "cifar100"):
        file, md5, url = (torchvision_attribute(name, key) for key in ("filename", "tgz_md5", "url"))
        return File(file, md5, (url,))
    return _CINIC if name == "cinic10" else None


def files(name: str) -> tuple[File, ...]:
    """The published files that the reader of `name` checks, in reading order (training first)."""
    return tuple(_files(name))


def _files(name: str) -> Iterator[File]:
    folder = named(name).folder
    if name in ("cifar10", "cifar100"):
        for file, md5 in torchvision_attribute(name, "train_list") + torchvision_attribute(name, "test_list"):
            yield File(f"{folder}/{file}", md5)
    elif name == "svhn":
        for split in ("train", "test"):
            url, file, md5 = torchvision_attribute(name, "split_list")[split]
            yield File(f"{folder}/{file}", md5, (url,))
    elif name in ("mnist", "fashion_mnist"):
        mirrors = torchvision_attribute(name, "mirrors")
        for file, md5 in torchvision_attribute(name, "resources"):
            yield File(f"{folder}/{file}", md5, tuple(mirror + file for mirror in mirrors))
    elif name == "celeba":
        needed = ("identity_CelebA.txt", "list_attr_celeba.txt", "img_align_celeba.zip")
        listed = {file: (identifier, md5) for identifier, md5, file in torchvision_attribute(name, "file_list")}
        for file in needed:
            identifier, md5 = listed[file]
            yield File(f"{folder}/{file}", md5, (f"https://drive.google.com/file/d/{identifier}/view",))


def gunzipped(name: str, file: str) -> str | None:
    """The md5 of an MNIST or Fashion-MNIST file after gunzip; None where it is not known."""
    return _GUNZIPPED.get(name, {}).get(file)
