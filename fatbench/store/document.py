"""A cell as a document: what a line of an exported file says and what the database holds of a cell.

The models below are the one description of it: they check what is read and written, and name the columns of `runs`.
`parsed` makes a document of a line, `fatbench.store.problems` says what cannot be in it, `fatbench.store.merge` makes
one of two, `fatbench.store.cell_records` reads and writes the database, `fatbench.store.old_files` translates older
lines.

The digest of a finished stage is the SHA-256 of the canonical JSON of all that its document says about it: its row, its
numbers, its outcomes, its runs, and the cell's spec. A flipped bit in a file or a database is detected by it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fatbench.errors import CONTROL, FatbenchError
from fatbench.store.grid_points import Point, labels_text
from fatbench.store.rows import LARGEST, dumps

FORMAT = "fatbench results"
SCHEMA_VERSION = 2
VERSIONS = (1, 2)  # that can be read
LEVELS = 30  # of nested JSON in a line
LINE = 2**26  # characters of a line
VALUES = 2**23  # commas in a line: each value takes up to 64 bytes
LISTS = 2**21  # lists and mappings in a line


class ExchangeError(FatbenchError):
    """A file cannot be imported; nothing of it was, or the message says how much."""


# --- fields ------------------------------------------------------------------------------------------------------


@functools.lru_cache(1024)  # numbers of the same commit share their time
def _check_date(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text} is not a valid time") from None
    return text


_TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z$"
Time = Annotated[str, Field(pattern=_TIME), AfterValidator(_check_date)]
Name = Annotated[str, Field(min_length=1, max_length=190)]
StageName = Annotated[str, Field(pattern=r"^(train|[^@]+@[0-9]{1,9})$", max_length=190)]
Integer = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Value = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Status = Literal["todo", "done", "failed", "interrupted"]  # no process runs a stage in a file
Commit = Annotated[str, Field(pattern=r"^([0-9a-f]{40}|release .*)$")]  # a release: see `old_files`
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# not strict, because JSON has lists in place of tuples
Row = Annotated[tuple[Natural, Integer, Name, Value, Natural, Natural, Time], Field(strict=False)]
Block = Annotated[
    tuple[Natural, list[Integer], Natural | list[Natural], dict[Name, list[Value]], Natural, Time], Field(strict=False)
]
Chunk = Annotated[tuple[Natural, Annotated[Natural, Field(ge=1)], str], Field(strict=False)]


def _check_depth(value: Any) -> Any:
    """Raise ValueError for JSON that is nested too deeply for a recursive reader."""
    level = [value]
    for _ in range(LEVELS):
        nodes = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [inner for node in nodes for inner in node]
        if not level:
            return value
    raise ValueError(f"nested more than {LEVELS} levels deep")


ABSENT: Any = None  # default of an optional key; never read


class _Open(BaseModel):
    """A mapping in which these keys are checked and others are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Best(_Open):
    round: Natural
    value: Value | None = ABSENT


class _Requested(_Open):
    n: Annotated[int, Field(ge=1)] | None  # there may be fewer images
    batch: Annotated[int, Field(ge=1)]


class _Record(_Open):
    last: _Best | None = ABSENT
    best_val: _Best | None = Field(ABSENT, alias="best-val")
    best_test: _Best | None = Field(ABSENT, alias="best-test")
    model: str | None = ABSENT
    requested: _Requested | None = ABSENT


class _Data(_Open):
    name: str
    variant: str | None = ABSENT
    fingerprint: str | None = ABSENT


class _Plugin(_Open):
    plugin: str
    sha256: str
    modules: dict[str, str] = ABSENT
    names: list[str]


class _Extra(_Open):
    data: _Data | str | None = ABSENT
    attack: str | None = ABSENT
    path: str | None = ABSENT
    user: str | None = ABSENT
    stack: Natural | None = ABSENT  # clients and cells trained as one program, in runs with path "fast"
    vectorise: Annotated[int, Field(ge=1, lt=2**31)] = ABSENT
    dropped: bool = ABSENT
    lease: Annotated[float, Field(gt=0, le=1e9)] | None = ABSENT
    plugins: list[_Plugin] = ABSENT


class _Settings(_Open):
    name: Name
    implementation: str | None = ABSENT


def _as(model: type[_Open]) -> Any:
    """A mapping whose keys `model` checks, but which stays as it is in the document."""

    def fits(value: dict[str, Any]) -> dict[str, Any]:
        model.model_validate(_check_depth(value))
        return value

    return Annotated[dict[str, Any], AfterValidator(fits)]


# --- the document ------------------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Header(_Part):
    format: Literal["fatbench results"]
    schema_version: int
    cells: Natural


class Run(_Part):
    """One attempt at a stage."""

    uid: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    stage: StageName
    suite: str
    preset: str | None
    status: Status
    started: Time
    ended: Time | None
    host: str | None
    pid: Integer | None
    device: str | None
    precision: str | None
    commit: Commit | None
    dirty: bool | None
    versions: dict[str, str] | None
    log: str | None
    error: str | None
    extra: _as(_Extra)  # type: ignore[valid-type]


class Numbers:
    """The rows (round, client, metric, value, n, run, created) of blocks; each iteration makes them anew."""

    def __init__(self, blocks: Sequence[Sequence[Any]]):
        self.blocks = blocks

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for round, metric, clients, values, sizes, run, created in self.series():
            for client, value, size in zip(clients, values, sizes, strict=True):
                yield round, client, metric, value, size, run, created

    def series(self) -> Iterator[tuple[Any, ...]]:
        """(round, metric, clients, their values, their n, run, created), one for each metric of a block."""
        for round, clients, n, metrics, run, created in self.blocks:
            sizes = n if isinstance(n, list | tuple) else [n] * len(clients)
            for metric, values in metrics.items():
                yield round, metric, clients, values, sizes, run, created

    def __len__(self) -> int:
        return sum(len(block[1]) * len(block[3]) for block in self.blocks)

    def of(self, metric: str) -> Numbers:
        """Those of one metric."""
        blocks = (block for block in self.blocks if metric in block[3])
        return Numbers([(*block[:3], {metric: block[3][metric]}, *block[4:]) for block in blocks])

    def rounds(self) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of each round in order, provided that the blocks are in the order of rounds."""
        for _, group in groupby(self.blocks, lambda block: block[0]):
            yield sorted(Numbers(list(group)))


def blocks_of(rows: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows, in the order of rounds, as blocks in which shared values are written once.

    A block is (round, clients, n or [n, ...], {metric: [value, ...]}, run, created).
    """
    blocks: list[tuple[Any, ...]] = []
    for round, of_round in groupby(rows, lambda row: row[0]):
        series: dict[tuple[Any, ...], list[tuple[int, int, float]]] = {}
        for _, client, metric, value, n, run, created in of_round:
            series.setdefault((run, created, metric), []).append((client, n, value))
        metrics_by_key: dict[tuple[Any, ...], dict[str, list[float]]] = {}
        for (run, created, metric), client_values in series.items():
            clients, sizes, values = zip(*client_values, strict=True)
            metrics_by_key.setdefault((run, created, clients, sizes), {})[metric] = list(values)
        blocks += [
            (round, list(clients), sizes[0] if len(set(sizes)) == 1 else list(sizes), metrics, run, created)
            for (run, created, clients, sizes), metrics in metrics_by_key.items()
        ]
    return blocks


class Stage(_Part):
    """A stage with its numbers and outcomes."""

    stage: StageName
    status: Status
    round: Natural
    total: Natural
    record: _as(_Record)  # type: ignore[valid-type]
    settings: _as(_Settings) | None = None  # type: ignore[valid-type]
    run: Natural | None
    error: str | None
    digest: Digest | None = None
    numbers: list[Block]
    outcomes: list[Chunk]

    @property
    def rows(self) -> Numbers:
        """Its numbers, one by one."""
        return Numbers(self.numbers)

    @property
    def chunks(self) -> list[tuple[int, int, bytes]]:
        """Its outcomes: (first example, how many, packed bits). Raises ValueError for text that is no base64."""
        return [(start, n, base64.b64decode(text, validate=True)) for start, n, text in self.outcomes]

    @property
    def bits(self) -> str:
        """Its outcomes as a text of "0" and "1"."""
        return "".join(f"{int.from_bytes(bits):0{8 * len(bits)}b}"[:n] for _, n, bits in self.chunks)


Label = Annotated[str, Field(max_length=190)]


class PointLine(_Part):
    """A point of a suite's grid at which a cell stands."""

    suite: Label
    preset: Label
    labels: Annotated[dict[Label, Label], Field(max_length=20)]
    method: Label
    data: Label
    split: Label
    model: Label
    evaluations: Annotated[list[Name], Field(max_length=1000)]
    current: bool = True

    def of_cell(self, cell: str) -> Point:
        """The point as it is stored."""
        replaced_fields = {"cell": cell, "labels": labels_text(self.labels), "evaluations": tuple(self.evaluations)}
        return Point(**(dict(self) | replaced_fields))


class Cell(_Part):
    """A cell, or one of its replicates, with its runs and stages."""

    cell: Name
    replicate: Natural = 0
    points: list[PointLine] = []
    spec: Annotated[dict[str, Any], AfterValidator(_check_depth)]
    created: Time
    runs: list[Run]
    stages: list[Stage]

    @property
    def by_stage(self) -> dict[str, Stage]:
        """Its stages by name."""
        return {stage.stage: stage for stage in self.stages}


RUN_COLUMNS = tuple(name for name in Run.model_fields if name not in ("versions", "extra"))  # which are JSON
_HEADER, _CELL, _ROWS = TypeAdapter(_Header), TypeAdapter(Cell), TypeAdapter(list[Row], config=ConfigDict(strict=True))


def as_line(cell: Cell) -> str:
    """A document as a line of a file; equal documents give equal lines."""
    line: dict[str, Any] = {"cell": cell.cell, "spec": cell.spec, "created": cell.created}
    line |= {"runs": [dict(run) for run in cell.runs], "stages": [dict(stage) for stage in cell.stages]}
    if cell.replicate:
        line["replicate"] = cell.replicate
    if cell.points:
        line["points"] = [point.model_dump(exclude_defaults=True) for point in cell.points]
    return dumps(line) + "\n"


# --- digests -----------------------------------------------------------------------------------------------------


class Sealing:
    """The digest of a stage whose numbers are added in order, some at a time."""

    def __init__(
        self, created: str, spec: Any = None, runs: Sequence[Any] = (), stage: Mapping[str, Any] | None = None
    ):
        """Without a stage only what stands before the numbers is known: see `complete`."""
        row = stage or {}
        content = {
            **{key: row.get(key) for key in ("stage", "status", "round", "total", "record", "settings", "error")},
            "spec": spec,
            "created": created,
            "run": row.get("run"),
            "runs": sorted(runs, key=lambda run: str(run["uid"])),
            "numbers": [],
            "outcomes": row.get("outcomes"),
        }
        key = '"numbers":['
        # the first match is the list: no key before it has a mapping as its value, and strings escape their quotes
        head, _, tail = dumps(content).partition(f"{key}]")
        self.sha256, self.after, self.has_numbers = hashlib.sha256(f"{head}{key}".encode()), f"]{tail}", False

    @classmethod
    def of(cls, cell: Cell, stage: Stage) -> Sealing:
        """That of a stage of a document, still without its numbers."""
        row = dict(stage) | {"run": None if stage.run is None else cell.runs[stage.run].uid}
        return cls(cell.created, cell.spec, [dict(run) for run in cell.runs if run.stage == stage.stage], row)

    def add(self, numbers: Sequence[Sequence[Any]]) -> None:
        """Add numbers in order, each with the uid of its run."""
        self.sha256.update(f"{',' * (self.has_numbers and bool(numbers))}{dumps(numbers)[1:-1]}".encode())
        self.has_numbers |= bool(numbers)

    def hexdigest(self) -> str:
        """The SHA-256 in hexadecimal; the same on every machine and in every order of the runs."""
        complete = self.sha256.copy()
        complete.update(self.after.encode())
        return complete.hexdigest()


def digest(cell: Cell, stage: Stage) -> str:
    """The digest of a stage of a document."""
    uids = [run.uid for run in cell.runs]
    sealing = Sealing.of(cell, stage)
    blocks = [
        (*block[:3], {name: [value + 0.0 for value in block[3][name]] for name in block[3]}, uids[block[4]], block[5])
        for block in stage.numbers
    ]
    for rows in Numbers(blocks).rounds():
        sealing.add(rows)
    return sealing.hexdigest()


def sealed(cell: Cell) -> Cell:
    """The document with the right digests of its finished stages."""
    stages = [
        stage.model_copy(update={"digest": digest(cell, stage) if stage.status == "done" else None})
        for stage in cell.stages
    ]
    return cell.model_copy(update={"stages": stages})


# --- reading -----------------------------------------------------------------------------------------------------


def header(line: str, location: str) -> tuple[int, int]:
    """(cells, version of the form) that a file's first line announces. ExchangeError: it is not fatbench's."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ExchangeError(f"{location}: not a file written by 'fatbench export'")
    if value.get("schema_version") not in VERSIONS:
        raise ExchangeError(
            f"{location}: written by another fatbench (schema_version {str(value.get('schema_version'))[:20]};"
            f" this one reads {' and '.join(map(str, VERSIONS))})"
        )
    return int(_validate(_HEADER, parsed(line, location), location).cells), int(value["schema_version"])


def document(value: Mapping[str, Any], location: str) -> Cell:
    """JSON data as a document. ExchangeError: a field is invalid; the message has its place."""
    stages = value.get("stages")
    in_blocks = [
        {**stage, "numbers": _in_blocks(stage["numbers"], f"stages.{i}.numbers", location)}
        if isinstance(stage, dict) and isinstance(stage.get("numbers"), list)
        else stage
        for i, stage in enumerate(stages if isinstance(stages, list) else ())
    ]
    cell: Cell = _validate(_CELL, {**value, "stages": in_blocks} if isinstance(stages, list) else value, location)
    for i, stage in enumerate(cell.stages):
        for j, (_, clients, n, metrics, *_) in enumerate(stage.numbers):
            lists: list[Any] = [clients, *metrics.values(), *([n] if isinstance(n, list) else [])]
            if len(set(map(len, lists))) > 1:
                raise ExchangeError(f"{location}: stages.{i}.numbers.{j}: its lists differ in length")
    return cell


def _in_blocks(entries: Sequence[Any], path: str, location: str) -> Sequence[Any]:
    """Entries of which some are rows, as in version 1, all as blocks."""
    blocks = [isinstance(entry, list | tuple) and len(entry) == 6 and isinstance(entry[3], dict) for entry in entries]
    if all(blocks):
        return entries
    if not any(blocks):
        return blocks_of(_validate(_ROWS, entries, location, path))
    return [block for entry in entries for block in _in_blocks([entry], path, location)]


def _no_number(name: str) -> Any:
    """Raise ValueError for NaN and infinities, which Python's JSON reader accepts."""
    raise ValueError(f"{name} is not a number")


def parsed(text: str, at: str) -> dict[str, Any]:
    """A line as a JSON object. ExchangeError: it is none, or has what no database can store; `at`: its place."""
    if len(text) > LINE or text.count(",") > VALUES or text.count("[") + text.count("{") > LISTS:
        raise ExchangeError(f"{at}: more than {LINE} characters or {VALUES} values in a line: not written by export")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        truncation = "" if text.endswith("\n") else "; the file is truncated here"
        reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise ExchangeError(f"{at}: not JSON ({reason}){truncation}") from None
    except RecursionError:
        raise ExchangeError(f"{at}: nested more than {LEVELS} levels deep") from None
    except ValueError as error:  # also raised for a number of thousands of digits
        raise ExchangeError(f"{at}: {error}") from None
    if "\\u" in text:
        _check_storable(value, at)
    if ("\\" in text or not text.isascii() or "\x7f" in text) and ESCAPED.search(text):
        _check_printable(value, at)
    if not isinstance(value, dict):
        raise ExchangeError(f"{at}: expected a JSON object, got a {type(value).__name__}")
    return value


def _validate(form: TypeAdapter[Any], value: Any, location: str, path: str = "") -> Any:
    """Data as the validated model. Raises ExchangeError with the place of the first mistake."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        keys = (*filter(None, path.split(".")), *problem["loc"])
        dotted_path = ".".join(str(key) for key in keys if str(key) not in UNION_MEMBERS)
        message = problem["msg"].removeprefix("Value error, ").replace("1" + 100 * "0", f"{LARGEST:g}")
        message = re.sub(r" or instance of \w+", "", message)
        prefix = f"{shorten(dotted_path)}: " if dotted_path else ""
        raise ExchangeError(f"{location}: {prefix}{shorten(message)}") from None
    except RecursionError:
        raise ExchangeError(f"{location}: nested more than {LEVELS} levels deep") from None


UNION_MEMBERS = ("_Data", "int", "list[int]", "constrained-int", "list[constrained-int]")


def _check_storable(value: Any, location: str) -> None:
    """Raise ExchangeError for an escape that no database can store."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr).encode()
    except (UnicodeEncodeError, RecursionError):
        text = b"\\u0000"
    if b"\\u0000" in text:
        raise ExchangeError(f"{location}: text that cannot be stored (a NUL, or half of a surrogate pair)")


ESCAPED = re.compile(CONTROL.pattern + r"|\\[ubf]")


def _check_printable(value: Any, location: str, path: str = "") -> None:
    """Raise ExchangeError for text or a key with a control character, other than tabs and ends of lines."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        _check_printable(member, location, f"{path}.{key}" if path else str(key))
    text = value if isinstance(value, str) else "".join(value) if isinstance(value, dict) else ""
    if match := CONTROL.search(text):
        raise ExchangeError(f"{location}: {shorten(path) or 'a key'}: a control character (U+{ord(match[0]):04X})")


def shorten(text: str) -> str:
    """The text in one line of at most 300 characters."""
    return " ".join(text.split()) if len(text) <= 300 else " ".join(text[:300].split()) + "..."
