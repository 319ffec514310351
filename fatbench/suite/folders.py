"""The folders of suites. Imports nothing heavy, because shells complete the names of suites with it."""

from __future__ import annotations

import re
from pathlib import Path


def folders() -> list[Path]:
    """The folders that are searched for suites by name: ./suites, then those of the program."""
    package = Path(__file__).parent.parent
    return [Path("suites"), package.parent / "suites", package / "suites"]


def available() -> dict[str, Path]:
    """name -> file of every suite that can be run by its name."""
    file_by_name: dict[str, Path] = {}
    for folder in folders():
        if folder.is_dir():
            for file in sorted(folder.glob("*.yaml")):
                file_by_name.setdefault(file.stem, file)
    return dict(sorted(file_by_name.items()))


def own_files() -> dict[str, str]:
    """name -> file of the suites in the working directory."""
    file_by_name: dict[str, str] = {}
    for file in sorted(file for file in Path().glob("*.y*ml") if file.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if name := re.search(r"^name: *['\"]?([^'\"\s#]+)", text, re.MULTILINE):
            file_by_name.setdefault(name[1], str(file))
    return file_by_name
