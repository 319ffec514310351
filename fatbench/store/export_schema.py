"""Checks the lines of exported results: the type and range of every field, and what must fit together.

Every command can read, count and print whatever is accepted here. A refused line is reported with its first mistake.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fatbench.errors import CONTROL, FatbenchError, UnknownName
from fatbench.store import consistency, doubt_names, export_lines, number_text
from fatbench.store.number_text import NumberText
from fatbench.store.points import Point, labels_text
from fatbench.store.rows import LARGEST

FORMAT = "fatbench results"
SCHEMA_VERSION = 2
VERSIONS = (1, 2)  # that can be read
LEVELS = 30  # of nested JSON in a line
LINE = 2**26  # characters besides long lists of numbers: parsed JSON takes 25 times as much memory
NUMBERS = 2**23  # in a line: as rows they take a gigabyte


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
# not strict, because JSON has lists in place of tuples
NumberLine = Annotated[tuple[Natural, Integer, Name, Value, Natural, Natural, Time], Field(strict=False)]
Chunk = Annotated[tuple[Natural, Annotated[Natural, Field(ge=1)], str], Field(strict=False)]


def _check_depth(value: Any) -> Any:
    """Raise ValueError for JSON that is nested too deeply for a recursive reader."""
    level = [value]
    for _ in range(LEVELS):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
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
    stack: Natural | None = ABSENT  # clients and cells trained as one program, in runs with path "fast"
    vectorise: Annotated[int, Field(ge=1, lt=2**31)] = ABSENT
    dropped: bool = ABSENT
    lease: Annotated[float, Field(gt=0, le=1e9)] | None = ABSENT
    plugins: list[_Plugin] = ABSENT


class _Settings(_Open):
    name: Name
    implementation: str | None = ABSENT


def _as(model: type[_Open]) -> Any:
    """A mapping whose keys `model` checks, but which stays as it is in the line."""

    def fits(value: dict[str, Any]) -> dict[str, Any]:
        model.model_validate(_check_depth(value))
        return value

    return Annotated[dict[str, Any], AfterValidator(fits)]


# --- lines -------------------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Header(_Line):
    format: Literal["fatbench results"]
    schema_version: int
    cells: Natural


class Run(_Line):
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
    commit: str | None
    dirty: bool | None
    versions: dict[str, str] | None
    log: str | None
    error: str | None
    extra: _as(_Extra)  # type: ignore[valid-type]


class Stage(_Line):
    """A stage with its numbers and outcomes."""

    stage: StageName
    status: Status
    round: Natural
    total: Natural
    record: _as(_Record)  # type: ignore[valid-type]
    settings: _as(_Settings) | None = None  # type: ignore[valid-type]
    run: Natural | None
    error: str | None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    numbers: list[NumberLine]
    outcomes: list[Chunk]


Label = Annotated[str, Field(max_length=190)]


class PointLine(_Line):
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


class CellLine(_Line):
    """A cell with its runs and stages."""

    cell: Name
    replicate: Natural = 0
    points: list[PointLine] = []
    spec: Annotated[dict[str, Any], AfterValidator(_check_depth)]
    created: Time
    runs: list[Run]
    stages: list[Stage]


_HEADER, _CELL, _NUMBERS = TypeAdapter(_Header), TypeAdapter(CellLine), TypeAdapter(list[NumberLine])


def header(line: str, location: str) -> int:
    """The number of cells that a file's first line announces. Raises ExchangeError if it is not fatbench's."""
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
    return int(_validate(_HEADER, parsed(line, location), location).cells)


def cell(
    line: str,
    location: str,
    identify: Callable[[Mapping[str, Any]], str] | None = None,
    contradiction: Callable[[Mapping[str, Any]], str | None] | None = None,
    *,
    checked: bool = False,
) -> CellLine:
    """A line as a cell.

    identify: computes the identity of a spec, which must be the cell's id. contradiction: describes how a stage's name
    contradicts its settings, or returns None. checked: the same line was read before without errors, so the checks are
    skipped. Raises ExchangeError, with `location` and the place in the line, if it is no cell, contradicts itself, or a
    finished stage does not match its digest.
    """
    value = parsed(line, location)
    unpack(value, location)
    stages = value["stages"] if isinstance(value.get("stages"), list) else []
    texts = {i: stage["numbers"] for i, stage in enumerate(stages) if _has_number_text(stage)}
    stages_without_text = [{**stage, "numbers": []} if i in texts else stage for i, stage in enumerate(stages)]
    cell_line: CellLine = _validate(_CELL, {**value, "stages": stages_without_text} if texts else value, location)
    for i, text in texts.items():
        cell_line.stages[i].numbers = text
        if not checked:
            _check_order(text, location, i)
    if not checked:
        _check_consistency(cell_line, value, location, identify, contradiction)
    for i, stage in enumerate(cell_line.stages):
        if i in texts:
            stage.numbers = NumberText(line, texts[i].begin, texts[i].end, translated=True)  # type: ignore[assignment]
            continue
        stage.numbers = [
            (round, client, *doubt_names.current_form(metric, value), n, run, created)
            for round, client, metric, value, n, run, created in stage.numbers
        ]
    return cell_line


def _has_number_text(stage: Any) -> bool:
    return isinstance(stage, dict) and isinstance(stage.get("numbers"), NumberText)


def _check_order(text: NumberText, location: str, stage: int) -> None:
    """Raise ExchangeError if a number is invalid, out of the order of rounds, or occurs twice."""
    first_index, last, keys_of_round = 0, -1, set[tuple[Any, ...]]()
    for piece in text.pieces():
        lines = _rows(_json(piece, location), f"{location}: stages.{stage}.numbers")
        check_numbers(lines, location, stage, first_index)
        for i, (round, client, metric, *_) in enumerate(lines, first_index):
            if round > last:
                last, keys_of_round = round, set()
            if round < last or (client, metric) in keys_of_round:
                raise ExchangeError(f"{location}: stages.{stage}.numbers.{i}: out of order, or occurs twice")
            keys_of_round.add((client, metric))
        first_index += len(lines)


def unpack(line: Mapping[str, Any], at: str) -> None:
    """Replace a line's blocks of numbers by rows, as in version 1. Raises ExchangeError for invalid blocks."""
    stages = line.get("stages")
    count = 0
    for number, stage in enumerate(stages if isinstance(stages, list) else ()):
        entries = stage.get("numbers") if isinstance(stage, dict) else None
        if not isinstance(entries, list):
            continue  # text, or a mistake that the validation reports
        stage["numbers"] = _rows(entries, f"{at}: stages.{number}.numbers")
        count += len(stage["numbers"])
        if count > NUMBERS:
            raise ExchangeError(f"{at}: more than {NUMBERS} numbers in a line")


def _rows(entries: Sequence[Any], at: str) -> list[Any]:
    try:
        return number_text.rows(entries)
    except ValueError as error:
        raise ExchangeError(f"{at}.{error}") from None


def _check_consistency(
    cell_line: CellLine,
    value: Mapping[str, Any],
    location: str,
    identify: Callable[[Mapping[str, Any]], str] | None,
    contradiction: Callable[[Mapping[str, Any]], str | None] | None,
) -> None:
    """Raise ExchangeError if the parts of a line do not fit together."""
    if identify is not None:
        try:
            identity = identify(cell_line.spec)
        except (FatbenchError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ExchangeError(
                f"{location}: cell {cell_line.cell}: {shorten(str(error))}{_plugin_hint(cell_line, error)}"
            ) from None
        if identity != cell_line.cell:
            raise ExchangeError(
                f"{location}: cell {cell_line.cell}: its id does not match its settings ({identity}): was it edited?"
            )
    _check_distinct([run.uid for run in cell_line.runs], "run", cell_line, location)
    _check_distinct([stage.stage for stage in cell_line.stages], "stage", cell_line, location)
    for stage in cell_line.stages:
        for run in sorted({number[5] for number in stage.numbers} | (set() if stage.run is None else {stage.run})):
            if run >= len(cell_line.runs):
                raise ExchangeError(f"{location}: cell {cell_line.cell} {stage.stage}: run {run} does not exist")
        if isinstance(stage.numbers, list):
            _check_distinct([number[:3] for number in stage.numbers], "number", cell_line, location)
        position = 0
        for start, n, text in stage.outcomes:
            try:
                bits = bits_of(text)
            except ValueError as error:
                raise ExchangeError(f"{location}: cell {cell_line.cell} {stage.stage}: outcomes: {error}") from None
            if start != position or len(bits) != (n + 7) // 8:
                raise ExchangeError(
                    f"{location}: cell {cell_line.cell} {stage.stage}: the outcomes from {start} on do not fit"
                )
            position += n
    for name, problem in consistency.problems(value, contradiction):
        raise ExchangeError(f"{location}: cell {cell_line.cell} {name}: {problem}")
    for damaged_stage, _ in export_lines.mismatches(value):
        problem = (
            "its digest does not match its numbers or outcomes"
            if damaged_stage.get("digest")
            else "a finished stage has no digest"
        )
        raise ExchangeError(
            f"{location}: cell {cell_line.cell} {damaged_stage['stage']}: {problem}; was the file edited?"
        )


def check_fields(line: Mapping[str, Any]) -> None:
    """Raise ExchangeError if a field is invalid in a line to be exported. Numbers are covered by digests."""
    covered: dict[str, list[Any]] = {"numbers": [], "outcomes": []}
    stages = [{**stage, **covered} if stage["status"] == "done" else stage for stage in line["stages"]]
    _validate(_CELL, {**line, "stages": stages}, f"cell {line['cell']}")


def check_numbers(lines: Sequence[Any], location: str, stage: int, first_index: int) -> None:
    """Raise ExchangeError for an invalid number of a stage; `first_index` is the position of the first of them."""
    try:
        _NUMBERS.validate_python(lines)
    except ValidationError as error:
        problem = error.errors()[0]
        row, *path_within = problem["loc"]
        raise ExchangeError(
            _message(problem, ["stages", stage, "numbers", first_index + int(row), *path_within], location)
        ) from None


def bits_of(text: str) -> bytes:
    """The packed outcomes of a chunk."""
    return base64.b64decode(text, validate=True)


def parsed(line: str, location: str) -> dict[str, Any]:
    """A line as a JSON object, with long lists of numbers as `NumberText`. Raises ExchangeError if it is none."""
    value = _json(line, location)
    if not isinstance(value, dict):
        raise ExchangeError(f"{location}: expected a JSON object, got a {type(value).__name__}")
    return value


def _json(text: str, at: str) -> Any:
    """A line or a part of it as JSON. Raises ExchangeError for invalid JSON or text that cannot be stored."""
    try:
        value = number_text.parsed(text, LINE)
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
    if ESCAPED.search(text):
        _check_printable(value, at)
    return value


def _validate(form: TypeAdapter[Any], value: Mapping[str, Any], location: str) -> Any:
    """A line as the validated model. Raises ExchangeError with the place of the first mistake."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ExchangeError(_message(problem, problem["loc"], location)) from None
    except RecursionError:
        raise ExchangeError(f"{location}: nested more than {LEVELS} levels deep") from None


def _message(problem: Mapping[str, Any], path: Sequence[str | int], location: str) -> str:
    """The message of a mistake in a line, from pydantic's."""
    dotted_path = ".".join(str(key) for key in path if str(key) != "_Data")
    message = problem["msg"].removeprefix("Value error, ").replace("1" + 100 * "0", f"{LARGEST:g}")
    message = re.sub(r" or instance of \w+", "", message)
    return f"{location}: {shorten(dotted_path) + ': ' if dotted_path else ''}{shorten(message)}"


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


def _plugin_hint(cell: CellLine, error: Exception) -> str:
    """The part of a message that names the plug-in from which a cell's runs had an unknown name."""
    records = (record for run in cell.runs for record in run.extra.get("plugins", ()))
    names = {
        f"{record['plugin']} (sha256 {record['sha256'][:12]})"
        for record in records
        if isinstance(error, UnknownName) and error.entry in record["names"]
    }
    return f"; its runs used the plug-in {' and '.join(sorted(names))}: pass it with --plugin" if names else ""


def _check_distinct(keys: Sequence[Any], key_kind: str, cell: CellLine, location: str) -> None:
    known_keys = set()
    for key in keys:
        if key in known_keys:
            raise ExchangeError(f"{location}: cell {cell.cell}: {key_kind} {key} occurs twice")
        known_keys.add(key)
