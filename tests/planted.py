"""Forty mistakes to plant, each in a copy of the program, and the tests that see them: what fewer tests must not lose.

    python tests/planted.py                 `make planted`: plants all and says which test sees each; 1 if one is unseen
    python tests/planted.py holm kappa      some of them

The mistakes are in planted.yaml; `test_planted.py` holds them against today's program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PLANTED: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "planted.yaml").read_text())


def text(mistake: dict[str, str]) -> str:
    """The file with the mistake in it. ValueError: what is to be mistaken does not stand there once."""
    source = (ROOT / "fatbench" / mistake["in"]).read_text()
    if source.count(mistake["right"]) != 1:
        raise ValueError(f"{mistake['in']} has {mistake['right']!r} {source.count(mistake['right'])} times, not once")
    return source.replace(mistake["right"], mistake["wrong"])


def first_failure(folder: Path, tests: str) -> str:
    """The first of the tests that fails in the copy of the program in `folder`; empty: none does."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", tests]
    there = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, cwd=folder, env=there, capture_output=True, text=True)
    failed = (line for line in ran.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests")))
    return next(failed, "").partition(" ")[2].split(" - ")[0]


def seen_by(name: str, folder: Path) -> str:
    """The first test that fails with the mistake and passes without it; empty: none does."""
    mistake = PLANTED[name]
    file = folder / "fatbench" / mistake["in"]
    for tests in mistake["seen_by"].split():
        right = file.read_text()
        file.write_text(text(mistake))
        try:
            found = first_failure(folder, f"tests/test_{tests}.py")
        finally:
            file.write_text(right)
        if found and not first_failure(folder, found):
            return found
    return ""


def main() -> int:
    """Plant the mistakes named, or all; the number of those that no test sees is not zero: 1."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        folder.mkdir()
        for place in map(ROOT.joinpath, ("fatbench", "tests", "suites", "docs", "benchmarks", "results")):
            shutil.copytree(place, folder / place.name)
        for file in filter(Path.is_file, ROOT.glob("[!.]*")):
            shutil.copy(file, folder)
        seen = {}
        for name in sys.argv[1:] or PLANTED:
            seen[name] = seen_by(name, folder)
            print(f"{name:20} {seen[name] or 'NOT SEEN'}", flush=True)
    print(f"{len([*filter(None, seen.values())])} of {len(seen)} are seen")
    return 0 if all(seen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
