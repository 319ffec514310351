"""Text files that may be compressed, by gzip (`.gz`) or xz (`.xz`), and which files of a folder hold results."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, TextIO

DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # what reading a damaged one raises, beside OSError
MAGIC = {b"\x1f\x8b": gzip.GzipFile, b"\xfd7zXZ": lzma.LZMAFile}


def read(file: Path) -> IO[bytes]:
    """A file's bytes as they were before they were compressed; its first ones say how, whatever its name is.

    OSError: it cannot be read; reading on may raise DAMAGED.
    """
    with file.open("rb") as stream:
        begin = stream.read(6)
    for magic, reader in MAGIC.items():
        if begin.startswith(magic):
            return reader(file)
    return file.open("rb")


def read_text(file: Path) -> TextIO:
    """The same as text in UTF-8."""
    return io.TextIOWrapper(read(file), encoding="utf-8")


@contextmanager
def written(handle: BinaryIO, name: str) -> Iterator[TextIO]:
    """A text stream to a binary one, compressed as the ending of `name` says; equal texts give equal bytes."""
    packed: gzip.GzipFile | lzma.LZMAFile | None = None
    if name.endswith(".gz"):
        packed = gzip.GzipFile("", "wb", fileobj=handle, mtime=0)
    elif name.endswith(".xz"):
        packed = lzma.LZMAFile(handle, "wb")  # noqa: SIM115  # closed below
    stream = io.TextIOWrapper(packed or handle, encoding="utf-8", newline="\n")
    yield stream
    stream.detach()  # flushes; the handle is closed by its owner
    if packed is not None:
        packed.close()


RESULTS = (".jsonl", ".jsonl.gz", ".jsonl.xz")  # endings of files that `fatbench export` wrote


def results_in(folder: Path) -> list[Path]:
    """The files of results in a folder, by name."""
    return sorted(file for file in folder.glob("*.jsonl*") if file.name.endswith(RESULTS))
