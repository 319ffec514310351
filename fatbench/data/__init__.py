"""Data sets: readers of the published files, below one root folder, into uint8 arrays.

    catalogue       facts about each data set: classes, shape, counts, files, checksums, licence
    disk            data sets on disk: what is there, whether it is complete, how to fetch it
    common          what the readers share: `Dataset`, checksums, unpacking
    arrays          MNIST, Fashion-MNIST, SVHN, digits
    cifar           CIFAR-10 and CIFAR-100
    image_folders   folders of images, CINIC-10, CelebA
    hosted          torchvision's data sets and Hugging Face's
    decoded         the cache of decoded images
    own             data sets of a plug-in
    own_objects     images and labels of a running program

A wrong checksum is an error unless the suite declares it as `variant: NAME`. Every data set carries the SHA-256 of its
arrays, so that two tables can be held to the same images. Nothing here imports torch, and numpy is imported with the
first reader that is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fatbench import settings
from fatbench.data.catalogue import class_folders
from fatbench.data.disk import prepare, status, verify, weights_status
from fatbench.errors import SpecError
from fatbench.suite.entry import DataEntry, Images
from fatbench.suite.facts import First
from fatbench.suite.types import Count, Fraction, Natural

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["DATASETS", "Dataset", "prepare", "status", "verify", "weights_status"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """One data set in memory, or memory-mapped: images (N, C, H, W) uint8, labels (N,) int64 in 0..classes-1.

    `writers` and `test_writers` (N,) int64 are the person behind each example (CelebA: the celebrity's number), or
    None. `fingerprint` is the SHA-256 over all arrays, `variant` the suite's name for files that are not the published
    ones, `doubts` is {doubt about the arrays: how many}, and `note` names the files of a folder that were not read.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    classes: int
    writers: NDArray[np.int64] | None
    test_writers: NDArray[np.int64] | None
    name: str
    variant: str | None
    fingerprint: str
    doubts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


def cifar10(root: Path, *, variant: str | None = None) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images of 32x32 in 10 classes.

    Reads root/cifar-10-batches-py/{data_batch_1..5,test_batch}, or unpacks root/cifar-10-python.tar.gz. The files are
    pickles and are read without executing anything. Source: Krizhevsky 2009.
    """
    from fatbench.data import cifar, common

    return common.finish("cifar10", variant, cifar.load("cifar10", root))


def cifar100(root: Path, *, variant: str | None = None) -> Dataset:
    """CIFAR-100 with its 100 fine labels: 50,000 + 10,000 colour images of 32x32.

    Reads root/cifar-100-python/{train,test}, or unpacks root/cifar-100-python.tar.gz, as `cifar10` does.
    Source: Krizhevsky 2009.
    """
    from fatbench.data import cifar, common

    return common.finish("cifar100", variant, cifar.load("cifar100", root))


def svhn(root: Path, *, variant: str | None = None) -> Dataset:
    """SVHN, cropped digits: 73,257 + 26,032 colour images of 32x32 in 10 classes; the extra set is not used.

    Reads {train,test}_32x32.mat in root, root/svhn or root/SVHN. The published label 10 is the digit 0.
    Source: Netzer et al. 2011.
    """
    from fatbench.data import arrays, common

    return common.finish("svhn", variant, arrays.load_svhn(root))


def celeba(
    root: Path,
    *,
    split: Literal["recipe", "json"] = "recipe",
    sample: Fraction = 0.05,
    least: Count = 5,
    seed: Natural = 0,
    variant: str | None = None,
) -> Dataset:
    """CelebA as in LEAF: is this celebrity smiling? One writer per celebrity, 84x84 colour images.

    `split: recipe` makes LEAF's split from root/celeba/{identity_CelebA.txt,list_attr_celeba.txt} (or from LEAF's
    all_data/*.json): the draws of `preprocess.sh -s niid --sf SAMPLE -k LEAST -t sample --tf 0.9` with both its seeds
    set to `seed`. `split: json` reads LEAF's own train/*.json and test/*.json, in root/celeba or root/celeba/data.
    Images come from img_align_celeba, a folder or the published zip. The lists have published checksums, the images do
    not. Source: Caldas et al. 2018 (LEAF); SFAT's Table 19 has 455 clients, from a draw that it does not state.
    """
    from fatbench.data import common, image_folders

    if split == "json" and (sample, least, seed) != (0.05, 5, 0):
        raise SpecError("celeba: sample, least and seed need 'split: recipe'; LEAF's json files fix the sample")
    return common.finish("celeba", variant, image_folders.load_celeba(root, split, sample, least, seed))


def celeba_sample(*, split: str, sample: float) -> Images:
    """The approximate size of LEAF's sample; that of its json files is unknown."""
    if split == "json":
        return Images(None, None, 2, 84, 3, about=True)
    test = round(sample * (0.1 * 200_288 + 0.45 * 9343))
    return Images(round(sample * 200_288) - test, test, 2, 84, 3, about=True)


def mnist(root: Path, *, variant: str | None = None) -> Dataset:
    """MNIST: 60,000 + 10,000 grey images of 28x28 in 10 classes.

    Reads root/MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz|.xz]; of several, the .gz. The checksums are
    those of the uncompressed content. Source: LeCun et al. 1998.
    """
    from fatbench.data import arrays, common

    return common.finish("mnist", variant, arrays.load_idx("mnist", root))


def fashion_mnist(root: Path, *, variant: str | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28x28 in 10 classes.

    Reads root/FashionMNIST/raw/..., the same files as `mnist`, or those of the Debian package dataset-fashion-mnist in
    /usr/share/datasets/fashion-mnist. Source: Xiao et al. 2017.
    """
    from fatbench.data import arrays, common

    return common.finish("fashion_mnist", variant, arrays.load_idx("fashion_mnist", root))


def cinic10(root: Path, first: First = (None, None), *, enlarge: bool = False, variant: str | None = None) -> Dataset:
    """CINIC-10: 90,000 training and 90,000 test colour images of 32x32 in the 10 classes of CIFAR-10.

    Reads root/CINIC-10/{train,valid,test}/<class>/*.png, or unpacks root/CINIC-10.tar.gz. `enlarge` adds the 90,000
    validation images after the training images. The unpacked images have no published checksums: their numbers are
    checked. They are ordered by a hash of their names, so that the first n are a fair sample.
    Source: Darlow et al. 2018.
    """
    from fatbench.data import common, image_folders

    counts = (180_000 if enlarge else 90_000, 90_000)
    return common.finish("cinic10", variant, image_folders.load_cinic(root, enlarge, first), counts)


def cinic_images(*, enlarge: bool) -> Images:
    """CINIC-10's images, with or without its validation images."""
    return Images(180_000 if enlarge else 90_000, 90_000, 10, 32, 3)


def image_folder(
    root: Path, first: First = (None, None), *, path: str, size: Count, variant: str | None = None
) -> Dataset:
    """Any images: path/train/<class>/*.png (or .jpg, ...) and path/test/<class>/*.png, `path` absolute or below root.

    Classes are the folders of train in the order of their names. Every image becomes RGB (16 bits of grey are scaled)
    and is resized to `size` x `size` if necessary (bicubic, without cropping). Images are ordered by a hash of class
    and file name, so that the first n are a fair sample. Files of other suffixes and in subfolders are not read, but
    counted.
    """
    from fatbench.data import common, image_folders

    return common.finish("image_folder", variant, image_folders.load_image_folder(root, path, size, first))


def counted_files(*, path: str, size: int) -> Images:
    """The images that are in the folder now."""
    folder = settings.data_folder() / Path(path).expanduser()

    classes: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for split in classes:
        with suppress(OSError):
            classes[split] = class_folders(folder / split)
    train, test = (sum(map(len, files.values())) or None for files in classes.values())
    return Images(train, test, len(classes["train"]) or None, size, 3, about=True)


def torchvision(
    data_folder: Path,
    first: First = (None, None),
    /,
    *,
    dataset: str,
    size: Count,
    grey: bool = False,
    train_split: str = "train",
    test_split: str = "test",
    variant: str | None = None,
    **settings: Any,
) -> Dataset:
    """Any class of torchvision.datasets: {name: torchvision, dataset: KMNIST, size: 28, grey: true}.

    Images become RGB, or grey, and are resized (bicubic) to `size` x `size` without cropping. The class's own argument
    `train`, else `split`, gives both parts; without either, every fifth image of each class is a test image. Parts
    that are sorted by class are reordered by a hash, so that the first n are a fair sample. Other settings go to the
    class: {name: torchvision, dataset: EMNIST, split: letters, ...}. It reads its files in the data folder, or in
    `root` below it, and fetches nothing.
    """
    from fatbench.data import common, hosted

    loaded = hosted.load_torchvision(data_folder, dataset, size, grey, (train_split, test_split), settings, first)
    return common.finish("torchvision", variant, loaded)


def images_of_size(*, size: int, grey: bool) -> Images:
    """Images of the suite's size, whose number only the package knows."""
    return Images(side=size, channels=1 if grey else 3)


def huggingface(
    root: Path,
    first: First = (None, None),
    *,
    dataset: str,
    size: Count,
    grey: bool = False,
    config: str | None = None,
    image: str = "image",
    label: str = "label",
    train_split: str = "train",
    test_split: str = "test",
    variant: str | None = None,
) -> Dataset:
    """A data set of the Hugging Face hub, or a folder written by `save_to_disk`, through the package `datasets`.

    {name: huggingface, dataset: ylecun/mnist, size: 28, grey: true}. `image` and `label` name the columns. Images
    become RGB, or grey, and are resized (bicubic) to `size` x `size` without cropping. A split that is sorted by class
    is reordered by a hash, so that the first n are a fair sample. `root` is not used: the package fetches into its own
    cache. Needs `pip install datasets`.
    """
    from fatbench.data import common, hosted

    loaded = hosted.load_huggingface(dataset, config, size, grey, (train_split, test_split), (image, label), first)
    return common.finish("huggingface", variant, loaded)


def digits(root: Path, *, variant: str | None = None) -> Dataset:
    """Scikit-learn's digits: 1,797 grey images of 8x8 in 10 classes, always available.

    Every fifth image of each class is a test image (355), the rest train (1,442). Values 0..16 become 0..255.
    `root` is not used. Source: Alpaydin and Kaynak 1998 (the test set of the UCI collection).
    Who of its 13 writers wrote which image is not published; here the images in file order are cut into 13 equal parts.
    """
    from fatbench.data import arrays, common

    return common.finish("digits", variant, arrays.load_digits())


def plane(root: Path, *, variant: str | None = None) -> Dataset:
    """800 + 200 points of the unit square, below and above a wave: 2 classes of images of 1x1 with 2 channels, x and y.

    The wave is y = 1/2 + sin(2 pi x) / 5. Points lie evenly (the R2 sequence), none closer than 1/20 to the wave in y;
    the first 500 of each class, of which every fifth is a test point. Rounded to 1/255. `root` is not used.
    Source: ours, for SFAT's toy of two clients (Zhu et al. 2023, Figure 5; differences: sfat-toy); Roberts 2018 for R2.
    """
    from fatbench.data import arrays, common

    return common.finish("plane", variant, arrays.load_plane())


DATASETS: dict[str, Callable[..., Dataset]] = {
    "cifar10": DataEntry(cifar10, images=Images(50_000, 10_000, 10, 32, 3), cites=("krizhevsky2009",)),
    "cifar100": DataEntry(cifar100, images=Images(50_000, 10_000, 100, 32, 3), cites=("krizhevsky2009",)),
    "svhn": DataEntry(svhn, images=Images(73_257, 26_032, 10, 32, 3), cites=("netzer2011",)),
    "celeba": DataEntry(celeba, images=celeba_sample, parts=("writers",), cites=("caldas2018", "liu2015")),
    "mnist": DataEntry(mnist, images=Images(60_000, 10_000, 10, 28, 1), cites=("lecun1998",)),
    "fashion_mnist": DataEntry(fashion_mnist, images=Images(60_000, 10_000, 10, 28, 1), cites=("xiao2017",)),
    "cinic10": DataEntry(cinic10, images=cinic_images, cites=("darlow2018",)),
    "image_folder": DataEntry(image_folder, images=counted_files),
    "torchvision": DataEntry(torchvision, images=images_of_size),
    "huggingface": DataEntry(huggingface, images=images_of_size),
    "digits": DataEntry(digits, images=Images(1442, 355, 10, 8, 1), parts=("writers",), cites=("alpaydin1998",)),
    "plane": DataEntry(plane, images=Images(800, 200, 2, 1, 2), cites=("zhu2023",)),
}
