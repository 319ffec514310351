"""Files that are written whole or not at all: on a full disk what was there before is still there.

`-` is stdout, and stdin where a file is read. Devices and pipes are written as they are, never replaced. An address hf://
is a file of the Hugging Face hub (`fatbench.hub`).
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fatbench import hub
from fatbench.errors import MachineError, SpecError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replacing(file: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `file`, which takes its name when all is written and on the disk.

    Of a link the target is written. Stdout ("-"), a device or a pipe is no name to take: the stream goes there.
    new: FileExistsError if anything has that name. OSError: it cannot be written, and nothing was changed.
    """
    if not file.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if (what := hub.address(file)) is not None:
        with tempfile.TemporaryDirectory(prefix="fatbench-") as place:
            with (copy := Path(place) / "file").open("xb") as handle:
                yield handle
            hub.upload(copy, what)
        return
    if not new:
        if (descriptor := _unnamed(file)) is not None:
            with os.fdopen(descriptor, "wb") as handle:
                yield handle
            return
        file = Path(os.path.realpath(file))
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as handle:
            yield handle
            _sync(handle)
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
    """Write a file whole, as `replacing` does.

    said: how a message calls the file, such as "-o table.tex". new: it must not be there. MachineError: the disk is
    full; SpecError: it cannot be written.
    """
    with _explaining(said or file):
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
            _sync(handle)


def regular(file: Path) -> Path:
    """A file that can be read more than once: what stdin ("-") or a pipe gives is kept until the program ends.

    MachineError: a file of the hub cannot be had.
    """
    if (what := hub.address(file)) is not None:
        return _fetched(what)
    try:
        return _kept(file) if str(file) == "-" or stat.S_ISFIFO(file.stat().st_mode) else file
    except OSError:  # whoever reads it says why
        return file


@functools.cache
def _fetched(what: hub.Address) -> Path:
    return hub.download(what)


@functools.cache
def _kept(file: Path) -> Path:
    folder = tempfile.mkdtemp(prefix="fatbench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / "stdin"
    with open(0 if str(file) == "-" else file, "rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)
    return copy


def _sync(handle: BinaryIO) -> None:
    handle.flush()
    if stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
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


def _unnamed(file: Path) -> int | None:
    """A descriptor of what is no file to replace: our stdout or stderr, whatever they are, a device or a pipe."""
    if str(file) == "-":
        sys.stdout.flush()  # what was printed comes first
        return os.dup(1)
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    for standard in (1, 2):  # opened anew, `>> log` would lose what is in it
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(standard)):
                return os.dup(standard)
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return None
    return os.open(file, os.O_WRONLY)
