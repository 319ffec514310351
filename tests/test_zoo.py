"""The zoo: networks of results by name, known by the SHA-256 of their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fatbench
from fatbench.errors import MachineError, SpecError
from fatbench.runner import zoo

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "vit-half-jpeg75-cpu.jsonl.xz"
FILE = ROOT / "results" / "weights" / "vit-half-jpeg75.safetensors"
NAME = "vit-half-jpeg75/0"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_the_committed_network_is_found_by_its_name_and_gives_the_logits_of_its_file(place: Path) -> None:
    network = fatbench.load_model(NAME, results=[RESULTS], places=[FILE.parent])
    assert not network.training
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert network(images).shape == (2, 10)
    same = zoo.module(FILE, zoo.entries([RESULTS])[0].sha256)
    torch.testing.assert_close(network(images), same(images))


def test_a_network_comes_from_an_address_once_and_another_file_is_refused(place: Path) -> None:
    (one,) = zoo.entries([RESULTS])
    served = place / "served"
    served.mkdir()
    shutil.copy(FILE, served / f"{one.sha256}.safetensors")
    address = served.as_uri()
    found = zoo.find(one, [address])
    assert found is not None and found.is_relative_to(place / "cache")
    shutil.rmtree(served)
    assert zoo.find(one) == found  # of the cache
    found.unlink()
    assert zoo.find(one, [address]) is None
    served.mkdir()
    (served / f"{one.sha256}.safetensors").write_bytes(FILE.read_bytes()[:-1] + b"x")
    with pytest.raises(MachineError, match="it is another file"):
        zoo.find(one, [address])
    with pytest.raises(MachineError, match=rf"{one.sha256}\.safetensors .*fatbench run {one.cell}"):
        fatbench.load_model(NAME, results=[RESULTS])


def test_names_are_of_labels_and_seed_and_a_part_is_enough() -> None:
    known = zoo.names(zoo.entries([ROOT / "results" / "sfat-fashion-cpu.jsonl.xz"]))
    assert len(known) == 31 and "sfat-fashion/Non-IID/SFAT/6" in known
    assert zoo.choose("sfat-fashion/Re-SFAT/6", known) == known["sfat-fashion/Non-IID/Re-SFAT/6"]
    assert set(known["sfat-fashion/Non-IID/SFAT/6"].numbers) >= {"natural", "pgd20", "autoattack"}
    with pytest.raises(SpecError, match="'sfat-fashion/SFAT/6' could be any of sfat-fashion/IID/SFAT/6, "):
        zoo.choose("sfat-fashion/SFAT/6", known)
    with pytest.raises(SpecError, match="no network is named"):
        zoo.choose("sfat-fashion/SFATT/6", known)


def test_models_lists_numbers_and_what_is_here(place: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("list", "models", str(RESULTS), "--format", "json")
    (row,) = [row for row in json.loads(out)["models"] if row["file"]]
    assert (code, row["name"], row["file"]) == (0, NAME, str(FILE)) and 0.6 < row["numbers"]["natural"] < 0.65
    assert row["attacks"]["natural"]["name"] == "natural"
    _, out, _ = run("list", "models", str(ROOT / "results" / "fat-byzantine-cpu.jsonl.xz"))
    assert sum("25/255" in line and "SHA-256" not in line for line in out.splitlines()) == 4
    assert " --like fat-byzantine --preset cpu" in out
    assert "another version of fatbench" in run("evaluate", str(FILE))[2]
    code, out, _ = run("list", "models", str(ROOT / "results" / "sfat-fashion-cpu.jsonl.xz"), "--format", "json")
    names = [row["name"] for row in json.loads(out)["models"]]
    first = [name for name in names if name.startswith("sfat-fashion/Non-IID/SFAT/")]
    assert [name.rpartition("/")[2] for name in first] == ["6", "7", "8", "9", "10"]
    assert run("list", "models")[0] == 3
    assert run("list", "models", "no.jsonl")[::2] == (2, "fatbench: no such file: no.jsonl\n")


def test_small_networks_of_the_results_are_committed_with_the_numbers_of_their_rows() -> None:
    results = [ROOT / "results" / "fat-byzantine-cpu.jsonl.xz"]
    known = zoo.names(zoo.entries(results))
    here = {name for name, one in known.items() if zoo.find(one, [FILE.parent]) is not None}
    assert here == {f"fat-byzantine/AT/{a}/{b}/3" for a in ("none", "IPM 0.5") for b in ("mean", "multi-Krum")}
    network = fatbench.load_model("none/multi-Krum/3", results=results, places=[FILE.parent])
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 10)
