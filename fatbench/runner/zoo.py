"""The zoo: networks of stored results by name, with their numbers; a file must have the SHA-256 that was stored.

    entries(results)                     the networks in files of results, one for each cell and round
    find(network, places)                its file: in a folder, or fetched from an address
    module(file)                         the torch module, in eval mode

A name is SUITE/LABEL/.../SEED, with the labels that distinguish the cell from others of its suite.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench import packed, settings, whole_file
from fatbench.errors import FatbenchError, MachineError, SpecError, did_you_mean, reason
from fatbench.store.document import document
from fatbench.store.stage_names import parsed
from fatbench.suite import calls, facts, files
from fatbench.suite.cells import Plan

if TYPE_CHECKING:
    from torch import nn

FOLDERS = (Path("results/models"), Path("results/weights"))  # of the repository


@dataclass(frozen=True)
class Network:
    """A network that was attacked."""

    cell: str
    suite: str
    preset: str
    round: int
    sha256: str  # of its file
    numbers: Mapping[str, float]  # metric -> accuracy in [0, 1]
    attacks: Mapping[str, Mapping[str, Any]]  # metric -> settings of its attack
    how: str = ""  # how it was trained: options of `fatbench run CELL`
    trained_with: Sequence[Mapping[str, Any]] = ()  # records of the plug-ins


def entries(results: Iterable[Path]) -> list[Network]:
    """The networks in files that `fatbench export` wrote. SpecError: no such file. MachineError: it is unreadable."""
    network_by_key: dict[tuple[str, str], Network] = {}
    for file in results:
        for cell in _cells(file):
            run: dict[str, Any] = next(iter(cell["runs"]), {})
            finished = (one for one in cell["runs"] if (one["stage"], one["status"]) == ("train", "done"))
            trained = next(finished, run)
            for stage in cell["stages"]:
                digest = (stage.get("record") or {}).get("model")
                if digest is None or stage["status"] != "done":
                    continue
                key = cell["cell"], digest
                round = int(stage["stage"].rpartition("@")[2])
                earlier = network_by_key.get(key)
                numbers = {**(earlier.numbers if earlier else {}), **dict(_numbers(stage))}
                attack = {parsed(stage["stage"]).metric: stage["settings"] or {}}
                attacks = {**(earlier.attacks if earlier else {}), **attack}
                suite, preset = str(run.get("suite", "")), str(run.get("preset", ""))
                plugin_records = (trained.get("extra") or {}).get("plugins", ())
                network_by_key[key] = Network(
                    cell["cell"], suite, preset, round, digest, numbers, attacks, _run_options(trained), plugin_records
                )
    return list(network_by_key.values())


def rows(results: Iterable[Path], folders_or_urls: Sequence[str | Path] = ()) -> list[dict[str, Any]]:
    """A dictionary for each network, sorted by name; its "file" is None if the file is not found."""
    networks = names(entries(results))
    folders = [network for network in folders_or_urls if "://" not in str(network)]

    def in_order(item: tuple[str, Network]) -> list[tuple[str, int]]:  # by numbers in names: seed 10 follows seed 9
        return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d*)", item[0])]

    return [
        {
            "name": name,
            "cell": network.cell,
            "round": network.round,
            "sha256": network.sha256,
            "suite": network.suite,
            "preset": network.preset,
            "numbers": dict(network.numbers),
            "attacks": {metric: dict(settings) for metric, settings in network.attacks.items()},
            "file": None if (file := find(network, folders)) is None else str(file),
        }
        for name, network in sorted(networks.items(), key=in_order)
    ]


def _cells(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        raise SpecError(f"no such file: {file}")
    try:
        with packed.read_text(file) as lines:
            for line in lines:
                if line.startswith('{"cell"'):
                    cell = document(json.loads(line), str(file))
                    stages = [dict(stage) | {"numbers": stage.rows} for stage in cell.stages]
                    yield {**dict(cell), "runs": [dict(run) for run in cell.runs], "stages": stages}
    except (OSError, ValueError, *packed.DAMAGED) as error:
        raise MachineError(f"{file}: cannot be read as results ({reason(error, file)})") from None


def _run_options(run: Mapping[str, Any]) -> str:
    """The options of a run that its bits depend on."""
    options = {"precision": run.get("precision"), "path": (run.get("extra") or {}).get("path")}
    return "".join(f" --{option} {value}" for option, value in options.items() if value)


def _numbers(stage: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (metric, accuracy) of an attack's stage, over all clients."""
    label = parsed(stage["stage"]).metric
    for _, client, metric, value, *_ in stage["numbers"]:
        if metric == label and client < 0:
            yield metric, float(value)


def names(networks: Sequence[Network]) -> dict[str, Network]:
    """Each network by its name; if its suite is not known here, the name is SUITE/CELL."""
    plans: dict[tuple[str, str], Plan | None] = {}
    network_by_name: dict[str, Network] = {}
    for network in networks:
        key = network.suite, network.preset
        if key not in plans:
            try:
                plans[key] = files.load(network.suite).plan(network.preset, refuse=False)
            except FatbenchError:
                plans[key] = None
        plan = plans[key]
        cell = None if plan is None else next((cell for cell in plan.cells if cell.id == network.cell), None)
        if plan is None or cell is None:
            name = f"{network.suite}/{network.cell}"
        else:
            axes = [axis for axis in cell.key if len({other_cell.key.get(axis) for other_cell in plan.cells}) > 1]
            name = "/".join([network.suite, *(cell.key[axis] for axis in axes), str(cell.spec["seed"])])
        network_by_name[name if name not in network_by_name else f"{name}@{network.round}"] = network
    return network_by_name


def choose(name: str, networks: Mapping[str, Network]) -> Network:
    """The network of this name, or the only one whose name has these parts in order. SpecError: none, or several."""
    if name in networks:
        return networks[name]
    name_parts = name.split("/")

    def fits(other_name: str) -> bool:
        remaining_parts = iter(other_name.split("/"))
        return all(name_part in remaining_parts for name_part in name_parts)

    several = [other_name for other_name in networks if fits(other_name)]
    if len(several) > 1:
        raise SpecError(f"'{name}' could be any of {', '.join(sorted(several)[:4])}")
    if not several:
        raise SpecError(f"no network is named '{name}'{did_you_mean(name, networks)}")
    return networks[several[0]]


def find(network: Network, sources: Sequence[str | Path] = ()) -> Path | None:
    """Find the file of a network in the sources (folders or addresses https://...), or in the usual folders.

    Returns None if it is nowhere. MachineError: the file at an address is another one.
    """
    for source in (*sources, *FOLDERS, settings.files_folder(settings.database()) / network.cell):
        if str(source).startswith(("https://", "http://", "file://")):
            fetched = _fetch(str(source), network.sha256)
            if fetched is not None:
                return fetched
            continue
        for file in sorted(Path(source).glob("*.safetensors")):
            if hashlib.sha256(file.read_bytes()).hexdigest() == network.sha256:
                return file
    cached = settings.cache_folder() / "models" / f"{network.sha256}.safetensors"
    return cached if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == network.sha256 else None


def _fetch(address: str, sha256: str) -> Path | None:
    """Fetch ADDRESS/SHA256.safetensors into the cache; None if it does not exist. MachineError: it is another file."""
    target = settings.cache_folder() / "models" / f"{sha256}.safetensors"
    url = f"{address.rstrip('/')}/{sha256}.safetensors"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            content = answer.read()
    except (OSError, ValueError, http.client.HTTPException):  # URLError is an OSError
        return None
    if (digest := hashlib.sha256(content).hexdigest()) != sha256:
        raise MachineError(f"{url} has SHA-256 {digest}, not {sha256}: it is another file")
    whole_file.write(target, content, make_folder=True)
    return target


def module(file: Path, sha256: str, trained_with: Sequence[Mapping[str, Any]] = ()) -> nn.Module:
    """Build the network in a model's file, in eval mode; it takes images (B, C, H, W) in [0, 1] and gives logits.

    trained_with: records of the plug-ins of its training. MachineError: the file is damaged or holds no network of a
    run, or the code of a plug-in's network has changed since.
    """
    from fatbench.runner import checkpoints, own_network, stage

    state, _, header = checkpoints.load_model(file, "cpu", sha256)
    spec = json.loads(header["spec"])
    data = facts.of_data(calls.check("Data", spec["data"], "data"))
    side = spec.get("size") or data.side
    if data.channels is None or side is None:
        raise MachineError(f"{file}: the size of its images is only known from the data set")
    settings, shape = calls.check("Model", stage.without_weights(spec["model"]), "model"), (data.channels, side, side)
    network: nn.Module = calls.build("Model", settings)(shape, int(header["classes"]))
    network.load_state_dict(state)
    own_network.demand_trained_network(file, header, settings, network, shape, int(header["classes"]), trained_with)
    return network.eval()
