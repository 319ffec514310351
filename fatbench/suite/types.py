"""The types that settings in a suite file may have: Python types with ranges, checked before anything runs.

A function's keyword-only arguments are its settings; their annotations name the types below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator

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


_read = BeforeValidator(number_of)

Count = Annotated[int, Ge(1), Le(10**9 - 1), _read]  # 1, 2, 3, ...; nine digits, as the names of stages allow
Natural = Annotated[int, Ge(0), _read]  # 0, 1, 2, ...
Real = Annotated[float, _read]
Positive = Annotated[float, Gt(0), _read]
Rate = Annotated[float, Gt(0), Le(1e6), _read]  # a learning rate; a larger one overflows float32 in a step or two
NonNegative = Annotated[float, Ge(0), _read]
Radius = Annotated[float, Ge(0), Le(1), _read]  # an epsilon or a step, in units of the [0, 1] pixel range
Probability = Annotated[float, Ge(0), Le(1), _read]
Fraction = Annotated[float, Gt(0), Le(1), _read]  # a fraction of something that must not be empty
Momentum = Annotated[float, Ge(0), Lt(1), _read]


def _matching(pattern: str, example: str) -> AfterValidator:
    """A validator of texts that match the whole pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {example}")
        return text

    return AfterValidator(check)


Blocks = Annotated[str, _matching(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", "numbers such as 1,9")]  # of a model, from 1


def _clients(value: int | str) -> int | str:
    """Clients as a number of them, or as a list such as "3,7"."""
    if value != 0 and (isinstance(value, int) or re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", value)):
        return value
    raise ValueError('expected a number of clients, or their numbers such as "3,7"')


Clients = Annotated[int | str, AfterValidator(_clients)]
Pairs = Annotated[  # of clients, from 0, and the server
    str, _matching(r"\s*(\d+|server)-(\d+|server)\s*(,\s*(\d+|server)-(\d+|server)\s*)*", "pairs such as 0-3,0-server")
]


def _weights(text: str) -> str:
    weights.parse_weights(text)
    return text


Weights = Annotated[str, AfterValidator(_weights)]  # of a model: timm, a known name, or a file with its digest


@dataclass(frozen=True)
class Kind:
    """Marks the annotation of a setting that is a call."""

    name: str


# Settings that are calls themselves, {name: ..., key: value}: the annotation tells the table of the name. The function
# receives a callable with its settings bound.
Attack = Annotated[Callable[..., Any], Kind("Attack")]
Objective = Annotated[Callable[..., Any], Kind("Objective")]
Aggregator = Annotated[Callable[..., Any], Kind("Aggregator")]
PreAggregator = Annotated[Callable[..., Any], Kind("PreAggregator")]
Proximal = Annotated[Callable[..., Any], Kind("Proximal")]
Partition = Annotated[Callable[..., Any], Kind("Partition")]
Model = Annotated[Callable[..., Any], Kind("Model")]
Algorithm = Annotated[Callable[..., Any], Kind("Algorithm")]
Data = Annotated[Callable[..., Any], Kind("Data")]
Augment = Annotated[Callable[..., Any], Kind("Augment")]
Diagnostic = Annotated[Callable[..., Any], Kind("Diagnostic")]
Defence = Annotated[Callable[..., Any], Kind("Defence")]
Inversion = Annotated[Callable[..., Any], Kind("Inversion")]
Adversary = Annotated[Callable[..., Any], Kind("Adversary")]
Manipulation = Annotated[Callable[..., Any], Kind("Manipulation")]

# Settings that are a mapping without a name: the function receives an instance of the class in `signatures.CLASSES`.
Local = Annotated[Any, Kind("Local")]
Server = Annotated[Any, Kind("Server")]
Malicious = Annotated[Any, Kind("Malicious")]
