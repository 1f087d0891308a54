"""The command line; only `mpistream.__main__` imports it: it loads typer and rich."""
