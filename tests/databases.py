"""Databases for tests: fresh SQLite files, and a private PostgreSQL server where its binaries are found."""

from __future__ import annotations

import os
import pwd
import runpy
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine


def binaries_of_postgres() -> Path | None:
    """The folder of `initdb` and `postgres`: on the path, or where Debian keeps them, the newest version first."""
    found = [Path(name).resolve().parent for name in map(shutil.which, ("initdb", "postgres")) if name]
    kept = sorted(Path("/usr/lib/postgresql").glob("[0-9]*/bin"), key=lambda folder: -int(folder.parent.name))
    return next((f for f in [*found, *kept] if (f / "initdb").exists() and (f / "postgres").exists()), None)


# Runs a server until standard input ends, as it does when the tests are over or were killed, then removes its folder.
GUARDED = """
folder=$1; shift
"$@" < /dev/null &
read -r _
kill -INT $!
wait $!
rm -rf "$folder"
"""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The folder of the socket of a server of our own, reachable by nobody else; skipped where there is none."""
    pytest.importorskip("psycopg")
    binaries = binaries_of_postgres()
    if binaries is None:
        pytest.skip("no PostgreSQL server is installed here")
    with serving(binaries) as folder:
        yield folder


@contextmanager
def serving(binaries: Path) -> Iterator[str]:
    """A PostgreSQL server, and the folder of its socket. It does not run as root, so root starts it as another user."""
    folder = Path(tempfile.mkdtemp(prefix="fatbench-pg-", dir="/tmp"))  # a socket's path may have 107 bytes
    user = None
    if os.geteuid() == 0:
        known = [entry.pw_name for entry in pwd.getpwall()]
        user = next((name for name in ("postgres", "nobody") if name in known), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root and there is no other user to run it as")
        shutil.chown(folder, user)
    data = folder / "data"
    make = [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8"]
    made = subprocess.run(make, capture_output=True, text=True, user=user, cwd="/")
    if made.returncode != 0:
        shutil.rmtree(folder)
        pytest.fail(f"initdb ended with {made.returncode}:\n{made.stdout}{made.stderr}", pytrace=False)
    serve = [str(binaries / "postgres"), "-D", str(data), "-k", str(folder)]
    command = ["sh", "-c", GUARDED, "sh", str(folder), *serve, "-c", "listen_addresses=", "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, user=user, cwd="/")
    try:
        end = time.monotonic() + 300
        while subprocess.run([binaries / "pg_isready", "-q", "-h", folder], check=False).returncode != 0:
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
            time.sleep(0.05)
        yield str(folder)
    finally:
        server.stdin.close()
        server.wait(300)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_postgres(postgres_server: str) -> Callable[[], str]:
    """A function that gives the URL of an empty place: a schema of its own, which is faster made than a database."""

    def make() -> str:
        name = f"t{uuid.uuid4().hex}"
        engine = create_engine(f"postgresql+psycopg://postgres@/postgres?host={postgres_server}")
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        engine.dispose()
        return f"postgresql://postgres:geheim@/postgres?host={postgres_server}&options=-csearch_path%3D{name}"

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a database may be made, once on each kind of server."""
    if request.param == "sqlite":
        return str(tmp_path / "results" / "x.db")
    return str(request.getfixturevalue("new_postgres")())


@pytest.fixture
def other_url(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> str:
    """Another place of the same kind."""
    if "://" not in url:
        return str(tmp_path / "elsewhere" / "y.db")
    return str(request.getfixturevalue("new_postgres")())


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """The committed rows: file without its ending -> Store, to be read only; shared by all processes of a run."""
    pages = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "results_pages.py"))
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "rows"
    folder.mkdir(exist_ok=True)
    with closing(pages["Rows"](folder)) as rows:
        yield rows
