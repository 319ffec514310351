"""`fatbench models`: networks of stored results with their numbers, and whether their files are here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fatbench import packed, whole_file
from fatbench.cli.common import known_format, print_json
from fatbench.cli.options import Format
from fatbench.errors import NothingMatched, SpecError


def models(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Files written by `fatbench export`; default: those in results/.", show_default=False),
    ] = None,
    place: Annotated[
        list[str] | None, typer.Option("--from", metavar="PLACE", help="Folder or https address with the files.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The network that -o writes, or parts of its name.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the file of --name there, also hf://OWNER/NAME/FILE.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Only networks whose file is here.")] = False,
    format: Format = "text",
) -> None:
    """List the networks of results with their numbers; fatbench.load_model(NAME) gives one in Python.

    Example: fatbench models
    """
    from fatbench.cli import show
    from fatbench.runner import zoo

    known_format(format, ("text", "json"))
    if (name is None) != (output is None):
        raise SpecError("--name and -o FILE belong together: one names the network, the other where its file goes")
    files = results or packed.results_in(Path("results"))
    if name is not None and output is not None:
        network = zoo.choose(name, zoo.names(zoo.entries(files)))
        if (file := zoo.find(network, place or ())) is None:
            raise NothingMatched(
                f"--name {name}: its file, SHA-256 {network.sha256[:12]}, is not here: say --from PLACE"
            )
        whole_file.write(output, file.read_bytes(), f"-o {output}")
        return
    rows = zoo.rows(files, place or ())
    rows = [row for row in rows if row["file"] is not None or not here]
    if not rows:
        raise NothingMatched("no network is known here: name files of results, as fatbench export writes them")
    if format == "json":
        print_json({"models": rows})
    else:
        show.models(rows)
