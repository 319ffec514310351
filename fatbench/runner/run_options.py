"""The options of a run, declared once: for `fatbench run`, for `fatbench.run` and for the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fatbench import settings
from fatbench.errors import whole


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is carried out; what is not given is a setting of the table [run], see docs/running.md."""

    jobs: int | None = None  # cells in parallel
    device: str | None = None
    per_gpu: int | None = field(default_factory=lambda: settings.number("run.per_gpu"))
    executor: str = field(default_factory=lambda: settings.setting("run.executor") or "local")
    precision: str | None = None
    attack_precision: str | None = None  # of the evaluation; default: as precision
    path: str = field(default_factory=lambda: settings.setting("run.path") or settings.AUTO)
    microbatch: int | None = field(default_factory=lambda: settings.number("run.microbatch"))
    retry_failed: bool = False
    rerun_changed: bool = False
    fail_fast: bool = field(default_factory=lambda: settings.switch("run.fail_fast"))
    time_limit: str | None = None
    wait: bool = field(default_factory=lambda: settings.switch("run.wait", True))
    dry_run: bool = False
    log: str | None = field(default_factory=lambda: settings.setting("run.log"))  # tensorboard, wandb or mlflow
    db: str | None = None
    data: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("jobs", "per_gpu", "microbatch"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(name, value, 1))


def run_options(**given: Any) -> RunOptions:
    """The options of which something is given; None: the setting decides."""
    return RunOptions(**{name: value for name, value in given.items() if value is not None})
