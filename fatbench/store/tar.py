"""The tar in which half-done cells travel: what it holds, the cells' lines, and the files that they go on from.

    unfinished.json                              the list: size and SHA-256 of everything that follows, in this order
    cells.jsonl.xz                               the cells, as `fatbench.store.jsonl` writes them
    0a1b2c3d4e5f/state-000030.safetensors        files of each cell
    0a1b2c3d4e5f/model-000028.safetensors

A reader compares every byte with the list before it writes one. It takes names from the list, which can have only those
of our own files; a link, a folder, or a member that is not listed is refused. Equal cells give equal bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fatbench import packed, whole_file
from fatbench.errors import MachineError
from fatbench.store import jsonl
from fatbench.store.document import LINE, Cell, Digest, ExchangeError
from fatbench.store.problems import Contradiction, Identify
from fatbench.store.rows import dumps

LIST, LINES = "unfinished.json", "cells.jsonl.xz"
BLOCK, PIECE = tarfile.BLOCKSIZE, 2**20
STATE = "state-{:06d}.safetensors"
CellId = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
FileName = Annotated[
    str, Field(pattern=r"^((state|model|clients)-[0-9]{6,9}\.safetensors|artifacts/round-[0-9]{6,9}\.safetensors)$")
]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Listed(_Part):
    """A file, as the list has it."""

    sha256: Digest
    bytes: Annotated[int, Field(ge=0, lt=2**50)]


class Half(_Part):
    """The files of a cell; checkpoint: the one that its training goes on from, None: it is trained."""

    checkpoint: FileName | None
    files: dict[FileName, Listed]

    @property
    def digests(self) -> dict[str, str]:
        """{file: SHA-256}, as the record of a training has them."""
        return {name: listed.sha256 for name, listed in self.files.items()}


class _List(_Part):
    format: Literal["fatbench unfinished cells"]
    version: Literal[1]
    lines: Listed
    cells: dict[CellId, Half]

    def members(self) -> Iterator[tuple[str, Listed]]:
        """What follows the list, in order."""
        yield LINES, self.lines
        for cell, half in sorted(self.cells.items()):
            yield from ((f"{cell}/{name}", half.files[name]) for name in sorted(half.files))


_LIST = TypeAdapter(_List)


class Parts(NamedTuple):
    """A tar that was looked at from its first byte to its last."""

    file: Path
    cells: Mapping[str, Cell]
    halves: Mapping[str, Half]


# --- writing ------------------------------------------------------------------------------------------------------


class Content(NamedTuple):
    """A tar that is not written yet."""

    lines: bytes
    list: _List

    @property
    def size(self) -> int:
        """Bytes of its members."""
        return sum(listed.bytes for _, listed in self.list.members())


def content(cells: Sequence[Cell], halves: Mapping[str, Half]) -> Content:
    """What a tar of these cells holds. DatabaseError: a finished stage is damaged."""
    buffer = io.BytesIO()
    with packed.text_writer(buffer, LINES) as stream:
        stream.writelines(jsonl.lines(cells, len(cells)))
    lines = buffer.getvalue()
    listed = Listed(sha256=hashlib.sha256(lines).hexdigest(), bytes=len(lines))
    return Content(lines, _List(format="fatbench unfinished cells", version=1, lines=listed, cells=dict(halves)))


def write(file: Path, content: Content, folder: Path, opened: Mapping[str, BinaryIO]) -> None:
    """Write a tar; it appears whole or not at all. MachineError: it cannot be written, or a file has changed.

    folder: with the folders of the cells. opened: files that are read from here, because they may go.
    """
    text = dumps(content.list.model_dump()).encode()
    try:
        with (
            whole_file.replacing(file) as handle,
            tarfile.open(fileobj=handle, mode="w|", format=tarfile.GNU_FORMAT) as tar,
        ):
            _add(tar, LIST, len(text), io.BytesIO(text))
            for name, listed in content.list.members():
                if name == LINES:
                    _add(tar, name, listed.bytes, io.BytesIO(content.lines))
                elif name in opened:
                    _add(tar, name, listed.bytes, opened[name])
                else:
                    with (folder / name).open("rb") as source:
                        _add(tar, name, listed.bytes, source)
    except OSError as error:
        raise MachineError(f"cannot write {file}: {error.strerror or error}") from None


def _add(tar: tarfile.TarFile, name: str, size: int, source: BinaryIO) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, source)


# --- reading ------------------------------------------------------------------------------------------------------


def is_tar(file: Path) -> bool:
    """Whether a file is a tar by its first block. MachineError: it is on the hub, and cannot be had."""
    try:
        with whole_file.regular(file).open("rb") as stream:
            return stream.read(BLOCK)[257:262] == b"ustar"
    except OSError:  # whoever reads it says so
        return False


def read(file: Path, identify: Identify | None = None, contradiction: Contradiction | None = None) -> Parts:
    """Look at every byte of a tar and write nothing. The other arguments are those of `jsonl.check`.

    ExchangeError: it is damaged, truncated or none of ours. MachineError: it cannot be read.
    """
    with _opened(file) as stream, tempfile.TemporaryDirectory(prefix="fatbench-") as folder:
        listed = _list(stream, file)
        lines = Path(folder) / LINES
        with lines.open("wb") as target:
            for name, one in listed.members():
                _member(stream, file, name, one, target if name == LINES else None)
        if stream.read(BLOCK) != bytes(BLOCK):
            raise ExchangeError(f"{file}: damaged: more follows than its list has, or it is truncated")
        try:
            cells = _cells(lines, identify, contradiction)
        except ExchangeError as error:
            raise ExchangeError(str(error).replace(str(lines), f"{file}, {LINES}")) from None
    if problem := _mismatch(cells, listed.cells):
        raise ExchangeError(f"{file}: {problem}")
    return Parts(file, cells, listed.cells)


def unpack(parts: Parts, targets: Mapping[str, Path]) -> None:
    """Write files of a tar, {member: path}. ExchangeError: it is another than was looked at. OSError: no space."""
    with _opened(parts.file) as stream:
        for name, one in _list(stream, parts.file).members():
            if name not in targets:
                _member(stream, parts.file, name, one, None)
                continue
            cell, _, of_cell = name.partition("/")
            if parts.halves[cell].files[of_cell] != one:
                raise ExchangeError(f"{parts.file}: has changed while it was read")
            with targets[name].open("xb") as target:
                _member(stream, parts.file, name, one, target)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with whole_file.regular(file).open("rb") as stream:
            yield stream
    except OSError as error:
        raise MachineError(f"cannot read {file}: {error.strerror or error}") from None


def _list(stream: BinaryIO, file: Path) -> _List:
    """The list, which is the first member."""
    name, size = _header(stream, file)
    if name != LIST or size > LINE:
        raise ExchangeError(f"{file}: a tar, but none of 'fatbench export --unfinished'")
    text = _bytes(stream, size, file)
    _padding(stream, size, file)
    try:
        return _LIST.validate_python(json.loads(text))
    except (ValueError, RecursionError, ValidationError) as error:
        reason = error.errors()[0]["loc"] if isinstance(error, ValidationError) else "no JSON"
        raise ExchangeError(f"{file}: damaged, or of another version: its list is not valid ({reason})") from None


def _header(stream: BinaryIO, file: Path) -> tuple[str, int]:
    """(name, bytes) of the member that begins here. Its header is a single block; longer ones are refused."""
    block = stream.read(BLOCK)
    if len(block) < BLOCK or block == bytes(BLOCK):
        raise ExchangeError(f"{file}: truncated")
    try:
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError):
        raise ExchangeError(f"{file}: damaged: no header of a tar where one should be") from None
    if member.type != tarfile.REGTYPE or member.size < 0:
        raise ExchangeError(f"{file}: a tar, but none of 'fatbench export --unfinished': it has more than plain files")
    return member.name, member.size


def _member(stream: BinaryIO, file: Path, name: str, listed: Listed, target: Any) -> None:
    """Read the next member, which must be this one, and write it to `target`, if there is one."""
    found, size = _header(stream, file)
    if (found, size) != (name, listed.bytes):
        raise ExchangeError(f"{file}: damaged: {name} of {listed.bytes} bytes is listed, another member is here")
    digest = hashlib.sha256()
    for begin in range(0, size, PIECE):
        piece = _bytes(stream, min(PIECE, size - begin), file)
        digest.update(piece)
        if target is not None:
            target.write(piece)
    _padding(stream, size, file)
    if digest.hexdigest() != listed.sha256:
        raise ExchangeError(f"{file}: damaged: {name} has another SHA-256 than is listed")


def _padding(stream: BinaryIO, size: int, file: Path) -> None:
    if any(_bytes(stream, -size % BLOCK, file)):
        raise ExchangeError(f"{file}: damaged: something stands between two members")


def _bytes(stream: BinaryIO, size: int, file: Path) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise ExchangeError(f"{file}: truncated")
    return data


def _cells(lines: Path, identify: Identify | None, contradiction: Contradiction | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    with jsonl.read_parts(lines) as (_, version, numbered):
        for batch in numbered:
            for number, line in batch:
                location = f"{lines}:{number}"
                cell = jsonl.cell_of(line, version, location, identify, contradiction)
                cells[cell.cell] = cell
    return cells


def _mismatch(cells: Mapping[str, Cell], halves: Mapping[str, Half]) -> str:
    """In what the list and the cells' lines disagree, in words."""
    if cells.keys() != halves.keys() or any(cell.replicate for cell in cells.values()):
        return "its cells are not those of its list"
    for id, half in halves.items():
        train = cells[id].by_stage.get("train")
        if train is None:
            return f"cell {id} has no training"
        expected = None if train.status == "done" else STATE.format(train.round)
        if half.checkpoint != expected or (expected is not None and expected not in half.files):
            return f"cell {id} is at round {train.round}, and its checkpoint is {half.checkpoint}"
    return ""
