"""Every verb, a module each, named as it is; importing one adds it to the app."""

from __future__ import annotations

from mpistream.cli import bench, commit, diff, export, info, ls, plan, plot, repair, truncate, verify, watch
from mpistream.cli.terminal import app

__all__ = [
    "app",
    "bench",
    "commit",
    "diff",
    "export",
    "info",
    "ls",
    "plan",
    "plot",
    "repair",
    "truncate",
    "verify",
    "watch",
]
