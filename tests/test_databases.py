"""What the tests' own PostgreSQL says when it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from databases import serving


def test_why_no_server_can_be_made_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # another user runs it where root runs the tests
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    initdb = tmp_path / "initdb"
    initdb.write_text("#!/bin/sh\necho creating files\necho no room left >&2\nexit 3\n")
    initdb.chmod(0o755)
    with (
        pytest.raises(pytest.fail.Exception, match="initdb ended with 3:\ncreating files\nno room left"),
        serving(tmp_path),
    ):
        pass
