"""The authors' repositories, each at one commit: fetched, or taken from a folder of clones.

A clone is a git repository, with a work tree or bare. Only what the pinned commit holds is unpacked, so that changes
beside it do no harm and a clone without that commit is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess
import sys
import tarfile
import types
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fatbench.errors import MachineError


@dataclass(frozen=True)
class Source:
    """A repository on GitHub, the commit that is compared with, and which of its folders are needed (all: none)."""

    name: str  # owner/repository
    commit: str
    paths: tuple[str, ...] = ()
    title: str = ""


SOURCES = {
    "sfat": Source("ZFancy/SFAT", "13b07c1c0316e1e77c1946f46ba4ab0842fdd848", title="SFAT"),
    "fedtorch": Source("MLOPTPSU/FedTorch", "ab8068dbc96804a5c1a8b898fd115175cfebfe75", ("fedtorch",), "FedTorch"),
    "so-vit": Source("jiangtaoxie/So-ViT", "9eea9ff3bda942f944c8fbbb15e626777198b1dc", ("src",), "So-ViT"),
    "t2t": Source("yitu-opensource/T2T-ViT", "0f63dc9558f4d192de926504dbddfa1b3f5db6ca", ("models",), "T2T-ViT"),
    "tnt": Source(
        "huawei-noah/Efficient-AI-Backbones", "f90e129b645c3b1684fe07cd361cd557d0ad71f7", ("tnt_pytorch",), "TNT"
    ),
    "fedml": Source(
        "FedML-AI/FedML",
        "03e11dfee69a458a9820ec4e05b531a5f935eb2b",
        ("python/fedml/simulation/mpi/fedgkt", "python/fedml/simulation/sp/fednova", "python/fedml/model/cv/resnet56"),
        "FedML",
    ),
    "fednova": Source("JYWa/FedNova", "47b4e096dfb19dc43c728896fff335a5befb645d", ("distoptim",), "FedNova"),
    "fedaux": Source("fedl-repo/fedaux", "9700c8b0a747c0c6d2073fe2aad369a5769ae2eb", ("code",), "FedAUX"),
    "tamaya": Source(
        "alexandreduplessis/Tamaya_Federated_Learning",
        "c065b7294ba786442428b8024a1489fc89337a55",
        ("src",),
        "FedSoftBetter",
    ),
    "timm": Source(
        "huggingface/pytorch-image-models",
        "ce4d3485b690837ba4e1cb4e0e6c4ed415e36cea",
        ("timm/models/tnt.py",),
        "timm of 2022",
    ),
    "calfat": Source("cc233/CalFAT", "e53f8e8fdb978c9d9a9c1560a2044c66bcad0064", title="CalFAT"),
    "awp": Source("csdongxian/AWP", "a7acf5d842fccf1bbb4b91644352ce157d370a26", ("AT_AWP",), "AWP"),
    "fedrbn": Source(
        "illidanlab/FedRBN", "b18846cf9fe536f74613479eab2c7de713cd6fd0", ("federated", "nets", "utils"), "FedRBN"
    ),
    "blades": Source("lishenghui/blades", "ca1ac15c0e4b2cf671a9e6848456a5e185c00bf4", ("fllib/aggregators",), "Blades"),
    "byzantine": Source(
        "epfml/byzantine-robust-optimizer",
        "288417fe78da7d80be0ffd18c42cd675d5eb1b5a",
        ("codes",),
        "Byzantine-robust optimizer, with centred clipping",
    ),
    "breaching": Source(
        "JonasGeiping/breaching", "8bd99d52cdb8c38d6b12a191e620d11d275a8d45", ("breaching",), "breaching"
    ),
    "ilrg": Source("BUAA-CST/iLRG", "17e10f8b79bde1b9724d8a15a5ef9867a29c4617", ("methods.py",), "iLRG"),
}


def unpacked(source: Source, clones: Path | None, cache: Path, into: Path) -> Path:
    """The files of the pinned commit under `into`; from `clones` if it is given, else fetched into `cache`.

    MachineError: no git, no network, no such clone, or a clone that lacks the commit.
    """
    repository = found(source, clones) if clones else fetched(source, cache)
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", source.commit, *source.paths], capture_output=True, check=False
    )
    if archive.returncode:
        raise MachineError(f"{source.name}: {last_line(archive.stderr)} (commit {source.commit[:12]} in {repository})")
    folder = into / source.name.replace("/", "+")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def found(source: Source, clones: Path) -> Path:
    """The git directory of a source below `clones`: OWNER+NAME, OWNER/NAME or NAME, or `repo` in one of these."""
    owner, name = source.name.split("/")
    for place in (f"{owner}+{name}", f"{owner}/{name}", name):
        for folder in (clones / place, clones / place / "repo"):
            if (folder / ".git").exists() or (folder / "objects").is_dir():
                return folder
    raise MachineError(f"{source.name}: no clone in {clones} ({owner}+{name}, {source.name} or {name})")


def fetched(source: Source, cache: Path) -> Path:
    """A bare repository in `cache` that has the commit, fetched alone if it is not there."""
    folder = cache / source.name.replace("/", "+")
    if not _git(folder, "cat-file", "-e", f"{source.commit}^{{commit}}"):
        folder.mkdir(parents=True, exist_ok=True)
        _git(folder, "init", "--quiet", "--bare")
        address = f"https://github.com/{source.name}"
        done = subprocess.run(
            ["git", "-C", str(folder), "fetch", "--quiet", "--depth", "1", address, source.commit],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise MachineError(
                f"{source.name}: cannot fetch {source.commit[:12]}: {last_line(done.stderr)}; "
                "--clones FOLDER names clones that are here"
            )
    return folder


def _git(folder: Path, *words: str) -> bool:
    try:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        raise MachineError("fidelity needs git, and there is none") from None


def last_line(output: bytes) -> str:
    """What a program said last."""
    return (output.decode(errors="replace").strip().splitlines() or ["no message"])[-1]


# --- importing other people's modules -----------------------------------------------------------------------------


@contextlib.contextmanager
def imported(
    folder: Path, *names: str, stubs: Mapping[str, Mapping[str, Any]] | None = None
) -> Iterator[tuple[Any, ...]]:
    """Modules of a folder, for the time of the block: afterwards neither they nor the folder are to be found.

    stubs: modules that are not installed and that nothing compared needs, name -> what they hold. Calls of `.cuda()`
    stay on the CPU, what is printed is dropped, and warnings of old code are not ours.
    """
    before = dict(sys.modules)
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cpu())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in {name.split(".")[0] for name in names}:
            for known in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[known]
        for name, members in (stubs or {}).items():
            sys.modules[name] = _module(name, members)
        sys.path.insert(0, str(folder))
        try:
            yield tuple(importlib.import_module(name) for name in names)
        finally:
            sys.path.remove(str(folder))
            for name in set(sys.modules) - set(before):
                file = getattr(sys.modules[name], "__file__", None)
                if name in (stubs or {}) or (file and Path(file).is_relative_to(folder)):
                    del sys.modules[name]
            sys.modules.update(before)


def _module(name: str, members: Mapping[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """`.cuda()` of a tensor or module leaves it where it is."""
    with replaced(torch.Tensor, cuda=lambda self, *_: self), replaced(nn.Module, cuda=lambda self, *_: self):
        yield


@contextlib.contextmanager
def replaced(place: Any, **members: Any) -> Iterator[None]:
    """Attributes of a module or class in the place of its own, for the time of the block."""
    old = {name: getattr(place, name) for name in members}
    try:
        for name, value in members.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in old.items():
            setattr(place, name, value)


class Instead:
    """A module with some of its members replaced, for other modules to hold in its place."""

    def __init__(self, module: Any, **members: Any) -> None:
        self._module, self._members = module, members

    def __getattr__(self, name: str) -> Any:
        return self._members[name] if name in self._members else getattr(self._module, name)
