"""What is known of a cell before it runs, and the lines by which a function refuses one.

A line of a docstring, `Refuse if <condition>: <message>`, is evaluated for every cell that calls the function, before
anything is imported. Its names are, the first that fits:

* the function's own settings; of a nested call, `attack.name` or `attack.steps`,
* `clients`, `cohort` (clients of a round), `malicious` (those of an average round, rounded down), `images` (training
  images left), `last_batch` (examples of a client's last batch of an epoch), `classes`, `side` (of an image, in
  pixels), `channels`,
* the settings of the cell: `model.depth`, `model.parts`, `data.name`, `data.classes`, `algorithm.parts`, `auxiliary`.

A line `Bears: <expression>` of an aggregator is how many malicious clients of a round it is made for; more are refused.

What is not known refuses nothing. `{...}` in the message is an expression, and `{{` a brace. A function that a plug-in
brings refuses in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite.calls import Call, call
from fatbench.suite.formulas import UNKNOWN, evaluate, formula, lines, member, named, unreadable
from fatbench.suite.memoise import memoised_part
from fatbench.suite.signatures import Signature, describe, names
from fatbench.suite.types import number

DATA = {"data", "auxiliary"}  # settings of a cell that are data sets


@dataclass(frozen=True)
class Data:
    """What the docstring of a data set says of it; None if it does not say, or only the files know."""

    train: int | None  # images
    test: int | None
    classes: int | None
    side: int | None  # pixels
    channels: int | None
    about: bool = False  # `train` and `test` are about right: a line that begins with "about"


def of_data(spec: Mapping[str, Any]) -> Data:
    """The facts of a data set, from the lines Train, Test, Classes, Side and Channels of its function."""
    data = call("Data", spec)
    if _counts_files(data):
        return _of_data(data)
    found: Data = memoised_part("facts", "Data", data, lambda: _of_data(data))
    return found


def _counts_files(data: Call) -> bool:
    """Whether files, which come and go, decide what is known of a data set."""
    return "count(" in data.signature.doc


def _of_data(data: Call) -> Data:
    def fact(label: str) -> int | None:
        value = formula(data, label)
        return None if value is None else int(value)

    doc = data.signature.doc
    about = any(text.startswith("about ") for label in ("Train:", "Test:") for text in lines(doc, label))
    return Data(fact("Train"), fact("Test"), fact("Classes"), fact("Side"), fact("Channels"), about)


def fractions() -> frozenset[str]:
    """The metrics that are fractions, printed as per cent, from the lines `Fractions:` of what a cell may call."""
    kinds = ("Experiment", "Algorithm", "Aggregator", "Diagnostic")
    texts = [text for kind in kinds for name in names(kind) for text in lines(describe(kind, name).doc, "Fractions:")]
    return frozenset(metric.strip() for text in texts for metric in text.split(","))


ROLES = ("natural", "corruption", "attack")


def role(attack: Mapping[str, Any]) -> str:
    """What an attack of a suite is, by the line `Role:` of its function, or of the one that it wraps; else "attack".

    "natural" leaves images as they are, a "corruption" changes them without looking at a model. SpecError: no such
    role.
    """
    found = call("Attack", attack)
    said = lines(found.signature.doc, "Role:")
    if not said:
        return role(found.wrapped) if found.wrapped is not None else "attack"
    if said[0] not in ROLES:
        place = f"{found.signature.file}:{found.signature.line}"
        raise SpecError(f"{place}: 'Role: {said[0]}': expected {', '.join(ROLES)}{did_you_mean(said[0], ROLES)}")
    return said[0]


def cohort(spec: Mapping[str, Any]) -> int:
    """m = max(1, int(C * K)): clients that take part in a round, of those that train."""
    clients = int(spec["partition"].get("clients") or 1) - spec["algorithm"].get("validators", 0)
    return max(1, int(float(number(spec["algorithm"].get("participation", 1.0))) * clients + 1e-9))


def malicious(spec: Mapping[str, Any]) -> set[int]:
    """The numbers of a cell's malicious clients."""
    given = (spec.get("malicious") or {}).get("clients", 0)
    return set(range(given)) if isinstance(given, int) else {int(k) for k in given.split(",")}


def training_images(cell: Mapping[str, Any]) -> int | None:
    """How many training images a canonical cell takes of its data set. None: only the files know."""
    have = of_data(cell["data"]).train
    return cell["train"] or (have - cell.get("train_from", 0) if have else None)


def of_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a canonical cell by their names in an expression; UNKNOWN where only the files know."""
    data = of_data(cell["data"])
    clients, liars = cell["partition"].get("clients"), len(malicious(cell))
    total = training_images(cell)
    known = {
        "malicious": liars * cohort(cell) // clients if clients else None if liars else 0,
        "clients": clients,
        "cohort": cohort(cell) if clients else None,
        "images": total - cell["validation"] if total else None,
        "last_batch": last_batch(cell, total - cell["validation"])
        if total and (cell["train"] or not data.about)
        else None,
        "classes": data.classes,
        "side": cell["size"] or data.side,
        "channels": data.channels,
    }
    return {name: UNKNOWN if value is None else value for name, value in known.items()}


def last_batch(cell: Mapping[str, Any], images: int) -> int | None:
    """Examples of a client's last batch in an epoch, where every client has as many examples of so many images.

    The line `Each:` of a partition says how many. None: it does not, or clients do not train by `local`.
    """
    batch = (cell.get("algorithm", {}).get("local") or {}).get("batch")
    each = formula(call("Partition", cell["partition"]), "Each", images=images) if batch else None
    if not each or not batch:
        return None
    left = int(each) - int(float(number(cell["client_holdout"])) * int(each))
    return (left - 1) % int(batch) + 1


@dataclass(frozen=True)
class Refusal:
    """A `Refuse if` line that is true of a cell."""

    place: str  # of the call: "algorithm: aggregator"
    kind: str
    name: str
    condition: str
    reason: str


def refuse(call: Call, cell: Mapping[str, Any], place: str, known: dict[str, Any] | None = None) -> None:
    """SpecError: this call, or one nested in it, has a `Refuse if` line that is true of the cell.

    known: `of_cell(cell)`, if the caller has it already.
    """
    here = of_cell(cell) if known is None else known
    if call.kind != "Experiment" and _fine(call, cell, here):
        return
    for found in refusals(call, cell, here, place):
        raise SpecError(f"{found.place}: {found.reason}")


_READABLE: set[tuple[str, str, str]] = set()  # (kind, name, line) whose message has been evaluated once


def refusals(call: Call, cell: Mapping[str, Any], facts: Mapping[str, Any], place: str) -> Iterator[Refusal]:
    """Every line that is true of the cell, of this call and of those nested in it. facts: `of_cell(cell)`."""
    kind, signature = call.kind, call.signature

    def lookup(name: str, *path: str) -> Any:
        if name == "name":
            return signature.name
        if name in call:
            return member(call[name], path)
        if name in facts and not path:
            return facts[name]
        if name in cell:
            return member(cell[name], path)
        names = [*(setting.name for setting in signature.settings), *facts, *cell]
        raise ValueError(f"no setting or fact is named '{name}'{did_you_mean(name, names)}")

    def shown(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        value = evaluate(match[1], lookup)
        return f"{value:g}" if isinstance(value, float) else str(value)

    for line in _refusing(signature):
        condition, colon, message = line.partition(": ")
        try:
            if not colon:
                raise ValueError("write 'Refuse if <condition>: <message>'")
            value = evaluate(condition, lookup)
            refused = value is not UNKNOWN and bool(value)
            if not refused and (kind, signature.name, line) in _READABLE:
                continue
            reason = re.sub(r"\{\{|\}\}|\{([^{}]*)\}", shown, message)
            _READABLE.add((kind, signature.name, line))
        except (ValueError, TypeError) as error:
            raise unreadable(signature, f"Refuse if {line}", error) from None
        if refused:
            yield Refusal(place, kind, signature.name, condition, reason)
    for name, inner in call.nested.items():
        if not _fine(inner, cell, facts):
            yield from refusals(inner, cell, facts, f"{place}: {name}" if place else name)


def _refusing(signature: Signature) -> list[str]:
    """The lines `<condition>: <message>` of a function."""
    bears = "malicious > {0}: {{malicious}} malicious clients of {{cohort}}, {1} bears at most {{{0}}}"
    own = [bears.format(f"({each})", signature.name) for each in lines(signature.doc, "Bears:")]
    return [*lines(signature.doc, "Refuse if"), *own]


def _fine(part: Call, cell: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether no line of a part is true of the cell: asked again only where what its lines read is another."""
    names: frozenset[str] = memoised_part("reads", part.kind, part, lambda: _reads(part))
    read = [facts[name] if name in facts else cell.get(name) for name in names]
    given = [(type(each), each) if type(each) in (int, str) else id(each) for each in read]

    def find() -> tuple[Any, bool]:  # what was read is kept too, so that nothing else can have its id
        return read, not any(refusals(part, cell, facts, ""))

    data = names & DATA
    if any(isinstance(cell.get(name), Call) and _counts_files(cell[name]) for name in data):
        return find()[1]
    return bool(memoised_part("fine", part.kind, part, find, *given)[1])


def _reads(part: Call) -> frozenset[str]:
    """The names in the lines of a call, and of those nested in it, that are none of their settings."""
    found: set[str] = set()
    for line in _refusing(part.signature):
        condition, _, message = line.partition(": ")
        for text in (condition, *re.findall(r"\{([^{}]*)\}", message)):
            found |= named(text) - part.keys()
    return frozenset(found.union(*map(_reads, part.nested.values())))
