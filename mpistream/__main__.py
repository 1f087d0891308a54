"""``python -m mpistream`` and the command ``mpistream``."""

from __future__ import annotations

import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; without its packages say how to get them and exit with 2.

    Not collective.
    """
    try:
        from mpistream.cli.verbs import app  # noqa: PLC0415 (it loads typer and rich)
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        if package == "mpistream":
            raise
        print(f'mpistream: {package} is missing: pip install "mpistream[cli]"', file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding can't show must not end in a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
