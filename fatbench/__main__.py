"""The command `fatbench`, and `python -m fatbench`.

A worker process reads the script of its parent anew, and that names this module: so it imports nothing by itself.
"""


def main() -> None:
    """Run the command line."""
    from fatbench.cli.app import main as command

    command()


if __name__ == "__main__":
    main()
