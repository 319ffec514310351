"""Other users of this machine, for tests: what they do in a folder that all share."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fatbench.errors import FatbenchError

NOBODY, ANN = 65534, 65533  # two users; the second has no name


def done_as(uid: int, action: Callable[[], object], groups: Sequence[int] = ()) -> str:
    """What `action` raises as another user, "Type: message"; "" for nothing. Without root, it is this user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups(groups)
                os.setgid(uid)
                os.setuid(uid)
            said = ""
            try:
                action()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if not isinstance(error, FatbenchError):
                    said += traceback.format_exc()
            os.write(writer, said.encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can reach; pytest's own are for one user, which each of its starts sees to."""
    with tempfile.TemporaryDirectory(prefix="fatbench-users-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def shared(reachable: Path) -> Path:
    """A folder in which every user may write. Only for root, who may become two users."""
    if os.geteuid() != 0:
        pytest.skip("only root may become two users")
    folder = reachable / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder
