"""Errors a person can cause: one clear message, one documented exit code, never a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

MANY = 40  # names that a message lists
SECRET = "(?:password|passwd|passfile|pwd|secret|token)"

# what moves the cursor, sets the title, or turns the direction of what a terminal or a page shows
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_RETURN = re.compile(CONTROL.pattern + "|\r(?!\n)")  # which a terminal writes over the line that it has shown


def printable(text: str) -> str:
    """Text that any database takes and any terminal shows: no control character, no half of a surrogate pair."""
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if whole.isprintable() else escapes(whole)


def escapes(text: str, backslash: str = "\\") -> str:
    """A text with what stands for them in place of control characters."""

    def code(character: re.Match[str]) -> str:
        number = ord(character[0])
        return f"{backslash}x{number:02x}" if number < 256 else f"{backslash}u{number:04x}"

    return _RETURN.sub(code, text)


def masked(text: str) -> str:
    """A text without the passwords of addresses and of settings such as password=... and token=..."""
    # a path has one slash where an address has two; the literal PASSWORD stands in messages that show the form
    text = re.sub(r"(:/{1,2}[^/?#:\s'\"]+):(?!PASSWORD@)[^\s'\"]*@", r"\1:***@", text)
    return re.sub(rf"(?i)(\b[\w.-]*{SECRET}\s*=\s*)[^&\s'\")]+", r"\1***", text)


class FatbenchError(Exception):
    """A mistake the reader of the message can mend; `exit_code` is what the command line returns.

    A password in the message is masked here, whatever option, file or setting it came from, and so is what a terminal
    obeys.
    """

    exit_code = 2

    def __init__(self, message: object = ""):
        super().__init__(printable(masked(str(message))))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of all frames: the message, and the user's line that led to it."""
        import traceback

        ours = str(Path(__file__).parent)
        frames = traceback.extract_tb(self.__traceback__)
        inside = next((place for place, one in enumerate(frames) if one.filename.startswith(ours)), len(frames))
        called = frames[max(inside - 1, 0) : inside]
        return [f"{type(self).__name__}: {self}", *(f"  line {one.lineno}: {one.line}" for one in called)]


class SpecError(FatbenchError):
    """An invalid suite, cell or option (exit 2: nothing was run or written)."""


class UnknownName(SpecError):
    """No function of a kind has this name; `entry` is both, as a run's provenance has it: "aggregator near_median"."""

    def __init__(self, message: str, entry: str):
        super().__init__(message)
        self.entry = entry


class NothingMatched(FatbenchError):
    """A filter that leaves nothing to do (exit 3)."""

    exit_code = 3


class DatabaseError(FatbenchError):
    """A database of another schema, or not one of ours (exit 4)."""

    exit_code = 4


class MachineError(FatbenchError):
    """Something this machine cannot do: no such GPU, a data set missing or damaged (exit 5)."""

    exit_code = 5


class Unavailable(MachineError):
    """Something that every cell needs is not to be had at the moment: a lock, space on a disk, a server (exit 5).

    No cell is to blame: none is marked failed for it, and the same command goes on when it is there again.
    """


class Doubtful(FatbenchError):
    """Numbers that were measured and cannot be right (exit 6); they are stored."""

    exit_code = 6


def article(noun: str) -> str:
    """The noun with its article: "an attack", "a model"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, or all of them; of many, the three nearest.

    Returns " (did you mean 'x'?)", or " (known: a, b, c)" where nothing is near.
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.6)
    if near:
        return f" (did you mean '{near[0]}'?)"
    if len(names) > MANY:
        near = difflib.get_close_matches(str(given), names, cutoff=0)
        return f" (the nearest of {len(names)}: {', '.join(near)})"
    return f" (known: {', '.join(names)})" if names else ""
