"""What is freed stays with the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from fatbench.engine import memory
memory.keep(sys.argv[1] == "keep")
def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 24)  # 64 MB, in pages of 4 kB: 16,384
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the GNU C library")
def test_memory_that_was_freed_is_not_mapped_anew() -> None:
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "give back")
    )
    assert kept < given_back / 2
