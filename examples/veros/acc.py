"""Veros, an ocean model, writes its state and its averages with mpistream and goes on from what it wrote.

    mpiexec -n 2 python -m mpi4py examples/veros/acc.py acc.zarr

The setup is Veros' own idealised Atlantic and Southern Ocean (``acc_basic``), which needs no download. A record holds
everything that Veros itself would put into a restart file, ghost cells included, and the means over the interval that
its ``averages`` diagnostic computed. Kill it and start it again with the same command: it goes on from the last
committed record. On as many ranks as before the result is the same to the last bit; on others Veros sums in another
order.

With --check Veros also writes its averages in its own way, as netCDF, and at the end they are compared bit for bit with
those in the store; on several ranks that needs an h5py with MPI. At the end rank 0 prints how long the model stood in
output.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import h5netcdf
import numpy as np
from mpi4py import MPI
from veros import runtime_settings

import mpistream as ms

STEPS, COMMIT_EVERY = 10, 3  # time steps to a record, records to a commit
AVERAGED = ("temp", "salt", "u", "v", "psi")
comm = MPI.COMM_WORLD

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("url", type=Path)
parser.add_argument("--records", type=int, default=12)
parser.add_argument("--check", action="store_true", help="let Veros write its averages too, and compare")
arguments = parser.parse_args()

# The model's core reads these settings when it is imported. The grid is cut into bands of latitude.
runtime_settings.update(
    mpi_comm=comm,
    num_proc=(1, comm.size),
    diskless_mode=not arguments.check,
    force_overwrite=True,
    loglevel="error",
)

from veros import veros_routine  # noqa: E402
from veros.diagnostics.averages import Averages  # noqa: E402
from veros.distributed import exchange_overlap, get_chunk_slices  # noqa: E402
from veros.setups.acc_basic import ACCBasicSetup  # noqa: E402
from veros.variables import get_shape  # noqa: E402


class KeptAverages(Averages):
    """The model's averages; the last means stay here, so that a record can hold them."""

    def write_output(self, state: Any) -> None:
        self.means = {name: np.array(getattr(self.variables, name)) for name in self.output_variables}
        began = time.perf_counter()
        super().write_output(state)
        self.seconds = getattr(self, "seconds", 0.0) + time.perf_counter() - began


class Setup(ACCBasicSetup):
    """The setup with averages of an interval as long as a record."""

    path = ""

    @veros_routine
    def set_diagnostics(self, state):
        averages = state.diagnostics["averages"] = KeptAverages(state)
        averages.output_variables = list(AVERAGED)
        averages.output_path = self.path
        averages.sampling_frequency = state.settings.dt_tracer
        averages.output_frequency = STEPS * state.settings.dt_tracer


class Fields:
    """What goes into a record, and where this rank's part of it lies."""

    def __init__(self, model: Setup) -> None:
        state = self.state = model.state
        self.averages = state.diagnostics["averages"]
        # The model's time is the time of the record.
        self.meta = {n: m for n, m in state.var_meta.items() if m.write_to_restart and m.active and n != "time"}
        dims = {d: None for m in self.meta.values() for d in m.dims or ()}
        self.sizes = {d: get_shape(state.dimensions, (d,), local=False)[0] for d in dims}
        self.region = {d: (s.start, s.stop) for d in dims if (s := self.slices((d,))[0][0]) != slice(None)}

    def slices(self, dims: tuple[str, ...]) -> tuple[Any, Any]:
        """This rank's cells in the whole grid and in its own arrays: they tile the grid, ghost cells included."""
        n = self.state.dimensions
        return get_chunk_slices(n["xt"], n["yt"], dims, include_overlap=True)

    def mean_dims(self, name: str) -> tuple[str, ...]:
        return tuple(d for d in self.meta[name].dims if d != "timesteps")

    def schema(self) -> ms.StreamSchema:
        variables = {}
        for name, meta in self.meta.items():
            attrs = {"long_name": meta.long_description or meta.name, "units": meta.units or "1"}
            dtype = np.asarray(getattr(self.state.variables, name)).dtype.name
            variables[name] = ms.Variable(("time", *(meta.dims or ())), dtype, attrs=attrs)
            if name in AVERAGED:
                attrs = attrs | {"cell_methods": "time: mean"}
                variables[f"{name}_mean"] = ms.Variable(("time", *self.mean_dims(name)), dtype, attrs=attrs)
        return ms.StreamSchema(
            dims={"time": None, **self.sizes},
            time=ms.AppendTime(units="seconds since 1900-01-01", calendar="360_day"),
            variables=variables,
            attrs={"title": "Veros, idealised Atlantic and Southern Ocean"},
        )

    def record(self) -> dict[str, Any]:
        blocks = {}
        for name, meta in self.meta.items():
            blocks[name] = np.asarray(getattr(self.state.variables, name))[self.slices(meta.dims)[1]]
            if name in AVERAGED:
                blocks[f"{name}_mean"] = self.averages.means[name][self.slices(self.mean_dims(name))[1]]
        return blocks

    def restore(self, reader: ms.StoreReader) -> None:
        """Set the model to the last record: each rank reads its own part."""
        variables, settings = self.state.variables, self.state.settings
        with variables.unlock():
            variables.time = reader.times[-1]
            for name, meta in self.meta.items():
                region = {d: self.region[d] for d in meta.dims or () if d in self.region}
                found = reader.read_record(name, -1, region=region)
                value = np.array(getattr(variables, name))
                own = self.slices(meta.dims)[1]
                value[own] = found
                if meta.dims:
                    value = np.array(exchange_overlap(value, meta.dims, settings.enable_cyclic_x))
                    # The exchange fills ghost cells at the rim, too, which the model leaves alone in some variables.
                    value[own] = found
                setattr(variables, name, value if meta.dims else value.dtype.type(value))


def main() -> int:
    model = Setup()
    model.path = str(arguments.url.with_suffix(".averages.nc"))
    model.setup()
    fields = Fields(model)
    schema = fields.schema()
    seconds = 0.0
    try:
        writer = ms.write_resume(arguments.url, schema=schema, comm=comm, region=fields.region)
    except ms.ResumeError as error:  # the same on every rank
        if error.kind != "no_store":
            raise
        writer = ms.write_open(arguments.url, schema, comm=comm, region=fields.region)
    with writer as w:
        first = w.n_records
        if first:
            fields.restore(w.reader)
        for i in range(first, arguments.records):
            for _ in range(STEPS):
                model.step(model.state)
            began = time.perf_counter()
            w.write_record(float(model.state.variables.time), fields.record())
            if (i + 1) % COMMIT_EVERY == 0:
                w.commit()
            seconds += time.perf_counter() - began
            if comm.rank == 0:
                print(f"acc: record {i + 1} of {arguments.records}", flush=True)
    n = max(arguments.records - first, 1)
    if comm.rank == 0:
        print(
            f"acc: {len(schema.variables)} variables; the model stood {1e3 * seconds / n:.1f} ms a record in mpistream"
        )
    if not arguments.check or comm.rank > 0:
        return 0
    own_way = 1e3 * fields.averages.seconds / n
    print(f"acc: and {own_way:.1f} ms for its own netCDF of the averages alone")
    return compare(arguments.url, Path(model.path), fields, range(first, arguments.records))


def compare(url: Path, path: Path, fields: Fields, records: range) -> int:
    """Compare the means with those in the model's own file, on rank 0."""
    reader = ms.open_reader(url)
    n_wrong = n_cells = 0
    with h5netcdf.File(path, "r") as file:
        for name in AVERAGED:
            inner = tuple(
                slice(2, -2) if d in ("xt", "xu", "yt", "yu") else slice(None) for d in fields.mean_dims(name)
            )
            for k, record in enumerate(records):
                own = file.variables[name][k].T
                ours = reader.read_record(f"{name}_mean", record)[inner]
                is_sea = own != file.variables[name].attrs["_FillValue"]
                n_cells += int(is_sea.sum())
                n_wrong += int((own[is_sea].view("int64") != ours[is_sea].view("int64")).sum())
    print(
        f"acc: compared the means of {', '.join(AVERAGED)}, records {records.start} to {records.stop - 1}, with "
        f"{path.name}: {n_wrong} of {n_cells} cells differ"
    )
    return 1 if n_wrong or not n_cells else 0


if __name__ == "__main__":
    sys.exit(main())
