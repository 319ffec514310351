"""The provenance of a number: the version of the code, the machine, and the versions of libraries."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fatbench.suite.plugin_reads import PACKAGES


@cache
def produced_by(device: str) -> dict[str, Any]:
    """The provenance of results on a device: {"device", "versions", "user", "commit", "dirty", ...}."""
    versions = {"python": platform.python_version()}
    for package in (*PACKAGES, "fatbench"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    name = device
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name(device)
    else:
        name = f"cpu ({processor()})"
    return {"device": name, "versions": versions, "user": user(), **code_version()}


def user() -> str | None:
    """The name of who runs this; None where the system has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return None


INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_tile",
                "neon", "asimd", "sve", "bf16")  # fmt: skip
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # the last is ARM's


@cache
def cpu() -> dict[str, str]:
    """The CPU, and what decides which kernels run on it: {"model", "capability" as torch names it, "instructions"}."""
    import torch

    instruction_names = " ".join(instructions())
    return {
        "model": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "instructions": instruction_names,
    }


def instructions() -> list[str]:
    """Those of `INSTRUCTIONS` that this CPU has; [] if the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return [name for name in INSTRUCTIONS if name in flags]


def emulates_bfloat16() -> bool:
    """Whether this CPU lacks instructions for bfloat16; False if the system does not tell."""
    instruction_names = instructions()
    return bool(instruction_names) and not BFLOAT16.intersection(instruction_names)


def slurm_job() -> str:
    """The SLURM job of this process as squeue names it ("77_3" in an array); empty outside SLURM."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else os.environ.get("SLURM_JOB_ID", "")


@cache
def code_version() -> dict[str, Any]:
    """{"commit": 40 hex digits, "dirty": bool} of the running code; both None outside a git checkout.

    If something is not committed, "diff" is the SHA-256 of the difference, including untracked files.
    """
    root = Path(__file__).parent.parent.parent

    def git(*arguments: str) -> str | None:
        try:
            process = subprocess.run(
                ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return process.stdout.strip()

    if not (root / ".git").exists() or (commit := git("rev-parse", "HEAD")) is None:
        return {"commit": None, "dirty": None}
    if not git("status", "--porcelain", "--", "fatbench"):
        return {"commit": commit, "dirty": False}
    digest = hashlib.sha256((git("diff", "HEAD", "--binary", "--", "fatbench") or "").encode())
    for name in sorted((git("ls-files", "--others", "--exclude-standard", "--", "fatbench") or "").splitlines()):
        digest.update(f"\0{name}\0".encode() + _content(root / name))
    return {"commit": commit, "dirty": True, "diff": digest.hexdigest()}


def short_version() -> str:
    """The first letters of the running code's commit, with "+" if something is not committed."""
    code = code_version()
    return f"{code['commit'][:12]}{'+' * code['dirty']}" if code["commit"] else ""


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # gone since git listed it
        return b""


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
