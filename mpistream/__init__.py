"""Parallel output of MPI simulations into one sharded Zarr v3 store.

Every rank writes its own shards, without locks and without a gather of field data; small tokens go to
rank 0, which verifies that they tile the store and only then commits.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpistream._version import __version__
from mpistream.decomposition import decompose
from mpistream.description import AppendTime, Coordinate, IndexedTime, Staggered, Variable
from mpistream.errors import (
    AlignmentError,
    CommitError,
    FencedError,
    FormatError,
    MPIStreamError,
    ProtocolError,
    ResumeError,
    SchemaError,
    StoreError,
    TilingError,
)
from mpistream.indices import Indices
from mpistream.layout import suggest_layout
from mpistream.location_writer import LocationSeriesWriter
from mpistream.locations import chunk_locations, location_schema
from mpistream.node import Node
from mpistream.options import Options
from mpistream.parallel import StreamWriter
from mpistream.parts import PartWriter, write_open_part
from mpistream.plan import Plan, plan
from mpistream.reader import StoreReader, open_reader, read_blob, read_output_manifest, read_record, read_static
from mpistream.region import Region
from mpistream.schema import StreamSchema, schema_fingerprint
from mpistream.session import write_open, write_resume
from mpistream.token import CommitReceipt, CommitToken

if TYPE_CHECKING:
    from mpistream.carrying import commit_tokens
    from mpistream.checkpoints import CheckpointPair
    from mpistream.exporting import Exported, export
    from mpistream.hdf5 import HDF5Reader, open_hdf5
    from mpistream.location_series import write_open_locations
    from mpistream.preemption import PreemptionGuard
    from mpistream.repairing import repair, truncate
    from mpistream.several import commit_all
    from mpistream.verifying import verify

# Loaded when they are first asked for: every module is some questions to a metadata server, a thousand ranks at a time,
# and most ranks only write. None of these modules has the name of what it gives.
_LATER = {
    "commit_tokens": "carrying",
    "CheckpointPair": "checkpoints",
    "Exported": "exporting",
    "export": "exporting",
    "HDF5Reader": "hdf5",
    "open_hdf5": "hdf5",
    "write_open_locations": "location_series",
    "PreemptionGuard": "preemption",
    "repair": "repairing",
    "truncate": "repairing",
    "commit_all": "several",
    "verify": "verifying",
}

__all__ = [
    "AlignmentError",
    "AppendTime",
    "CheckpointPair",
    "CommitError",
    "CommitReceipt",
    "CommitToken",
    "Coordinate",
    "Exported",
    "FencedError",
    "FormatError",
    "HDF5Reader",
    "IndexedTime",
    "Indices",
    "LocationSeriesWriter",
    "MPIStreamError",
    "Node",
    "Options",
    "PartWriter",
    "Plan",
    "PreemptionGuard",
    "ProtocolError",
    "Region",
    "ResumeError",
    "SchemaError",
    "Staggered",
    "StoreError",
    "StoreReader",
    "StreamSchema",
    "StreamWriter",
    "TilingError",
    "Variable",
    "__version__",
    "chunk_locations",
    "commit_all",
    "commit_tokens",
    "decompose",
    "export",
    "location_schema",
    "open_hdf5",
    "open_reader",
    "plan",
    "read_blob",
    "read_output_manifest",
    "read_record",
    "read_static",
    "repair",
    "schema_fingerprint",
    "suggest_layout",
    "truncate",
    "verify",
    "write_open",
    "write_open_locations",
    "write_open_part",
    "write_resume",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"mpistream.{_LATER[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
