"""What does not depend on the machine: dispatcher operations and host synchronisations, counted while code runs.

    with Counter() as counted:
        step()
    counted.operations, counted.launches, counted.syncs

An operation is what reaches the dispatcher below autograd; `launches` are those that start a kernel
(`fatbench.engine.counters`). A synchronisation is an operation whose result or shape the host must know before it goes
on.
On a CPU `.cpu()` does nothing and is not seen; tests/test_local.py looks for it by name.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fatbench.engine.cohort import train_cohort
from fatbench.engine.counters import Flops, Formula, starts_a_kernel
from fatbench.engine.local import LocalTraining, copy_state
from fatbench.engine.rounds import Problem

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Counter(TorchDispatchMode):
    """Counts operations by name, and those that make the host wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tally[str] = Tally()
        self.launches = 0
        self.syncs = 0

    @property
    def operations(self) -> int:
        return self.seen.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen[func.overloadpacket.__name__] += 1
        self.launches += starts_a_kernel(func)
        self.syncs += _waits(func, args, result)
        return result


def _waits(func: Any, args: Any, result: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:  # by numbers the shape is known, by a mask it is not
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if WAITS & set(func.tags):
        return True
    given = args[-1] if func is torch.ops.aten.copy_.default else args[0] if args else None
    on_device = isinstance(given, torch.Tensor) and given.device.type != "cpu"
    return on_device and isinstance(result, torch.Tensor) and result.device.type == "cpu"


def _of_torch(formula: Callable[..., int]) -> Formula:
    """A formula of `torch.utils.flop_counter`, which also knows fused attention, as `Flops` calls it."""
    return lambda out, *args, **kwargs: formula(*args, **kwargs, out_val=out)


def flops(act: Callable[[], object]) -> int:
    """The floating-point operations of matrix products, convolutions and attention while `act` runs."""
    with Flops({name: _of_torch(formula) for name, formula in flop_registry.items()}) as counted:
        act()
    return counted.total


def per_batch(run: Callable[[int], object]) -> tuple[int, int, int]:
    """(operations, launches, synchronisations) that `run(3)` has more than `run(2)`: those of the third batch."""
    counts = []
    for batches in (2, 3):
        with Counter() as counted:
            run(batches)
        counts.append((counted.operations, counted.launches, counted.syncs))
    operations, launches, syncs = (more - less for less, more in zip(*counts, strict=True))
    return operations, launches, syncs


def cohort_batches(problem: Problem, objective: Any, batch: int = 32) -> Callable[[int], object]:
    """run(n): one client trained for n batches through `train_cohort`, with momentum and weight decay."""
    start = copy_state(problem.model)
    local = LocalTraining(batch=batch, lr=0.01, momentum=0.9, weight_decay=1e-4, objective=objective)

    def run(batches: int) -> object:
        problem.shards[:] = [torch.arange(batches * batch, device=problem.device)]
        return train_cohort(problem, start, [0], 0, local)

    return run
