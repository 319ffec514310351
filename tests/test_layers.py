"""The contracts of pyproject.toml on who imports whom hold: `make lint` says which line breaks one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"


def test_imports_keep_their_contracts() -> None:
    """In a process of its own: the linter configures logging for all of its process."""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
