"""The cache of decoded images: an array in the cache folder, which every process maps into memory.

An array is identified by the contents of its files, not by their times, so a replaced file is decoded again. Small sets
are decoded by each process and not cached. Entries that were not used for 30 days are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fatbench import settings, whole_file
from fatbench.data.common import DamagedData, Images, Labels, eight_bits, parsing, read_bytes
from fatbench.errors import MachineError

CHUNK = 64  # images that a thread takes at a time
SMALL = 64 << 20  # bytes of decoded images that each process decodes for itself
VERSION = b"1"  # of the decoding
DOUBTS = 2  # version of the checks of a set
NAMED = 10  # damaged files named in a message
UNUSED = 30 * 86400  # seconds after which an unused entry is removed


class Interrupted(Exception):
    """The user asked to stop while images were decoded."""


Fetch = Callable[[Path], bytes]
Progress = Callable[[str, int, int], None]  # (title, images done, images in all); may raise to stop
_PROGRESS: ContextVar[Progress] = ContextVar("progress", default=lambda what, done, total: None)


@contextlib.contextmanager
def progress(say: Progress) -> Iterator[None]:
    """A context in which `say` is called while images are decoded."""
    token = _PROGRESS.set(say)
    try:
        yield
    finally:
        _PROGRESS.reset(token)


@dataclass(frozen=True)
class Decoded:
    """The images of several lists of files, and their digest."""

    parts: tuple[Images, ...]
    sha256: str  # over the files, in order, and how they were decoded
    folder: Path | None  # that holds the array; None: it is in memory

    def doubts(self, fingerprint: str) -> Mapping[str, float] | None:
        """The doubts about the set of this `fingerprint`, as stored beside the array; None: not determined yet."""
        if self.folder is not None:
            with contextlib.suppress(OSError, ValueError):
                return dict(json.loads(self._doubts_file(fingerprint).read_text()))
        return None

    def keep(self, fingerprint: str, doubts: Mapping[str, float]) -> None:
        """Store the doubts about the set beside the array, so that it need not be read again for them."""
        if self.folder is not None and not self._doubts_file(fingerprint).is_file():
            with contextlib.suppress(OSError), whole_file.replacing(self._doubts_file(fingerprint)) as handle:
                handle.write(json.dumps(dict(doubts)).encode())

    def _doubts_file(self, fingerprint: str) -> Path:
        assert self.folder is not None
        return self.folder / f"doubts-{DOUBTS}-{fingerprint[:32]}.json"  # the same images may get other labels


def decode(
    files_by_split: Sequence[Sequence[Path]], size: int, *, resize: bool = True, fetch: Fetch = read_bytes
) -> Decoded:
    """The images of files, each part as (N, 3, size, size) uint8, RGB; large ones mapped from the cache folder.

    resize: bicubic to size x size without cropping; otherwise any other size is an error. `fetch` returns a file's
    bytes. Raises DamagedData with the files that are missing, no images or of another size, if possible before any is
    decoded, and MachineError if there is no room for the array.
    """
    files = [file for split_files in files_by_split for file in split_files]
    total = 3 * size * size * len(files)
    content_digest = hashlib.sha256(
        VERSION + json.dumps([size, resize, [len(split_files) for split_files in files_by_split]]).encode()
    )
    cached = settings.cache_folder() / "decoded"
    reading = f"reading {len(files):,} images of {_common_folder(files)}" if total >= SMALL else ""
    for digest in _in_threads(lambda i: hashlib.sha256(fetch(files[i])).digest(), len(files), reading):
        content_digest.update(digest)
    sha256 = content_digest.hexdigest()
    folder = cached / sha256[:32]
    if total >= SMALL and (folder / "images.npy").is_file():
        with contextlib.suppress(OSError, ValueError):
            return _map_array(folder, files_by_split, sha256, size)
    _in_threads(lambda i: _check_file(files[i], fetch(files[i]), size, resize), len(files), reading)
    shape = (len(files), 3, size, size)
    if total >= SMALL:
        with contextlib.suppress(OSError):
            cached.mkdir(parents=True, exist_ok=True)
            _evict(cached)
            with tempfile.TemporaryDirectory(prefix=".decoding-", dir=cached) as temporary:
                new_folder = Path(temporary, "new")  # has the umask's permissions, and not those of a temporary folder
                new_folder.mkdir()
                array = _new_array(new_folder / "images.npy", shape)
                _fill(array, files, size, resize, fetch)
                array.flush()
                del array
                with contextlib.suppress(OSError):  # another process has finished first
                    new_folder.rename(folder)
            return _map_array(folder, files_by_split, sha256, size)
        if total > settings.available_memory() / 2:
            room = shutil.disk_usage(next(one for one in (cached, *cached.parents) if one.exists())).free
            raise MachineError(
                f"{_common_folder(files)}: {len(files):,} decoded images take {total / 1e9:.1f} GB; {cached} has"
                f" {room / 1e9:.1f} GB left or cannot be written (XDG_CACHE_HOME names another folder), and"
                f" {settings.available_memory() / 1e9:.1f} GB of memory are free"
            )
    array = np.empty(shape, np.uint8)
    _fill(array, files, size, resize, fetch)
    return Decoded(_split_parts(array, files_by_split), sha256, None)


def fingerprint(decoded: Decoded, classes: int, *labels: Labels | None) -> str:
    """The SHA-256 of a set of decoded files with its labels (and writers): that of its files, not of its pixels."""
    digest = hashlib.sha256(f"files {decoded.sha256} {classes};".encode())
    for array in labels:
        digest.update(b"none;" if array is None else f"{array.shape};".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _map_array(folder: Path, files_by_split: Sequence[Sequence[Path]], sha256: str, size: int) -> Decoded:
    # copy on write, because torch accepts no read-only array
    array = np.load(folder / "images.npy", mmap_mode="c")
    with contextlib.suppress(OSError):
        os.utime(folder)  # the time of its last use
    if array.shape != (sum(map(len, files_by_split)), 3, size, size) or array.dtype != np.uint8:
        raise ValueError(f"{folder}: holds another array")
    return Decoded(_split_parts(array, files_by_split), sha256, folder)


def _evict(cached: Path) -> None:
    """Remove entries that were not used for long; a process that maps one keeps it until it ends."""
    for entry in cached.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > UNUSED:
                shutil.rmtree(entry)


def _split_parts(array: Images, files_by_split: Sequence[Sequence[Path]]) -> tuple[Images, ...]:
    ends = np.cumsum([len(split_files) for split_files in files_by_split]).tolist()
    return tuple(array[end - len(split_files) : end] for split_files, end in zip(files_by_split, ends, strict=True))


def _new_array(file: Path, shape: tuple[int, ...]) -> Any:
    """A new array in a file with its disk space allocated: running out of it later would kill the process."""
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    with file.open("r+b") as handle:
        os.posix_fallocate(handle.fileno(), 0, file.stat().st_size)
    return array


def _fill(array: Images, files: Sequence[Path], size: int, resize: bool, fetch: Fetch) -> None:
    def decode_one(i: int) -> None:
        array[i] = _pixels(files[i], fetch(files[i]), size, resize)

    title = f"decoding {len(files):,} images of {_common_folder(files)} ({array.nbytes / 1e9:.2g} GB)"
    _in_threads(decode_one, len(files), title if array.nbytes >= SMALL else "")


def _common_folder(files: Sequence[Path]) -> str:
    return os.path.commonpath([files[0].parent, files[-1].parent])


def _pixels(file: Path, data: bytes, size: int, resize: bool) -> Any:
    """(3, size, size) uint8 from a file's bytes. Raises DamagedData for no image, or another size."""
    from PIL import Image

    with parsing(file, "an image"), Image.open(io.BytesIO(data)) as image:
        rgb = eight_bits(image, "RGB")
        if rgb.size != (size, size):
            if not resize:
                raise ValueError(f"{rgb.width}x{rgb.height}, not {size}x{size}")
            rgb = rgb.resize((size, size), Image.Resampling.BICUBIC)
        return np.asarray(rgb).transpose(2, 0, 1)


def _check_file(file: Path, data: bytes, size: int, resize: bool) -> None:
    """Raise DamagedData if the head or the end of a file shows that it is damaged, mostly without decoding it."""
    from PIL import Image

    with parsing(file, "an image"), Image.open(io.BytesIO(data)) as image:
        if not resize and image.size != (size, size):
            raise ValueError(f"{image.width}x{image.height}, not {size}x{size}")
        is_whole = b"\xff\xd9" in data[-1024:] if image.format == "JPEG" else image.format == "PNG"
        if image.format == "PNG":
            image.verify()
    if not is_whole:  # other formats, and a JPEG that seems to end early
        _pixels(file, data, size, resize)


def _in_threads(act: Callable[[int], Any], n: int, title: str = "") -> list[Any]:
    """[act(i) for i in range(n)] in several threads. Raises DamagedData with all files for which `act` raises it.

    title: for `Progress`; empty: no progress is reported.
    """
    say, stop, done_count = _PROGRESS.get(), threading.Event(), 0
    damaged: list[str] = []

    def work_chunk(start: int) -> list[Any]:
        results: list[Any] = []
        for i in range(start, min(start + CHUNK, n)):
            if stop.is_set():
                break
            try:
                results.append(act(i))
            except DamagedData as error:
                damaged.append(str(error))
        return results

    all_results: list[Any] = []
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # Pillow and hashlib release the GIL
        try:
            for results in pool.map(work_chunk, range(0, n, CHUNK)):
                all_results += results
                done_count = min(done_count + CHUNK, n)
                if title:
                    say(title, done_count, n)
        except BaseException:  # also Ctrl-C: running threads end at the next image
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if damaged:
        remainder = f"; and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        raise DamagedData("; ".join(sorted(damaged)[:NAMED]) + remainder)
    return all_results
