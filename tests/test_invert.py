"""`fatbench invert`: one's own model and update, by files alone; what cannot be right is refused in one line."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from fatbench.store import jsonl
from fatbench.store.stages import Store

NETWORK = """
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

def make():
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=48, depth=1, num_heads=2, num_classes=5)

def cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(196, 5))
"""
Run = Callable[..., tuple[int, str, str]]


def step(name: str, count: int = 1, steps: int = 3, lr: float = 0.1, decay: float = 0.0) -> None:
    """A script as anybody would write it: its weights before and after some steps of SGD, and its last gradient."""
    space: dict[str, object] = {}
    exec(NETWORK, space)
    net = space[name]()  # type: ignore[operator]
    torch.save(net.state_dict(), "before.pt")
    x = images(count)
    y = torch.tensor([3, 1, 0, 2])[:count]
    optimizer = torch.optim.SGD(net.parameters(), lr, weight_decay=decay)
    for i in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net((x - 0.5) / 0.5), y).backward()
        if i == 0:
            torch.save({n: p.grad.clone() for n, p in net.named_parameters()}, "gradient.pt")
        optimizer.step()
    torch.save(net.state_dict(), "after.pt")


def images(count: int) -> Tensor:
    small = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return F.interpolate(small, (16, 16), mode="bilinear").mul(255).round() / 255


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NETWORK)
    step("make")
    for i, image in enumerate(images(2)):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(f"original-{i}.png")
    return tmp_path


@pytest.fixture
def run(run: Run) -> Run:
    """`fatbench invert`, of options as they are typed."""
    return lambda line: run("invert", *shlex.split(line))


VIT = "before.pt --model net.py:make --shape 3x16x16 --classes 5 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5"
SHORT = "--inversion '{name: patch_ls}'"


def test_three_steps_on_one_image_give_it_away(here: Path, run: Run) -> None:
    code, out, err = run(f"{VIT} --after after.pt --images 1 {SHORT} --original original-0.png --format json")
    assert code == 0, err
    found = json.loads(out)
    assert found["labels"] == [3]
    assert found["residual"] < 1e-3
    (row,) = found["attacks"]
    assert (row["threat"], row["labels"]) == ("A", "unused")
    assert row["psnr"] > 40
    with Image.open(row["file"]) as made:
        assert made.width >= 16


def test_a_full_disk_leaves_no_picture(here: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def full(handle: int) -> None:
        if "originals.png" in os.readlink(f"/proc/self/fd/{handle}"):  # the last of them
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run(f"{VIT} --after after.pt --images 1 {SHORT} --original original-0.png")
    assert (code, err) == (5, "fatbench: -o inverted: the disk is full; nothing was changed\n")
    assert os.listdir("inverted") == []


def test_the_gradient_of_two_images_is_called_a_mixture(here: Path, run: Run) -> None:
    step("make", count=2, steps=1)
    code, out, _ = run(f"{VIT} --gradient gradient.pt --images 2 {SHORT}")
    assert code == 0
    assert "labels, recovered: 1, 3" in out
    assert "a mixture" in out


def test_weight_decay_needs_who_knows_the_client(here: Path, run: Run) -> None:
    step("make", steps=5, decay=0.05)
    corrected = "--inversion '{name: patch_ls, decay: corrected}'"
    line = f"{VIT} --after after.pt --images 1 --original original-0.png --format json"
    known = f"{corrected} --threat C --set local.lr=0.1 --set local.epochs=5 --set local.weight_decay=0.05"
    psnr = [json.loads(run(f"{line} {more}")[1])["attacks"][0]["psnr"] for more in (SHORT, known)]
    assert psnr[1] > psnr[0] + 10
    code, _, err = run(f"{line} {corrected}")
    assert (code, err.count("\n")) == (2, 1)
    assert "needs the client's rate, steps and batch size (threat model C), and --threat is B" in err


def test_any_network_is_attacked_by_matching(here: Path, run: Run) -> None:
    step("cnn", steps=1)
    line = "before.pt --model net.py:cnn --shape 3x16x16 --classes 5"
    matching = "--inversion '{name: matching, steps: 3}'"
    code, out, err = run(f"{line} --after after.pt --labels 3 {matching}")
    assert code == 0, err
    assert "matching (steps: 3)" in out and "given" in out
    assert "the buffers tell the number of local steps: 1" in err and "ignored" not in err
    assert "attacks take the update as one of eval mode" in err and "--mode train" in err
    statistics = "--inversion '{name: matching, steps: 3, statistics: 0.1}' --threat E"
    code, out, err = run(f"{line} --after after.pt --images 1 --labels 3 --mode train {statistics}")
    assert code == 0 and "| E " in out and "eval mode" not in err
    code, _, err = run(f"{line} --gradient gradient.pt --images 1 --labels 3 --mode train {statistics}")
    assert code == 2 and "it reads the batch's statistics: --mode train, and files with the buffers" in err
    code, _, err = run(f"{line} --after after.pt --labels 3 {SHORT}")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no such parameter: matching takes any model" in err


def change(file: str, **changes: Tensor | None) -> None:
    state = torch.load(file)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del state[key]
        else:
            state[key] = value
    torch.save(state, file)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--after after.pt", 2, "say how many images are behind the update by --images N"),
        ("--after after.pt --images 2 --labels 3,1,1", 2, "--images 2 contradicts --labels, which are 3"),
        ("--after after.pt --labels 7", 2, "--labels: 7 is not one of 5 classes"),
        ("--after after.pt --labels x", 2, "--labels: expected whole numbers such as 3,1, got 'x'"),
        ("--images 1", 2, "give the update as --after WEIGHTS or as --gradient FILE"),
        ("--gradient after.pt --images 1", 2, "after.pt is almost equal to before.pt, so it holds weights"),
        ("--after gradient.pt --images 1", 2, "does not resemble before.pt: is it a gradient?"),
        ("--after after.pt --images 1 --std 0,1,1", 2, "--std: must be positive"),
        ("--after nothing.pt --images 1", 5, "nothing.pt: no such file"),
        ("--after before.pt --images 1", 2, "before.pt is the same as before.pt: there is no update"),
        ("--after after.pt --images 1 --threat F", 2, "expected A, B, C, D or E, got 'F' (a manipulated model"),
        ("--after after.pt --images 1 --mode train", 2, "--mode: train: this model computes the same in both modes"),
        ("--after after.pt --images 1 --mode both", 2, "expected eval or train, got 'both'"),
        ("--after after.pt --images 1 --set local.epochs=2", 2, "needs local.lr"),
        ("--after after.pt --images 1 --set local.lr=0.1", 2, "threat model B does not know it: --threat C"),
        ("--after after.pt --images 1 --inversion oracle", 2, "it needs the original images"),
        ("--after after.pt --images 1 --inversion patchls", 2, "no inversion is named 'patchls' (did you mean"),
        ("--after after.pt --images 2", 2, "only if local.lr is known"),
        ("--after after.pt --images 1 --original original-0.png --original original-1.png", 2, "2 images, and the up"),
    ],
)  # fmt: skip
def test_mistakes_get_one_line_and_write_nothing(here: Path, run: Run, options: str, code: int, message: str) -> None:
    got, out, err = run(f"{VIT} {options}")
    assert (got, out, err.count("\n")) == (code, "", 1), err
    assert message in err
    assert not Path("inverted").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pos_embed": torch.zeros(1, 5, 48)}, "is not an update of this model: pos_embed is 1x5x48, 1x17x48 needed"),
        ({"head__bias": None}, "is not an update of this model: head.bias is missing, 5 needed"),
        ({"norm__bias": torch.full((48,), torch.nan)}, "norm.bias has entries that are not finite"),
    ],
)
def test_updates_of_another_model_are_refused(here: Path, run: Run, changes: dict, message: str) -> None:
    change("after.pt", **changes)
    code, out, err = run(f"{VIT} --after after.pt --images 1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_suite_stands_below_in_the_same_table(here: Path, run: Run) -> None:
    line = f"{VIT} --after after.pt --images 1 {SHORT} --original original-0.png --like privacy-imprint"
    code, out, err = run(line)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert "--like privacy-imprint: no cell of preset paper has inverted updates here yet" in err
    rows = Path(__file__).parent.parent / "results" / "privacy-imprint-cpu.jsonl.xz"
    with Store.open("a.db", create=True) as store:
        jsonl.import_(store, rows)
    code, out, err = run(f"{line} -k defence=none --db a.db")
    assert code == 0, err
    (mine,) = [row for row in out.splitlines() if row.startswith("| patch_ls")]
    (fished,) = [row for row in out.splitlines() if row.startswith("| fishing ")]
    assert mine.count("|") == fished.count("|")
    assert "| F        | given     | privacy-imprint: mean of 40 clients" in fished


def test_what_a_defence_hides_is_said_before_anything_runs(here: Path, run: Run) -> None:
    change("gradient.pt", pos_embed=torch.zeros(1, 17, 48))
    code, out, err = run(f"{VIT} --gradient gradient.pt --images 1 {SHORT}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "patch_ls: it reads pos_embed, which the update withholds (all zeros)" in err
    change("gradient.pt", head__bias=torch.zeros(5))
    code, _, err = run(f"{VIT} --gradient gradient.pt --images 1 {SHORT}")
    assert code == 2
    assert "head.bias is all zeros" in err


def test_an_original_that_claims_to_be_huge(here: Path, run: Run) -> None:
    """A header of a few bytes: 60,000 x 60,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    signed = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    Path("huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + signed)
    code, _, err = run(f"{VIT} --after after.pt --images 1 --original huge.png")
    assert (code, err.count("\n")) == (5, 1) and "--original huge.png: not an image" in err


def test_the_command_of_the_page(here: Path, run: Run) -> None:
    page = (Path(__file__).parent.parent / "docs" / "invert.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^fatbench invert (.+)$", page, re.MULTILINE)
    code, out, err = run(command)
    assert code == 0, err
    assert "| patch_ls" in out and "one image, which patch_ls finds" in out
    assert sorted(file.name for file in Path("inverted").iterdir()) == ["1-patch-ls.png", "originals.png"]
