"""The folders of suites, and the papers whose tables these repeat, by the beginnings of the suites' names.

Imports nothing heavy, because shells complete the names of suites with it.
"""

from __future__ import annotations

import re
from pathlib import Path


def folders() -> list[Path]:
    """The folders that are searched for suites by name: ./suites, then those of the program."""
    package = Path(__file__).parent.parent
    return [Path("suites"), package.parent / "suites", package / "suites"]


def available() -> dict[str, Path]:
    """name -> file of every suite that can be run by its name."""
    file_by_name: dict[str, Path] = {}
    for folder in folders():
        if folder.is_dir():
            for file in sorted(file for file in folder.glob("*.yaml") if "." not in file.stem):
                file_by_name.setdefault(file.stem, file)
    return dict(sorted(file_by_name.items()))


def own_files() -> dict[str, str]:
    """name -> file of the suites in the working directory."""
    file_by_name: dict[str, str] = {}
    for file in sorted(file for file in Path().glob("*.y*ml") if file.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if name := re.search(r"^name: *['\"]?([^'\"\s#]+)", text, re.MULTILINE):
            file_by_name.setdefault(name[1], str(file))
    return file_by_name


# --- papers ---------------------------------------------------------------------------------------------------------

PAPERS = {
    "sfat": "SFAT (Zhu et al., ICLR 2023)",
    "fat-transformers": "FAT with transformers (Aldahdooh et al., arXiv 2022)",
    "fedvkd": "FedVKD and FedAUX (Tao et al., Electronics 2022)",
    "fedaux": "FedVKD and FedAUX (Tao et al., Electronics 2022)",
    "adfl": "AdFL (Danilenka et al., arXiv 2022)",
    "april": "Random binary weights against gradient inversion (Sawada et al., arXiv 2024)",
    "fat-aggregators": "Comparisons of our own",
    "fat-baselines": "Comparisons of our own",
    "fat-bounds": "Comparisons of our own",
    "fat-variance": "Comparisons of our own",
    "fat-byzantine": "Comparisons of our own",
    "fat-adaptive": "Comparisons of our own",
    "fat-personal": "Comparisons of our own",
    "fat-transfer": "Comparisons of our own",
    "fat-tuned": "Comparisons of our own",
    "privacy": "Comparisons of our own",
    "vit": "Networks that other suites begin with",
}
CITES = {  # first words of a suite's name -> papers of what it combines, beside those of its functions
    "fat-baselines": ("wong2020",), "fat-bounds": ("wong2020",), "fat-byzantine": ("zizzo2020",),
    "fat-adaptive": ("zizzo2020", "kim2023"), "fat-transfer": ("kim2022",), "privacy-robust": ("zhang2022",),
    "vit-s-half": ("sawada2024",),
}  # fmt: skip
LINKS = {  # paper -> {kind of link: URL}; docs/references.md has the same
    "SFAT (Zhu et al., ICLR 2023)": {"code": "https://github.com/ZFancy/SFAT"},
    "FAT with transformers (Aldahdooh et al., arXiv 2022)": {"arXiv": "https://arxiv.org/abs/2206.02131"},
    "FedVKD and FedAUX (Tao et al., Electronics 2022)": {"DOI": "https://doi.org/10.3390/electronics11172638"},
    "AdFL (Danilenka et al., arXiv 2022)": {"arXiv": "https://arxiv.org/abs/2206.08124"},
    "Random binary weights against gradient inversion (Sawada et al., arXiv 2024)": {
        "arXiv": "https://arxiv.org/abs/2409.19988"
    },
}
OTHER = "Others"
METHODS = ("SFAT", "FedWAvg", "FedVKD", "FedAUX", "AdFL")  # the methods that the papers propose: beginnings of labels


def paper_of(suite: str) -> str:
    """The paper of a suite, with authors, venue and year; OTHER for a suite of none of these papers."""
    return next((paper for prefix, paper in PAPERS.items() if f"{suite}-".startswith(f"{prefix}-")), OTHER)


def is_jpeg(suite: str) -> bool:
    """Whether a suite repeats experiments on images that went through JPEG."""
    return suite.rpartition("-")[2].startswith("jpeg")
