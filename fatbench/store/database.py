"""Opens a database: its address, its connections, its errors, its schema's version.

SQLite is the default; PostgreSQL is for several machines. Every error of a driver that a user can cause becomes a
`FatbenchError` with one clear message, and no message shows a password.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast
from urllib.parse import quote
from weakref import finalize

from sqlalchemy import Connection, create_engine, event, func, insert, inspect, select, text
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from fatbench.errors import DatabaseError, FatbenchError, MachineError, SpecError, Unavailable
from fatbench.settings import shown_url
from fatbench.store import rights
from fatbench.store.rows import stored_text
from fatbench.store.schema import (
    APPLICATION_ID,
    IDENTITY,
    METADATA,
    OUTCOMES_VIEW,
    RESULTS_VIEW,
    SCHEMA,
    SUITE_CELLS,
    TAKEN_OVER,
    VERSION,
    VIEW,
    VIEWS,
    WORK,
)

log = logging.getLogger("fatbench")

BUSY = 60.0  # seconds that SQLite waits for another process's lock
PAUSE = 1.0  # seconds between two tries at a locked database
# how SQLite's messages about damage begin that have no error code
DAMAGE = ("no such ", "unknown function", "foreign key mismatch", "unsupported file format")
EXPORT = "export it with the fatbench that wrote it (fatbench export -o FILE), and import FILE into a new database"
IMMUTABLE = "ro&immutable=1"  # reads without locks and leaves nothing
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "afs", "glusterfs")


class NoDatabase(DatabaseError):
    """The database does not exist yet: nothing has been run."""


class Locked(Unavailable):
    """Another process has locked the database, or its server does not answer: worth trying again.

    Nothing of the transaction was written, unless the message says that this is unknown.
    """


T = TypeVar("T")
P = ParamSpec("P")


def patiently(attempt: Callable[[], T], patience: float, stop: Callable[[], object] = lambda: False) -> T:
    """The result of `attempt`, which is repeated while the database is locked.

    Raises Locked after `patience` seconds, or when `stop` says that the user will not wait.
    """
    deadline, warned = time.monotonic() + patience, False
    while True:
        try:
            return attempt()
        except Locked as error:
            if time.monotonic() >= deadline or stop():
                raise
            if not warned:
                log.warning("%s: waiting for it", error)
            warned = True
        time.sleep(PAUSE)


class HasDatabase(Protocol):
    """A store, as far as `patient` needs it."""

    @property
    def database(self) -> Database:
        """The open database."""


Source = TypeVar("Source", bound="Database | HasDatabase")


def patient(work: Callable[Concatenate[Source, P], T]) -> Callable[Concatenate[Source, P], T]:
    """Decorate a function of a store or database to start again if the server went away during a transaction.

    The server has rolled that transaction back, so it happens once; the function's other transactions must tolerate
    being repeated.
    """

    @wraps(work)
    def persistent(source: Source, *args: P.args, **kwargs: P.kwargs) -> T:
        database = source if isinstance(source, Database) else source.database
        # each try reads it again
        positional: Any = [list(value) if isinstance(value, Iterator) else value for value in args]
        keywords: Any = {name: list(value) if isinstance(value, Iterator) else value for name, value in kwargs.items()}
        return patiently(lambda: work(source, *positional, **keywords), database.patience, database.stop)

    return persistent


# --- addresses ---------------------------------------------------------------------------------------------------


def _parse_url(url: str) -> URL:
    """A URL, or the path of a SQLite file, as SQLAlchemy's URL. Raises SpecError for anything else."""
    if "://" not in url:
        if not url.strip():
            raise SpecError("the database's address is empty: give a file such as results/fatbench.db, or a URL")
        return URL.create("sqlite", database=str(Path(url).expanduser().absolute()))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise SpecError(
            f"{shown_url(url)}: not a database URL (sqlite:///FILE, postgresql://USER:PASSWORD@HOST/NAME)"
        ) from None
    if parsed.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        if url.count("@") > 1:  # else part of the password would be taken for the host
            raise SpecError(f"{shown_url(url)}: write %40 for every '@' except the one before the host")
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.host:
            raise SpecError(f"{shown_url(url)}: a SQLite URL has three slashes, sqlite:///FILE")
        if not parsed.database or parsed.database == ":memory:":
            raise SpecError(f"{shown_url(url)}: workers need a file that all of them can open: sqlite:///FILE")
        return URL.create("sqlite", database=str(Path(parsed.database).absolute()))
    raise SpecError(f"{shown_url(url)}: unknown kind of database '{parsed.drivername}' (known: sqlite, postgresql)")


def on_network(path: Path) -> bool:
    """Whether a file is on a network file system, as far as Linux tells."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    folder = os.path.realpath(path.parent)
    matching_mounts = [
        (len(m[1]), m[2]) for m in mounts if m[1] == "/" or folder == m[1] or folder.startswith(m[1] + "/")
    ]
    return max(matching_mounts, default=(0, ""))[1] in NETWORK


# --- connections -------------------------------------------------------------------------------------------------


def mode(path: Path) -> str:
    """How SQLite may open a file now, as a parameter of its address."""
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return "rw"
    log = f"{path}-wal"  # without one, SQLite would leave an empty log of this user, which locks out all others
    return "ro" if os.path.exists(log) and os.path.getsize(log) else IMMUTABLE


def _sqlite(path: Path) -> Callable[[], sqlite3.Connection]:
    """A function that connects to a SQLite file; `_begin` starts transactions, not the driver."""

    def connect() -> sqlite3.Connection:
        address = f"file:{quote(str(path))}?mode={mode(path)}"
        connection = sqlite3.connect(address, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False)
        connection.text_factory = stored_text
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            # a commit must survive a power cut: the runner then deletes the checkpoint of the commit before
            connection.execute("PRAGMA synchronous = FULL")
        except sqlite3.Error:
            connection.close()
            raise
        except UnicodeDecodeError:  # SQLite quotes the damaged bytes of its schema
            connection.close()
            error = sqlite3.DatabaseError("malformed database schema")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error from None
        return connection

    return connect


def _read_text(connection: Any, _record: object) -> None:
    """Make a PostgreSQL connection read text as SQLite's is read."""
    from psycopg.adapt import Loader

    class Text(Loader):
        def load(self, data: Any) -> str:
            return stored_text(bytes(data))

    for kind in ("text", "varchar", "bpchar"):
        connection.adapters.register_loader(kind, Text)


def _begin(connection: Connection) -> None:
    """Start a transaction. A writer locks at once: after a read, SQLite could refuse the lock."""
    write = connection.get_execution_options().get("fatbench_write")
    if connection.get_execution_options().get("fatbench_light"):
        connection.exec_driver_sql("PRAGMA synchronous = NORMAL")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")


def lock(connection: Connection) -> None:
    """Keep other processes from changing the schema, or adding the same cell, until the transaction ends.

    On SQLite there is only one writer anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(APPLICATION_ID)))


class Database:
    """An open database. Each transaction has its own connection, so it may be used after a fork."""

    patience = 0.0  # seconds that a transaction waits for the database, after the minute that SQLite waits by itself

    @staticmethod
    def stop() -> object:
        """Whether the user has asked to stop waiting."""
        return False

    def __init__(self, url: str):
        """Use `open`; this checks only the address."""
        parsed = _parse_url(url)
        self.shown = shown_url(url)
        # of a link its target, beside which SQLite keeps its log
        self.path = Path(os.path.realpath(cast(str, parsed.database))) if parsed.drivername == "sqlite" else None
        self._secret = parsed.password
        self._release: Callable[[], object] = lambda: None
        if self.path is None:
            if "connect_timeout" not in parsed.query:
                parsed = parsed.update_query_dict({"connect_timeout": "20"})
            try:
                self._engine = create_engine(parsed, poolclass=NullPool)
            except ModuleNotFoundError as error:
                install_command = "pip install 'fatbench[postgres]'"
                raise SpecError(
                    f"{self.shown}: the driver '{error.name}' is not installed: {install_command}"
                ) from None
            except (ArgumentError, ValueError) as error:
                raise SpecError(f"{self.shown}: {self._safe(str(error))}") from None
            event.listen(self._engine, "connect", _read_text)
        else:
            self.connect = _sqlite(self.path)
            self._engine = create_engine("sqlite://", creator=self.connect, poolclass=NullPool)
            event.listen(self._engine, "begin", _begin)
        snapshot = {"isolation_level": "REPEATABLE READ"} if self._engine.dialect.name == "postgresql" else {}
        self._reader = self._engine.execution_options(**snapshot)
        self._writer = self._engine.execution_options(fatbench_write=True)
        # in a log that is not on a network, a commit without a sync may be lost with the power, and harms nothing
        light = self.path is not None and not on_network(self.path)
        self._light_writer = self._engine.execution_options(fatbench_write=True, fatbench_light=light)

    @classmethod
    def open(cls, url: str, *, create: bool = False) -> Self:
        """The database at `url`: a SQLAlchemy URL or the path of a SQLite file.

        create: make the file, its folder and the schema if they are missing. Raises NoDatabase if it is missing and
        not to be created, DatabaseError if it is not fatbench's, of another version or damaged, MachineError if it
        cannot be read, written or reached, and SpecError for an unknown kind of database.
        """
        database = cls(url)
        is_new = database.path is not None and not os.path.exists(database.path)  # False for a name that is too long
        database._ready_file(create)
        try:
            with database.reading() as connection:
                number = database._schema(connection)
                if number is not None:
                    database._demand_schema(connection, number)
            if number is not None:
                if create and database.path is None:
                    database._demand_grants()
            elif create:
                with database.writing() as connection:
                    database._create(connection)
            else:
                raise NoDatabase(f"{database.shown} is empty: nothing has been run yet")
        except Unavailable as error:
            # a full disk; if it is locked, another process is filling the file
            if is_new and database.path is not None and not isinstance(error, Locked):
                with suppress(OSError):
                    if not database.path.stat().st_size:
                        database.path.unlink()
            raise
        if database.path is not None:
            if create:
                database._set_journal()
            with database._explain_errors():  # kept open: the last connection to close writes back the log, too slowly
                kept = database.connect()
                database._release = finalize(database, kept.close)
                kept.execute("SELECT count(*) FROM cells").fetchone()
        return database

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database. Nothing is pending: every method is one transaction."""
        self._release()

    # --- transactions and what can go wrong in them --------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one snapshot of the database."""
        with self._explain_errors(), self._begin_patiently(self._reader) as connection:
            yield connection

    @contextmanager
    def writing(self, *, lasting: bool = True) -> Iterator[Connection]:
        """A transaction that writes all or nothing; on SQLite it is the only writer from its start.

        lasting: it survives a power cut.
        """
        number = None
        try:
            writer = self._writer if lasting else self._light_writer
            with self._explain_errors(), self._begin_patiently(writer) as connection:
                yield connection
                if self.path is None:
                    number = connection.scalar(text("SELECT txid_current_if_assigned()"))  # None if nothing was written
        except Locked:
            if number is None or not self._committed(number):
                raise

    def _committed(self, number: int) -> bool:
        """Whether a transaction whose commit got no answer was committed. Raises Locked if the server does not say."""

        def status() -> bool:
            try:
                with self._explain_errors(), self._begin_patiently(self._reader) as connection:
                    transaction_status = connection.scalar(text("SELECT txid_status(:number)"), {"number": number})
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) == "22023":  # a restarted server does not know the number
                    return False
                raise
            if transaction_status == "in progress":
                raise Locked(f"{self.shown}: a transaction has not ended, and whether it will be committed is unknown")
            return bool(transaction_status == "committed")

        return patiently(status, self.patience, self.stop)

    @contextmanager
    def _begin_patiently(self, engine: Engine) -> Iterator[Connection]:
        """Begin a transaction; retry for `patience` seconds while locked, which is safe: nothing is written yet."""
        with ExitStack() as stack:

            def begin() -> Connection:
                with self._explain_errors():
                    return stack.enter_context(engine.begin())

            yield patiently(begin, self.patience, self.stop)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise
        except (DBAPIError, sqlite3.Error) as error:
            explanation = self._explanation(error)
            if explanation is None:
                raise
            raise explanation from error

    def _safe(self, message: str) -> str:
        return message.replace(str(self._secret), "***") if self._secret else message

    def _explanation(self, error: DBAPIError | sqlite3.Error) -> FatbenchError | None:
        """A driver's error as an error for the user; None if it can only be a bug of fatbench."""
        original, shown_url = error.orig if isinstance(error, DBAPIError) else error, self.shown
        if isinstance(original, sqlite3.Error):
            code = getattr(original, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return Unavailable(f"{shown_url}: the disk is full; nothing was written in this step")
            if getattr(original, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED:
                return Unavailable(f"{shown_url} was moved or deleted while it was open")
            if code == sqlite3.SQLITE_READONLY:
                return Unavailable(self._unwritable())
            if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
                return Unavailable(f"{shown_url} cannot be opened (does its folder exist, and is it writable?)")
            if code == sqlite3.SQLITE_IOERR:
                return Unavailable(f"{shown_url}: reading or writing failed ({original}): is the disk full or damaged?")
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return Locked(f"{shown_url}: another process has been writing for more than a minute")
            if code == sqlite3.SQLITE_NOTADB:
                return DatabaseError(f"{shown_url} is not a fatbench database, nor any SQLite file")
            # the schema's version was checked, so a missing table or column is damage
            if code == sqlite3.SQLITE_CORRUPT or str(original).startswith(DAMAGE):
                return DatabaseError(f"{shown_url} is damaged: {original}")
            if "decode to UTF-8" in str(original):
                context = " ".join(str(original).partition(" with text")[0].split())
                return DatabaseError(f"{shown_url} is damaged: {context} (fatbench check)")
            return None
        state = getattr(original, "sqlstate", None)  # None if the server was not reached
        primary = getattr(getattr(original, "diag", None), "message_primary", None)
        reason = " ".join(self._safe(str(primary or original)).split())
        if state == "53100":
            return Unavailable(f"{shown_url}: the server's disk is full; nothing of this step was written")
        if state in ("25006", "42501"):
            statement = getattr(error, "statement", None) or ""
            # FOR UPDATE needs the right to write
            is_read = (
                state == "42501" and statement.lstrip().startswith(("SELECT", "WITH")) and " FOR " not in statement
            )
            return MachineError(f"{shown_url} cannot be {'read' if is_read else 'written'}: {reason}")
        if isinstance(error, OperationalError):  # not reached, shut down, out of memory or connections
            return Locked(f"{shown_url}: {reason}")
        return None

    # --- opening -------------------------------------------------------------------------------------------------

    def _ready_file(self, create: bool) -> None:
        """Check the SQLite file and its folder, which `create` makes; SQLite itself checks the contents."""
        path = self.path
        if path is None:
            return
        if os.access(path, os.W_OK):
            rights.drop_readers_log(path)
        if create:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise MachineError(f"{self.shown}: cannot make its folder: {error.strerror}") from None
            if rights.refusal_of_database(path):
                raise MachineError(self._unwritable())
        # Open the file only through SQLite: closing any other handle would drop all locks of this process, and another
        # process, believing itself alone, would remove the log (sqlite.org/howtocorrupt.html, 2.2).
        try:
            if create:
                with suppress(FileExistsError):
                    path.touch(exist_ok=False)  # with the permissions that the user's umask leaves; SQLite's are 0644
            file_mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise NoDatabase(f"{self.shown} does not exist: nothing has been run yet") from None
        except OSError as error:
            raise MachineError(f"{self.shown} cannot be read: {error.strerror}") from None
        if stat.S_ISDIR(file_mode):
            raise DatabaseError(f"{self.shown} is a folder, not a fatbench database")
        if not os.access(path, os.R_OK):
            raise MachineError(f"{self.shown} cannot be read: Permission denied")

    def _unwritable(self) -> str:
        reason = rights.refusal_of_database(self.path) if self.path is not None else ""
        return f"{self.shown} cannot be written{reason and f': {reason}'}"

    def _schema(self, connection: Connection) -> str | None:
        """The version of the database's schema; "" if it has none, None for an empty database."""
        tables = set(inspect(connection).get_table_names())
        if self.path is not None:
            id = connection.exec_driver_sql("PRAGMA application_id").scalar()
            if not tables and id in (0, APPLICATION_ID):
                return None
            if id != APPLICATION_ID:
                raise DatabaseError(f"{self.shown} is not a fatbench database")
        if VERSION.name in tables:
            return connection.scalar(select(VERSION.c.version_num)) or ""
        if self.path is None:
            if connection.scalar(select(func.current_schema())) is None:
                raise MachineError(
                    f"{self.shown} cannot be read: this user may use no schema there (GRANT USAGE ON SCHEMA)"
                )
            if name_clashes := sorted(
                tables & {*METADATA.tables, VIEW.name, SUITE_CELLS.name, OUTCOMES_VIEW, RESULTS_VIEW}
            ):
                raise DatabaseError(
                    f"{self.shown} is not a fatbench database: it has another program's '{name_clashes[0]}'"
                )
            return None
        return ""

    def _demand_schema(self, connection: Connection, number: str) -> None:
        if number == SCHEMA:
            return
        writer = ""
        with suppress(SQLAlchemyError):
            commit = connection.scalar(text('SELECT "commit" FROM runs ORDER BY id DESC LIMIT 1'))
            writer = f", last written by commit {commit}" if commit else ""
        direction, advice = ("newer", "update fatbench") if number > SCHEMA else ("older", EXPORT)
        if number in TAKEN_OVER and self.path is not None:
            advice = f"fatbench import {self.path} --db NEW.db takes it over; it stays, and models are copied beside"
        raise DatabaseError(
            f"{self.shown} has schema {number or 'none'}{writer}, {direction} than {SCHEMA} of this fatbench: {advice}"
        )

    def _demand_grants(self) -> None:
        """Raise MachineError if a server does not let this user do all that a run does."""
        query = text(
            "SELECT place, right_ FROM unnest(CAST(:tables AS text[])) AS place,"
            " unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) AS right_ WHERE NOT has_table_privilege(place, right_) UNION"
            " SELECT place, 'USAGE' FROM unnest(ARRAY['runs_id_seq', 'round_metrics_id_seq']) AS place"
            " WHERE NOT has_sequence_privilege(place, 'USAGE')"
        )
        with self.reading() as connection:
            missing = connection.execute(query, {"tables": [*METADATA.tables]}).all()
        if missing:
            (first, *others), rights_ = (sorted({row[i] for row in missing}) for i in (0, 1))
            more = f" and {len(others)} more" if others else ""
            raise MachineError(
                f"{self.shown} cannot be written: this user has no {', '.join(rights_)} on {first}{more}"
                " (docs/clusters.md lists the grants)"
            )

    def _create(self, connection: Connection) -> None:
        """Create the schema, unless another process has just done so."""
        lock(connection)
        number = self._schema(connection)
        if number is not None:
            self._demand_schema(connection, number)
            return
        METADATA.create_all(connection, checkfirst=False)
        WORK.create_all(connection)
        VERSION.create(connection)
        connection.execute(insert(VERSION).values(version_num=SCHEMA))
        connection.execute(insert(IDENTITY).values(id=uuid.uuid4().hex))
        for sql in VIEWS[connection.dialect.name]:
            connection.execution_options(no_parameters=True).exec_driver_sql(sql)  # psycopg would read its %
        if self.path is not None:
            connection.exec_driver_sql(f"PRAGMA application_id = {APPLICATION_ID}")

    def _set_journal(self) -> None:
        """Use a write-ahead log, so that readers and writers do not wait for each other, unless on a network.

        The log needs memory shared by all processes, which a network file system cannot provide.
        """
        assert self.path is not None
        journal_mode = "delete" if on_network(self.path) else "wal"
        with self._explain_errors(), self._engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            if raw.execute("PRAGMA journal_mode").fetchone()[0] == journal_mode:
                return
            try:
                raw.execute(f"PRAGMA journal_mode = {journal_mode}")
            except sqlite3.OperationalError as error:
                # in use at the moment: the next process to open it tries again, and both modes are safe
                if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
