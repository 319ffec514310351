"""The README as a package index shows it: links and images are absolute there, relative in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent


def absolute(text: str, repository: str, ref: str) -> str:
    """A Markdown text whose relative links lead to the repository's files at `ref`, and its images to their bytes."""
    text = text.replace("](../../", f"]({repository}/")  # pages of the host, such as its badges
    text = re.sub(r"!\[([^\]]*)\]\((?!https?://)([^)#]+)\)", rf"![\1]({repository}/raw/{ref}/\2)", text)
    return re.sub(r"\]\((?!https?://|#)([^)]+)\)", rf"]({repository}/blob/{ref}/\1)", text)


class ReadmeHook(MetadataHookInterface):
    """Hatchling's hook of `dynamic = ["readme"]`: the links are of the version that is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into the metadata."""
        version = re.search(r'"(.+)"', (ROOT / "fatbench" / "version.py").read_text(encoding="utf-8").splitlines()[-1])
        assert version is not None
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
