"""Data sets in folders of images: any image folder, CINIC-10, CelebA with LEAF's split."""

from __future__ import annotations

import hashlib
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fatbench.data import catalogue, decoded
from fatbench.data.common import (
    Check,
    DamagedData,
    Labels,
    Loaded,
    Missing,
    holdings,
    listed,
    md5,
    missing_error,
    parsing,
    read_bytes,
    reading,
    unpack,
)
from fatbench.suite.facts import First


def hash_order(classes: Mapping[str, Sequence[Path]], order: Sequence[str]) -> tuple[list[Path], Labels]:
    """(files, labels) of all classes, ordered by a hash of class and file name.

    So the order is the same on every machine, and the first n images are a fair sample of the classes.
    """
    rows = [
        (hashlib.blake2b(f"{name}/{file.name}".encode()).digest(), file, number)
        for number, name in enumerate(order)
        for file in classes.get(name, ())
    ]
    rows.sort(key=lambda row: row[0])
    return [file for _, file, _ in rows], np.array([number for _, _, number in rows], dtype=np.int64)


def class_folders_of(folder: Path) -> dict[str, list[Path]]:
    """{class: its image files}. Raises DamagedData if the folder is missing."""
    with reading(folder):
        return catalogue.class_folders(folder)


# --- any image folder ---------------------------------------------------------------------------------------------

TINY = (
    "Tiny ImageNet as published: move train/CLASS/images/* to train/CLASS, and val/images/* to test/CLASS by the list"
    " val/val_annotations.txt"
)


def load_image_folder(root: Path, path: str, size: int, first: First) -> Loaded:
    """path/train/<class>/* and path/test/<class>/*, `path` absolute or below the root; first: as in `_decode_first`."""
    folder = Path(root, Path(path).expanduser())
    if not folder.is_dir():
        found = "; ".join(["", *holdings(folder.parent)])
        raise Missing(f"data: {{name: image_folder, path: {path}}}: no such folder: {folder} (below --data){found}")
    train, test = class_folders_of(folder / "train"), class_folders_of(folder / "test")
    if len(train) < 2:
        found = "; ".join(["", *holdings(folder / "train")])
        raise DamagedData(f"{folder / 'train'} has {len(train)} class folders, at least 2 are needed{found}")
    for name, files in train.items():
        if not files:
            found = "; ".join(["", *holdings(folder / "train" / name)])
            tiny = (folder / "val" / "val_annotations.txt").is_file()
            raise DamagedData(f"{folder / 'train' / name} has no image files{found}{f'; {TINY}' if tiny else ''}")
    if unknown_classes := sorted(set(test) - set(train)):  # the other way round: a class without test images
        raise DamagedData(
            f"{folder / 'test' / unknown_classes[0]}: '{unknown_classes[0]}' is not a class in {folder / 'train'},"
            f" which has {listed(list(train))}"
        )
    train_files, train_labels = hash_order(train, list(train))
    test_files, test_labels = hash_order(test, list(train))
    if not test_files:
        raise DamagedData(f"{folder / 'test'} holds no images")
    loaded = _decode_first(folder, (train_files, test_files), (train_labels, test_labels), len(train), first, size)
    unread = catalogue.unread_files(folder / "test", test_files)
    if first[0] != 1:  # else the image stands in for a set that is not read
        unread += catalogue.unread_files(folder / "train", train_files)
    return replace(loaded, unread=unread)


def _decode_first(
    folder: Path,
    files: tuple[Sequence[Path], Sequence[Path]],
    labels: tuple[Labels, Labels],
    classes: int,
    first: First,
    size: int,
    resize: bool = True,
) -> Loaded:
    """The first training and test images of a folder; the others are only counted."""
    train_labels, test_labels = (split_labels[:n] for split_labels, n in zip(labels, first, strict=True))
    decoded_images = decoded.decode(
        [split_labels[:n] for split_labels, n in zip(files, first, strict=True)], size, resize=resize
    )
    return Loaded(
        where=folder,
        train_images=decoded_images.parts[0],
        train_labels=train_labels,
        test_images=decoded_images.parts[1],
        test_labels=test_labels,
        classes=classes,
        gaps=True,  # the folders name the classes
        counts=(len(files[0]), len(files[1])),
        sha256=decoded.fingerprint(decoded_images, classes, train_labels, test_labels),
        decoded=decoded_images,
    )


# --- CINIC-10 -----------------------------------------------------------------------------------------------------

CINIC_SPLITS = ("train", "valid", "test")


def cinic_folder(root: Path) -> Path:
    """The folder with train, valid and test; the archive is unpacked first if the folder is missing."""

    def target_of(parts: tuple[str, ...]) -> tuple[str, ...] | None:
        split, name, file = parts[-3:] if len(parts) >= 3 else ("", "", "")
        wanted = split in CINIC_SPLITS and name in catalogue.CINIC_CLASSES and file.endswith(".png")
        return (split, name, file) if wanted else None

    return unpack("cinic10", root, target_of)


def cinic_files(folder: Path, split: str) -> dict[str, list[Path]]:
    """{class: files} of one split. Raises DamagedData for other classes than the ten."""
    classes = class_folders_of(folder / split)
    if set(classes) != set(catalogue.CINIC_CLASSES):
        unexpected = sorted(set(classes) ^ set(catalogue.CINIC_CLASSES))[0]  # one too many, or one that is missing
        problem = "is missing" if unexpected in catalogue.CINIC_CLASSES else "is not a class of CINIC-10"
        raise DamagedData(f"{folder / split / unexpected} {problem}")
    return classes


def load_cinic(root: Path, enlarge: bool, first: First = (None, None)) -> Loaded:
    """CINIC-10; with `enlarge`, the training set is train and valid. first: as in `_decode_first`."""
    folder = cinic_folder(root)
    order = catalogue.CINIC_CLASSES
    split_files = [
        hash_order(cinic_files(folder, split), order) for split in (("train", "valid") if enlarge else ("train",))
    ]
    train_files = [file for files, _ in split_files for file in files]
    test_files, test_labels = hash_order(cinic_files(folder, "test"), order)
    train_labels = np.concatenate([labels for _, labels in split_files])
    files, labels = (train_files, test_files), (train_labels, test_labels)
    return _decode_first(folder, files, labels, len(order), first, 32, resize=False)


def survey_cinic(root: Path) -> tuple[Path, int]:
    """(folder, number of images) without decoding any; an archive that is not unpacked is not counted (0)."""
    folder = root / catalogue.dataset_facts("cinic10").folder
    published = catalogue.archive("cinic10")
    assert published is not None
    if not folder.is_dir():
        if (root / published.path).is_file():
            return root / published.path, 0
        raise missing_error("cinic10", root, folder, root / published.path)
    return folder, sum(len(files) for split in CINIC_SPLITS for files in cinic_files(folder, split).values())


# --- CelebA -------------------------------------------------------------------------------------------------------

Shots = list[tuple[str, int]]  # one celebrity's images in order: (file name, 1 if smiling else 0)
Celebrities = dict[int, Shots]  # {celebrity's number: their images}

LISTS = ("identity_CelebA.txt", "list_attr_celeba.txt")
IMAGES = "img_align_celeba"


def load_celeba(root: Path, split: str, sample: float, least: int, seed: int) -> Loaded:
    """CelebA, 84x84, by celebrity; see `fatbench.data.celeba` for the settings."""
    base = celeba_folder(root)
    checks: tuple[Check, ...] = ()
    if split == "json":
        train, test = (read_leaf(_json_files(base, split_name)) for split_name in ("train", "test"))
    elif _find(base, LISTS[0]) is None and _find(base, "all_data") is not None:
        train, test = leaf_recipe(read_leaf(_json_files(base, "all_data")), sample, least, seed)
    else:
        celebrities, checks = read_lists(base)
        train, test = leaf_recipe(celebrities, sample, least, seed)
    with celeba_images(base) as (image_folder, fetch):
        train_files, train_labels, writers = _files_and_labels(train, image_folder)
        test_files, test_labels, test_writers = _files_and_labels(test, image_folder)
        # LEAF uses PIL's default filter, nearest until Pillow 7 and bicubic since; here bicubic
        decoded_images = decoded.decode((train_files, test_files), 84, fetch=fetch)
        return Loaded(
            where=base,
            train_images=decoded_images.parts[0],
            train_labels=train_labels,
            test_images=decoded_images.parts[1],
            test_labels=test_labels,
            classes=2,
            checks=checks,
            writers=writers,
            test_writers=test_writers,
            sha256=decoded.fingerprint(decoded_images, 2, train_labels, test_labels, writers, test_writers),
            decoded=decoded_images,
        )


def celeba_folder(root: Path) -> Path:
    """root/celeba. Raises Missing if there is none."""
    base = root / catalogue.dataset_facts("celeba").folder
    if not base.is_dir():
        raise missing_error("celeba", root, base)
    return base


def celeba_split(base: Path) -> str:
    """The `split` that the files are for: "json" if LEAF's own split is there, else "recipe"."""
    return "recipe" if _find(base, "train") is None else "json"


def _find(base: Path, name: str) -> Path | None:
    """The path of `name` where torchvision or LEAF store it: celeba, celeba/raw, celeba/data or celeba/data/raw."""
    folders = (base, base / "raw", base / "data", base / "data" / "raw")
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _json_files(base: Path, split_name: str) -> list[Path]:
    folder = _find(base, split_name)
    files = sorted(folder.glob("*.json")) if folder is not None else []
    if not files:
        raise DamagedData(
            f"{folder or base / split_name}: LEAF's {split_name}/*.json is missing (its preprocess.sh writes it)"
        )
    return files


def read_leaf(files: Sequence[Path]) -> Celebrities:
    """The celebrities of LEAF's json files, {"users": [...], "user_data": {user: {"x": [name], "y": [0 or 1]}}}."""
    celebrities: Celebrities = {}
    for file in files:
        data = read_bytes(file)
        with parsing(file, "a LEAF json file"):
            content = json.loads(data)
            for user in content["users"]:
                entry = content["user_data"][user]
                celebrities[int(user)] = [
                    _shot(name, label) for name, label in zip(entry["x"], entry["y"], strict=True)
                ]
    return celebrities


def _shot(name: Any, label: Any) -> tuple[str, int]:
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    if label not in (0, 1):  # LEAF writes 0.0 and 1.0
        raise ValueError(f"label {label!r} is not 0 or 1")
    return name, int(label)


def read_lists(base: Path) -> tuple[Celebrities, tuple[Check, ...]]:
    """The celebrities of the published lists, in the order in which they first appear, and the lists' checksums."""
    checks, texts = [], []
    published = {Path(file.path).name: file.md5 for file in catalogue.files("celeba")}
    for name in LISTS:
        path = _find(base, name) or base / name
        data = read_bytes(path)
        checks.append(Check(path, published[name], md5(data)))
        with parsing(path, "a list of CelebA"):
            texts.append(data.decode("utf-8").splitlines())
    identities, attributes = texts
    smiles: dict[str, int] = {}
    with parsing(checks[1].file, "a list of CelebA"):
        column = 1 + attributes[1].split().index("Smiling")
        for line in attributes[2:]:
            if fields := line.split():
                smiles[fields[0]] = {"1": 1, "-1": 0}[fields[column]]  # a KeyError is reported as damage
        if len(smiles) != int(attributes[0]):  # the list's first line counts the others
            raise ValueError(f"{len(smiles):,} lines, its head says {int(attributes[0]):,}")
    celebrities: Celebrities = {}
    with parsing(checks[0].file, "a list of CelebA"):
        for line in identities:
            if line.strip():
                name, celebrity = line.split()
                if name not in smiles:
                    raise ValueError(f"{name} is not in {LISTS[1]}")
                celebrities.setdefault(int(celebrity), []).append(_shot(name, smiles[name]))
        if (total := sum(map(len, celebrities.values()))) != len(smiles):
            raise ValueError(f"{total:,} images, {LISTS[1]} has {len(smiles):,}")
    return celebrities, tuple(checks)


def leaf_recipe(celebrities: Celebrities, sample: float, least: int, seed: int) -> tuple[Celebrities, Celebrities]:
    """(training, test) images of each celebrity by LEAF's recipe, draw for draw.

    Celebrities with fewer than `least` images are left out; the others are shuffled and taken until `sample` of all
    images is reached (the last one only in part, and left out if fewer than `least` remain); 0.9 of each one's images,
    rounded down, train. Source: LEAF, data/utils/{sample,remove_users,split_data}.py with --smplseed and --spltseed
    equal to `seed`. Without these flags LEAF draws unseeded, so its recipe alone reproduces no published split. Raises
    DamagedData if no celebrity is left.
    """
    eligible = {celebrity: shots for celebrity, shots in celebrities.items() if len(shots) >= least}
    images_wanted = int(sample * sum(map(len, eligible.values())))
    order, rng = list(eligible), random.Random(seed)
    rng.shuffle(order)
    drawn_celebrities: Celebrities = {}
    count = 0
    for celebrity in order:
        if count >= images_wanted:
            break
        shots = eligible[celebrity]
        if count + len(shots) > images_wanted:
            # LEAF permutes the first ones, it does not draw from all of them
            shots = [shots[index] for index in rng.sample(range(images_wanted - count), images_wanted - count)]
        count += len(shots)
        drawn_celebrities[celebrity] = shots
    train: Celebrities = {}
    test: Celebrities = {}
    rng = random.Random(seed)  # another script of LEAF, with a seed of its own
    for celebrity, shots in drawn_celebrities.items():
        if len(shots) < max(least, 2):
            continue
        # LEAF keeps an image for each side whatever the fraction
        n_train = 1 if len(shots) == 2 else max(1, int(0.9 * len(shots)))
        train_indices = set(rng.sample(range(len(shots)), n_train))
        train[celebrity] = [shot for index, shot in enumerate(shots) if index in train_indices]
        test[celebrity] = [shot for index, shot in enumerate(shots) if index not in train_indices]
    if not train:
        raise DamagedData(
            f"CelebA: sample {sample} of {len(eligible)} celebrities with at least {least} images leaves none"
        )
    return train, test


def _files_and_labels(celebrities: Celebrities, image_folder: Path) -> tuple[list[Path], Labels, Labels]:
    """(files, labels, celebrities), one for each image, celebrity after celebrity."""
    rows = [(name, smile, celebrity) for celebrity, shots in celebrities.items() for name, smile in shots]
    labels, writers = (np.array([row[column] for row in rows], dtype=np.int64) for column in (1, 2))
    return [image_folder / name for name, _, _ in rows], labels, writers


@contextmanager
def celeba_images(base: Path) -> Iterator[tuple[Path, Callable[[Path], bytes]]]:
    """A context with (folder or zip file of the aligned images, function from a path below it to the bytes)."""
    folder, packed = _find(base, IMAGES), _find(base, f"{IMAGES}.zip")
    if folder is not None:
        yield folder, read_bytes
        return
    if packed is None:
        raise DamagedData(f"{base / IMAGES} and {base / IMAGES}.zip are missing")
    # the zip's 202,599 files are read in place, not unpacked
    with reading(packed), parsing(packed, "a zip file"):
        archive = zipfile.ZipFile(packed)

    def fetch(path: Path) -> bytes:
        try:
            member = archive.getinfo(f"{IMAGES}/{path.name}")
        except KeyError:
            raise DamagedData(f"{path} is missing") from None
        with parsing(path, "a whole member of the zip file"):
            return archive.read(member)

    with archive:
        yield packed, fetch


def survey_celeba(root: Path) -> tuple[Path, int, tuple[Check, ...]]:
    """(folder, number of images there, checksums of the lists) without decoding any image."""
    base = celeba_folder(root)
    checks: tuple[Check, ...] = ()
    if any(_find(base, name) is not None for name in LISTS) or _find(base, "train") is _find(base, "all_data") is None:
        _, checks = read_lists(base)
    with celeba_images(base) as (image_folder, _):
        if image_folder.is_dir():
            with os.scandir(image_folder) as entries:
                return base, sum(entry.name.endswith(".jpg") for entry in entries), checks
        with zipfile.ZipFile(image_folder) as archive:
            return base, sum(name.endswith(".jpg") for name in archive.namelist()), checks
