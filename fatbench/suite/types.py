"""The types that settings in a suite file may have: Python types with ranges, checked before anything runs.

A function's keyword-only arguments are its settings; their annotations name the types below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator

from fatbench.errors import SpecError
from fatbench.suite import weights

FRACTION = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*/\s*(\d+(?:\.\d+)?)\s*\Z")
DECIMAL = re.compile(r"\s*-?\d*\.?\d+(?:[eE][+-]?\d+)?\s*\Z")


def number(value: Any) -> Any:
    """The float of a fraction such as "8/255"; any other value is returned unchanged."""
    if isinstance(value, str) and (match := FRACTION.match(value)):
        denominator = float(match[2])
        if denominator == 0:
            raise ValueError("division by zero")
        return float(match[1]) / denominator
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def number_of(value: Any) -> Any:
    """The number of a text such as "8/255" or "0.03"; any other value is returned unchanged."""
    if isinstance(value, str) and DECIMAL.match(value):
        return int(value) if re.fullmatch(r"\s*-?\d+\s*", value) else float(value)
    return number(value)


def rounded_down(value: float) -> int:
    """A number >= 0 rounded down, a rounding error below a whole number to that: 0.29 * 100 is 28.999999999999996."""
    return math.floor(value + max(1e-9, 1e-12 * value))


def count_of(share: float, total: int) -> int:
    """A share of so many below 1, rounded down; from 1 on it is the number itself: 0.2 of 10 is 2, and so is 2."""
    return rounded_down(share * total if share < 1 else share)


@dataclass(frozen=True)
class Named:
    """The name of a type: in settings.json, in help and, of a setting that is a call, the kind of function."""

    name: str


_read = BeforeValidator(number_of)

# 1, 2, 3, ...; nine digits, as the names of stages allow
Count = Annotated[int, Ge(1), Le(10**9 - 1), _read, Named("Count")]
Natural = Annotated[int, Ge(0), _read, Named("Natural")]  # 0, 1, 2, ...
Real = Annotated[float, _read, Named("Real")]
Positive = Annotated[float, Gt(0), _read, Named("Positive")]
# a learning rate; a larger one overflows float32 in a step or two
Rate = Annotated[float, Gt(0), Le(1e6), _read, Named("Rate")]
NonNegative = Annotated[float, Ge(0), _read, Named("NonNegative")]
# an epsilon or a step, in units of the [0, 1] pixel range
Radius = Annotated[float, Ge(0), Le(1), _read, Named("Radius")]
Probability = Annotated[float, Ge(0), Le(1), _read, Named("Probability")]
Fraction = Annotated[float, Gt(0), Le(1), _read, Named("Fraction")]  # a fraction of something that must not be empty
Momentum = Annotated[float, Ge(0), Lt(1), _read, Named("Momentum")]


def _list_of(item: str, example: str) -> AfterValidator:
    """A validator of texts of one item or more that match a pattern, with commas between them."""

    def check(text: str) -> str:
        if not re.fullmatch(rf"\s*({item})\s*(,\s*({item})\s*)*", text):
            raise ValueError(f"expected {example}")
        return text

    return AfterValidator(check)


Blocks = Annotated[str, _list_of(r"[1-9]\d*", "numbers such as 1,9"), Named("Blocks")]  # of a model, from 1
_ATTACKERS = _list_of("component|initial|surrogate|known|optimised", "attackers such as component,initial")
FeatureAttackers = Annotated[str, _ATTACKERS, Named("FeatureAttackers")]  # of `fatbench.methods.exposure`
_SCORES = _list_of("loss|adversarial|others", "scores such as loss,others")
MemberScores = Annotated[str, _SCORES, Named("MemberScores")]  # of `fatbench.methods.membership`


def _clients(value: int | str) -> int | str:
    """Clients as a number of them, or as a list such as "3,7"."""
    if value != 0 and (isinstance(value, int) or re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value)):
        return value
    raise ValueError('expected a number of clients, or their numbers such as "3,7"')


Clients = Annotated[int | str, AfterValidator(_clients), Named("Clients")]


def _client_rounds(value: Any) -> Any:
    """A mapping {client: round}, or its text "3:5,7:10", as the text in the order of the clients."""
    text = ",".join(f"{k}:{round}" for k, round in value.items()) if isinstance(value, Mapping) else value
    if isinstance(text, str) and re.fullmatch(r"\s*\d+\s*:\s*\d+\s*(,\s*\d+\s*:\s*\d+\s*)*", text):
        return ",".join(f"{k}:{round}" for k, round in sorted(client_rounds(text).items()))
    raise ValueError("expected clients and a round of each, such as {3: 5}")


def client_rounds(text: str | None) -> dict[int, int]:
    """{client: round} of the text of `ClientRounds`."""
    return {int(k): int(round) for k, round in (pair.split(":") for pair in text.split(","))} if text else {}


ClientRounds = Annotated[str, BeforeValidator(_client_rounds), Named("ClientRounds")]
# of clients, from 0, and the server
Pairs = Annotated[str, _list_of(r"(\d+|server)-(\d+|server)", "pairs such as 0-3,0-server"), Named("Pairs")]


def _weights(text: str) -> str:
    weights.parse_weights(text)
    return text


# of a model: timm, a known name, or a file with its digest
Weights = Annotated[str, AfterValidator(_weights), Named("Weights")]


# Settings that are calls themselves, {name: ..., key: value}: the annotation tells the table of the name. The function
# receives a callable with its settings bound.
Attack = Annotated[Callable[..., Any], Named("Attack")]
Objective = Annotated[Callable[..., Any], Named("Objective")]
Aggregator = Annotated[Callable[..., Any], Named("Aggregator")]
PreAggregator = Annotated[Callable[..., Any], Named("PreAggregator")]
Proximal = Annotated[Callable[..., Any], Named("Proximal")]
Partition = Annotated[Callable[..., Any], Named("Partition")]
Model = Annotated[Callable[..., Any], Named("Model")]
Algorithm = Annotated[Callable[..., Any], Named("Algorithm")]
Data = Annotated[Callable[..., Any], Named("Data")]
Augment = Annotated[Callable[..., Any], Named("Augment")]
Diagnostic = Annotated[Callable[..., Any], Named("Diagnostic")]
Defence = Annotated[Callable[..., Any], Named("Defence")]
Inversion = Annotated[Callable[..., Any], Named("Inversion")]
Adversary = Annotated[Callable[..., Any], Named("Adversary")]
Manipulation = Annotated[Callable[..., Any], Named("Manipulation")]

# Settings that are a mapping without a name: the function receives an instance of the class in `signatures.CLASSES`.
Local = Annotated[Any, Named("Local")]
Server = Annotated[Any, Named("Server")]
Malicious = Annotated[Any, Named("Malicious")]
Availability = Annotated[Any, Named("Availability")]

# --- types and their names ------------------------------------------------------------------------------------------


def name_of(annotation: Any) -> str | None:
    """The name of a type of this module, also without its `| None`."""
    alternatives = get_args(annotation) if is_union(annotation) else (annotation,)
    marks = [mark for alternative in alternatives for mark in getattr(alternative, "__metadata__", ())]
    return next((mark.name for mark in marks if isinstance(mark, Named)), None)


def is_union(annotation: Any) -> bool:
    """Whether a type has alternatives, such as `Radius | None`."""
    return get_origin(annotation) in (Union, UnionType)


def text_of(annotation: Any) -> str:
    """The text of a type: "Radius", "Positive | None", "Literal['a', 'b']"."""
    if is_union(annotation):
        return " | ".join(map(text_of, get_args(annotation)))
    if get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(annotation)))}]"
    if get_origin(annotation) is Annotated:
        return name_of(annotation) or text_of(get_args(annotation)[0])
    own_name = "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
    arguments = ", ".join(map(text_of, get_args(annotation)))
    return f"{own_name}[{arguments}]" if arguments else own_name


def evaluated(text: str, space: Mapping[str, Any] = {}) -> Any:
    """The type of a text. space: further names that the text may have."""
    return eval(text, {**globals(), **space})


# --- seeds as text, as `--seeds` and suite files take them, and as tables and messages say them ---------------------

SEEDS = 100_000  # the most of a list


def parse_seeds(text: str) -> list[int]:
    """The seeds of a text such as "0-4", "6,7" or "3"; SpecError for any other text."""
    seeds: list[int] = []
    for range_text in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", range_text)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise SpecError(f"expected seeds such as 0-4 or 6,7, got '{text[:60]}'", option="seeds")
        seed_range = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(seeds) + len(seed_range) > SEEDS:
            raise SpecError(f"more than {SEEDS} seeds: '{text[:60]}'", option="seeds")
        seeds += seed_range
    return list(dict.fromkeys(seeds))


def seeds_text(seeds: Iterable[int]) -> str:
    """The seeds in order, more than ten in a row as a range: "0, 1, 2", "10-39, 41"."""
    texts: list[str] = []
    rest = sorted(seeds)
    while rest:
        length = next((n for n, seed in enumerate(rest) if seed != rest[0] + n), len(rest))
        texts += [f"{rest[0]}-{rest[length - 1]}"] if length > 10 else map(str, rest[:length])
        rest = rest[length:]
    return ", ".join(texts)
