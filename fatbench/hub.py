"""Files of the Hugging Face hub: hf://datasets/OWNER/NAME/FILE, and hf://OWNER/NAME/FILE of a model's repository.

Who may read and write is the hub's business: `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatbench.errors import MachineError

ADDRESS = re.compile(r"hf:/+(?:(datasets|spaces|models)/)?([\w.-]+/[\w.-]+)/(.+)")  # a path has one slash of two


@dataclass(frozen=True)
class Address:
    """A file of a repository of the hub."""

    kind: str  # dataset, space or model
    repository: str
    file: str

    def __str__(self) -> str:
        return f"hf://{'' if self.kind == 'model' else f'{self.kind}s/'}{self.repository}/{self.file}"


def address(file: Path) -> Address | None:
    """The file of the hub that a path names; None: it is one of this machine."""
    found = ADDRESS.fullmatch(str(file))
    return None if found is None else Address((found[1] or "models").removesuffix("s"), found[2], found[3])


def download(what: Address) -> Path:
    """The file as it is on the hub now, in the hub's cache. MachineError: it cannot be had."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(what.repository, what.file, repo_type=what.kind))
    except (OSError, ValueError) as error:
        raise _unreachable(what, error) from None


def upload(local: Path, what: Address) -> None:
    """Commit a file to a repository that exists. MachineError: it cannot be, or is not allowed."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().upload_file(
            path_or_fileobj=str(local), path_in_repo=what.file, repo_id=what.repository, repo_type=what.kind,
            commit_message=f"{what.file}, written by fatbench",
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise _unreachable(what, error) from None


def _unreachable(what: Address, error: Exception) -> MachineError:
    response: Any = getattr(error, "response", None)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    code = f"HTTP {response.status_code}: " if getattr(response, "status_code", None) else ""
    return MachineError(f"{what}: {code}{lines[0]}")
