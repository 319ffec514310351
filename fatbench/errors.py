"""Errors that a user can cause: each has a clear message and a documented exit code, and prints no traceback."""

from __future__ import annotations

import contextlib
import difflib
import operator
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

MANY = 40  # the most names that a message lists
SECRET = "(?:password|passwd|passfile|pwd|secret|token)"

# control characters: they move the cursor, set the title or change the direction of text
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")  # of memory, in the repr of an object
_RETURN = re.compile(CONTROL.pattern + "|\r(?!\n)")  # a bare carriage return overwrites the line before it


def printable(text: str) -> str:
    """Make a text safe for any database and terminal: escape control characters and lone surrogates."""
    encoded = text.encode("utf-8", "backslashreplace").decode()
    return encoded if encoded.isprintable() else escapes(encoded)


def escapes(text: str, backslash: str = "\\") -> str:
    """Replace the control characters of a text by escapes such as "\\x1b"."""

    def code(character: re.Match[str]) -> str:
        number = ord(character[0])
        return f"{backslash}x{number:02x}" if number < 256 else f"{backslash}u{number:04x}"

    return _RETURN.sub(code, text)


def masked(text: str) -> str:
    """Hide the passwords in a text's addresses and in settings such as password=... and token=..."""
    # in a path, an address's two slashes become one; messages that show the form contain the literal PASSWORD
    text = re.sub(r"(:/{1,2}[^/?#:\s'\"]+):(?!PASSWORD@)[^\s'\"]*@", r"\1:***@", text)
    return re.sub(rf"(?i)(\b[\w.-]*{SECRET}\s*=\s*)[^&\s'\")]+", r"\1***", text)


ARGUMENTS = {  # of options whose argument in Python has another name
    "k": "where", "set": "override", "attack": "attacks", "data": "data_folder", "table": "id", "plugin": "plugins",
    "model": "network",
}  # fmt: skip

SHORT = ("c", "k", "o")  # options with one dash


class FatbenchError(Exception):
    """An error that the reader of the message can correct; the command line returns `exit_code`.

    option: what the message is about, in the words of the command line and without dashes: "seeds", "like NAME", or a
    setting, "run.path". Python's `str` begins with the argument of that name, `at_terminal` with the option. A message
    that begins with a space or "=" continues it.
    Passwords in the message are hidden, control characters escaped and addresses of memory left out, whatever option,
    file or object they came from.
    """

    exit_code = 2

    def __init__(self, message: object = "", option: str = ""):
        message, self.option = (printable(ADDRESS.sub("", masked(str(text)))) for text in (message, option))
        super().__init__(message)

    def __str__(self) -> str:
        name, space, value = self.option.partition(" ")
        argument = ARGUMENTS.get(name, name.removeprefix("run.").replace("-", "_"))
        return self._after(f"{argument}{space and '='}{value}")

    def at_terminal(self) -> str:
        """The message with the option as it is typed."""
        name = self.option.partition(" ")[0]
        return self._after(f"{'' if '.' in name else '-' if name in SHORT else '--'}{self.option}")

    def _after(self, place: str) -> str:
        message = self._message()
        return f"{place}{'' if message[:1] in ' =' else ': '}{message}" if self.option else message

    def _message(self) -> str:
        return Exception.__str__(self)

    def _render_traceback_(self) -> list[str]:
        """The lines that a notebook shows instead of a traceback: the message, and the user's line that caused it."""
        package_folder = str(Path(__file__).parent)
        frames = [one for one in traceback.extract_tb(self.__traceback__) if one.filename != contextlib.__file__]
        first_inside = next(
            (i for i, frame in enumerate(frames) if frame.filename.startswith(package_folder)), len(frames)
        )
        caller = frames[max(first_inside - 1, 0) : first_inside]  # the user's frame, or []
        return [f"{type(self).__name__}: {self}", *(f"  line {frame.lineno}: {frame.line}" for frame in caller)]


class SpecError(FatbenchError):
    """An invalid suite, cell or option (exit 2: nothing was run or written).

    keys: those that lead to the mistake from the mapping that is checked, outermost first; `at` makes a place of them.
    """

    keys: tuple[str | int, ...] = ()

    def _message(self) -> str:
        return ": ".join([*map(str, self.keys), super()._message()])

    def below(self, key: str | int) -> Self:
        """The same error, seen from the mapping that has this key."""
        self.keys = (key, *self.keys)
        return self

    def at(self, place: Callable[[tuple[str | int, ...]], str]) -> Self:
        """The same error with the place of its keys, such as "mine.yaml:7: lr"."""
        text, option = f"{place(self.keys)}: {super()._message()}", str(self.keys[0]) if self.keys else ""
        if option.startswith("--"):  # what is in no file
            self.option, text = option.removeprefix("--"), text.removeprefix(f"{option}: ")
        self.args, self.keys = (printable(text),), ()
        return self


class UnknownName(SpecError):
    """No function of a kind has this name. `entry` has both, as in a run's provenance: "aggregator near_median"."""

    def __init__(self, message: str, entry: str = "", option: str = ""):  # pickle gives the message alone
        super().__init__(message, option)
        self.entry = entry


class NothingMatched(FatbenchError):
    """A filter leaves nothing to do (exit 3)."""

    exit_code = 3


class DatabaseError(FatbenchError):
    """A database has another schema, or is not fatbench's (exit 4)."""

    exit_code = 4


class MachineError(FatbenchError):
    """This machine cannot do it: there is no such GPU, or a data set is missing or damaged (exit 5)."""

    exit_code = 5


class Unavailable(MachineError):
    """Something that every cell needs is unavailable now: a lock, space on a disk, a server (exit 5).

    No cell is marked as failed for it; the same command continues once it is available again.
    """


class Doubtful(FatbenchError):
    """Numbers were measured and stored, but cannot be right (exit 6)."""

    exit_code = 6


def reason(error: BaseException, file: Path) -> str:
    """Why a file could not be read or written, without the file's name, which the message has already."""
    text = str(getattr(error, "strerror", None) or error)
    return re.sub(rf""":? ['"]?{re.escape(str(file))}['"]?""", "", text)


def article(noun: str) -> str:
    """The noun with its article: "an attack", "a model"."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def shown(value: object) -> str:
    """A value in a message: a number, a text or a list of them itself, else its type, whose repr may be an address."""
    if isinstance(value, list | tuple) and len(value) <= MANY:
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict) and len(value) <= MANY:
        return f"{{{', '.join(f'{key!r}: {shown(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, int | float | complex | str | None) else article(type(value).__name__)


@contextlib.contextmanager
def about(option: str) -> Iterator[None]:
    """A context whose errors are about this option, see `FatbenchError`."""
    try:
        yield
    except FatbenchError as error:
        error.option = error.option or option
        raise


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number, numpy's too. Raises SpecError for anything else, and below `least`."""
    try:
        number = operator.index(value)
    except TypeError:  # of numpy's arrays and torch's tensors of fractions, too
        number = least - 1
    if number < least or isinstance(value, bool):
        raise SpecError(f"{name}: expected a whole number of {least} or more, got {shown(value)}")
    return number


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The end of an error message: " (did you mean 'x'?)", or " (known: a, b, c)" if no name is similar.

    Names of several parts are similar if one part is: 'x_median' and 'y_median' to "median". If there are many names,
    only the three nearest are listed.
    """
    names = sorted(set(choices))
    name_by_lower = {known_name.lower(): known_name for known_name in names}
    lower = str(name).lower()
    parts = {part for known_name in names if "_" in known_name for part in known_name.lower().split("_")}
    # a whole part before a name that is only similar: "median" is not "meamed"
    near = [repr(known_name) for known_name in names if lower in known_name.lower().split("_")]
    if lower in parts and len(near) <= 3:
        return f" (did you mean {' or '.join(near)}?)"
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6) or [
        name_by_lower[match] for match in difflib.get_close_matches(lower, name_by_lower, n=1, cutoff=0.6)
    ]
    if near:
        return f" (did you mean '{near[0]}'?)"
    for part in difflib.get_close_matches(lower, parts, n=1, cutoff=0.8):
        near = [repr(known_name) for known_name in names if part in known_name.lower().split("_")]
        if len(near) <= 3:
            return f" (did you mean {' or '.join(near)}?)"
    if len(names) > MANY:
        near = difflib.get_close_matches(str(name), names, cutoff=0)
        return f" (the nearest of {len(names)}: {', '.join(near)})"
    return f" (known: {', '.join(names)})" if names else ""
