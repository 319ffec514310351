"""The data layer on small files in the published layouts; pickles that attack; files that are damaged."""

from __future__ import annotations

import errno
import functools
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import struct
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError

import data_layouts as layouts
import numpy as np
import pytest
from PIL import Image

from fatbench.data import DATASETS, Dataset, catalogue, cifar, common, decoded, disk, hosted, image_folders, own
from fatbench.errors import MachineError, SpecError
from fatbench.suite import calls, signatures

CELEBRITIES = {7: 5, 3: 6, 11: 5, 2: 4}  # celebrity -> number of images; the last has too few


# Every set of the table: how to write a small one, and the settings to read it with.
def write_huggingface(root: Path) -> None:
    """A data set of the package `datasets` in ./mine, as its users save it: 6 + 3 grey images of 4x4."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "class": datasets.ClassLabel(names=["a", "b", "c"])})
    parts = {}
    for split, n, dark in (("train", 6, 0), ("test", 3, 1)):
        images = [Image.fromarray(np.full((4, 4), 40 * k + dark, np.uint8)) for k in range(n)]
        columns = {"image": images, "class": [k % 3 for k in range(n)]}
        parts[split] = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict(parts).save_to_disk("mine")


SMALL: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "cifar10": (layouts.write_cifar10, {}),
    "cifar100": (layouts.write_cifar100, {}),
    "svhn": (lambda root: layouts.write_svhn(root / "svhn"), {}),
    "celeba": (lambda root: layouts.write_celeba(root, CELEBRITIES), {"sample": 1.0}),
    "mnist": (layouts.write_mnist, {}),
    "fashion_mnist": (lambda root: layouts.write_mnist(root, "FashionMNIST"), {}),
    "cinic10": (layouts.write_cinic, {}),
    "image_folder": (lambda root: layouts.write_image_folder(root / "mine"), {"path": "mine", "size": 12}),
    "torchvision": (lambda root: None, {"dataset": "FakeData", "size": 6, "image_size": (3, 8, 8), "num_classes": 3}),
    "huggingface": (write_huggingface, {"dataset": "mine", "size": 6, "label": "class"}),
    "digits": (lambda root: None, {}),
    "plane": (lambda root: None, {}),
}


FASHION = Path("/usr/share/datasets/fashion-mnist")  # of the Debian package dataset-fashion-mnist


@pytest.fixture(autouse=True)
def _no_system_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is installed on the machine changes no test."""
    system(monkeypatch, tmp_path / "no-such-package")
    monkeypatch.chdir(tmp_path)


def system(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make `folder` the one where a system package keeps Fashion-MNIST."""
    facts = replace(catalogue.CATALOGUE["fashion_mnist"], package=str(folder))
    monkeypatch.setitem(catalogue.CATALOGUE, "fashion_mnist", facts)


def small(name: str, root: Path) -> Dataset:
    write, settings = SMALL[name]
    write(root)
    return DATASETS[name](root, variant="small", **settings)


def publish(monkeypatch: pytest.MonkeyPatch, root: Path, name: str) -> None:
    """Make the files under the root the published ones of `name`."""
    sums, files = [], catalogue.files
    for file in files(name):
        data = (root / file.path).read_bytes()
        content = None if file.content is None else common.md5(gzip.decompress(data))
        sums.append(catalogue.File(file.path, common.md5(data), file.urls, content))
    monkeypatch.setattr(catalogue, "files", lambda asked: tuple(sums) if asked == name else files(asked))


def message(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    found = str(caught.value)
    assert len(found.splitlines()) == 1
    return found


def damage(name: str, root: Path) -> str:
    return message(common.DamagedData, lambda: DATASETS[name](root, variant="small"))


# --- every member of the table ------------------------------------------------------------------------------------


def test_the_catalogue_and_this_file_cover_the_table() -> None:
    assert list(catalogue.CATALOGUE) == list(DATASETS) == signatures.names("Data")
    assert set(SMALL) == set(DATASETS)


@pytest.mark.parametrize("name", DATASETS)
def test_a_data_set_is_what_the_engine_expects(name: str, tmp_path: Path) -> None:
    data = small(name, tmp_path)
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        assert images.dtype == np.uint8 and images.ndim == 4 and images.flags.c_contiguous and images.flags.writeable
        assert labels.dtype == np.int64 and labels.shape == (len(images),) and labels.flags.writeable
        assert len(images) > 0 and labels.min() >= 0 and labels.max() < data.classes
    assert data.train_images.shape[1:] == data.test_images.shape[1:] == data.shape
    facts = catalogue.dataset_facts(name)
    assert facts.shape in (None, data.shape) and facts.classes in (None, data.classes)
    assert data.name == name and data.variant == "small"
    if name in ("celeba", "digits"):
        assert data.writers is not None and data.test_writers is not None
        assert data.writers.dtype == np.int64 and data.writers.shape == data.train_labels.shape
        assert data.test_writers.shape == data.test_labels.shape
    else:
        assert data.writers is None and data.test_writers is None


def test_the_digits_are_cut_into_thirteen_writers_in_file_order() -> None:
    data = DATASETS["digits"](Path())
    assert data.writers is not None and data.test_writers is not None
    assert (np.diff(data.writers) >= 0).all() and (np.diff(data.test_writers) >= 0).all()
    images = np.bincount(data.writers) + np.bincount(data.test_writers)
    assert len(images) == 13 and images.sum() == 1797 and set(images) == {138, 139}


@pytest.mark.parametrize("name", DATASETS)
def test_the_same_files_give_the_same_fingerprint_and_one_pixel_another(name: str, tmp_path: Path) -> None:
    data = small(name, tmp_path)
    assert DATASETS[name](tmp_path, variant="again", **SMALL[name][1]).fingerprint == data.fingerprint
    arrays = ("train_images", "train_labels", "test_images", "test_labels", "writers")
    fields = {field: getattr(data, field) for field in (*arrays, "classes", "test_writers")}
    if name in ("celeba", "cinic10", "image_folder"):  # that of the files
        files = [file for file in tmp_path.rglob("*") if file.suffix in (".png", ".jpg")]
        for file in files:
            with Image.open(file) as picture:
                changed = picture.convert("RGB")
            changed.paste((9, 9, 9), (0, 0, 9, 9))
            changed.save(file)
        assert files
        assert DATASETS[name](tmp_path, variant="small", **SMALL[name][1]).fingerprint != data.fingerprint
        return
    loaded = common.Loaded(where=tmp_path, **fields)
    assert common.fingerprint(loaded) == data.fingerprint
    for field in arrays:
        if fields[field] is not None:
            fields[field].flat[-1] ^= 1
            assert common.fingerprint(loaded) != data.fingerprint
            fields[field].flat[-1] ^= 1


@pytest.mark.parametrize("name", sorted(catalogue._FILES.keys() | {"cinic10"}))
def test_a_set_that_is_not_there_says_where_it_should_be(name: str, tmp_path: Path) -> None:
    found = message(common.Missing, lambda: DATASETS[name](tmp_path))
    assert found.startswith(f"{catalogue.dataset_facts(name).title} is not in {tmp_path} (searched ")
    assert f"'fatbench fetch {name}'" in found
    assert common.Missing.exit_code == 5


PUBLISHED = ["cifar10", "cifar100", "svhn", "mnist", "fashion_mnist"]


@pytest.mark.parametrize("name", [*PUBLISHED, "celeba"])
def test_a_wrong_checksum_is_an_error_that_says_how_to_name_a_variant(name: str, tmp_path: Path) -> None:
    write, settings = SMALL[name]
    write(tmp_path)
    found = message(common.Differs, lambda: DATASETS[name](tmp_path, **settings))
    first = catalogue.files(name)[0]
    at = next(tmp_path.rglob(Path(first.path).name))
    content = gzip.decompress(at.read_bytes()) if first.content else at.read_bytes()
    assert found.startswith(f"{at} (and ")
    assert f"is {common.md5(content)}, not {first.content or first.md5};" in found
    assert f"data: {{name: {name}, variant: NAME}}" in found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_have_no_variant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SMALL[name][0](tmp_path)
    publish(monkeypatch, tmp_path, name)
    assert DATASETS[name](tmp_path).variant is None
    found = message(MachineError, lambda: DATASETS[name](tmp_path, variant="jpeg"))
    assert "are the published ones: remove 'variant'" in found and "variant: jpeg" in found


def test_truncated_files_are_named(tmp_path: Path) -> None:
    """Every file of every small set in turn is cut at several places; each time the message names it."""
    for name in sorted(set(DATASETS) - {"digits", "plane", "torchvision", "huggingface"}):
        write, settings = SMALL[name]
        root = tmp_path / name
        write(root)
        used = [file for file in sorted(root.rglob("*")) if file.is_file() and file.suffix != ".txt"]
        if name == "celeba":
            used = [file for file in used if int(file.stem) <= 16]  # the fourth celebrity's are not used
        for file in used[:8]:
            whole = file.read_bytes()
            for cut in {0, 1, len(whole) // 3, len(whole) - 1}:
                file.write_bytes(whole[:cut])
                if name in ("celeba", "cinic10", "image_folder") and cut == len(whole) - 1:
                    continue  # Pillow does not need the last byte
                found = message(common.DamagedData, lambda: DATASETS[name](root, variant="small", **settings))  # noqa: B023
                assert found.startswith(f"{file} is truncated or damaged, not "), (name, cut)
            file.write_bytes(whole)
        DATASETS[name](root, variant="small", **settings)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cifar10", "cifar-10-batches-py/data_batch_3"),
        ("cifar100", "cifar-100-python/test"),
        ("svhn", "svhn/test_32x32.mat"),
        ("mnist", "MNIST/raw/t10k-labels-idx1-ubyte.gz"),
        ("celeba", "celeba/list_attr_celeba.txt"),
        ("celeba", "celeba/img_align_celeba/000003.jpg"),
    ],
)
def test_one_missing_file_is_named(name: str, file: str, tmp_path: Path) -> None:
    write, settings = SMALL[name]
    write(tmp_path)
    (tmp_path / file).unlink()
    found = message(common.DamagedData, lambda: DATASETS[name](tmp_path, variant="small", **settings))
    assert found.startswith(f"{tmp_path / file} is missing")


# --- CIFAR --------------------------------------------------------------------------------------------------------


def test_cifar10_images_are_channel_planes_in_file_order(tmp_path: Path) -> None:
    """A row of 3072 bytes is 1024 red, 1024 green, 1024 blue, each row by row."""
    images, labels = layouts.write_cifar10(tmp_path, n=10)
    data = DATASETS["cifar10"](tmp_path, variant="small")
    assert data.train_images.shape == (50, 3, 32, 32) and data.test_images.shape == (10, 3, 32, 32)
    assert data.train_images[12, 1, 5, 7] == images[12, 1024 + 5 * 32 + 7]
    assert np.array_equal(np.concatenate([data.train_images, data.test_images]).reshape(60, 3072), images)
    assert np.array_equal(np.concatenate([data.train_labels, data.test_labels]), labels)


def test_cifar100_has_the_fine_labels(tmp_path: Path) -> None:
    _, labels = layouts.write_cifar100(tmp_path)
    data = DATASETS["cifar100"](tmp_path, variant="small")
    assert data.classes == 100 and np.array_equal(data.train_labels, labels[:100])


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_batch_that_python_3_pickled_is_read_too(protocol: int, tmp_path: Path) -> None:
    images = layouts.pixels(3, 3072)
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps({"data": images, "labels": [1, 2, 3]}, protocol=protocol))
    found, labels, _ = cifar.read_batch(file, "labels")
    assert np.array_equal(found, images) and labels.tolist() == [1, 2, 3]
    file.write_bytes(pickle.dumps({"data": np.asfortranarray(images), "labels": [1, 2, 3]}, protocol=protocol))
    assert np.array_equal(cifar.read_batch(file, "labels")[0], images)


class Touch:
    """Unpickled by pickle.load, makes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_a_command_is_refused(protocol: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    evil = pickle.dumps({"data": Touch(victim), "labels": [1]}, protocol=protocol)
    pickle.loads(evil)
    assert victim.exists()  # the attack works on a plain unpickler
    victim.unlink()
    layouts.write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_4"
    batch.write_bytes(evil)
    for variant in (None, "jpeg"):
        found = message(cifar.UnsafePickle, lambda: DATASETS["cifar10"](tmp_path, variant=variant))  # noqa: B023
        assert found.startswith(f"{batch}: refusing to execute {os.system.__module__}.system;")
    assert not victim.exists()
    row = disk.verify("cifar10", tmp_path)
    assert row["state"] == "damaged" and "refusing to execute" in row["message"] and not victim.exists()


@pytest.mark.parametrize(
    "place",
    ["builtins eval", "__builtin__ getattr", "_codecs encode", "copyreg _reconstructor", "numpy load", "numpy array",
     "numpy.core.multiarray scalar", "numpy ndarray.tofile", "pickle loads"],
)  # fmt: skip
def test_every_other_global_is_refused(place: str, tmp_path: Path) -> None:
    module, name = place.split()
    file = tmp_path / "data_batch_1"
    for code in (f"c{module}\n{name}\n.".encode(), b"\x80\x04" + _unicode(module) + _unicode(name) + b"\x93."):
        file.write_bytes(code)
        said = message(cifar.UnsafePickle, lambda: cifar.read_batch(file, "labels"))
        assert f"refusing to execute {module}.{name}" in said


def _unicode(string: str) -> bytes:
    return b"\x8c" + bytes([len(string)]) + string.encode()


def test_no_numpy_code_is_reached_through_the_pickle() -> None:
    """The three names that are known lead to classes of ours: numpy's own would take a forged array of objects."""
    unpickler = cifar._Unpickler(b"", Path("file"))
    for known in unpickler.known.values():
        assert known.__module__ == cifar.__name__
    forged = layouts.cifar_batch(layouts.pixels(1, 3072), [1]).replace(layouts.text("u1"), layouts.text("O8"))
    file = Path(tempfile.mkdtemp()) / "data_batch_1"
    file.write_bytes(forged)
    assert "no uint8 array of 3072 columns" in message(common.DamagedData, lambda: cifar.read_batch(file, "labels"))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (pickle.dumps([1, 2], protocol=2), "no dictionary"),
        (pickle.dumps({"labels": [1]}, protocol=2), "data"),
        (layouts.cifar_batch(layouts.pixels(2, 3071), [1, 2]), "no uint8 array of 3072 columns"),
        (layouts.cifar_batch(layouts.pixels(2, 3072), [1, 2, 3]), "2 images, 3 labels"),
        (layouts.cifar_batch(layouts.pixels(1, 3072), [1], "fine_labels"), "labels"),
        (pickle.dumps({"data": 5, "labels": [1]}, protocol=2), "no uint8 array"),
        (b"\x80\x02}(U\x04dataP.", "persistent"),
        (b"not a pickle", ""),
    ],
)
def test_other_pickles_are_no_batch(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "data_batch_1"
    file.write_bytes(content)
    found = message(common.DamagedData, lambda: cifar.read_batch(file, "labels"))
    assert found.startswith(f"{file} is truncated or damaged, not a CIFAR batch (") and problem in found


def test_labels_must_be_whole_numbers_of_a_class(tmp_path: Path) -> None:
    layouts.write_cifar10(tmp_path)
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(layouts.cifar_batch(layouts.pixels(2, 3072), [3, 10]))
    assert damage("cifar10", tmp_path) == f"{batch.parent}: training labels run from 0 to 10, not 0 to 9"
    for labels in (["1", "2"], [0.5, 1.5], [[1], [2]], None):
        batch.write_bytes(pickle.dumps({"data": layouts.pixels(2, 3072), "labels": labels}, protocol=4))
        assert "labels are not a list of integers" in damage("cifar10", tmp_path)


# --- archives -----------------------------------------------------------------------------------------------------


def test_the_published_archive_is_unpacked_once_and_whole(tmp_path: Path) -> None:
    images, _ = layouts.write_cifar10(tmp_path)
    folder, archive = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-10-python.tar.gz"
    layouts.tar_folder(archive, folder, folder.name)
    before = os.umask(0o002)
    with ThreadPoolExecutor(4) as pool:  # several workers start at once
        found = list(pool.map(lambda _: DATASETS["cifar10"](tmp_path, variant="small"), range(4)))
    os.umask(before)
    assert all(np.array_equal(data.train_images.reshape(-1, 3072), images[:50]) for data in found)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [folder.name, archive.name]
    assert folder.stat().st_mode & 0o777 == 0o775  # a group shares the root
    archive.unlink()
    DATASETS["cifar10"](tmp_path, variant="small")


def test_who_unpacks_last_takes_what_the_first_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.write_cifar10(tmp_path)
    folder, archive = tmp_path / "cifar-10-batches-py", tmp_path / "cifar-10-python.tar.gz"
    layouts.tar_folder(archive, folder, folder.name)
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    assert len(DATASETS["cifar10"](tmp_path, variant="small").train_labels) == 50
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [folder.name, archive.name]


def test_an_archive_writes_nothing_but_the_files_of_the_set(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    batch = layouts.cifar_batch(layouts.pixels(10, 3072), list(range(10)))
    with tarfile.open(root / "cifar-10-python.tar.gz", "w:gz") as tar:
        for name in ("../../escape", "/tmp/fatbench-escape", "cifar-10-batches-py/../../escape", "other"):
            layouts.tar_add(tar, name, b"escaped")
        link = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"):
            layouts.tar_add(tar, f"cifar-10-batches-py/{name}", batch)
    found = damage("cifar10", root)
    folder = root / "cifar-10-batches-py"
    held = "holds data_batch_1, data_batch_2, data_batch_3, data_batch_4, data_batch_5"
    assert found == f"{folder / 'test_batch'} is missing; {folder} {held}"
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} == {"cifar-10-python.tar.gz", *(f"data_batch_{i}" for i in range(1, 6))}
    assert not Path("/tmp/fatbench-escape").exists()


def test_a_damaged_archive_leaves_nothing_behind(tmp_path: Path) -> None:
    layouts.write_cifar10(tmp_path)
    archive = tmp_path / "cifar-10-python.tar.gz"
    layouts.tar_folder(archive, tmp_path / "cifar-10-batches-py", "cifar-10-batches-py")
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive", b"", gzip.compress(b"no tar")):
        archive.write_bytes(content)
        assert damage("cifar10", tmp_path).startswith(f"{archive} is truncated or damaged, not a tar archive (")
        assert [entry.name for entry in tmp_path.iterdir()] == [archive.name]
    with tarfile.open(archive, "w:gz") as tar:
        layouts.tar_add(tar, "readme", b"hello")
    assert damage("cifar10", tmp_path) == (f"{archive} has none of the files of CIFAR-10")


# --- MNIST, SVHN, digits ------------------------------------------------------------------------------------------


def test_mnist_packed_and_unpacked_are_the_same_images(tmp_path: Path) -> None:
    images = layouts.write_mnist(tmp_path / "a", n=20)
    layouts.write_mnist(tmp_path / "b", n=20, packed=False)
    packed, unpacked = (DATASETS["mnist"](tmp_path / root, variant="small") for root in "ab")
    assert packed.fingerprint == unpacked.fingerprint
    assert np.array_equal(packed.train_images[:, 0], images[:20])
    assert np.array_equal(packed.test_images[:, 0], images[20:])
    assert packed.test_labels.tolist() == [i % 10 for i in range(20, 40)]


def repack(raw: Path, how: str) -> None:
    """Write the .gz files of a folder anew: other bytes, the same content."""
    for file in sorted(raw.glob("*.gz")):
        content = gzip.decompress(file.read_bytes())
        file.unlink()
        plain = file.with_suffix("")
        if how == "gz":
            file.write_bytes(gzip.compress(content, 1, mtime=1))
        elif how == "xz":
            plain.with_suffix(".xz").write_bytes(lzma.compress(content))
        else:
            plain.write_bytes(content)


@pytest.mark.parametrize("how", ["gz", "xz", "raw"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_files_are_known_by_what_is_inside(name: str, how: str, tmp_path: Path, monkeypatch: Any) -> None:
    downloads(monkeypatch, lambda *_: pytest.fail("something was fetched"))
    SMALL[name][0](tmp_path)
    publish(monkeypatch, tmp_path, name)
    raw = tmp_path / catalogue.dataset_facts(name).folder
    before, fingerprint = {file.read_bytes() for file in raw.iterdir()}, DATASETS[name](tmp_path).fingerprint
    repack(raw, how)
    assert not before & {file.read_bytes() for file in raw.iterdir()}
    data = DATASETS[name](tmp_path)
    assert data.variant is None and data.fingerprint == fingerprint
    assert "remove 'variant'" in message(MachineError, lambda: DATASETS[name](tmp_path, variant="mine"))
    for row in (disk.verify(name, tmp_path), disk.prepare(name, tmp_path)):
        assert (row["state"], row["n"], row["fingerprint"]) == ("complete", 40, fingerprint)
        assert row["files"][0]["expected"] == row["files"][0]["found"] == catalogue.files(name)[0].content
    last = next(raw.glob("t10k-labels*"))
    content = layouts.idx(np.ones(20, np.uint8))
    last.write_bytes({"gz": gzip.compress, "xz": lzma.compress, "raw": bytes}[how](content))
    assert disk.verify(name, tmp_path)["state"] == "variant"
    found = message(common.Differs, lambda: DATASETS[name](tmp_path))
    assert found.startswith(f"{last} is not the published file: the md5 of its content is ")
    assert f"{common.md5(content)}, not {catalogue.files(name)[3].content};" in found


def test_a_damaged_xz_file_is_named(tmp_path: Path) -> None:
    layouts.write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    repack(raw, "xz")
    file = raw / "t10k-images-idx3-ubyte.xz"
    file.write_bytes(file.read_bytes()[:-20])
    assert damage("mnist", tmp_path).startswith(f"{file} is truncated or damaged, not an xz file (")


def test_a_package_serves_where_the_root_has_no_whole_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads(monkeypatch, lambda *_: pytest.fail("something was fetched"))
    layouts.write_mnist(tmp_path, "FashionMNIST")
    publish(monkeypatch, tmp_path, "fashion_mnist")
    package, root = tmp_path / "package", tmp_path / "root"
    (tmp_path / "FashionMNIST" / "raw").rename(package)
    repack(package, "gz")
    system(monkeypatch, package)
    assert len(DATASETS["fashion_mnist"](root).train_labels) == 20
    row = {row["name"]: row for row in disk.status(root)}["fashion_mnist"]
    assert (row["state"], row["where"]) == ("complete", str(package))
    assert row["bytes"] == sum(file.stat().st_size for file in package.iterdir())
    assert disk.prepare("fashion_mnist", root)["where"] == str(package)
    raw = root / "FashionMNIST" / "raw"
    shutil.copytree(package, raw)
    (raw / "train-labels-idx1-ubyte.gz").unlink()
    assert disk.verify("fashion_mnist", root)["where"] == str(package)  # three of four files are no data set
    shutil.copy(package / "train-labels-idx1-ubyte.gz", raw)
    assert disk.verify("fashion_mnist", root)["where"] == str(raw)
    shutil.rmtree(root)
    (package / "train-labels-idx1-ubyte.gz").unlink()
    found = message(common.DamagedData, lambda: DATASETS["fashion_mnist"](root))
    assert found.startswith(f"{package / 'train-labels-idx1-ubyte.gz'} is missing; {package} holds t10k-images-idx3")


def test_prepare_fetches_what_a_broken_system_package_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, package = tmp_path / "server", tmp_path / "package"
    layouts.write_mnist(server, "FashionMNIST")
    publish(monkeypatch, server, "fashion_mnist")
    raw = server / "FashionMNIST" / "raw"
    shutil.copytree(raw, package)
    (package / "t10k-images-idx3-ubyte.gz").write_bytes(b"x")
    system(monkeypatch, package)
    downloads(monkeypatch, lambda url, folder, name, md5: shutil.copy(raw / name, folder) and None)
    row = disk.prepare("fashion_mnist", tmp_path / "root")
    assert (row["state"], row["where"]) == ("complete", str(tmp_path / "root" / "FashionMNIST" / "raw"))


@pytest.mark.skipif(not FASHION.is_dir(), reason="the Debian package dataset-fashion-mnist is not installed")
def test_the_debian_package_is_the_official_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the folder as the catalogue has it
    downloads(monkeypatch, lambda *_: pytest.fail("something was fetched"))
    row = disk.prepare("fashion_mnist", tmp_path)
    assert (row["state"], row["where"], row["n"]) == ("complete", str(FASHION), 70_000)
    data = DATASETS["fashion_mnist"](tmp_path)
    assert data.variant is None and data.train_images.shape == (60_000, 1, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [6_000] * 10 and len(data.test_labels) == 10_000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (layouts.idx(layouts.pixels(20, 28, 28))[:-1], "file has 15,695 bytes, header says 15,696"),
        (layouts.idx(layouts.pixels(20, 28, 28)) + b"x", "file has 15,697 bytes, header says 15,696"),
        (layouts.idx(layouts.pixels(20)), "magic number 0x00000801"),
        (b"\x00\x00\x08\x03" + b"\xff" * 12, "header says"),
    ],
)
def test_idx_files_that_are_not_what_their_header_says(content: bytes, problem: str, tmp_path: Path) -> None:
    layouts.write_mnist(tmp_path, packed=False)
    file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    file.write_bytes(content)
    found = damage("mnist", tmp_path)
    assert found.startswith(f"{file} is truncated or damaged, not an idx file (") and problem in found


def test_mnist_of_another_size_or_count_is_inconsistent(tmp_path: Path) -> None:
    layouts.write_mnist(tmp_path, packed=False)
    raw = tmp_path / "MNIST" / "raw"
    for shape, said in (
        ((20, 14, 14), f"{raw}: test images have shape (1, 14, 14), (1, 28, 28) is published"),
        ((19, 28, 28), f"{raw}: 19 test images, but 20 labels"),
    ):
        (raw / "t10k-images-idx3-ubyte").write_bytes(layouts.idx(layouts.pixels(*shape)))
        assert damage("mnist", tmp_path) == said
    (raw / "t10k-images-idx3-ubyte").write_bytes(layouts.idx(layouts.pixels(0, 28, 28)))
    (raw / "t10k-labels-idx1-ubyte").write_bytes(layouts.idx(layouts.pixels(0)))
    assert damage("mnist", tmp_path) == f"{raw} holds no test images"


@pytest.mark.parametrize("place", ["", "svhn", "SVHN"])
def test_svhn_turns_its_axes_and_calls_the_digit_0_by_its_name(place: str, tmp_path: Path) -> None:
    """Published X[y, x, c, n] is image n's [c, y, x] here; labels 1..9, 10 are 1..9, 0."""
    x = layouts.write_svhn(tmp_path / place)
    data = DATASETS["svhn"](tmp_path, variant="small")
    assert data.train_images[4, 2, 10, 20] == x[10, 20, 2, 4]
    assert np.array_equal(data.train_images, x.transpose(3, 2, 0, 1))
    assert data.train_labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_svhn_files_may_lie_apart_and_one_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.write_svhn(tmp_path / "svhn")
    publish(monkeypatch, tmp_path, "svhn")
    before = DATASETS["svhn"](tmp_path).fingerprint
    (tmp_path / "svhn" / "train_32x32.mat").rename(tmp_path / "train_32x32.mat")
    test = tmp_path / "svhn" / "test_32x32.mat"
    content = test.read_bytes()
    test.unlink()
    found = message(common.DamagedData, lambda: DATASETS["svhn"](tmp_path))
    assert found == f"{test} is missing; {test.parent} is empty"
    downloads(monkeypatch, lambda url, folder, name, md5: Path(folder, name).write_bytes(content) and None)
    row = disk.prepare("svhn", tmp_path)
    assert (row["state"], row["n"], row["fingerprint"]) == ("complete", 40, before)
    assert row["bytes"] == len(content) + (tmp_path / "train_32x32.mat").stat().st_size


def test_the_plane_is_two_sides_of_a_wave() -> None:
    """Pixels are x and y in 255ths; the first points by hand: n = 1 is (0.5 + 0.75488, 0.5 + 0.56984) mod 1, above the
    wave by -0.43 - 0.2 sin(2 pi 0.25488) = -0.63, so class 0; n = 2 is (0.00976, 0.63968), class 1."""
    data = DATASETS["plane"](Path("nowhere"))
    assert data.shape == (2, 1, 1) and data.train_images[:2, :, 0, 0].tolist() == [[65, 18], [2, 163]]
    assert data.train_labels[:2].tolist() == [0, 1]
    for images, labels, n in ((data.train_images, data.train_labels, 800), (data.test_images, data.test_labels, 200)):
        x, y = images[:, :, 0, 0].T / 255
        above = y - 0.5 - np.sin(2 * np.pi * x) / 5
        assert len(x) == n and labels.sum() == n // 2
        assert ((above > 0) == labels).all() and np.abs(above).min() > 0.05 - 0.005  # rounded to 255ths
        assert np.abs(np.histogram2d(x, y, [4, 1])[0] - n / 4).max() < 0.1 * n  # all over the square
    assert data.fingerprint == "eeae948b27a18cc04ef7fce30bd30df3a3cf937588beb8aef9a9af3b62b709e4"


def test_digits_are_scikit_learns() -> None:
    """Every fifth image of a class is tested on; 16 becomes 255, 8 becomes 128 (127.5 up), 1 becomes 16."""
    from sklearn.datasets import load_digits

    data, source = DATASETS["digits"](Path("nowhere")), load_digits()
    assert (len(data.train_labels), len(data.test_labels)) == (1442, 355)
    assert (catalogue.dataset_facts("digits").train, catalogue.dataset_facts("digits").test) == (1442, 355)
    seen = [0] * 10
    train, test = [], []
    for index, label in enumerate(source.target):
        (test if seen[label] % 5 == 4 else train).append(index)
        seen[label] += 1
    parts = ((data.train_images, data.train_labels, train), (data.test_images, data.test_labels, test))
    for images, labels, indices in parts:
        assert np.array_equal(images[:, 0], np.floor(source.images[indices] * 255 / 16 + 0.5))
        assert np.array_equal(labels, source.target[indices])
    assert [int((data.test_labels == label).sum()) for label in range(10)] == [count // 5 for count in seen]
    value = {int(v): int(p) for v, p in zip(source.images[train].ravel(), data.train_images.ravel(), strict=True)}
    assert (value[0], value[1], value[8], value[16]) == (0, 16, 128, 255)


# --- folders of images --------------------------------------------------------------------------------------------


def test_image_folder_reads_resizes_and_labels(tmp_path: Path) -> None:
    folder = layouts.write_image_folder(tmp_path / "mine")
    layouts.save(folder / "train" / "ant" / "grey.jpg", (30, 20), 100, mode="L")
    (folder / "train" / "ant" / "notes.txt").write_text("not an image")
    (folder / "train" / ".cache").mkdir()
    for path in ("mine", str(folder)):
        data = DATASETS["image_folder"](tmp_path, path=path, size=12)
        assert data.classes == 2 and data.shape == (3, 12, 12) and data.variant is None
        assert sorted(zip(data.train_labels.tolist(), data.train_images[:, 0, 0, 0].tolist(), strict=True)) == [
            (0, 10), (0, 10), (0, 10), (0, 100), (1, 200), (1, 200), (1, 200),
        ]  # fmt: skip
        assert sorted(data.test_images[:, 0, 5, 5].tolist()) == [10, 200]
        assert data.test_images[:, 0, 5, 5].tolist() == [10 if label == 0 else 200 for label in data.test_labels]
    assert DATASETS["image_folder"](tmp_path, path="mine", size=5).shape == (3, 5, 5)


def test_the_first_images_of_a_folder_are_of_all_classes(tmp_path: Path) -> None:
    """Read class after class, the first 40 of 80 would be of one class; by hash about half are, here 20 +- 10."""
    folder = layouts.write_image_folder(tmp_path / "mine", n=40)
    labels = DATASETS["image_folder"](tmp_path, path="mine", size=12).train_labels
    assert labels.sum() == 40 and 10 <= labels[:40].sum() <= 30
    (folder / "train" / "ant" / "0.png").unlink()  # the others keep their order
    without = DATASETS["image_folder"](tmp_path, path="mine", size=12)
    assert len(without.train_labels) == 79


def test_image_folders_that_cannot_be_used(tmp_path: Path) -> None:
    def read() -> Dataset:
        return DATASETS["image_folder"](tmp_path, path="mine", size=12)

    assert "no such folder" in message(common.Missing, read)
    folder = layouts.write_image_folder(tmp_path / "mine")
    layouts.save(folder / "test" / "cow" / "1.png", (12, 12), 0, mode="L")
    assert "'cow' is not a class in" in message(common.DamagedData, read)
    shutil.rmtree(folder / "test" / "cow")
    (cow := folder / "train" / "cow").mkdir()
    assert message(common.DamagedData, read) == f"{cow} has no image files; {cow} is empty"
    cow.rmdir()
    (folder / "train" / "bee" / "0.png").write_text("text")
    assert message(common.DamagedData, read).startswith(f"{folder / 'train' / 'bee' / '0.png'} is truncated or damaged")
    (folder / "train" / "bee").rename(tmp_path / "bee")
    shutil.rmtree(folder / "test" / "bee")
    assert "has 1 class folders, at least 2 are needed" in message(common.DamagedData, read)
    (tmp_path / "bee").rename(folder / "train" / "bee")
    (folder / "train" / "bee" / "0.png").unlink()
    (folder / "test" / "ant" / "t.png").unlink()
    assert message(common.DamagedData, read) == f"{folder / 'test'} holds no images"
    shutil.rmtree(folder / "test")
    assert message(common.DamagedData, read) == f"{folder / 'test'} is missing; {folder} holds train"


def test_cinic10_splits_and_classes(tmp_path: Path) -> None:
    """Red is 10 * class + split: 0 train, 1 valid, 2 test."""
    layouts.write_cinic(tmp_path)
    data = DATASETS["cinic10"](tmp_path, variant="small")
    assert data.train_images[:, 0, 0, 0].tolist() == (10 * data.train_labels).tolist()
    assert data.test_images[:, 0, 0, 0].tolist() == (10 * data.test_labels + 2).tolist()
    assert sorted(data.train_labels.tolist()) == sorted(list(range(10)) * 2)
    large = DATASETS["cinic10"](tmp_path, enlarge=True, variant="small")
    assert np.array_equal(large.train_images[:20], data.train_images)
    assert large.train_images[20:, 0, 0, 0].tolist() == (10 * large.train_labels[20:] + 1).tolist()
    assert np.array_equal(large.test_images, data.test_images)


def test_cinic10_counts_classes_and_sizes_are_checked(tmp_path: Path) -> None:
    folder = layouts.write_cinic(tmp_path)
    found = message(common.Differs, lambda: DATASETS["cinic10"](tmp_path))
    assert found.startswith(f"{folder} holds 20 training and 20 test images, not the published 90,000 and 90,000; ")
    assert "180,000" in message(common.Differs, lambda: DATASETS["cinic10"](tmp_path, enlarge=True))
    layouts.save(folder / "train" / "cat" / "odd.png", (32, 30), (0, 0, 0))
    found = damage("cinic10", tmp_path)
    assert found.startswith(f"{folder / 'train' / 'cat' / 'odd.png'} is") and "32x30, not 32x32" in found
    (folder / "test" / "cow").mkdir()
    assert damage("cinic10", tmp_path) == f"{folder / 'test' / 'cow'} is not a class of CINIC-10"
    (folder / "test" / "cow").rename(folder / "test" / "spare")
    (folder / "test" / "spare").rmdir()
    (folder / "test" / "dog").rename(tmp_path / "dog")
    assert damage("cinic10", tmp_path) == f"{folder / 'test' / 'dog'} is missing"


def state_of(name: str, root: Path) -> dict[str, Any]:
    """What `data status` says of a data set."""
    return next(row for row in disk.status(root) if row["name"] == name)


def test_cinic10_from_its_archive(tmp_path: Path) -> None:
    folder = layouts.write_cinic(tmp_path)
    before = DATASETS["cinic10"](tmp_path, variant="small").fingerprint
    layouts.tar_folder(tmp_path / "CINIC-10.tar.gz", folder, "")
    assert state_of("cinic10", tmp_path)["message"] == "complete, to be unpacked on first use"
    assert DATASETS["cinic10"](tmp_path, variant="small").fingerprint == before


# --- CelebA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "sample", "trained", "tested"),
    [
        (0, 0.5, {15: 18, 13: 5}, {15: [10, 18], 13: [5]}),
        (3, 0.5, {11: 4, 13: 6, 14: 4, 16: 8}, {11: [0], 13: [3], 14: [2], 16: [7]}),
        (3, 0.8, {11: 4, 13: 6, 14: 4, 16: 9, 15: 13}, {11: [0], 13: [3], 14: [2], 16: [6], 15: [7, 5]}),
        (7, 0.8, {15: 18, 11: 4, 16: 9, 14: 4}, {15: [15, 17], 11: [3], 16: [7], 14: [3]}),
        (
            7, 1.0, {15: 18, 11: 4, 16: 9, 14: 4, 12: 5, 13: 6},
            {15: [15, 17], 11: [3], 16: [7], 14: [3], 12: [4], 13: [3]},
        ),
    ],
)  # fmt: skip
def test_the_recipe_draws_what_leafs_scripts_draw(
    seed: int, sample: float, trained: dict[int, int], tested: dict[int, list[int]]
) -> None:
    """The numbers are what LEAF's sample.py, remove_users.py (-k 5) and split_data.py (0.9) gave, both seeds equal,
    for celebrities 10..16 with 3, 5, 6, 7, 5, 20, 10 images, of whom metadata_to_json.py leaves out the first."""
    sizes = {10: 3, 11: 5, 12: 6, 13: 7, 14: 5, 15: 20, 16: 10}
    celebrities = {c: [(f"{c}_{i}", i % 2) for i in range(n)] for c, n in sizes.items()}
    train, test = image_folders.leaf_recipe(celebrities, sample, 5, seed)
    assert {c: len(shots) for c, shots in train.items()} == trained and list(train) == list(trained)
    assert {c: [int(name.split("_")[1]) for name, _ in shots] for c, shots in test.items()} == tested
    for c in train:
        assert not set(train[c]) & set(test[c])
        assert set(train[c]) | set(test[c]) <= set(celebrities[c])


def celeba(root: Path, **settings: Any) -> Dataset:
    return DATASETS["celeba"](root, variant="small", **settings)


def test_celeba_by_celebrity(tmp_path: Path) -> None:
    """Images 1-5 are celebrity 7's, 6-11 are 3's, 12-16 are 11's, 17-20 are 2's (too few); even ones smile."""
    layouts.write_celeba(tmp_path, CELEBRITIES)
    data = celeba(tmp_path, sample=1.0)
    assert data.shape == (3, 84, 84) and data.classes == 2
    assert data.writers is not None and data.test_writers is not None
    assert {w: int((data.writers == w).sum()) for w in data.writers.tolist()} == {7: 4, 3: 5, 11: 4}
    assert sorted(data.test_writers.tolist()) == [3, 7, 11]
    owner = {i: 7 if i <= 5 else 3 if i <= 11 else 11 for i in range(1, 17)}
    seen = []
    for images, labels, writers in (
        (data.train_images, data.train_labels, data.writers),
        (data.test_images, data.test_labels, data.test_writers),
    ):
        for image, label, writer in zip(images, labels, writers, strict=True):
            number = int(image[0, 40, 40])
            seen.append(number)
            assert label == (number % 2 == 0) and writer == owner[number]
    assert sorted(seen) == list(range(1, 17))


def test_celeba_from_the_zip_is_the_same(tmp_path: Path) -> None:
    base = layouts.write_celeba(tmp_path, CELEBRITIES)
    before = celeba(tmp_path, sample=1.0).fingerprint
    layouts.zip_images(base)
    assert celeba(tmp_path, sample=1.0).fingerprint == before
    packed = base / "img_align_celeba.zip"
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) // 2])
    damaged = functools.partial(message, common.DamagedData, functools.partial(celeba, tmp_path, sample=1.0))
    assert damaged().startswith(f"{packed} is truncated or damaged")
    first = whole.index(b"\xff\xd8")
    packed.write_bytes(whole[:first] + b"????" + whole[first + 4 :])
    assert damaged().startswith(f"{packed / '000001.jpg'} is truncated or damaged, not a whole member of the zip file")
    packed.unlink()
    assert "img_align_celeba.zip" in damaged()


def test_celeba_with_the_split_that_leaf_wrote(tmp_path: Path) -> None:
    base = layouts.write_celeba(tmp_path, CELEBRITIES)
    layouts.write_leaf(
        base / "data" / "train" / "all_data_niid_05_keep_5_train_9.json",
        {"3": [("000006.jpg", 1.0), ("000007.jpg", 0.0)], "7": [("000001.jpg", 0)]},
    )
    layouts.write_leaf(
        base / "data" / "test" / "all_data_niid_05_keep_5_test_9.json",
        {"3": [("000008.jpg", 1.0)], "7": [("000002.jpg", 1)]},
    )
    data = DATASETS["celeba"](tmp_path, split="json")
    assert data.writers is not None and data.test_writers is not None
    assert data.train_images[:, 0, 40, 40].tolist() == [6, 7, 1] and data.writers.tolist() == [3, 3, 7]
    assert data.train_labels.tolist() == [1, 0, 0] and data.test_labels.tolist() == [1, 1]
    assert data.test_writers.tolist() == [3, 7]
    found = message(SpecError, lambda: celeba(tmp_path, split="json", sample=0.2))
    assert "need 'split: recipe'" in found


def test_celeba_recipe_from_leafs_all_data(tmp_path: Path) -> None:
    """all_data holds what the lists hold, so the recipe draws the same images."""
    base = layouts.write_celeba(tmp_path, CELEBRITIES)
    before = celeba(tmp_path, sample=1.0, seed=5)
    celebrities, _ = image_folders.read_lists(base)
    layouts.write_leaf(
        base / "data" / "all_data" / "all_data.json",
        {str(c): shots for c, shots in celebrities.items() if len(shots) >= 5},
    )
    for name in image_folders.LISTS:
        (base / name).unlink()
    assert celeba(tmp_path, sample=1.0, seed=5).fingerprint == before.fingerprint
    assert celeba(tmp_path, sample=1.0, seed=6).fingerprint != before.fingerprint


# --- the catalogue ------------------------------------------------------------------------------------------------


def test_checksums_and_addresses_are_torchvisions() -> None:
    from torchvision import datasets as tv

    for name, cifar_class in (("cifar10", tv.CIFAR10), ("cifar100", tv.CIFAR100)):
        assert catalogue.archive(name) == catalogue.File(cifar_class.filename, cifar_class.tgz_md5, (cifar_class.url,))
        published = cifar_class.train_list + cifar_class.test_list
        expected = [catalogue.File(f"{cifar_class.base_folder}/{file}", md5) for file, md5 in published]
        assert catalogue.files(name) == tuple(expected)
    svhn = [tv.SVHN.split_list[split] for split in ("train", "test")]
    assert catalogue.files("svhn") == tuple(catalogue.File(f"svhn/{file}", md5, (url,)) for url, file, md5 in svhn)
    listed = {file: (drive, md5) for drive, md5, file in tv.CelebA.file_list}
    assert [Path(file.path).name for file in catalogue.files("celeba")] == [
        *image_folders.LISTS,
        "img_align_celeba.zip",
    ]
    for file in catalogue.files("celeba"):
        drive, md5 = listed[Path(file.path).name]
        assert (file.md5, file.urls) == (md5, (f"https://drive.google.com/file/d/{drive}/view",))
    for name, mnist_class in (("mnist", tv.MNIST), ("fashion_mnist", tv.FashionMNIST)):
        folder = f"{mnist_class.__name__}/raw"
        assert [(file.path, file.md5, file.urls) for file in catalogue.files(name)] == [
            (f"{folder}/{file}", md5, tuple(mirror + file for mirror in mnist_class.mirrors))
            for file, md5 in mnist_class.resources
        ]
        assert catalogue.dataset_facts(name).folder == folder


def test_the_facts_of_a_set_with_default_settings() -> None:
    assert catalogue.dataset_facts("cifar10").memory == 60_000 * 3 * 32 * 32
    drawn = catalogue.dataset_facts("celeba")
    assert (drawn.train, drawn.test, drawn.exact) == (8802, 1212, False)
    assert catalogue.dataset_facts("image_folder").memory is None
    assert "did you mean 'cifar10'?" in message(SpecError, lambda: catalogue.dataset_facts("cifar1O"))


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"name": "image_folder", "path": "x", "size": 0}, "greater than or equal to 1"),
        ({"name": "image_folder", "size": 32}, "'image_folder' needs 'path'"),
        ({"name": "cifar10", "varient": "x"}, "did you mean 'variant'?"),
        ({"name": "cifar10", "variant": 5}, "should be a valid string"),
        ({"name": "celeba", "sample": 0}, "greater than 0"),
        ({"name": "celeba", "split": "random"}, "'recipe' or 'json'"),
    ],
)
def test_settings_are_checked_before_anything_is_read(node: dict[str, Any], problem: str) -> None:
    assert problem in message(SpecError, lambda: calls.check("Data", node))


# --- the command line's side --------------------------------------------------------------------------------------


def test_status_of_an_empty_root(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in disk.status(tmp_path / "none")}
    assert set(rows) == set(DATASETS) - {*catalogue.NAMED_BY_SUITES}
    always = {"digits", "plane"}
    assert {row["state"] for name, row in rows.items() if name not in always} == {"missing"}
    assert {row["bytes"] for name, row in rows.items() if name not in always} == {0}
    assert [rows["plane"][key] for key in ("state", "n", "train", "test", "bytes")] == ["complete", 1000, 800, 200, 0]
    digits = rows["digits"]
    assert (digits["state"], digits["n"], digits["train"], digits["test"]) == ("complete", 1797, 1442, 355)
    assert json.loads(json.dumps(list(rows.values())))


def test_status_tells_variants_damage_and_the_published_apart(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("cifar10", "svhn", "mnist", "celeba", "cinic10"):
        SMALL[name][0](tmp_path)
    (tmp_path / "svhn" / "test_32x32.mat").write_bytes(b"x")
    rows = {row["name"]: row for row in disk.status(tmp_path)}
    row = rows["cifar10"]
    assert row["state"] == "variant"
    assert row["message"] == "complete, checksums differ from the published files (a variant)"
    assert (row["n"], row["train"], row["test"]) == (60, 50, 10)
    folder = tmp_path / "cifar-10-batches-py"
    assert row["where"] == str(folder) and row["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert row["fingerprint"] == DATASETS["cifar10"](tmp_path, variant="small").fingerprint
    assert [file["expected"] for file in row["files"]] == [file.md5 for file in catalogue.files("cifar10")]
    assert rows["svhn"]["state"] == "damaged" and rows["svhn"]["message"].startswith(str(tmp_path / "svhn"))
    assert rows["celeba"]["state"] == "variant" and rows["celeba"]["n"] == 20
    assert rows["cinic10"]["state"] == "damaged"
    assert "holds 60 of the 270,000 published images" in rows["cinic10"]["message"]
    publish(monkeypatch, tmp_path, "mnist")
    row = disk.verify("mnist", tmp_path)
    assert (row["state"], row["message"], row["n"]) == ("complete", "complete", 40)


def test_verify_hashes_the_zip_of_celeba_and_reads_the_split(tmp_path: Path) -> None:
    base = layouts.write_celeba(tmp_path, dict.fromkeys(range(10), 40))
    layouts.zip_images(base)
    row = disk.verify("celeba", tmp_path)
    assert row["state"] == "variant" and row["n"] == 400 and row["fingerprint"] is not None
    assert [Path(file["file"]).name for file in row["files"]] == [*image_folders.LISTS, "img_align_celeba.zip"]
    assert row["files"][2]["expected"] == "00d2c5bc6d35e252742224ab0c1e8fcb"
    assert row["files"][2]["found"] == common.md5((base / "img_align_celeba.zip").read_bytes())


def test_verify_reads_all_of_cinic10(tmp_path: Path) -> None:
    folder = layouts.write_cinic(tmp_path)
    assert disk.verify("cinic10", tmp_path)["n"] == 60
    (folder / "valid" / "cat" / "valid-0.png").write_bytes(b"x")
    row = disk.verify("cinic10", tmp_path)
    assert row["state"] == "damaged" and "valid-0.png is truncated or damaged" in row["message"]


def downloads(monkeypatch: pytest.MonkeyPatch, download: Callable[..., None]) -> None:
    from torchvision.datasets import utils

    monkeypatch.setattr(utils, "download_url", download)


def test_prepare_offline_says_where_to_put_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def offline(url: str, folder: str, name: str, md5: str) -> None:
        tried.append(url)
        Path(folder, name).write_bytes(b"half of it")
        raise URLError("Name or service not known")

    downloads(monkeypatch, offline)
    found = message(MachineError, lambda: disk.prepare("mnist", tmp_path))
    target = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    assert found.startswith("could not fetch http") and "Name or service not known" in found
    assert found.endswith(f": put the published file at {target}")
    assert tried == list(catalogue.files("mnist")[0].urls)  # both mirrors
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_prepare_fetches_what_is_missing_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "server"
    layouts.write_mnist(elsewhere)
    publish(monkeypatch, elsewhere, "mnist")
    fetched, said = [], []

    def serve(url: str, folder: str, name: str, md5: str) -> None:
        data = (elsewhere / "MNIST" / "raw" / name).read_bytes()
        assert common.md5(data) == md5
        fetched.append(name)
        Path(folder, name).write_bytes(data)

    downloads(monkeypatch, serve)
    root = tmp_path / "root"
    (root / "MNIST" / "raw").mkdir(parents=True)
    first = "train-images-idx3-ubyte.gz"
    (root / "MNIST" / "raw" / first).write_bytes((elsewhere / "MNIST" / "raw" / first).read_bytes())
    row = disk.prepare("mnist", root, said.append)
    assert row["state"] == "complete" and len(fetched) == 3 and first not in fetched
    assert said[0] == "MNIST: terms of use: CC BY-SA 3.0 (http://yann.lecun.com/exdb/mnist/)"
    assert said[1].startswith("MNIST: fetching http") and len(said) == 4
    assert sorted(entry.name for entry in (root / "MNIST" / "raw").iterdir()) == sorted([first, *fetched])
    assert disk.prepare("mnist", root)["state"] == "complete" and len(fetched) == 3  # nothing is fetched twice


def test_prepare_unpacks_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "server"
    layouts.write_cifar10(server)
    publish(monkeypatch, server, "cifar10")
    packed = server / "cifar-10-python.tar.gz"
    layouts.tar_folder(packed, server / "cifar-10-batches-py", "cifar-10-batches-py")
    downloads(monkeypatch, lambda url, folder, name, md5: Path(folder, name).write_bytes(packed.read_bytes()) and None)
    root = tmp_path / "root"
    assert disk.prepare("cifar10", root)["n"] == 60
    assert DATASETS["cifar10"](root).variant is None


def test_prepare_leaves_a_variant_alone_and_mends_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads(monkeypatch, lambda *_: pytest.fail("something was fetched"))
    layouts.write_cifar10(tmp_path)
    assert disk.prepare("cifar10", tmp_path)["state"] == "variant"
    assert disk.prepare("digits", tmp_path)["state"] == "complete"
    batch = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(b"x")
    found = message(MachineError, lambda: disk.prepare("cifar10", tmp_path))
    assert found.startswith(f"{batch} is truncated") and "move those files away" in found
    assert batch.read_bytes() == b"x"


def test_prepare_says_what_is_still_wrong_after_fetching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts.write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").rename(tmp_path / "kept")
    content = (tmp_path / "kept").read_bytes()
    downloads(monkeypatch, lambda url, folder, name, md5: Path(folder, name).write_bytes(content) and None)
    found = message(MachineError, lambda: disk.prepare("mnist", tmp_path))
    assert found == f"MNIST in {tmp_path / 'MNIST' / 'raw'}: {disk.VARIANT}"


def test_prepare_on_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    found = message(MachineError, lambda: disk.prepare("svhn", tmp_path))
    assert found == f"cannot write {tmp_path / 'svhn' / 'train_32x32.mat'}: No space left on device"


def test_images_are_not_held_open(tmp_path: Path) -> None:
    """An image that Pillow cannot read leaves no open file (warnings are errors here)."""
    buffer = io.BytesIO()
    Image.new("RGB", (12, 12)).save(buffer, "PNG")
    file = tmp_path / "a.png"
    file.write_bytes(buffer.getvalue()[:50])
    message(common.DamagedData, lambda: decoded.decode([[file]], 12))


# --- data of others: torchvision, Hugging Face, arrays of a plug-in ------------------------------------------------


def test_a_class_of_torchvision_in_one_piece_is_cut_into_every_fifth_of_a_class(tmp_path: Path) -> None:
    data = small("torchvision", tmp_path)
    assert data.shape == (3, 6, 6) and len(data.train_labels) + len(data.test_labels) == 1000
    both = np.bincount(data.train_labels) + np.bincount(data.test_labels)
    assert np.bincount(data.test_labels).tolist() == (both // 5).tolist() and data.classes == 3


def test_a_class_of_torchvision_with_both_parts_reads_its_files_in_the_root(tmp_path: Path) -> None:
    layouts.write_mnist(tmp_path)
    layouts.write_mnist(tmp_path, "KMNIST", packed=False)
    given = {"dataset": "KMNIST", "size": 28, "grey": True}
    data = DATASETS["torchvision"](tmp_path, **given)
    same = DATASETS["mnist"](tmp_path, variant="small")
    assert data.fingerprint == same.fingerprint
    (tmp_path / "KMNIST" / "raw").rename(tmp_path / "gone")
    found = message(MachineError, lambda: DATASETS["torchvision"](tmp_path, **given))
    assert f"datasets.KMNIST('{tmp_path}', download=True)" in found


def test_a_data_set_of_hugging_face_keeps_its_order_and_names_what_it_lacks(tmp_path: Path) -> None:
    data = small("huggingface", tmp_path)
    assert data.shape == (3, 6, 6) and data.train_labels.tolist() == [0, 1, 2, 0, 1, 2] and data.classes == 3
    assert data.train_images.reshape(6, -1).tolist() == [[40 * k] * 108 for k in range(6)]
    mine = SMALL["huggingface"][1]
    read = DATASETS["huggingface"]
    for n, m in ((3, None), (2, 2)):  # the same as the first of all
        few = read(tmp_path, (n, m), **mine)
        assert (few.train_images == data.train_images[:n]).all() and (few.train_labels == data.train_labels[:n]).all()
        assert (few.test_images == data.test_images[:m]).all() and few.classes == data.classes
    for change, said in (
        ({"label": "label"}, "no column 'label' (known: class, image)"),
        ({"test_split": "tset"}, "no split 'tset' (did you mean 'test'?)"),
    ):
        assert said in message(SpecError, lambda: read(tmp_path, **{**mine, **change}))  # noqa: B023


def test_arrays_become_a_data_set_whatever_their_layout() -> None:
    grey = np.arange(2 * 5 * 4, dtype=np.uint8).reshape(2, 5, 4)
    colour = np.stack([grey, grey + 1, grey + 2], 3)  # (N, H, W, C)
    of_grey = own.dataset(grey, [0, 1], (grey + 1) / 255, [1, 0], name="mine")
    assert of_grey.shape == (1, 5, 4) and (of_grey.train_images + 1 == of_grey.test_images).all()
    turned = colour.transpose(0, 3, 1, 2) + 1
    data = own.dataset(colour, [0, 1], turned, [0, 1], name="mine", writers=([7, 8], [7, 7]))
    assert data.shape == (3, 5, 4) and data.classes == 2 and data.writers is not None
    assert (data.train_images + 1 == data.test_images).all() and data.train_images[0, 2, 0, 0] == 2
    assert data.fingerprint != of_grey.fingerprint and data.name == "mine"
    assert own.dataset(grey, [1, 2], grey + 1, [1, 2], name="mine", classes=3).classes == 3


X, Y = np.zeros((4, 8, 8)), [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ((X[0], Y, X, Y), "x: expected images (N, C, H, W), (N, H, W, C) or (N, H, W), got (8, 8)"),
        ((X + 7, Y, X, Y), "x: floats must be in [0, 1]; pixels of 0 to 255 are given as uint8"),
        ((X.astype(int), Y, X, Y), "x: expected uint8, or floats in [0, 1], got int64"),
        ((X, Y[:3], X, Y), "x, y: 4 images and 3 labels"),
        ((X, Y, X[:, :7], Y), "x has images of 1x8x8, x_test of 1x7x8"),
        ((X, [0, 1, 2, -1], X, Y), "labels begin at 0, the smallest is -1"),
        ((X, [1, 2, 3, 1], X, Y), "y: labels begin at 0, the smallest is 1 (classes=4 allows it)"),
        ((X, np.ones(4), X, Y), "y: expected integers (N,), got float64 (4,)"),
        ((X + np.nan, Y, X, Y), "x: 256 values are NaN"),
    ],
)
def test_arrays_that_cannot_be_a_data_set(arrays: tuple[Any, ...], said: str) -> None:
    assert message(SpecError, lambda: own.dataset(*arrays, name="mine")) == f"mine: {said}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return open('no.npz')", "mine.py:2: FileNotFoundError: [Errno 2] No such file or directory: 'no.npz'"),
        ("    return open(root / 'no.npz')", "no.npz'; --data names another folder"),
        ("    return 1, 2", "returned a tuple, not a Dataset; fatbench.dataset(...) makes one"),
    ],
)
def test_a_mistake_in_a_plug_in_s_data_set_is_a_line_with_its_place(tmp_path: Path, body: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def mine(root):\n{body}\n\n\nDATASETS = {{'mine': mine}}\n")
    signatures.add_plugin(file)
    try:
        assert said in message(SpecError, lambda: own.load(calls.check("Data", "mine"), tmp_path))
    finally:
        signatures.drop_plugins([file])


# --- what is asked of every data set ------------------------------------------------------------------------------


def write_emnist(root: Path, split: str, labels: list[int]) -> None:
    """A split of EMNIST in torchvision's layout: random training images with these labels, half as many test images."""
    folder = root / "EMNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for part, of_part, seed in (("train", labels, 1), ("test", labels[::2], 2)):
        arrays = {"images-idx3": layouts.pixels(len(of_part), 28, 28, seed=seed), "labels-idx1": np.uint8(of_part)}
        for kind, array in arrays.items():
            head = struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape)
            (folder / f"emnist-{split}-{part}-{kind}-ubyte").write_bytes(head + array.tobytes())


EMNIST = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}


@pytest.mark.parametrize(("split", "classes"), EMNIST.items())
def test_emnist_is_read_in_each_of_its_six_splits(tmp_path: Path, split: str, classes: int) -> None:
    """Letters are published with labels from 1; `train` and not `split` tells training images from test images."""
    labels = np.random.default_rng(0).permutation(2 * [*range(classes)]).tolist()
    write_emnist(tmp_path, split, [label + (split == "letters") for label in labels])
    data = DATASETS["torchvision"](tmp_path, dataset="EMNIST", size=28, grey=True, split=split)
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == (labels, labels[::2])
    few = DATASETS["torchvision"](tmp_path, (5, 3), dataset="EMNIST", size=28, grey=True, split=split)
    assert (few.train_images == data.train_images[:5]).all() and few.test_labels.tolist() == labels[:6:2]
    assert data.classes == classes and not data.doubts
    assert common.shared_images(data.train_images, data.test_images) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "EMNIST", "train_split": "letters", "test_split": "letters"}, "EMNIST needs the setting 'split'"),
        ({"dataset": "SVHN", "split": "test"}, "do not set 'split': both parts of torchvision's SVHN are read, by t"),
        ({"dataset": "KMNIST", "train": False}, "do not set 'train': both parts of torchvision's KMNIST are read, as"),
        ({"dataset": "EMNIST", "split": "letters", "tarin": 1}, "no setting 'tarin' (did you mean 'train'?)"),
    ],
)  # fmt: skip
def test_which_part_of_a_class_is_read_is_said_once(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    assert said in message(SpecError, lambda: DATASETS["torchvision"](tmp_path, size=28, **settings))


def random_images(n: int, *shape: int, seed: int = 0) -> Any:
    return layouts.pixels(n, *(shape or (1, 6, 6)), seed=seed)


def test_test_images_that_are_training_images_are_counted_and_half_of_them_refused() -> None:
    x, y, other = random_images(40), [0, 1] * 20, random_images(40, seed=1)
    for test, count in ((x, 40), (x[::-1], 40), (x[:7], 7), (np.concatenate([x[:20], other[:20]]), 20)):
        said = message(MachineError, lambda: own.dataset(x, y, test, y[: len(test)], name="mine"))  # noqa: B023
        assert said == f"mine: {count} of {len(test)} test images are training images, so there is no test set"
    some = own.dataset(x, y, np.concatenate([x[:3], other[3:]]), y, name="mine")
    assert some.doubts == {"test images are training images": 3}
    assert not own.dataset(x, y, other, y, name="mine").doubts
    nearly = x.copy()
    nearly[:, 0, 5, 5] ^= 1  # one pixel
    assert not own.dataset(x, y, nearly, y, name="mine").doubts


def test_large_images_that_differ_where_few_bytes_are_compared_first_are_not_the_same() -> None:
    x = np.zeros((2, 3, 32, 32), np.uint8)
    x[1, 0, 0, 5] = 9  # between two of the bytes that are compared first
    assert common.shared_images(x[:1], x) == 1 and common.shared_images(x, x) == 2


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (random_images(6, 28, 28, 4), [0, 1] * 3, "training images have 28 channels of 28x4: are the channels last?"),
        (random_images(6, 32, 40, 4), [0, 1] * 3, "training images have 32 channels of 40x4: are the channels last?"),
        (random_images(6, 28, 28, 13), [0, 1] * 3, "training images have 28 channels of 28x13: are the channels last?"),
        (random_images(6, 4, 8, 8) | np.uint8([0, 0, 0, 255])[:, None, None], [0, 1] * 3,
         "training images have 4 channels of 8x8, the last one the same everywhere: leave the alpha ch"),
        (random_images(6) % 2, [0, 1] * 3, "training images have no pixel above 1 of 255: floats in [0, 1]"),
        (random_images(6), [0, 1, 3] * 2, "no training image is of class 2: labels must be 0, 1, 2, ..."),
    ],
)  # fmt: skip
def test_arrays_that_are_not_believable(x: Any, y: list[int], said: str) -> None:
    other = x ^ np.uint8(x > 1)
    assert f"mine: {said}" in message(MachineError, lambda: own.dataset(x, y, other, y, name="mine"))


@pytest.mark.parametrize("shape", [(64, 2, 2), (13, 64, 64), (4, 8, 8), (1, 5, 4), (3, 2, 9)])
def test_other_numbers_of_channels_are_believed(shape: tuple[int, ...]) -> None:
    data = own.dataset(random_images(6, *shape), [0, 1] * 3, random_images(6, *shape, seed=1), [0, 1] * 3, name="mine")
    assert data.shape == shape


def test_floats_may_be_outside_by_a_rounding() -> None:
    x = random_images(4).astype(np.float32) / 255
    x[0, 0, 0, :2] = (-2.98e-8, 1 + 1.2e-7)
    data = own.dataset(x, [0, 1] * 2, x[::-1] / 2, [0, 1] * 2, name="mine")
    assert data.train_images[0, 0, 0, :2].tolist() == [0, 255]
    x[0, 0, 0, 0] = -1e-3
    assert "floats must be in [0, 1]" in message(SpecError, lambda: own.dataset(x, [0, 1] * 2, x, [0, 1] * 2, name="m"))


def test_the_data_set_of_a_plug_in_is_questioned_however_it_was_made(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy\nfrom fatbench.data import Dataset\n\n\ndef made(x, y):\n"
        "    return Dataset(x, y, 255 - x, y, 2, None, None, 'made', None, '0' * 64)\n\n\n"
        "def floats(root):\n    return made(numpy.eye(8)[:, None, None], numpy.arange(8) % 2)\n\n\n"
        "def labels(root):\n    return made(numpy.eye(8, dtype='uint8')[:, None, None] * 9, numpy.arange(8) / 8)\n\n\n"
        "def fine(root):\n    return made(numpy.eye(8, dtype='uint8')[:, None, None] * 9, numpy.arange(8) % 2)\n\n\n"
        "DATASETS = {'floats': floats, 'labels': labels, 'fine': fine}\n"
    )
    signatures.add_plugin(file)
    try:
        for name, said in (("floats", "are float64 (8, 1, 1, 8), not uint8"), ("labels", "labels are float64 (8,)")):
            assert said in message(MachineError, lambda: own.load(calls.check("Data", name), tmp_path))  # noqa: B023
        assert own.load(calls.check("Data", "fine"), tmp_path).classes == 2
    finally:
        signatures.drop_plugins([file])


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_of_grey_are_scaled(tmp_path: Path, suffix: str) -> None:
    """Pillow's convert() would cut them at 255: black and white remain."""
    grey = random_images(1, 12, 12)[0]
    for name, values in (("8", grey), ("16", grey.astype(np.uint16) * 257)):
        if suffix == "pgm":
            depth = f"P5 12 12 {np.iinfo(values.dtype).max}\n".encode()
            (tmp_path / f"{name}.pgm").write_bytes(depth + values.astype(values.dtype.newbyteorder(">")).tobytes())
        else:
            Image.fromarray(values).save(tmp_path / f"{name}.{suffix}")
    eight, sixteen = (decoded.decode([[tmp_path / f"{name}.{suffix}"]], 12).parts[0] for name in ("8", "16"))
    assert (eight == grey).all() and (sixteen == grey).all()


@pytest.mark.parametrize(("mode", "kind"), [("I", "integers"), ("F", "floats")])
def test_pixels_of_no_known_range_are_refused(tmp_path: Path, mode: str, kind: str) -> None:
    Image.new(mode, (12, 12), 7).save(tmp_path / "a.tif")
    said = message(common.DamagedData, lambda: decoded.decode([[tmp_path / "a.tif"]], 12))
    assert f"pixels are 32-bit {kind} of unknown range" in said


def test_the_first_images_of_a_sorted_class_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EuroSAT walks class folders; its 16-bit images are scaled although torchvision's loader would cut them."""
    for c in range(10):
        for i in range(20):
            file = tmp_path / "eurosat" / "2750" / f"class{c}" / f"{i:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8), (20 * c + i) * 257, np.uint16)).save(file)
    data = DATASETS["torchvision"](tmp_path, dataset="EuroSAT", size=8)
    assert len(data.test_labels) == 40 and len(data.train_labels) == 160
    assert len(np.unique(data.test_labels[:20])) >= 8 and len(np.unique(data.train_labels[:60])) == 10
    assert np.array_equal(data.train_images[:, 0, 0, 0] // 20, data.train_labels)
    again = DATASETS["torchvision"](tmp_path, dataset="EuroSAT", size=8)
    assert again.fingerprint == data.fingerprint
    opened, read = [], hosted._open_image
    monkeypatch.setattr(hosted, "_open_image", lambda path: (opened.append(path), read(path))[1])
    few = DATASETS["torchvision"](tmp_path, (30, 7), dataset="EuroSAT", size=8)
    assert len(opened) == 37 and few.classes == 10
    assert (few.train_images == data.train_images[:30]).all() and (few.train_labels == data.train_labels[:30]).all()
    assert (few.test_images == data.test_images[:7]).all() and (few.test_labels == data.test_labels[:7]).all()


def test_a_set_is_sorted_where_neighbours_have_the_same_label() -> None:
    labels = np.repeat(np.arange(10), 30)
    order = common.fair_order(labels)
    assert order is not None and sorted(order) == [*range(300)] and len(np.unique(labels[order][:60])) == 10
    assert common.fair_order(labels[order]) is None and common.fair_order(np.tile(np.arange(10), 30)) is None
    assert common.fair_order(np.tile(labels, 2)) is not None  # sorted twice, as two folders behind each other
    for short in ([], [1], [3] * 9):
        assert common.fair_order(np.array(short, np.int64)) is None


# --- data that are not what they seem ------------------------------------------------------------------------------

DIFFER = "training and test images differ in brightness"
FULL = layouts.pixels(40, 1, 8, 8, seed=5)
DARK = FULL // 16
HOT = np.where(np.arange(FULL.size).reshape(FULL.shape) == 77, 255, DARK + 1).astype(np.uint8)  # one bright pixel


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (DARK, DARK + 1, {"training images have few grey levels": 16, "test images have few grey levels": 16}),
        (255 - DARK, 253 - DARK, {"training images have few grey levels": 16, "test images have few grey levels": 16}),
        (FULL, FULL // 10, {"test images have few grey levels": 26, DIFFER: 255 / 25}),
        (FULL, FULL // 2, {DIFFER: 255 / 127}),
        (FULL, 128 + FULL // 2, {DIFFER: 255 / 127}),  # as bright, of half the contrast
        (FULL, (255 - np.sqrt(FULL) * 8).clip(0).astype(np.uint8), {}),
        (np.where(FULL > 200, FULL, 0), 255 - np.where(FULL > 200, FULL, 1), {DIFFER: ...}),  # a few lines, inverted
        (DARK.copy(), HOT, {"training images have few grey levels": 16, "test images have few grey levels": 16}),
        (FULL, np.full_like(FULL, 128), {"test images have few grey levels": 1, "test images are in two classes": 20,
                                         DIFFER: 255}),
        (FULL, FULL[::-1] // 3 * 3, {}),
    ],
)  # fmt: skip
def test_images_that_use_little_of_the_pixel_range(train: Any, test: Any, said: dict[str, Any]) -> None:
    """A radius of 8/255 is then a large part of their contrast; one bright pixel changes nothing."""
    data = own.dataset(train, [0, 1] * 20, test, [0, 1] * 20, name="mine")
    expected = {
        doubt: data.doubts.get(doubt) if value is ... else pytest.approx(value, rel=0.03)
        for doubt, value in said.items()
    }
    assert data.doubts == expected


def test_floats_of_a_tenth_of_the_range_are_dark() -> None:
    data = own.dataset(FULL / 255, [0, 1] * 20, FULL / 2550, [0, 1] * 20, name="mine")
    assert data.doubts["test images have few grey levels"] == 27


def test_published_sets_are_not_dark() -> None:
    for name in ("digits", "plane"):
        assert DATASETS[name](Path()).doubts == {}


@pytest.mark.skipif(not FASHION.is_dir(), reason="the Debian package dataset-fashion-mnist is not installed")
def test_the_whole_of_fashion_mnist_is_not_doubtful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system(monkeypatch, FASHION)
    assert DATASETS["fashion_mnist"](tmp_path).doubts == {}


def test_an_image_in_two_classes_is_counted_in_each_part() -> None:
    """Of equal images, those that are not of their most frequent class are wrong whatever a network answers."""
    x, other = random_images(20), random_images(20, seed=1)
    y = np.arange(20) % 2
    twice, labels = np.concatenate([x, x[:4]]), np.concatenate([y, 1 - y[:4]])
    assert own.dataset(other, y, twice, labels, name="mine").doubts == {"test images are in two classes": 4}
    assert own.dataset(twice, labels, other, y, name="mine").doubts == {"training images are in two classes": 4}
    same = np.concatenate([y, y[:4]])
    assert not own.dataset(other, y, twice, same, name="mine").doubts  # doubled within a class
    thrice = np.concatenate([x, x[:1], x[:1]])
    assert own.dataset(other, y, thrice, [*y, 0, 1], name="mine").doubts == {"test images are in two classes": 1}
    nearly = twice.copy()
    nearly[20:, 0, 5, 5] ^= 1
    assert not own.dataset(other, y, nearly, labels, name="mine").doubts
    many, count = random_images(200), [*np.arange(200) % 2, 1]  # one image in 201 moves no per cent
    assert not own.dataset(other, y, np.concatenate([many, many[:1]]), count, name="mine").doubts


def test_the_doubts_of_a_large_folder_are_those_of_its_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoded images are kept for the next time, and what is doubtful about them with these labels."""
    monkeypatch.setattr(decoded, "SMALL", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = layouts.write_image_folder(tmp_path / "mine", n=40)

    def read() -> Mapping[str, float]:
        return DATASETS["image_folder"](tmp_path, path="mine", size=12).doubts

    assert read() == read() == {}
    monkeypatch.setattr(common, "contradicted", lambda *_: pytest.fail("it was determined again"))
    assert read() == {}
    monkeypatch.undo()
    monkeypatch.setattr(decoded, "SMALL", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copy(folder / "test" / "ant" / "t.png", folder / "test" / "bee" / "u.png")
    assert read() == read() == {"test images are in two classes": 1}


def test_files_of_a_folder_that_are_not_read_are_counted_and_named(tmp_path: Path) -> None:
    folder = layouts.write_image_folder(tmp_path / "mine", n=40)
    read = functools.partial(DATASETS["image_folder"], tmp_path, path="mine", size=12)
    assert read().doubts == {} and read().note == ""
    for number, (suffix, form) in enumerate({".jfif": "JPEG", ".JPE": "JPEG"}.items()):
        Image.new("RGB", (12, 12), (7, number, 9)).save(folder / "test" / "ant" / f"more{suffix}", form)
    assert len(read().test_labels) == 4 and not read().doubts
    for place in ("test/ant/.DS_Store", "test/ant/Thumbs.db", "test/ant/._t.png", "train/.cache/a.png"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_bytes(b"\0")
    for place in ("test/ant/readme.md", "train/LICENSE", "train/bee/boxes.csv"):
        (folder / place).write_text("Ümlaut")
    (folder / "test" / "ant" / "nothing").symlink_to("nowhere")
    assert not read().doubts
    for place in ("test/ant/a.tga", "test/ant/b", "test/bee/c.npy", "test/stray.png", "test/bee/sub/t.png"):
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "test" / "ant" / "t.png", folder / place)
    (folder / "train" / "cats.zip").write_bytes(b"PK\0")
    data = read()
    assert len(data.test_labels) == 4 and data.doubts == {"files are not read": 6}
    assert data.note == (
        f"{folder}: 6 files are not read, because of suffix or folder:"
        " test/ant/a.tga, test/ant/b, test/bee/c.npy, test/bee/sub/t.png, test/stray.png and 1 more"
    )
    assert read(first=(1, None)).doubts == {"files are not read": 5}  # no word of training images
    shutil.rmtree(folder / "train" / ".cache")  # for torchvision it is a class
    given = {"dataset": "ImageFolder", "size": 12, "root": "mine/train"}
    assert DATASETS["torchvision"](tmp_path, **given).doubts == {"files are not read": 1}


def test_idx_files_are_read_under_the_names_that_programs_give_them(tmp_path: Path) -> None:
    layouts.write_mnist(tmp_path)
    raw = tmp_path / "MNIST" / "raw"
    read = functools.partial(DATASETS["mnist"], tmp_path, variant="small")
    right = read().fingerprint
    packed = {file.name.removesuffix(".gz"): file.read_bytes() for file in raw.iterdir()}
    for name_of, content_of in (
        (lambda name: name.replace("-idx", ".idx"), gzip.decompress),
        (lambda name: name.replace("-idx", ".idx") + ".gz", bytes),
        (lambda name: f"{name}/{name}", gzip.decompress),
        (lambda name: f"{name}.gz", gzip.decompress),  # named as packed, and is not
        (lambda name: name, bytes),  # packed, and not named so
        (lambda name: f"{name}.gz", lambda data: lzma.compress(gzip.decompress(data))),
    ):
        shutil.rmtree(raw)
        for name, data in packed.items():
            (raw / name_of(name)).parent.mkdir(parents=True, exist_ok=True)
            (raw / name_of(name)).write_bytes(content_of(data))
        assert read().fingerprint == right


def test_torchvision_reads_a_folder_of_the_suite(tmp_path: Path) -> None:
    folder = layouts.write_image_folder(tmp_path / "mine", n=5)
    read = functools.partial(DATASETS["torchvision"], tmp_path, dataset="ImageFolder", size=12)
    spec = calls.check("Data", {"name": "torchvision", "dataset": "ImageFolder", "size": 12, "root": "mine/train"})
    for data in (
        read(root="mine/train"),
        read(root=str(folder / "train")),
        own.load(spec, Path("elsewhere", tmp_path)),
    ):
        assert (len(data.train_labels), len(data.test_labels), data.classes) == (8, 2, 2)
    assert len(own.load(spec, tmp_path, (3, None)).train_labels) == 3
    found = message(SpecError, lambda: read(root="mine"))
    assert "would take the parts test, train of" in found
    assert f"{{name: image_folder, path: {folder}, size: 12}}" in found
    assert f"no such folder: {tmp_path / 'more'}" in message(common.Missing, lambda: read(root="more"))
    (folder / "train" / "ant" / "0.png").unlink()
    (folder / "train" / "bee" / "0.png").unlink()
    assert "no class has 5" in message(MachineError, lambda: read(root="mine/train"))
    assert "has no setting 'first'" in message(SpecError, lambda: read(**{"first": 3}))
