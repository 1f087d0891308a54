"""ADIOS2, engine BP5, from the PyPI wheel: built without MPI, so each rank writes a stream of its own.

Its manual ("BP5"): deferred puts, which write from the user's memory; ``BufferChunkSize`` as large as it may be;
``StatsLevel`` 0 where nobody asks for minima and maxima. With ``is_async`` also ``AsyncWrite``. A step a record;
streams always grow. The wheel has no lossless compressor, and BP5 no checksums.
"""

from __future__ import annotations

from typing import Any

import adios2
import numpy as np

from adapters.job import Job, MissingError
from adapters.job import Peer as Base


class Peer(Base):
    def __init__(self, job: Job, comm: Any) -> None:
        super().__init__(job, comm)
        if job.blosc is not None:
            try:
                adios2.Adios().define_operator("test", "blosc")
            except Exception as error:
                raise MissingError(
                    "the PyPI wheel is built without Blosc, and has no other lossless operator"
                ) from error
        self.path = str(self.folder / f"{comm.rank}.bp")

    def open(self) -> None:
        self.adios = adios2.Adios()
        io = self.adios.declare_io("out")
        io.set_engine("BP5")
        io.set_parameters({"BufferChunkSize": "2147381248", "StatsLevel": "0"})
        if self.job.options.get("is_async"):
            io.set_parameters({"AsyncWrite": "On"})
        shape = [self.job.ny, self.job.nx]
        like = np.empty(shape, "float32")
        self.variables = [io.define_variable(name, like, shape, [0, 0], shape, True) for name in self.job.names]
        if self.job.blosc is not None:
            name, level, shuffle = self.job.blosc
            operator = self.adios.define_operator("blosc", "blosc")
            settings = {"compressor": name, "clevel": str(level), "doshuffle": f"BLOSC_{shuffle.upper()}"}
            for variable in self.variables:
                variable.add_operation(operator, settings)
        self.engine = io.open(self.path, adios2.bindings.Mode.Write)

    def write(self, i: int, blocks: list[Any]) -> None:  # noqa: ARG002 (a stream counts by itself)
        self.engine.begin_step()
        for variable, block in zip(self.variables, blocks, strict=True):
            self.engine.put(variable, block, adios2.bindings.Mode.Deferred)
        self.engine.end_step()

    def close(self) -> None:
        self.engine.close()

    def begin_reading(self) -> None:
        self.file = adios2.FileReader(self.path)
        self.found = {name: self.file.inquire_variable(name) for name in self.job.names}

    def read(self, i: int, name: str, start: int, stop: int) -> Any:
        return self.file.read(self.found[name], [start, 0], [stop - start, self.job.nx], step_selection=[i, 1])

    def end_reading(self) -> None:
        self.file.close()
