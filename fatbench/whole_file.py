"""Files that are written whole or not at all: on a full disk what was there before is still there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fatbench.errors import MachineError, SpecError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(file: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `file`, which takes its name when all is written and on the disk.

    A link is replaced, never followed. new: FileExistsError if there is such a file. OSError: it cannot be written,
    and nothing was changed.
    """
    if not file.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        if not new or not _linked(part, file):
            os.replace(part, file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name too is on disk
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):
            part.unlink()


def _linked(part: Path, file: Path) -> bool:
    """Give a file its name unless that is taken (FileExistsError); False: it is free, on a disk without links."""
    try:
        os.link(part, file)  # unlike a new name, it never replaces what somebody put there meanwhile
    except FileExistsError:
        raise
    except OSError:
        if file.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        return False
    return True


def write(
    file: Path, content: str | bytes, said: object = None, *, new: bool = False, make_folder: bool = False
) -> None:
    """Write a file whole. What is no regular file, such as /dev/stdout, is written as it is.

    said: how a message calls the file, such as "-o table.tex". new: it must not be there. MachineError: the disk is
    full; SpecError: it cannot be written.
    """
    with _explaining(said or file):
        if not new and _special(file):
            file.write_bytes(_bytes(content))
            return
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, new=new) as handle:
            handle.write(_bytes(content))


def write_all(contents: Mapping[Path, str | bytes], said: object) -> None:
    """Write files, and their folders, that belong together: each takes its name when all are on the disk.

    Errors as for `write`.
    """
    with _explaining(said), ExitStack() as stack:
        for file, content in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(replacing(file))
            handle.write(_bytes(content))
            handle.flush()
            os.fsync(handle.fileno())


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content


@contextmanager
def _explaining(said: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise MachineError(f"{said}: the disk is full; nothing was changed") from None
        raise SpecError(f"{said}: {error.strerror or error}") from None


def _special(file: Path) -> bool:
    """Whether a pipe, a terminal or another device stands there."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
