"""Functions with the code of other packages: which package, whether it is installed, and how to install it."""

from __future__ import annotations

import importlib.util

from fatbench.errors import MachineError
from fatbench.suite.calls import Call
from fatbench.suite.signatures import Signature

EXTRAS = {"torchattacks": "fatbench[attacks]"}  # package -> what to install with pip, if its name differs


def packages(signature: Signature) -> tuple[str, ...]:
    """The packages that a function's entry names, any one of which is enough; empty if the code is ours."""
    return tuple(signature.entry.get("packages", ()))


def installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check(call: Call, location: str) -> None:
    """MachineError if the package of a function, or of one nested in it, is not installed."""
    for used_call in call.walk():
        names = packages(used_call.signature)
        if names and not any(map(installed, names)):
            raise MachineError(f"{location}: {missing_package(used_call.name, names[-1])}")


def missing_package(name: str, package: str) -> str:
    """The message for a function whose package is not installed."""
    return f"'{name}' needs the package {package}: pip install '{EXTRAS.get(package, package)}'"
