"""The options of a run, declared once: for `fatbench run`, for `fatbench.run` and for the runner."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from fatbench.errors import whole
from fatbench.settings import AUTO

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out. `fatbench run --help` says what each option means."""

    jobs: int | None = None  # cells side by side
    device: str | None = None
    per_gpu: int | None = None
    executor: str = "local"
    precision: str | None = None
    attack_precision: str | None = None  # of the evaluation; default: as precision
    path: str = AUTO
    microbatch: int | None = None
    retry_failed: bool = False
    rerun_changed: bool = False
    fail_fast: bool = False
    time_limit: str | None = None
    wait: bool = True
    dry_run: bool = False
    log: str | None = None  # who else writes learning curves: "tensorboard" or "wandb"
    db: str | None = None
    data: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("jobs", "per_gpu", "microbatch"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(f"--{name.replace('_', '-')}", value, 1))


def with_keywords(
    function: Callable[..., T], excluded: Collection[str] = (), types: Mapping[str, Any] | None = None
) -> Callable[..., T]:
    """Replace a function's last parameter, `options: RunOptions`, by a keyword for each option.

    excluded: options that keep their default. types: option -> its annotation, as Typer reads it.
    """
    own_signature = inspect.signature(function, eval_str=types is not None)
    offered_options = [option for option in fields(RunOptions) if option.name not in excluded]

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> T:
        bound = signature.bind(*arguments, **keywords).arguments
        options = {option.name: bound.pop(option.name) for option in offered_options if option.name in bound}
        return function(**bound, options=RunOptions(**options))

    option_parameters = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default,
            annotation=option.type if types is None else types[option.name],
        )
        for option in offered_options
    ]  # fmt: skip
    own_parameters = [parameter for parameter in own_signature.parameters.values() if parameter.name != "options"]
    signature = own_signature.replace(parameters=[*own_parameters, *option_parameters])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    return wrapper
