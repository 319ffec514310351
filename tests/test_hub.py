"""Results and models to and from the Hugging Face hub, played by a server of this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import result_files

from fatbench import hub
from fatbench.store.jsonl import import_
from fatbench.store.stages import Store

pytest.importorskip("huggingface_hub")
RESULTS = Path(__file__).parent.parent / "results"


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks for to commit and to fetch a small file; "me/results" and "me/network" are there."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(f"{self.command} {self.path} {self.headers.get('Authorization', '')}".strip())
        if not self.path.startswith(("/api/datasets/me/results/", "/api/models/me/network/")):
            self.answer(404, b'{"error": "Repository not found"}', X_Error_Code="RepoNotFound")
        elif self.path.endswith("/preupload/main"):
            named = [one["path"] for one in json.loads(body)["files"]]
            answer = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in named]
            self.answer(200, json.dumps({"files": answer}).encode(), Content_Type="application/json")
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            done = {"commitOid": "1" * 40, "commitUrl": f"http://{self.headers['Host']}/datasets/me/results/commit/1"}
            self.answer(200, json.dumps(done).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        content = self.files.get(self.path.rpartition("/resolve/main/")[2])
        if content is None:
            self.answer(404, X_Error_Code="EntryNotFound")
        else:
            self.answer(200, content, ETag=f'"{hashlib.sha256(content).hexdigest()}"', X_Repo_Commit="1" * 40)

    do_HEAD = do_GET


@pytest.fixture
def server() -> Iterator[tuple[type[Hub], str]]:
    handler = type("Handler", (Hub,), {"files": {}, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.mark.nightly
def test_results_go_to_the_hub_and_come_back(server: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, address = server
    head, *cells = result_files.lines(RESULTS / "sfat-fashion-cpu.jsonl.xz")
    few = tmp_path / "few.jsonl"
    few.write_text("".join([json.dumps(json.loads(head) | {"cells": 2}) + "\n", *cells[:2]]), encoding="utf-8")
    with Store.open(str(tmp_path / "a.db"), create=True) as store:
        import_(store, few)

    def fatbench(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_mine",
               "HF_HUB_DISABLE_TELEMETRY": "1"}  # fmt: skip
        command = [sys.executable, "-m", "fatbench", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    there = "hf://datasets/me/results/runs/results.jsonl"
    done = fatbench("export", "--db", "a.db", "-o", there)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert any("/commit/main" in one and one.endswith("Bearer hf_mine") for one in handler.asked)
    assert set(handler.files) == {"runs/results.jsonl"} and handler.files["runs/results.jsonl"].count(b"\n") == 3
    done = fatbench("import", there, "--db", "b.db")
    assert done.returncode == 0 and "2 cells, 2 new cells" in done.stdout, done.stderr
    done = fatbench("compare", there, "a.db")
    assert done.returncode == 0, done.stderr
    done = fatbench("import", "hf://datasets/me/results/none.jsonl", "--db", "b.db")
    assert done.returncode == 5 and done.stderr.startswith("fatbench: hf://datasets/me/results/none.jsonl: HTTP 404: ")
    done = fatbench("export", "--db", "a.db", "-o", "hf://datasets/you/results/x.jsonl")
    assert done.returncode == 5 and "hf://datasets/you/results/x.jsonl: HTTP 404: " in done.stderr
    assert "Traceback" not in done.stderr and sorted(os.listdir(tmp_path)) == ["a.db", "b.db", "few.jsonl", "hf"]


NET = """
from torch import nn


def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_a_network_goes_to_the_hub_and_one_of_it_is_attacked(server: Any, tmp_path: Path, monkeypatch, run) -> None:
    import huggingface_hub
    import torch

    handler, address = server
    api, fetch = huggingface_hub.HfApi, huggingface_hub.hf_hub_download
    monkeypatch.setattr(huggingface_hub, "HfApi", partial(api, endpoint=address, token="hf_mine"))
    cached = partial(fetch, endpoint=address, cache_dir=tmp_path / "hf")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cached)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fatbench.packed.results_in", lambda folder: [RESULTS / "vit-half-jpeg75-cpu.jsonl.xz"])
    there, weights = "hf://me/network/vit.safetensors", RESULTS / "weights"
    assert run("fetch", "vit-half-jpeg75", "-o", there) == (0, "", "")
    assert handler.files["vit.safetensors"] == (weights / "vit-half-jpeg75.safetensors").read_bytes()
    assert any("/api/models/me/network/commit/main" in one for one in handler.asked)
    Path("net.py").write_text(NET)
    torch.save(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).state_dict(), "net.pt")
    handler.files["net.pt"] = Path("net.pt").read_bytes()
    Path("net.pt").unlink()
    attack = [
        "--model",
        "net.py:make",
        "--dataset",
        "digits",
        "--attack",
        "natural",
        "--images",
        "20",
        "--device",
        "cpu",
    ]
    code, out, err = run("evaluate", "hf://me/network/net.pt", *attack, "--device", "cpu")
    assert code == 0 and out.startswith("natural accuracy ") and "20 images" in out, err
    code, _, err = run("evaluate", "hf://me/network/no.pt", *attack)
    assert code == 5 and err.startswith("fatbench: hf://me/network/no.pt: HTTP 404: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/me/results/a/b.jsonl", hub.Address("dataset", "me/results", "a/b.jsonl")),
        ("hf:/me/network/model.safetensors", hub.Address("model", "me/network", "model.safetensors")),
        ("hf://me/network", None),
        ("results/hf.jsonl", None),
        ("-", None),
    ],
)
def test_an_address_is_told_from_a_file(text: str, expected: hub.Address | None) -> None:
    assert hub.address(Path(text)) == expected
    assert expected is None or hub.address(Path(str(expected))) == expected
