"""What an installed copy holds, what it asks for, and whether the pins and bounds agree."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from ruamel.yaml import YAML

import fatbench
from fatbench.suite.folders import PAPERS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Distribution -> what Python calls it, where the two differ.
MODULES = {
    "vl-convert-python": "vl_convert", "annotated-types": "annotated_types", "pillow": "PIL", "psycopg": "psycopg",
    "pyyaml": "yaml", "ruamel-yaml": "ruamel", "scikit-learn": "sklearn",
}  # fmt: skip
# Dependencies that no `import` statement names, and why they are there.
UNSEEN = {"pyautoattack": "imported by name, for `autoattack` may stand in its place"}
# Modules that need not be installed: the extra, or the package that stands in, says so.
OPTIONAL = {"autoattack", "datasets"}


def requirements(*extras: str) -> dict[str, Requirement]:
    """Canonical name -> requirement, of the package and of these extras."""
    lines = [*PROJECT["dependencies"], *(line for e in extras for line in PROJECT["optional-dependencies"][e])]
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    split = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in split}


def tree(folder: str) -> set[str]:
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: what an installer does with it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_the_package_the_suites_and_their_format_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = tree("fatbench") | {f"fatbench/{name}" for name in tree("suites")} | {"fatbench/docs/suites.md"}
    assert names == expected
    assert {"fatbench/suites/README.md", "fatbench/suites/sfat-cifar10.yaml"} <= names
    assert "fatbench/suites/published/sfat-t3.csv" in names
    assert wheel.name == f"fatbench-{fatbench.__version__}-py3-none-any.whl"


def run_installed(installed: Path, folder: Path, *arguments: str, code: int = 0) -> str:
    env = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_installed_copy_finds_its_own_suites(installed: Path, tmp_path: Path) -> None:
    code = "import fatbench.suite.files as s; print(*(f'{n}\\t{f}' for n, f in s.available().items()), sep='\\n')"
    found = dict(line.split("\t") for line in run_installed(installed, tmp_path, "-c", code).splitlines())
    assert sorted(found) == sorted(path.stem for path in (ROOT / "suites").glob("*.yaml") if "." not in path.stem)
    assert {Path(file).parent for file in found.values()} == {installed / "fatbench" / "suites"}


def test_installed_copy_plans_and_makes_its_database(installed: Path, tmp_path: Path) -> None:
    """`extends` and the published numbers are found without a checkout."""
    out = run_installed(installed, tmp_path, "-m", "fatbench", "show", "sfat-cifar10")
    assert "sfat-cifar10" in out
    code = "from fatbench.store.stages import Store; Store.open('x.db', create=True);"
    code += "import fatbench; print(fatbench.__file__)"
    assert run_installed(installed, tmp_path, "-c", code).strip() == str(installed / "fatbench" / "__init__.py")
    assert (tmp_path / "x.db").stat().st_size > 0


@pytest.mark.nightly
def test_a_method_of_one_s_own_from_an_empty_folder_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    """`fatbench new`, run, report, plot, edit, told so, run again: by the wheel alone."""

    def fatbench_(*words: str, code: int = 0) -> str:
        return run_installed(installed, tmp_path, "-m", "fatbench", *words, code=code)

    assert "fatbench run mine.yaml --smoke" in fatbench_("new", "aggregator", "mine")
    chosen = ("mine.yaml", "--smoke", "-k", "method=mine")
    assert "1 of 1 cells done" in fatbench_("run", "suite", *chosen, "--jobs", "1")
    before = fatbench_("report", "mine.yaml")
    assert re.search(r"^\| mine \(own\) +\| +\d", before, re.M) and "mine.py (sha256 " in before
    assert "mine-curves-smoke.svg" in fatbench_("plot", "mine.yaml", "--format", "svg")
    mine = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(mine + "\n# a comment is no change\n")
    assert "1 done, 0 to go" in fatbench_("run", "suite", *chosen, "--jobs", "1")
    (tmp_path / "mine.py").write_text(mine.replace("    limit =", "    factor = 2 * factor\n    limit ="))
    assert "--rerun changed computes them again" in fatbench_("run", "suite", *chosen, "--jobs", "1", code=1)
    assert "1 of 1 cells done" in fatbench_("run", "suite", *chosen, "--jobs", "1", "--rerun", "changed")
    after = fatbench_("report", "mine.yaml")
    plug_in = re.compile(r"mine\.py \(sha256 (\w+)")
    assert plug_in.findall(before) != plug_in.findall(after)


def test_console_script_points_at_a_function() -> None:
    module, function = PROJECT["scripts"]["fatbench"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@functools.cache
def imported() -> dict[str, set[str]]:
    """Third-party module -> files of the package that import it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "fatbench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"fatbench", *OPTIONAL}:
                found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def test_what_is_imported_is_declared() -> None:
    declared = requirements(*(e for e in PROJECT["optional-dependencies"] if e != "dev"))
    known = {MODULES.get(name, name.replace("-", "_")) for name in declared}
    undeclared = {module: sorted(files) for module, files in imported().items() if module not in known}
    assert undeclared == {}


def test_what_is_declared_is_used() -> None:
    """Each dependency is imported, or stands in UNSEEN with its reason; a reason outlived is removed."""
    used = set(imported())
    unused = {name for name in requirements() if MODULES.get(name, name.replace("-", "_")) not in used}
    assert unused == set(UNSEEN)


def test_every_dependency_has_a_lower_bound_that_its_pin_meets() -> None:
    pinned = pins()
    for name, requirement in requirements("dev", "postgres").items():
        assert [s.operator for s in requirement.specifier] == [">="], f"{name}: a lower bound and nothing tighter"
        assert pinned[name] in requirement.specifier, f"{name}: constraints.txt pins {pinned[name]}"


def test_constraints_are_pins_alone() -> None:
    """Names and versions: no address, no path, nothing twice."""
    lines = [x for x in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)] == []
    assert len(pins()) == len(lines)


@pytest.mark.nightly
def test_an_attack_of_torchattacks_needs_no_requests() -> None:
    """It asks for a vulnerable version: `make` overrides that, constraints.txt leaves it out."""
    code = (
        "import sys; sys.modules['requests'] = None; import torch, torchattacks;"
        "x, y, model = torch.rand(2, 3), torch.tensor([0, 1]), torch.nn.Linear(3, 2);"
        "assert torchattacks.FGSM(model, eps=0.1)(x, y).shape == x.shape"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["uv"]["override-dependencies"] == ["requests>=2.32.4"]
    assert not {"requests", "urllib3", "idna", "chardet"} & set(pins())


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize("others", [["flwr"], ["jupyterlab>=4"], ["mlflow>=2"], ["sphinx>=8"], ["flwr", "mlflow>=2"]])
def test_it_resolves_beside_what_people_have(wheel: Path, others: list[str], python: str) -> None:
    """With a requests that has no known vulnerability; torchattacks, which wants an old one, is an extra."""
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        pytest.skip("uv is not installed")
    wanted = "\n".join([f"fatbench @ {wheel.as_uri()}", *others])
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python, "-"]
    done = subprocess.run(command, input=wanted, cwd=wheel.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert {Requirement(one).name for one in others} <= set(found) and "torchattacks" not in found
    assert Version(found.get("requests", "2.32.4")) >= Version("2.32.4")


def test_what_wants_an_old_requests_is_installed_without_it() -> None:
    assert "torchattacks" not in requirements() and "torchattacks" in requirements("attacks")
    for file in ("README.md", "Dockerfile", ".github/workflows/beside.yml"):
        assert re.search(r"pip install .*--no-deps torchattacks", (ROOT / file).read_text(encoding="utf-8")), file


def made(*target: str) -> str:
    """What `make` writes."""
    command = ["make", "-C", str(ROOT), "--no-print-directory", *target]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_builds_for_the_cpu_are_installed_before_what_needs_torch(tmp_path: Path) -> None:
    """What `make demo TORCH=cpu` and README's lines hand to pip; the index is not asked."""
    lines = {torch: made("-n", "demo", f"VENV={tmp_path / 'v'}", f"TORCH={torch}") for torch in ("", "cpu")}
    first, second = (line for line in lines["cpu"].splitlines() if "pip install" in line)
    asked = "xargs .*/bin/python -m pip install .*--index-url (https://download\\.pytorch\\.org/whl/cpu)$"
    found = re.search(asked, first)
    assert found and "--editable '.[attacks]'" in second
    assert "--index-url" not in lines[""]
    pinned = pins()
    line = f"pip install --index-url {found[1]} torch=={pinned['torch']} torchvision=={pinned['torchvision']}\n"
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")


def test_torch_and_torchvision_are_one_build() -> None:
    """torchvision's metadata names the one torch it was compiled for."""
    lines = importlib.metadata.requires("torchvision") or []
    (torch,) = [r for r in map(Requirement, lines) if r.name == "torch" and (r.marker is None or r.marker.evaluate())]
    assert Version(importlib.metadata.version("torch")) in torch.specifier


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(fatbench.__version__)}\] - (unreleased|\d{{4}}-\d\d-\d\d)$", text, re.M)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_make_help_lists_what_the_documents_name() -> None:
    listed = set(re.findall(r"^make ([a-z]+) ", made("help"), re.M))
    named = set()
    for file in ("README.md", "CONTRIBUTING.md", "docs/speed.md", "docs/development.md", "results/speed.md"):
        named |= set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / file).read_text(encoding="utf-8"), re.M))
    assert {"demo", "test", "check"} <= named & listed
    assert named <= listed


@pytest.mark.nightly
def test_a_run_of_the_tests_ends_with_what_it_left_out_and_why(tmp_path: Path) -> None:
    """As continuous integration sees it, in two processes."""
    for name in ("conftest.py", "databases.py", "crew.py", "users.py", "ray_cluster.py"):  # the plug-ins it names
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('i', [1, 2])\ndef test_a(i): pytest.skip('no moon')\n"
        "def test_b(): pytest.importorskip('no_such_package')\n"
        "def test_c(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "test_it.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert re.search(r"3 tests could not be run:\n +2  no moon\n +1  could not import 'no_such_package'", run.stdout)
    command[-1] = "test_it.py::test_c"
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "\nEvery test could be run.\n" in run.stdout


def test_a_checker_of_types_reads_ours(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "fatbench/py.typed" in archive.namelist()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_what_a_package_index_shows_leads_somewhere(wheel: Path) -> None:
    """Links of the README are relative in the repository; there they are absolute, and of the version that is shown."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        described = archive.read(name).decode()
    repository, at = PROJECT["urls"]["Repository"], f"v{fatbench.__version__}"
    links = re.findall(r"\]\(([^)]+)\)", described)
    assert len(links) > 12 and all(link.startswith("https://") for link in links)
    own = [link.removeprefix(f"{repository}/") for link in links if link.startswith(repository)]
    files = [link.split("/", 2)[2] for link in own if link.startswith(("blob/", "raw/"))]
    assert files and all((ROOT / file).exists() for file in files)
    assert {link.split("/")[1] for link in own if not link.startswith("actions/")} == {at}
    assert f"]({repository}/blob/{at}/results/bounds.md)" in described


def test_the_placeholder_of_the_repository_is_one_and_is_filled_in_by_the_release() -> None:
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    named = [url for url in PROJECT["urls"].values() if "OWNER" in url]
    assert named and all(url.startswith("https://github.com/OWNER/fatbench") for url in named)
    assert "s|OWNER/fatbench|$GITHUB_REPOSITORY| pyproject.toml" in release.replace('"', "")
    assert "OWNER" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    YAML(typ="safe").load(release)


def test_a_source_archive_leaves_out_the_tests_and_what_they_read(tmp_path: Path) -> None:
    """They are run in a clone: in an unpacked archive they could not start."""
    (built,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"fatbench-{fatbench.__version__}"
    assert not any((source / name).exists() for name in ("tests", "results", "benchmarks"))
    (rebuilt,) = WheelBuilder(str(source)).build(directory=str(tmp_path), versions=["standard"])
    assert {*zipfile.ZipFile(rebuilt).namelist()} >= {"fatbench/py.typed", "fatbench/suites/sfat-cifar10.yaml"}


# --- what a release needs -----------------------------------------------------------------------------------------


def test_the_citation_is_of_this_version_and_names_the_papers_of_the_references() -> None:
    cited = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert (cited["version"], cited["license"]) == (fatbench.__version__, PROJECT["license"])
    references = (ROOT / "docs" / "references.md").read_text(encoding="utf-8")
    prefixes = set()
    for one in cited["references"]:
        names, paper = one["authors"], rf"\*\*{one['authors'][0]['family-names']} et al\. {one['year']}\*\*: ([^*]+)"
        said = " ".join(re.search(paper, references)[1].split())  # type: ignore[index]
        assert all(f"{name['given-names']} {name['family-names']}" in said for name in names)
        assert one["title"].lower() in said.lower()
        prefixes |= set(re.findall(r"([a-z-]+)-\*", one["notes"]))
    of_papers = {prefix for prefix, paper in PAPERS.items() if re.search(r"\b20\d\d\)$", paper)}
    assert prefixes == of_papers


def test_the_workflow_runs_what_ci_runs_on_every_python() -> None:
    """The oldest and the newest at each push, not as root; every one at night."""
    folder = ROOT / ".github" / "workflows"
    found, nightly = (YAML(typ="safe").load(folder / f"{name}.yml")["jobs"] for name in ("tests", "nightly"))
    classifiers = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert found["tests"]["strategy"]["matrix"]["python"] == [classifiers[0], classifiers[-1]]
    assert nightly["versions"]["strategy"]["matrix"]["python"] == classifiers
    steps = [step["run"] for step in found["tests"]["steps"] if "run" in step]
    assert steps[-1].split()[-1] == ".ci/run" and "sudo" not in steps[-1]
    targets = {name for job in ("long", "as-root") for name in nightly[job]["strategy"]["matrix"]["target"]}
    (recipe,) = re.findall(r"^nightly:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r"MAKE\) (slurm .*)", recipe)[0].split()) <= targets


def test_the_badges_are_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    low, *_, high = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert PROJECT["requires-python"] == f">={low}"
    assert f"badge/python-{low}_to_{high}-" in text and f"badge/licence-{PROJECT['license']}-" in text
    for workflow in re.findall(r"actions/workflows/([a-z.]+)", text):
        assert (ROOT / ".github" / "workflows" / workflow).is_file()


@pytest.mark.nightly
def test_an_empty_environment_installs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    venv.create(tmp_path / "empty", with_pip=not uv.exists())
    python = str(tmp_path / "empty" / "bin" / "python")
    install = [str(uv), "pip", "install", "--python", python] if uv.exists() else [python, "-m", "pip", "install"]
    subprocess.run([*install, "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([tmp_path / "empty" / "bin" / "fatbench", "list", "suites"], cwd=tmp_path, env=env,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert "sfat-cifar10" in done.stdout


def docker() -> bool:
    """Whether a daemon answers."""
    return bool(shutil.which("docker")) and subprocess.run(["docker", "info"], capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not docker(), reason="no docker daemon")
def test_the_image_is_built_and_runs() -> None:
    subprocess.run(["docker", "build", "--quiet", "-t", "fatbench-test", str(ROOT)], check=True)
    command = ["docker", "run", "--rm", "fatbench-test", "run", "suite", "sfat-cifar10", "--smoke", "-k", "method=SFAT"]
    done = subprocess.run([*command, "--seeds", "6"], capture_output=True, text=True, check=True)
    assert "cells done" in done.stderr


def test_the_image_takes_files_that_exist() -> None:
    """What COPY and .dockerignore name; the pins of torch that the Dockerfile looks for."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in allowed) and "constraints.txt" in allowed
    assert {"torch", "torchvision"} <= set(pins())
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]["include"]
    taken = {name.strip("/") for name in wheel}
    assert all(any(name == part or name.startswith(f"{part}/") for part in allowed) for name in taken)


@pytest.mark.parametrize(("version", "said"), [("", "say which"), ("9.9.9", "has another version|commit or stash")])
def test_a_release_that_does_not_agree_is_refused(version: str, said: str) -> None:
    command = ["bash", "docs/release.sh", version, str(Path(sys.executable).parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and re.match(f"release: .*({said})", done.stderr)
