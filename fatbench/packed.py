"""Read and write text files that may be compressed with gzip (`.gz`) or xz (`.xz`), find results, name other files."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, TextIO

DAMAGED = (EOFError, zlib.error, lzma.LZMAError)  # reading a damaged file raises these, or OSError
MAGIC = {b"\x1f\x8b": gzip.GzipFile, b"\xfd7zXZ": lzma.LZMAFile}


OTHERS = {  # beginning of a file, in small letters -> what it is, where data or weights were meant
    (b"<!doctype html", b"<html", b"\xef\xbb\xbf<!doctype html"): "an HTML page",
    (b"<?xml", b"\xef\xbb\xbf<?xml"): "an XML document",
    (b"version https://git-lfs",): "a pointer of Git LFS ('git lfs pull' fetches the file)",
    (b"pk\x03\x04",): "a zip file",
}


def kind_of(file: Path) -> str:
    """What a file is by its first bytes, in words; empty for anything else, as for what cannot be read."""
    head = b""
    with suppress(OSError), file.open("rb") as stream:  # a member of an archive is no file
        head = stream.read(512).lstrip().lower()
    return next((kind for starts, kind in OTHERS.items() if head.startswith(starts)), "")


def read(file: Path) -> IO[bytes]:
    """Open a file and decompress it, if its first bytes (not its name) say that it is compressed.

    OSError: it cannot be opened. Reading the stream may raise DAMAGED.
    """
    with file.open("rb") as stream:
        begin = stream.read(6)
    for magic, reader in MAGIC.items():
        if begin.startswith(magic):
            return reader(file)
    return file.open("rb")


def read_text(file: Path) -> TextIO:
    """Open a file as `read` does, as UTF-8 text."""
    return io.TextIOWrapper(read(file), encoding="utf-8")


@contextmanager
def text_writer(handle: BinaryIO, name: str) -> Iterator[TextIO]:
    """A text stream that writes to a binary one, compressed by the ending of `name`; equal texts give equal bytes."""
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


RESULTS = (".jsonl", ".jsonl.gz", ".jsonl.xz")  # endings of the files that `fatbench export` writes


def results_in(folder: Path) -> list[Path]:
    """The files of results in a folder, sorted by name."""
    return sorted(file for file in folder.glob("*.jsonl*") if file.name.endswith(RESULTS))
