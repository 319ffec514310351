"""This machine in facts, for `fatbench doctor`: versions, devices, folders."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from fatbench import settings
from fatbench.suite import plugins, signatures, weights
from fatbench.version import __version__

MPS = "/tmp/nvidia-mps"  # where NVIDIA's daemon has its pipes unless told otherwise


def _auto_choices(gpus: Sequence[str]) -> str:
    """What precision and path are where they are auto on these GPUs, [] on a CPU, and why."""
    from fatbench.runner import slots

    if not gpus:
        return "--precision fp32, a CPU has no TF32; run.path loop, a CPU repeats no recorded steps"
    reasons = {"tf32": "for training and its monitor, fp32 for attacks", "fp32": "which are not known to have TF32"}
    by_precision: dict[str, list[str]] = {}
    for gpu in gpus:
        by_precision.setdefault(slots.precision_for(gpu), []).append(gpu)
    precisions = [f"--precision {bits} on {', '.join(on)}, {reasons[bits]}" for bits, on in by_precision.items()]
    return "; ".join([*precisions, "run.path graphs for cells whose kernels start longer than they run, else loop"])


def facts() -> list[tuple[str, str]]:
    """(name, fact): versions, devices, folders, what a bug report needs. A name can stand twice."""
    from fatbench.runner import provenance
    from fatbench.store import inputs, integrity

    code = provenance.code_version()
    lines: list[tuple[str, str]] = [
        ("fatbench", f"{__version__}, commit {code['commit'] or 'unknown'}{' (modified)' if code['dirty'] else ''}"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("system", f"{platform.platform()}, {provenance.processor()}, {os.cpu_count()} cores"),
        *([("cpu", "no instructions for bfloat16: use --precision fp32")] if provenance.emulates_bfloat16() else []),
    ]
    try:
        import torch

        lines.append(("torch", f"{torch.__version__}, threads {torch.get_num_threads()}"))
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            lines.append((f"cuda:{i}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
        if torch.cuda.device_count():
            running = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS), "control").exists()
            beside = "running: cells on one GPU compute side by side"
            advice = beside if running else "not running: the cells on a GPU take turns"
            lines.append(("mps", f"{advice} (docs/gpu.md, Several cells on one GPU)"))
        if not torch.cuda.device_count():
            lines.append(("cuda", "no GPU found"))
        lines.append(("auto", _auto_choices([f"cuda:{i}" for i in range(torch.cuda.device_count())])))
    except (ImportError, OSError) as error:
        lines.append(("torch", f"does not import: {error}"))
    versions = provenance.produced_by("cpu")["versions"]
    lines.append(("packages", ", ".join(f"{name} {v}" for name, v in versions.items() if name != "python")))
    url = settings.database()
    try:
        state = integrity.check(url, contents=False)
    except Exception as error:
        state = f"{error}"
    shown_url = settings.shown_url(url)
    lines.append(("database", state if state.startswith(shown_url) else f"{shown_url}: {state}"))
    root = settings.data_folder()
    lines.append(("data", str(root)))
    if plugin_files := signatures.plugins():
        lines.append(
            ("plug-ins", ", ".join(f"{inputs.describe(plugins.version(file))} at {file}" for file in plugin_files))
        )
    lines += [("weights", weights.describe(name, root)) for name in weights.WEIGHTS]
    lines.append(("checkpoints", str(settings.files_folder(url))))
    return lines
