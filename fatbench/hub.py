"""Files on the Hugging Face hub: hf://datasets/OWNER/NAME/FILE, and hf://OWNER/NAME/FILE in a model's repository.

Log in with `hf auth login` or HF_TOKEN to read private files and to write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatbench.errors import MachineError

ADDRESS = re.compile(
    r"hf:/+(?:(datasets|spaces|models)/)?([\w.-]+/[\w.-]+)/(.+)"
)  # `Path` turns the two slashes into one


@dataclass(frozen=True)
class Address:
    """A file in a repository on the hub."""

    kind: str  # dataset, space or model
    repository: str
    file: str

    def __str__(self) -> str:
        return f"hf://{'' if self.kind == 'model' else f'{self.kind}s/'}{self.repository}/{self.file}"


def address(file: Path) -> Address | None:
    """The file on the hub that a path names; None if it is a file on this machine."""
    match = ADDRESS.fullmatch(str(file))
    return None if match is None else Address((match[1] or "models").removesuffix("s"), match[2], match[3])


def download(remote: Address) -> Path:
    """Download the newest version of a file into the hub's cache. MachineError: it cannot be downloaded."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(remote.repository, remote.file, repo_type=remote.kind))
    except (OSError, ValueError) as error:
        raise _unreachable(remote, error) from None


def upload(local: Path, remote: Address) -> None:
    """Commit a file to an existing repository. MachineError: it cannot be uploaded."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().upload_file(
            path_or_fileobj=str(local), path_in_repo=remote.file, repo_id=remote.repository, repo_type=remote.kind,
            commit_message=f"{remote.file}, written by fatbench",
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise _unreachable(remote, error) from None


def _unreachable(remote: Address, error: Exception) -> MachineError:
    response: Any = getattr(error, "response", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    code = f"HTTP {response.status_code}: " if getattr(response, "status_code", None) else ""
    return MachineError(f"{remote}: {code}{lines[0]}")
