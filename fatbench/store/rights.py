"""What this user may write and remove, where others work in the same folder: looked at before anything is changed."""

from __future__ import annotations

import os
import pwd
import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

PATIENCE = 1.0  # seconds that a reader's program may take to end before its log counts as in use


def refusal(path: Path) -> str:
    """Why this user may not write a file or folder, such as "belongs to ann"; "" if they may, or it is not there."""
    if not os.path.exists(path) or os.access(path, os.W_OK):
        return ""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return "is on a read-only file system"
    return _owned(path.stat())


def _owned(status: os.stat_result) -> str:
    if status.st_uid == os.geteuid():
        return f"has permissions that forbid it ({stat.S_IMODE(status.st_mode):04o})"
    try:
        return f"belongs to {pwd.getpwuid(status.st_uid).pw_name}"
    except KeyError:
        return f"belongs to user {status.st_uid}"


def refusal_to_remove(path: Path) -> str:
    """Why this user may not remove a file, or a folder and what is in it: "FILE belongs to ann"; "" if they may."""
    folder, status = path.parent.stat(), path.lstat()
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"{path.parent} {refusal(path.parent) or _owned(folder)}"
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, status.st_uid):
        return f"{path} {_owned(status)}"  # in such a folder each may remove only their own
    if not stat.S_ISDIR(status.st_mode):
        return ""
    if not os.access(path, os.R_OK):
        return f"{path} {_owned(status)}"
    return next((reason for entry in path.iterdir() if (reason := refusal_to_remove(entry))), "")


# --- the files of SQLite ------------------------------------------------------------------------------------------


def refusal_of_database(path: Path) -> str:
    """Why this user may not write a SQLite database: "g.db-wal belongs to ann: ..."; "" if they may.

    What SQLite keeps beside the file while it is open must be writable as well, and so must the folder.
    """
    if reason := refusal(path):
        return f"it {reason}"
    log, index, journal = (path.with_name(path.name + ending) for ending in ("-wal", "-shm", "-journal"))
    for file in (log, journal):
        if reason := refusal(file):
            empty = f": remove it and {index.name}, once no program has the database open"
            full = " and is not empty: its owner must open the database (fatbench check), which writes it back"
            return f"{file.name} {reason}{full if file.stat().st_size else empty}"
    if reason := refusal(index):
        return f"{index.name} {reason}: remove it, once no program has the database open"
    reason = refusal(path.parent)
    return reason and f"its folder {path.parent} {reason}"


def drop_readers_log(path: Path) -> None:
    """Remove the empty log of a user who read a database without being allowed to write it.

    SQLite makes it for them, and with it nobody else can write. It goes only if no process has the database open, which
    SQLite's own lock says; the lock keeps others out meanwhile. A log with something in it stays.
    """
    log, index = (path.with_name(path.name + ending) for ending in ("-wal", "-shm"))
    foreign = [file for file in (log, index) if refusal(file)]
    if not foreign:
        return
    address = f"file:{quote(str(path))}?mode=rw"
    with suppress(sqlite3.Error, OSError), closing(sqlite3.connect(address, uri=True, timeout=PATIENCE)) as connection:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # takes the lock, which is kept
        is_log = connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"  # else reading locks nobody out
        if is_log and not (log in foreign and log.stat().st_size):
            for file in foreign:
                file.unlink()
