"""Files written whole or not at all: a full disk, a link, a file that is there, a device."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fatbench import whole_file
from fatbench.errors import MachineError, SpecError


def test_a_file_is_replaced_and_its_folder_made(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    with pytest.raises(SpecError, match="No such file or directory"):
        whole_file.write(file, "one")
    whole_file.write(file, "one", make_folder=True)
    whole_file.write(file, b"two")
    assert file.read_bytes() == b"two" and os.listdir(file.parent) == ["a.txt"]


def test_on_a_full_disk_the_old_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "page.html"
    file.write_text("good")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"^-o page\.html: the disk is full; nothing was changed$"):
        whole_file.write(file, "half", "-o page.html")
    assert file.read_text() == "good" and os.listdir(tmp_path) == ["page.html"]


def test_the_part_of_another_process_is_in_nobody_s_way_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every container the program is process 1, so a part by that number may be anybody's, of now or long ago."""
    file, other = tmp_path / "t.md", tmp_path / f".t.md.{os.getpid()}.part"
    other.write_text("another's")
    with whole_file.replacing(file) as first, whole_file.replacing(file) as second:
        first.write(b"first")
        second.write(b"second")
        assert len(os.listdir(tmp_path)) == 3
    assert file.read_text() == "first" and sorted(os.listdir(tmp_path)) == [other.name, "t.md"]
    monkeypatch.setattr(whole_file.secrets, "token_hex", lambda size: str(os.getpid()))
    with pytest.raises(SpecError, match="File exists"):
        whole_file.write(file, "new")
    assert other.read_text() == "another's" and file.read_text() == "first"


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_of_files_that_belong_together_none_is_changed(
    fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three files, the disk full at each of them; with room all three are written."""
    old, new = tmp_path / "a", tmp_path / "new" / "b"
    old.write_text("good")
    sync, calls = os.fsync, []

    def full(handle: int) -> None:
        calls.append(handle)
        if len(calls) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    contents: dict[Path, str | bytes] = {old: "one", new: b"two", new.with_name("c"): "three"}
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match=r"^-o there: the disk is full; nothing was changed$"):
        whole_file.write_all(contents, "-o there")
    assert old.read_text() == "good" and len(calls) == fails and list(new.parent.glob("*")) == []
    whole_file.write_all(contents, "-o there")
    assert [file.read_text() for file in contents] == ["one", "two", "three"]
    assert sorted(os.listdir(new.parent)) == ["b", "c"]


@pytest.mark.parametrize("new", [False, True])
def test_of_a_link_the_target_is_written_and_one_that_must_be_new_is_refused(new: bool, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "out.md"
    link.symlink_to("folder/target")  # which is not there yet
    if new:
        with pytest.raises(SpecError, match="File exists"):
            whole_file.write(link, "table", new=True)
        assert not target.exists()
    else:
        whole_file.write(link, "table")
        assert target.read_text() == "table"
    assert link.is_symlink() and sorted(os.listdir(tmp_path)) == ["folder", "out.md"]


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "out.md"
    link.symlink_to("out.md")
    with pytest.raises(SpecError, match="Too many levels of symbolic links"):
        whole_file.write(link, "table")


def test_what_must_be_new_replaces_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("mine")
    with pytest.raises(SpecError, match="File exists"):
        whole_file.write(file, "other", new=True)
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["mine.py"]


def test_what_must_be_new_is_written_on_a_disk_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(part: Path, file: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", without)
    file = tmp_path / "mine.py"
    whole_file.write(file, "mine", new=True)
    with pytest.raises(SpecError, match="File exists"):
        whole_file.write(file, "other", new=True)
    assert file.read_text() == "mine" and os.listdir(tmp_path) == ["mine.py"]


def test_folders_are_refused_and_devices_written(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"-o .*: Is a directory"):
        whole_file.write(tmp_path, "x", f"-o {tmp_path}")
    read, write = os.pipe()
    whole_file.write_all({Path(f"/proc/self/fd/{write}"): "to a pipe"}, "-o there")
    with whole_file.replacing(Path(f"/proc/self/fd/{write}")) as stream:
        stream.write(b" twice")
    os.close(write)
    with os.fdopen(read) as received:
        assert received.read() == "to a pipe twice"
