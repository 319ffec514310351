"""Checkpoints of others: what is tensors is read, as torch reads it; nothing in a file is executed."""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import decimal
import enum
import functools
import gzip
import lzma
import os
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fatbench.errors import MachineError, SpecError
from fatbench.models import external_network, pretrained, torch_files

LEGACY = {"_use_new_zipfile_serialization": False}


def net(fill: float = 1.0) -> nn.Sequential:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.arange(value.numel()).view(value.shape) + fill)
    return network


def loaded(file: Path, entry: str | None = None, network: nn.Module | None = None) -> tuple[nn.Module, str]:
    """(the network with the file's state, what was said)."""
    network = network or net(0.0)
    return network, external_network.load(network, file.name, pretrained.read_state("evaluate", file, entry)[0])


def assert_equal(network: nn.Module, other: nn.Module | None = None) -> None:
    own, others = network.state_dict(), (other or net()).state_dict()
    assert own.keys() == others.keys()
    for name, value in own.items():
        assert torch.equal(value, others[name].to(value.dtype)), name


# --- what lies beside a state -------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclass
class Options:
    lr: float = 0.1

    class Inner:
        pass


class Easy(dict[str, Any]):
    """A mapping with attributes, as settings are often kept."""


class Listed(list[Any]):
    pass


Point = collections.namedtuple("Point", "x y")

BESIDE: dict[str, Any] = {
    "numpy number": np.float64(93.1),
    "numpy array": np.arange(3.0),
    "numpy objects": np.array([{"a": 1}, None], dtype=object),
    "numpy dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "numpy records": np.zeros(2, dtype=[("a", "f4")]),
    "numpy type": np.float32,
    "numpy generator": np.random.default_rng(0),
    "path": Path("a/b"),
    "date": datetime.date(2020, 1, 2),
    "date and time": datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    "defaultdict": collections.defaultdict(list, a=[1]),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1.0, 2.0], maxlen=3),
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "enum": Colour.RED,
    "inner class": Options.Inner(),
    "dataclass": Options(),
    "dictionary of its own kind": Easy(lr=0.1),
    "list of its own kind": Listed([1, 2]),
    "named tuple": Point(1, 2),
    "partial": functools.partial(max, 1),
    "function": net,
    "built-in": max,
    "class": Options,
    "complex": 1j,
    "decimal": decimal.Decimal("0.1"),
    "slice": slice(1, 2),
    "range": range(3),
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "arguments": argparse.Namespace(lr=0.1, path=Path("x")),
    "generator's state": random.getstate(),
    "torch's types": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided],
    "module": nn.Linear(2, 2),
    "error": ValueError("x"),
    "optimiser": torch.optim.Adam(net().parameters()).state_dict(),
    "optimiser with steps": {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3)}}, "param_groups": []},
    "generator's tensor": {"torch": torch.get_rng_state(), "cuda": [torch.get_rng_state()]},
    "metrics": {"best": torch.tensor(0.9)},
    "curves": {"accuracy": np.arange(5.0), "loss": np.arange(5.0)},
    "itself": [],
}
BESIDE["itself"].append(BESIDE["itself"])


@pytest.mark.parametrize("form", [{}, LEGACY, {"pickle_protocol": 4}, {"pickle_protocol": 5}], ids=str)
@pytest.mark.parametrize("kind", BESIDE)
def test_what_lies_beside_a_state_is_left(tmp_path: Path, kind: str, form: dict[str, Any]) -> None:
    """Beside a state under a word of its own, and among the names of a state."""
    for content in ({"mine": net().state_dict(), "x": BESIDE[kind]}, {**net().state_dict(), "x": BESIDE[kind]}):
        torch.save(content, file := tmp_path / "net.pt", **form)
        network, said = loaded(file)
        assert_equal(network)
        assert said == ""


def test_all_of_them_at_once(tmp_path: Path) -> None:
    torch.save({"mine": net().state_dict(), **BESIDE}, file := tmp_path / "net.pt")
    assert_equal(loaded(file)[0])
    assert pretrained.read_state("evaluate", file)[1] == ["mine"]


# --- tensors, as torch reads them ---------------------------------------------------------------------------------

BASE = torch.arange(24.0).reshape(2, 3, 4)
TENSORS: dict[str, Tensor] = {
    **{
        str(dtype): torch.arange(6).to(dtype).reshape(2, 3)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32,
            torch.float8_e4m3fn,
        )
    },
    "view": BASE[1, 1:, ::2],
    "transposed": BASE.permute(2, 0, 1),
    "expanded": torch.ones(1, 3).expand(1000, 3),
    "number": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "parameter": nn.Parameter(torch.ones(2)),
    "buffer": nn.Buffer(torch.ones(2)),
    "channels last": torch.rand(1, 3, 2, 2).to(memory_format=torch.channels_last),
    "needs a gradient": torch.ones(2, requires_grad=True),
}  # fmt: skip
TENSORS["with an attribute"] = torch.ones(3)
TENSORS["with an attribute"].note = "mine"  # type: ignore[attr-defined]
TENSORS["parameter with an attribute"] = nn.Parameter(torch.ones(3))
TENSORS["parameter with an attribute"].note = "mine"  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", [{}, LEGACY, {"pickle_protocol": 5}], ids=str)
def test_tensors_are_what_torch_reads(tmp_path: Path, form: dict[str, Any]) -> None:
    # old files cannot name the types that came after them
    stored = {key: value for key, value in TENSORS.items() if form is not LEGACY or key not in OF_LATER}
    torch.save(stored, file := tmp_path / "net.pt", **form)
    expected, found = torch.load(file, weights_only=False), torch_files.read(file)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        given = found[key]
        assert (given.dtype, given.shape) == (value.dtype, value.shape), key
        eight = value.dtype == torch.float8_e4m3fn  # which torch does not compare
        assert torch.equal(*(one.detach().view(torch.uint8) if eight else one.detach() for one in (given, value))), key


OF_LATER = {str(dtype) for dtype in (torch.uint16, torch.uint32, torch.float8_e4m3fn)}


def test_tensors_that_share_their_numbers_share_them_here(tmp_path: Path) -> None:
    torch.save({"a": BASE[0], "b": BASE[1]}, file := tmp_path / "net.pt")
    found = torch_files.read(file)
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_state_of_numpy_arrays(tmp_path: Path, how: str, protocol: int) -> None:
    arrays = {name: value.numpy() for name, value in net().state_dict().items()}
    arrays["1.weight"] = np.asfortranarray(arrays["1.weight"].astype(">f8"))
    arrays["2.num_batches_tracked"] = np.int64(7)
    file = tmp_path / "net.pt"
    if how == "torch":
        torch.save(arrays, file, pickle_protocol=protocol)
    else:
        file.write_bytes(pickle.dumps(arrays, protocol))
    network, said = loaded(file)
    assert_equal(network)
    assert said == f"net.pt: {NO_COUNTER}"


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_state_of_tensors_that_pickle_dumped(tmp_path: Path, protocol: int) -> None:
    (file := tmp_path / "net.pkl").write_bytes(pickle.dumps({"model": net().state_dict()}, protocol))
    assert_equal(loaded(file)[0])


# --- nothing is executed ------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def call(module: str, name: str, *arguments: str) -> bytes:
    """The instructions that call a function with texts."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(map(text, arguments)) + b"tR"


MARK = "fatbench_was_executed"
RUN = f"__import__('os').environ.__setitem__('{MARK}', '1')"
SHELL = "touch executed"
HOSTILE = {
    "os.system": call("os", "system", SHELL),
    "posix.system": call("posix", "system", SHELL),
    "nt.system": call("nt", "system", SHELL),
    "subprocess": call("subprocess", "getoutput", SHELL),
    "eval": call("builtins", "eval", RUN),
    "exec": call("builtins", "exec", RUN),
    "old eval": call("__builtin__", "eval", RUN),
    "import": call("builtins", "__import__", "antigravity"),
    "a chain of getattr": b"cbuiltins\ngetattr\n(" + call("builtins", "__import__", "os") + text("system") + b"tR("
    + text(SHELL) + b"tR",
    "a dotted name": call("os", "path.os.system", SHELL),
    "torch's own": call("torch.hub", "load_state_dict_from_url", "file:///etc/passwd"),
    "torch.load": call("torch", "load", "executed"),
    "torch.storage": b"ctorch.storage\n_load_from_bytes\n(C" + bytes([len(b := call("os", "system", SHELL) + b".")]) + b
    + b"tR",
    "a reconstructor": b"ccopyreg\n_reconstructor\n(csubprocess\nPopen\n" + text(SHELL) + b"NtR",
    "newobj": b"csubprocess\nPopen\n(" + text(SHELL) + b"t\x81",
    "newobj with keywords": b"csubprocess\nPopen\n(" + text(SHELL) + b"t}" + text("shell") + b"\x88s\x92",
    "inst": b"(" + text(SHELL) + b"ios\nsystem\n",
    "obj": b"(cos\nsystem\n" + text(SHELL) + b"o",
    "a state": b"cbuiltins\nobject\n)\x81}" + text("__setstate__") + b"cos\nsystem\nsb" + text(SHELL) + b"b",
    "a state of a class": b"cbuiltins\nobject\n}" + text("__setstate__") + b"cos\nsystem\nsb",
    "slots of a state": b"cbuiltins\nobject\n)\x81N}" + text("__class__") + b"csubprocess\nPopen\ns\x86b",
    "a stack": text("os") + text("system") + b"\x93(" + text(SHELL) + b"tR",
    "an extension": b"\x82\x01(" + text(SHELL) + b"tR",
    "an item": b"ccollections\nOrderedDict\n)R" + call("os", "system", SHELL) + b"K\x01s",
    "a list": b"cos\nenviron\n" + text(MARK) + text("1") + b"s",
    "code": b"ctypes\nFunctionType\n(ctypes\nCodeType\n)R}tR)R",
    "a persistent id": b"(" + text("module") + b"cos\nsystem\n" + text(SHELL) + b"tQ",
    "a storage's type": b"(" + text("storage") + b"cos\nsystem\n" + text("0") + text("cpu") + b"K\x01tQ",
    "rebuilt by a function": b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\nctorch\nTensor\n("
    + text(SHELL) + b"tNtR",
    "rebuilt by a text": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + text("x") + b"ctorch\nTensor\n(tNtR",
    "a type of numbers": b"ctorch._utils\n_rebuild_tensor_v3\n((" + text("storage")
    + b"ctorch.storage\nUntypedStorage\n" + text("0") + text("cpu")
    + b"K\x04tQK\x00K\x01\x85K\x01\x85\x89Nctorch\nload\ntR",
    "an array's type": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR(K\x01K\x01\x85"
    b"cnumpy\ndtype\n(" + text("O8") + b"\x89\x88tR\x89C\x08AAAAAAAAtb",
    "an array of a length": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85C\x01btR(K\x01K\x01\x85"
    b"cnumpy\ndtype\n(" + text("f8") + b"\x89\x88tR\x89\x8a\x06\x00\x00\x00\x00\x00\x01tb",
    "bytes of a length": b"\x8e" + struct.pack("<Q", 1 << 50) + b"x",
    "a bytearray of a length": b"\x96" + struct.pack("<Q", 1 << 46) + b"x",
    "a frame of a length": b"\x95" + struct.pack("<Q", 1 << 50) + b"x",
    "a text of a length": b"X" + struct.pack("<I", 2**32 - 1) + b"x",
    "a place in the memory": b"Nr" + struct.pack("<I", 2**32 - 1),
    "depth": b"(" * 100_000,
    "depth of lists": b"]" * 200_000 + b"a" * 199_999,
    "depth of calls": b"ctorch._utils\n_rebuild_parameter\nq\x00" + b"h\x00(" * 50_000 + b"N" + b"tR" * 50_000,
    "laughs": b"]q\x00" + b"".join(b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1])
                                   for i in range(60)),
}  # fmt: skip


def zipped(file: Path, data: bytes, **members: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": data, "byteorder": b"little", "data/0": b"\0" * 16, **members}.items():
            archive.writestr(f"net/{name}", content)


def dictionary(**values: bytes) -> bytes:
    return b"\x80\x02}" + b"".join(text(key) + value + b"s" for key, value in values.items()) + b"."


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_nothing_is_executed(
    kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence, or the file is read: no function of a file is called, nothing of this process is changed."""
    monkeypatch.chdir(tmp_path)
    data, file = dictionary(x=HOSTILE[kind]), Path("net.pt")
    if form == "zip":
        zipped(file, data)
    else:
        head = pickle.dumps(torch_files.MAGIC, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
        file.write_bytes(head + data + pickle.dumps([], 2) if form == "old" else data)
    with monkeypatch.context() as patched:
        for name in ("eval", "exec", "compile"):
            patched.setattr(builtins, name, functools.partial(never, name))
        for function in ("system", "popen", "fork", "execv", "posix_spawn"):
            patched.setattr(os, function, functools.partial(never, function))
        with pytest.raises((SpecError, MachineError)) as refused:
            pretrained.read_state("evaluate", file)
    assert "\n" not in str(refused.value)
    assert MARK not in os.environ and {path.name for path in tmp_path.iterdir()} == {"net.pt"}
    assert capfd.readouterr() == ("", "")


def never(name: str, *arguments: Any) -> None:
    raise AssertionError(f"{name} was called")


def test_the_files_above_do_execute_where_a_pickle_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file that is no attack cannot pass for one that is held off."""
    monkeypatch.chdir(tmp_path)
    executed = 0
    for kind in ("os.system", "posix.system", "a chain of getattr", "inst", "obj", "a stack", "subprocess"):
        pickle.loads(dictionary(x=HOSTILE[kind]))
        executed += Path("executed").is_file()
        Path("executed").unlink()
    assert executed == 7


def test_a_class_of_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    before = {name: dict(vars(kind)) for name, kind in (("Unbuilt", torch_files.Unbuilt), ("Tensor", Tensor))}
    for attribute in ("append", "name", "__call__", "__setstate__"):
        state = b"ctorch\nTensor\nN}" + text(attribute) + text("mine") + b"s\x86b"
        zipped(tmp_path / "net.pt", dictionary(x=state))
        with pytest.raises(MachineError, match="damaged"):
            pretrained.read_state("evaluate", tmp_path / "net.pt")
    assert before == {"Unbuilt": dict(vars(torch_files.Unbuilt)), "Tensor": dict(vars(Tensor))}


def storage(key: str = "0", numel: int = 4, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + integer(numel) + b"tQ"


def integer(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def tensor(offset: int = 0, size: int = 4, stride: int = 1, **of_storage: Any) -> bytes:
    shape = integer(size) + b"\x85" + integer(stride) + b"\x85"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(**of_storage) + integer(offset) + shape + b"\x89NtR"


@pytest.mark.parametrize(
    ("value", "readable"),
    [
        (tensor(), True),
        (tensor(size=1 << 40, stride=0), True),  # as large as its shape says only when it is copied
        (tensor(numel=1 << 40), True),  # what a storage says of its size is not believed
        (tensor(size=5), False),
        (tensor(offset=1), False),
        (tensor(offset=-1), False),
        (tensor(stride=-1), False),
        (tensor(size=-1), False),
        (tensor(size=1 << 62, stride=1 << 62), False),
        (tensor(key="1"), False),
        (tensor(key="../data.pkl"), False),
        (tensor(kind="DoubleStorage"), False),
        (tensor(kind="NoStorage"), False),
    ],
)
def test_a_tensor_stays_inside_its_storage(tmp_path: Path, value: bytes, readable: bool) -> None:
    zipped(file := tmp_path / "net.pt", dictionary(w=value))
    if readable:
        state, _ = pretrained.read_state("evaluate", file)
        with pytest.raises(SpecError, match="another network's weights"):
            external_network.load(nn.Linear(3, 2), "net.pt", state)
        return
    with pytest.raises(MachineError, match=r"cannot read .*net\.pt"):
        pretrained.read_state("evaluate", file)


def test_a_compressed_file_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(file := tmp_path / "net.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/data.pkl", dictionary(w=tensor()))
        archive.writestr("net/data/0", b"\0" * 10_000_000)
    with pytest.raises(MachineError, match=r"it is compressed, which torch\.save never does"):
        pretrained.read_state("evaluate", file)


def test_a_file_of_another_kind_is_called_so(tmp_path: Path) -> None:
    """Whatever its name says; a state is read whatever its name says, too."""
    state = net().state_dict()
    torch.save(state, whole := tmp_path / "whole")
    np.savez(arrays := tmp_path / "arrays.npz", w=np.ones(2))
    save_file(state, tensors := tmp_path / "tensors.safetensors")
    for content, said in (
        (b"version https://git-lfs.github.com/spec/v1\noid 1", "it is a pointer of Git LFS"),
        (b"<!DOCTYPE html><p>", "it is an HTML page"), (b"a text", "damaged: "), (b"", "EOFError"),
        (b'{"a": 1}', "it is no pickle"), (gzip.compress(whole.read_bytes()), "it is compressed: unpack it first"),
        (lzma.compress(whole.read_bytes()), "it is compressed: unpack it first"),
        (arrays.read_bytes(), "it is a zip file of w.npy"), (whole.read_bytes()[:-99], "File is not a zip file"),
        (tensors.read_bytes()[:99], "header"),
    ):  # fmt: skip
        for suffix in ("pt", "safetensors"):
            (file := tmp_path / f"net.{suffix}").write_bytes(content)
            with pytest.raises(MachineError, match=r"not a file that torch\.save or safetensors wrote") as error:
                pretrained.read_state("evaluate", file)
            assert said in str(error.value) and not re.search(r": \d+$|0x", str(error.value)), error.value
    for source in (whole, tensors):
        for suffix in ("pt", "bin", "safetensors"):
            (file := tmp_path / f"net.{suffix}").write_bytes(source.read_bytes())
            assert_equal(loaded(file)[0])


@pytest.mark.parametrize("kind", ["zip", "old"])
def test_any_damage_is_one_sentence(tmp_path: Path, kind: str) -> None:
    content = {"model": net().state_dict(), "a": Path("x")}
    torch.save(content, file := tmp_path / "net.pt", **(LEGACY if kind == "old" else {}))
    whole, draw = file.read_bytes(), random.Random(0)
    outcomes = collections.Counter[str]()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data[: draw.randrange(len(data))] if draw.random() < 0.3 else data)
        try:
            pretrained.read_state("evaluate", file)
            outcomes["read"] += 1
        except (SpecError, MachineError) as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    # few: old files hold addresses of memory, so that the damage is another each time
    assert outcomes["read"] > 5 and outcomes["refused"] > 20


# --- names --------------------------------------------------------------------------------------------------------


def named(rename: Callable[[str], str], **more: Any) -> dict[str, Any]:
    return {**{rename(name): value for name, value in net().state_dict().items()}, **more}


def inside(word: str) -> Callable[[str], str]:
    """A wrapper around one layer, as of `model.features = DataParallel(model.features)`."""
    return lambda name: name.replace("1.", f"1.{word}.", 1) if name.startswith("1.") else name


def uncounted(start: str) -> dict[str, Tensor]:
    return {start + name: value for name, value in net().state_dict().items() if "num_batches" not in name}


NO_COUNTER = "no num_batches_tracked in it, on which no answer depends"
NAMES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        start: (named(f"{start}{{}}".format), f"names without '{start}' before them")
        for start in (
            "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "module.module.", "module.", "model.", "1.",
            "net.backbone.", "a.b.c.d.",
        )
    },
    "averaged": (torch.optim.swa_utils.AveragedModel(net()).state_dict(),
                 "names without 'module.' before them; left out: n_averaged"),
    "one layer compiled": (named(inside("_orig_mod")), "names without '_orig_mod' in them"),
    "one layer in parallel": (named(inside("module")), "names without 'module' in them"),
    "no counters": (uncounted(""), NO_COUNTER),
    "no counters, a start": (uncounted("model."), f"names without 'model.' before them; {NO_COUNTER}"),
    "an epoch": (named(str, epoch=torch.tensor(3)), "left out: epoch"),
    "a start and a step": (named("model.{}".format, step=torch.tensor([3])),
                           "names without 'model.' before them; left out: step"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NAMES)
def test_names_that_wrappers_write_are_taken_and_it_is_said(tmp_path: Path, kind: str) -> None:
    state, words = NAMES[kind]
    torch.save({"state_dict": state}, file := tmp_path / "net.pt")
    network, said = loaded(file)
    assert said == f"net.pt: {words}"
    assert_equal(network)


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, torch.optim.swa_utils.AveragedModel])
def test_a_network_that_is_wrapped_takes_a_plain_state(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.save(net().state_dict(), file := tmp_path / "net.pt")
    inner = net(0.0)
    if wrap is torch.optim.swa_utils.AveragedModel:  # its counter is no part of a plain state
        with pytest.raises(SpecError, match="n_averaged is missing"):
            loaded(file, network=wrap(inner))
        return
    start = "module." if wrap is nn.DataParallel else "_orig_mod."
    assert loaded(file, network=wrap(inner))[1] == f"net.pt: names with '{start}' before them"
    assert_equal(inner)


def test_a_network_around_the_one_of_the_state(tmp_path: Path) -> None:
    """Such as one that normalises first."""
    torch.save(net().state_dict(), file := tmp_path / "net.pt")
    network = nn.Sequential(nn.Identity(), net(0.0))
    assert loaded(file, network=network)[1] == "net.pt: names with '1.' before them"
    assert_equal(network[1])


def test_more_than_the_network_is_not_left_out_unasked(tmp_path: Path) -> None:
    """A mean beside the network's layers, or two networks: one is chosen by its start."""
    with_mean = named("1.{}".format, **{"0.mean": torch.zeros(3)})
    torch.save({"state_dict": with_mean}, file := tmp_path / "net.pt")
    with pytest.raises(SpecError, match=r"every name is there below '1': choose with entry"):
        loaded(file)
    for entry in ("1", "state_dict.1"):
        assert_equal(loaded(file, entry)[0])
    two = {**named("student.{}".format), **{f"teacher.{n}": v for n, v in net(5.0).state_dict().items()}}
    torch.save(two, file)
    with pytest.raises(SpecError, match=r"every name is there below 'student, teacher': choose with entry"):
        loaded(file)
    assert_equal(loaded(file, "student")[0])
    assert_equal(loaded(file, "teacher")[0], net(5.0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state | {"3.weight": torch.zeros(5, 3)}, "3.weight is 5x3, 2x3 needed"),
        (lambda state: state | {"4.weight": torch.zeros(5, 3)}, "4.weight is 5x3, none needed"),
        (lambda state: state | {"scale": torch.tensor(2.0)}, "scale is a number, none needed"),
        (lambda state: {n: v for n, v in state.items() if n != "3.bias"}, "3.bias is missing, 2 needed"),
        (lambda state: {n: v for n, v in state.items() if n != "2.running_var"}, "2.running_var is missing, 3 needed"),
    ],
)
@pytest.mark.parametrize("start", ["", "model."])
def test_another_networks_weights_are_refused_with_any_start(
    tmp_path: Path, start: str, change: Callable[[dict[str, Any]], dict[str, Any]], said: str
) -> None:
    state = {start + name: value for name, value in change(net().state_dict()).items()}
    torch.save(state, file := tmp_path / "net.pt")
    with pytest.raises(SpecError, match="another network's weights") as refused:
        loaded(file)
    assert said in str(refused.value)
    assert not start or " weights (names without 'model.' before them" in str(refused.value)


# --- entries ------------------------------------------------------------------------------------------------------

ENTRIES: dict[str, tuple[Any, list[str]]] = {
    **{word: ({word: net().state_dict(), "round": 4}, [word])
       for word in ("global_model", "best", "params", "weights", "model_state", "student", "state_dict", "0")},
    "nested": ({"model": {"state_dict": net().state_dict(), "name": "x"}}, ["model.state_dict"]),
    "deeper": ({"a": {"b": {"c": net().state_dict()}}}, ["a.b.c"]),
    "a list": ([net().state_dict(), 3], ["0"]),
    "clients": ({"server": {"net": net().state_dict()}, "clients": []}, ["server.net"]),
    "a mapping of its own kind": ({"mine": Easy(net().state_dict())}, ["mine"]),
    "a defaultdict": (collections.defaultdict(None, net().state_dict()), []),
    "a tensor beside": ({"params": net().state_dict(), "prototypes": torch.ones(3, 2)}, ["params"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_any_mapping_of_tensors_is_an_entry(tmp_path: Path, kind: str) -> None:
    content, entries = ENTRIES[kind]
    torch.save(content, file := tmp_path / "net.pt")
    assert pretrained.read_state("evaluate", file)[1] == entries
    for entry in (None, *entries):
        assert_equal(loaded(file, entry)[0])


def test_several_states_are_listed_and_one_is_chosen(tmp_path: Path) -> None:
    other = {name: value * 0 for name, value in net().state_dict().items()}
    torch.save({"last": other, "best": net().state_dict(), "epoch": 3}, file := tmp_path / "net.pt")
    with pytest.raises(SpecError, match=r"net\.pt holds 2 states, choose one with entry: last \(9 tensors\), best \("):
        loaded(file)
    assert_equal(loaded(file, "best")[0])
    with pytest.raises(SpecError, match=r"has no entry 'bst' \(it has last \(9 .*\) \(did you mean 'best'"):
        loaded(file, "bst")
    torch.save({"clients": [net().state_dict(), other], "model": net().state_dict()}, file)
    assert pretrained.read_state("evaluate", file)[1] == ["model", "clients.0", "clients.1"]
    assert_equal(loaded(file, "clients.0")[0])
    torch.save({"teacher": {"state_dict": other}, "student": {"state_dict": net().state_dict()}}, file)
    with pytest.raises(SpecError, match=r"2 states.*: teacher\.state_dict"):
        loaded(file)
    assert_equal(loaded(file, "student.state_dict")[0])
    torch.save({**net().state_dict(), "norm": {"mean": torch.zeros(3)}}, file)
    with pytest.raises(SpecError, match=r"2 states.*: \. \(9 tensors\), norm \(1 tensor\)"):
        loaded(file)
    assert_equal(loaded(file, ".")[0])


# --- numbers that are no weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda: torch.ones(2, 3).to_sparse(), "3.weight is a sparse matrix: save it as tensor.to_dense()"),
        (lambda: torch.ones(2, 3).to_sparse_csr(), "3.weight is a sparse matrix: save it as tensor.to_dense()"),
        (lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8), "3.weight is quantised: save it as"),
        (lambda: torch.ones(2, 3, device="meta"), "3.weight is without numbers (on the device 'meta')"),
        (lambda: torch.ones(2, 3, dtype=torch.int8), "is int8, float32 needed: whole numbers are weights with their"),
        (lambda: torch.ones(2, 3, dtype=torch.uint8), "3.weight is uint8, float32 needed"),
        (lambda: torch.ones(2, 3, dtype=torch.bool), "3.weight is bool, float32 needed"),
        (lambda: torch.ones(2, 3, dtype=torch.int64), "3.weight is int64, float32 needed"),
        (lambda: torch.ones(2, 3, dtype=torch.complex64), "3.weight is complex64, float32 needed"),
        (lambda: torch.ones(2, 3, dtype=torch.complex64).conj(), "3.weight is a tensor of a kind that is not read"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of sparse and quantised tensors: they are in beta, or leave
def test_weights_without_their_numbers_are_one_sentence(tmp_path: Path, value: Callable[[], Any], said: str) -> None:
    torch.save({"model": {**net().state_dict(), "3.weight": value()}}, file := tmp_path / "net.pt")
    with pytest.raises(SpecError) as refused:
        loaded(file)
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_real_numbers_of_any_size_are_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {name: value.to(dtype) for name, value in net().state_dict().items()}  # the counter, too
    torch.save(state, file := tmp_path / "net.pt")
    assert_equal(loaded(file)[0])


def test_a_whole_module_is_no_state(tmp_path: Path) -> None:
    for content in (net(), {"model": net(), "epoch": 3}):
        torch.save(content, file := tmp_path / "net.pt")
        with pytest.raises(SpecError, match=r"holds pickled Python objects, not a state dict: torch.save\(model"):
            loaded(file)


def test_what_is_left_unbuilt_has_no_address_of_memory_in_a_message(tmp_path: Path) -> None:
    torch.save({"where": Path("x"), b"name": 1}, file := tmp_path / "net.pt")  # the name, too, is an object there
    shown = repr(torch_files.read(file))
    assert "Path" in shown and "_codecs.encode" in shown and " at 0x" not in shown


def test_published_weights_behind_a_start(tmp_path: Path) -> None:
    torch.save(named("_orig_mod.module.{}".format, n_averaged=torch.tensor(1)), file := tmp_path / "net.pt")
    state, start = pretrained.without_start(pretrained.from_file("vit", file))
    assert start == "_orig_mod.module." and state.keys() == net().state_dict().keys()
    assert pretrained.without_start(net().state_dict())[1] == ""
