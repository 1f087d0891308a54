"""One library a module, each behind the same few calls, so that `peers.py` measures all of them alike.

`run.py` is what each rank runs: it takes one job as JSON, drives the library's `Peer`, and rank 0 prints one line of
JSON. Nothing here knows another library, and a job runs with the Python in which its library is installed; what all of
them import (this file, `job.py`, `data.py`, `run.py`) needs numpy 1.24 and mpi4py 3.1 only.
"""
