"""The start of every rank of `mpi_run`: ``python rank_main.py (script | -m module | -c code) args``.

SIGUSR2 makes the rank write where each of its threads stands, also when it hangs in a call of MPI, to a file of its
own in the folder $MPISTREAM_TEST_TRACES.
"""

from __future__ import annotations

import faulthandler
import io
import os
import runpy
import signal
import sys

__all__ = ["RANK_VARIABLES", "main"]

# Where launchers say which rank a process is.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def main() -> None:
    """Run what the command line names as ``__main__``."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # At once, and whole, so that lines of several ranks stay lines.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    faulthandler.enable()
    traces = open(os.path.join(os.environ["MPISTREAM_TEST_TRACES"], str(os.getpid())), "w")  # noqa: SIM115 - to the end
    faulthandler.register(signal.SIGUSR2, file=traces, all_threads=True)
    del sys.argv[0]
    # As `python` itself does: the script's folder, or for -m and -c the current one, is searched first. What
    # stands there now is the folder of this file.
    match sys.argv[0]:
        case "-m":
            del sys.argv[0]
            sys.path[0] = ""
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        case "-c":
            code = sys.argv.pop(1)
            sys.path[0] = ""
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case script:
            sys.path[0] = script.rpartition("/")[0] or "."
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
