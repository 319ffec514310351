"""Write files whole or not at all: if the disk is full, the old content is kept.

`-` is stdout for writing and stdin for reading. Devices and pipes are written to, never replaced. An address hf://...
is a file on the Hugging Face hub (`fatbench.hub`).
"""

from __future__ import annotations

import atexit
import errno
import functools
import os
import secrets
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

FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or the user's quota


@contextmanager
def replacing(file: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `file`, which replaces it once everything is on the disk.

    For a link, its target is replaced. For stdout ("-"), a device or a pipe, the stream goes there directly.
    new: raise FileExistsError if `file` exists. OSError: it cannot be written, and nothing was changed.
    """
    if not file.name:  # "." and "/"
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if (hub_address := hub.address(file)) is not None:
        with tempfile.TemporaryDirectory(prefix="fatbench-") as folder_name:
            with (copy := Path(folder_name) / "file").open("xb") as handle:
                yield handle
            hub.upload(copy, hub_address)
        return
    if not new:
        if (descriptor := _open_stream(file)) is not None:
            with os.fdopen(descriptor, "wb") as handle:
                yield handle
            return
        file = Path(os.path.realpath(file))
    # not named after the process: in every container it has the same number
    temporary = file.with_name(f".{file.name[-40:]}.{secrets.token_hex(8)}.part")
    handle = temporary.open("xb")
    try:
        with handle:
            yield handle
            _sync(handle)
        if not new or not _link_new(temporary, file):
            os.replace(temporary, file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name must reach the disk too
        finally:
            os.close(folder)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _link_new(temporary: Path, file: Path) -> bool:
    """Give a file its name; FileExistsError if it is taken. Returns False if the disk has no hard links."""
    try:
        os.link(temporary, file)  # unlike rename, link never replaces a file that was created meanwhile
    except FileExistsError:
        raise
    except OSError:
        if file.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        return False
    return True


def write(
    file: Path, content: str | bytes, label: object = None, *, new: bool = False, make_folder: bool = False
) -> None:
    """Write a file as `replacing` does.

    label: the file's name in messages, such as "-o table.tex". new: the file must not exist. MachineError: the disk is
    full. SpecError: the file cannot be written.
    """
    with _explaining(label or file):
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, new=new) as handle:
            handle.write(_bytes(content))


def write_all(contents: Mapping[Path, str | bytes], label: object) -> None:
    """Write files that belong together, and their folders; none is replaced before all are on the disk.

    Raises the errors of `write`.
    """
    with _explaining(label), ExitStack() as stack:
        for file, content in contents.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(replacing(file))
            handle.write(_bytes(content))
            _sync(handle)


def regular(file: Path) -> Path:
    """A file that can be read repeatedly: the content of stdin ("-") or a pipe is kept until the program ends.

    MachineError: a file on the hub cannot be downloaded.
    """
    if (hub_address := hub.address(file)) is not None:
        return _download(hub_address)
    try:
        return _keep_copy(file) if str(file) == "-" or stat.S_ISFIFO(file.stat().st_mode) else file
    except OSError:  # opening the file will report it
        return file


@functools.cache
def _download(hub_address: hub.Address) -> Path:
    return hub.download(hub_address)


@functools.cache
def _keep_copy(file: Path) -> Path:
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
def _explaining(label: object) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise MachineError(f"{label}: the disk is full; nothing was changed") from None
        raise SpecError(f"{label}: {error.strerror or error}") from None


def is_new_file(file: Path) -> bool:
    """Whether what was written to `file` is a file by this name now, or on the hub: no stdout, device or pipe."""
    if str(file) == "-" or hub.address(file) is not None:
        return str(file) != "-"
    return file.is_file() and _standard_stream(file.stat()) is None


def _standard_stream(status: os.stat_result) -> int | None:
    """1 or 2: stdout or stderr is this file; None: neither."""
    for standard in (1, 2):
        with suppress(OSError):
            if os.path.samestat(status, os.fstat(standard)):
                return standard
    return None


def _open_stream(file: Path) -> int | None:
    """A descriptor for stdout, stderr, a device or a pipe; None if `file` is a regular file or does not exist."""
    if str(file) == "-":
        sys.stdout.flush()  # earlier prints come first
        return os.dup(1)
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    if (standard := _standard_stream(status)) is not None:  # opening it anew would truncate the log of `>> log`
        return os.dup(standard)
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return None
    return os.open(file, os.O_WRONLY)
