"""Standard streams that every command can count on, whatever started it: cron, a service, a shell with a full disk."""

from __future__ import annotations

import io
import os
import sys

from fatbench.errors import MachineError


class _Stream(io.TextIOWrapper):
    """A standard stream that loses what the system refuses, and all that follows; a reader that is gone ends it."""

    refused = False

    def write(self, text: str) -> int:
        try:
            return len(text) if self.refused else super().write(text)
        except OSError as error:
            self._refuse(error)
        return len(text)

    def flush(self) -> None:
        try:
            if not self.refused:
                super().flush()
        except OSError as error:
            self._refuse(error)

    def close(self) -> None:
        """Write what is left; the stream below belongs to Python."""
        self.flush()

    def _refuse(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        self.refused = True


class _Output(_Stream):
    """What it refuses is a message: the disk that stdout goes to is full."""

    def _refuse(self, error: OSError) -> None:
        super()._refuse(error)
        raise MachineError(f"stdout: {error.strerror}") from None


def make_ready() -> None:
    """Open what is closed, so that no file takes its place, and explain what stdout refuses; stderr loses it.

    A run goes on without its messages: after its terminal was closed, or when the disk of their file is full.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)
            text = os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False)
            setattr(sys, name, text)
            setattr(sys, f"__{name}__", text)  # which Python keeps
    for name, kind in (("stdout", _Output), ("stderr", _Stream)):
        text = getattr(sys, name)
        as_before = {"line_buffering": text.line_buffering, "write_through": text.write_through}
        # a terminal in latin-1 shows what it can
        setattr(sys, name, kind(text.buffer, text.encoding, "replace", **as_before))
