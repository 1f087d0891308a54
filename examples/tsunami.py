"""A tsunami in the Strait of Georgia: an MPI model that writes, stops and goes on with mpistream.

    mpiexec -n 4 python -m mpi4py examples/tsunami.py --out eta.zarr --checkpoint state.zarr
    mpiexec -n 3 python -m mpi4py examples/tsunami.py --out eta.zarr --checkpoint state.zarr --resume

The model solves the linear shallow-water equations on the sphere,

    d(eta)/dt = -div(h u),      d(h u)/dt = -g h grad(eta),

over the measured sea floor that matplotlib ships as sample data (91 x 120 points), interpolated to
1,093 x 1,441 cells of 0.2 km. It uses explicit forward-backward steps on an Arakawa C-grid: the surface
elevation ``eta`` at the centre of a cell, the transports ``hu`` and ``hv`` (depth times velocity, m2/s)
on the faces between cells. Coasts and the rim of the map reflect.

Each rank has an even part of the cells, wherever its edges lie; mpistream moves what it must to the ranks
that write whole shards.

Two stores are written, and nothing else is kept:

``--out``         the results, float32: ``eta`` and ``speed``, ``u`` and ``v`` on their own points, ``depth`` once
``--checkpoint``  the whole state, float64, every few records: what a restart reads

``--resume`` takes everything from them: size, step and the newest state; any number of ranks will do.
The fields don't depend on the number of ranks, bit for bit, for three reasons: every cell is computed
by the same elementwise operations in the same order wherever it lies; nothing global (a sum, a maximum)
enters a step; and what needs exp or cos is computed on global axes first and cut to the rank afterwards.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpistream as ms

Array = NDArray[np.float64]

GRAVITY = 9.81  # m s-2
EARTH_RADIUS = 6_371_000.0  # m
SHALLOWEST = 20.0  # m; water is at least this deep: the waves over it must span a dozen cells

HUMP_LAT, HUMP_LON = 49.335, -123.83  # the deep basin in the middle of the strait
HUMP_HEIGHT, HUMP_RADIUS = 2.0, 7_000.0  # m

# The output grows by one record at a time; four of them make a commit, two commits a row of shards,
# three commits a checkpoint. A checkpoint follows a commit, so that the output is never behind it.
RECORDS_PER_ROW = 8
RECORDS_PER_COMMIT = 4
RECORDS_PER_CHECKPOINT = 12

TILE = (32, 512)  # rows, columns; what a step touches of a tile fits into a core's L2 cache

SHARDS = (4, 2)  # the grid is cut into so many shards, however many ranks there are


@dataclass(frozen=True)
class SeaFloor:
    """The measured depths: ``depth[j, i]`` in metres, positive down, at ``lat[j]``, ``lon[i]``."""

    lat: Array
    lon: Array
    depth: Array

    @classmethod
    def load(cls, comm: MPI.Comm) -> SeaFloor:
        """Read the sample data on rank 0, which hands the 44 kB to the others. Collective."""
        floor = None
        if comm.rank == 0:
            from matplotlib.cbook import get_sample_data  # slow to import, so on one rank only

            with np.load(get_sample_data("topobathy.npz", asfileobj=False)) as data:
                lat, lon, topo = (data[key].astype(np.float64) for key in ("latitude", "longitude", "topo"))
            floor = cls(lat, lon - 360.0, -topo)
        return comm.bcast(floor)


@dataclass(frozen=True)
class Axis:
    """One axis of the model's grid, evenly spaced from the first to the last measured point."""

    edges: Array
    centres: Array
    below: NDArray[np.intp]  # each centre lies between the measured points below and below + 1,
    weight: Array  # at this share of the way

    @classmethod
    def between(cls, points: Array, n_cells: int) -> Axis:
        edges = np.linspace(points[0], points[-1], n_cells + 1)
        centres = 0.5 * (edges[:-1] + edges[1:])
        below = np.searchsorted(points, centres) - 1
        return cls(edges, centres, below, (centres - points[below]) / np.diff(points)[below])


@dataclass(frozen=True)
class Grid:
    """The global grid: both axes and the time step, the same on every rank."""

    lat: Axis
    lon: Axis
    floor: SeaFloor
    dt: float  # s

    @classmethod
    def over(cls, floor: SeaFloor, ny: int, nx: int) -> Grid:
        lat, lon = Axis.between(floor.lat, ny), Axis.between(floor.lon, nx)
        dy = EARTH_RADIUS * np.radians(lat.edges[1] - lat.edges[0])
        dx = EARTH_RADIUS * np.radians(lon.edges[1] - lon.edges[0]) * np.cos(np.radians(floor.lat[-1]))
        # Stable while no wave crosses a cell in a step. The fastest one runs over the deepest point, and
        # cells are narrowest in the north. Whole sixteenths of a second keep all times exact.
        limit = 1.0 / np.sqrt(GRAVITY * floor.depth.max() * (1.0 / dx**2 + 1.0 / dy**2))
        return cls(lat, lon, floor, float(np.floor(0.98 * limit * 16.0) / 16.0))

    def depth(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Array:
        """Depth of the cells rows x columns, bilinear between the measured points."""
        j, i = self.lat.below[rows, None], self.lon.below[columns]
        north, east = self.lat.weight[rows, None], self.lon.weight[columns]
        at = self.floor.depth
        southern = (1.0 - east) * at[j, i] + east * at[j, i + 1]
        northern = (1.0 - east) * at[j + 1, i] + east * at[j + 1, i + 1]
        return (1.0 - north) * southern + north * northern

    def hump(self) -> tuple[Array, Array]:
        """The initial elevation, as the two global factors of its outer product."""
        metres_per_degree = EARTH_RADIUS * np.pi / 180.0
        y = (self.lat.centres - HUMP_LAT) * metres_per_degree
        x = (self.lon.centres - HUMP_LON) * metres_per_degree * np.cos(np.radians(HUMP_LAT))
        return HUMP_HEIGHT * np.exp(-((y / HUMP_RADIUS) ** 2)), np.exp(-((x / HUMP_RADIUS) ** 2))


def even_box(cart: MPI.Cartcomm, ny: int, nx: int) -> dict[str, tuple[int, int]]:
    """Return the cells of this rank of the process grid."""
    axes = zip(("lat", "lon"), (ny, nx), cart.dims, cart.coords, strict=True)
    return {dim: (n * rank // n_ranks, n * (rank + 1) // n_ranks) for dim, n, n_ranks, rank in axes}


def shard_shape(grid: Grid) -> dict[str, int]:
    """Return the cells of a shard; the staggered dims have the same edges."""
    return {"lat": -(-len(grid.lat.edges) // SHARDS[0]), "lon": -(-len(grid.lon.edges) // SHARDS[1])}


def dims_of(grid: Grid) -> dict[str, int | ms.Staggered | None]:
    """Return the dims: of faces there is one more than of cells, along either axis."""
    cells = {"lat": len(grid.lat.centres), "lon": len(grid.lon.centres)}
    return {"time": None, **cells, "lat_v": ms.Staggered("lat"), "lon_u": ms.Staggered("lon")}


def wet_tiles(wet: NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (south, north, west, east) of the tiles that hold water, without dry columns on either side.

    On land all fields stay +0.0 whether a tile covers it or not, so how it is cut has no bearing on a bit.
    """
    n_rows, n_columns = wet.shape
    for south in range(0, n_rows, TILE[0]):
        north = min(south + TILE[0], n_rows)
        for start in range(0, n_columns, TILE[1]):
            columns = start + np.flatnonzero(wet[south:north, start : start + TILE[1]].any(axis=0))
            if columns.size:
                yield south, north, int(columns[0]), int(columns[-1]) + 1


class ShallowWater:
    """The state on one rank and how it advances.

    Every array has one more cell on each side than the rank owns. In this halo stand the neighbour's
    cells, or land where the map ends. Only ``eta`` has to be exchanged in a step: the transports into
    the first row and column are computed here once more, from the same numbers as on the neighbour.
    """

    def __init__(self, grid: Grid, cart: MPI.Cartcomm, box: Mapping[str, tuple[int, int]]) -> None:
        rows, columns = (np.arange(box[dim][0] - 1, box[dim][1] + 1) for dim in ("lat", "lon"))
        ny, nx = len(grid.lat.centres), len(grid.lon.centres)
        on_map = ((rows >= 0) & (rows < ny))[:, None] & ((columns >= 0) & (columns < nx))
        self._rows, self._columns = rows.clip(0, ny - 1), columns.clip(0, nx - 1)
        # Faces of the cells: a rank has those to the south and west of its own, and the rim if it lies there.
        self._n_v = box["lat"][1] - box["lat"][0] + (box["lat"][1] == ny)
        self._n_u = box["lon"][1] - box["lon"][0] + (box["lon"][1] == nx)
        self._grid, self._cart = grid, cart

        depth = grid.depth(self._rows, self._columns)
        wet = on_map & (depth > 0.0)
        self.depth, self.wet = depth[1:-1, 1:-1], wet[1:-1, 1:-1]
        self.eta, self.hu, self.hv = (np.zeros(depth.shape) for _ in range(3))

        # The factors of a step. A face between two wet cells has the mean of their depths; all others
        # are closed: their factor is 0, and so the transport through them stays 0.
        water = np.where(wet, np.maximum(depth, SHALLOWEST), 0.0)
        self._half_over_depth = 0.5 / np.where(self.wet, water[1:-1, 1:-1], np.nan)
        cos_centre = np.cos(np.radians(grid.lat.centres))[self._rows, None]
        cos_north = np.cos(np.radians(grid.lat.edges[1:]))[self._rows, None]
        dy = EARTH_RADIUS * np.radians(grid.lat.edges[1] - grid.lat.edges[0])
        dx = EARTH_RADIUS * np.radians(grid.lon.edges[1] - grid.lon.edges[0])  # at the equator
        self._push_u, self._push_v = np.zeros_like(depth), np.zeros_like(depth)
        open_u, open_v = wet[:, :-1] & wet[:, 1:], wet[:-1] & wet[1:]
        h_u, h_v = 0.5 * (water[:, :-1] + water[:, 1:]), 0.5 * (water[:-1] + water[1:])
        self._per_depth_u, self._per_depth_v = np.full_like(depth, np.nan), np.full_like(depth, np.nan)
        np.divide(1.0, h_u, out=self._per_depth_u[:, :-1], where=open_u)
        np.divide(1.0, h_v, out=self._per_depth_v[:-1], where=open_v)
        self._push_u[:, :-1] = open_u * (GRAVITY * grid.dt * h_u / (dx * cos_centre))
        self._push_v[:-1] = open_v * (GRAVITY * grid.dt * h_v / dy)
        # div(h u) = (d(hu)/dx + d(cos(lat) hv)/dy) / cos(lat), with dx at the equator
        self._gain_u = grid.dt / (dx * cos_centre)
        self._gain_v = grid.dt / (dy * cos_centre)
        self._cos_north = cos_north

        self._tiles = list(wet_tiles(wet[:-1, :-1]))
        self._work = np.empty((2, TILE[0] + 1, TILE[1]))
        self._halo = Halo(cart, depth.shape)

    def start(self) -> None:
        """Set the initial state: water at rest under a hump."""
        along_lat, along_lon = self._grid.hump()
        hump = along_lat[self._rows, None] * along_lon[self._columns]
        self.eta[1:-1, 1:-1] = np.where(self.wet, hump[1:-1, 1:-1], 0.0)
        self._halo.exchange(self.eta)

    def state(self) -> dict[str, Array]:
        """Return the fields that a restart needs, as this rank's blocks."""
        return {"eta": self.eta[1:-1, 1:-1], "hu": self._on_u(self.hu), "hv": self._on_v(self.hv)}

    def _on_u(self, field: Array) -> Array:
        """The western faces of this rank's cells, and the rim: those of index 0 are the eastern ones of the halo."""
        return field[1:-1, : self._n_u]

    def _on_v(self, field: Array) -> Array:
        return field[: self._n_v, 1:-1]

    def restore(self, state: Mapping[str, Array]) -> None:
        """Set the fields that ``state`` returned, on however many ranks, and their halos.

        Of ``hu`` and ``hv`` all faces of this rank's cells are given, those to the north and east, too.
        """
        self.eta[1:-1, 1:-1] = state["eta"]
        self.hu[1:-1, :-1] = state["hu"]
        self.hv[:-1, 1:-1] = state["hv"]
        for field in (self.eta, self.hu, self.hv):
            self._halo.exchange(field)

    def advance(self, n_steps: int) -> None:
        """Go n_steps steps of dt ahead. Collective."""
        for _ in range(n_steps):
            for tile in self._tiles:
                self._sweep(*tile)
            self._halo.exchange(self.eta)

    def _sweep(self, south: int, north: int, west: int, east: int) -> None:
        """Advance the transports of one tile, then its elevation.

        One sweep from the south-west to the north-east may do both. A face needs the old ``eta`` on either
        side: the tiles to the north and east come later. A cell needs the new transports through all its
        faces: the tiles to the south and west are done.
        """
        eta, hu, hv = self.eta, self.hu, self.hv
        here = np.s_[south:north, west:east]
        slope = self._work[0, : north - south, : east - west]
        np.subtract(eta[south:north, west + 1 : east + 1], eta[here], out=slope)
        slope *= self._push_u[here]
        hu[here] -= slope
        np.subtract(eta[south + 1 : north + 1, west:east], eta[here], out=slope)
        slope *= self._push_v[here]
        hv[here] -= slope

        # The first row and column are halo: their elevation comes from the neighbours.
        south, west = max(south, 1), max(west, 1)
        here = np.s_[south:north, west:east]
        outflow = self._work[0, : north - south + 1, : east - west]
        loss = self._work[1, : north - south, : east - west]
        np.multiply(hv[south - 1 : north, west:east], self._cos_north[south - 1 : north], out=outflow)
        np.subtract(outflow[1:], outflow[:-1], out=loss)
        loss *= self._gain_v[south:north]
        eta[here] -= loss
        np.subtract(hu[here], hu[south:north, west - 1 : east - 1], out=loss)
        loss *= self._gain_u[south:north]
        eta[here] -= loss

    def surface(self) -> NDArray[np.float32]:
        """Return the surface elevation in metres, NaN on land."""
        return np.where(self.wet, self.eta[1:-1, 1:-1], np.nan).astype(np.float32)

    def velocities(self) -> dict[str, NDArray[np.float32]]:
        """Return the velocities on the faces in m/s, NaN where a face is closed."""
        u = self._on_u(self.hu) * self._on_u(self._per_depth_u)
        v = self._on_v(self.hv) * self._on_v(self._per_depth_v)
        return {"u": u.astype(np.float32), "v": v.astype(np.float32)}

    def speed(self) -> NDArray[np.float32]:
        """Return the speed at the centres in m/s, NaN on land: the faces' mean transport over the depth."""
        u = (self.hu[1:-1, :-2] + self.hu[1:-1, 1:-1]) * self._half_over_depth
        v = (self.hv[:-2, 1:-1] + self.hv[1:-1, 1:-1]) * self._half_over_depth
        return np.sqrt(u * u + v * v).astype(np.float32)


class Halo:
    """Exchange of the outermost rows and columns between neighbours of a Cartesian communicator."""

    def __init__(self, cart: MPI.Cartcomm, shape: tuple[int, ...]) -> None:
        ny, nx = shape
        # South, north, west, east: the order in which neighbourhood collectives name the neighbours.
        # Where the map ends the neighbour is MPI.PROC_NULL, and the halo there stays as it is.
        sizes = [(1, nx - 2), (1, nx - 2), (ny - 2, 1), (ny - 2, 1)]
        owned = [(1, 1), (ny - 2, 1), (1, 1), (1, nx - 2)]
        halo = [(0, 1), (ny - 1, 1), (1, 0), (1, nx - 1)]
        self._send, self._receive = (
            [MPI.DOUBLE.Create_subarray(shape, size, at).Commit() for size, at in zip(sizes, corners, strict=True)]
            for corners in (owned, halo)
        )
        self._cart = cart

    def exchange(self, field: Array) -> None:
        """Fill the halo of a field from the neighbours. Collective."""
        ones, zeros = [1] * 4, [0] * 4
        self._cart.Neighbor_alltoallw([field, ones, zeros, self._send], [field, ones, zeros, self._receive])


def output_schema(grid: Grid, steps_per_record: int) -> ms.StreamSchema:
    """Describe the results, with all that a resumed run must know about this one in the attributes."""
    dims = ("time", "lat", "lon")
    on_u, on_v = ("time", "lat", "lon_u"), ("time", "lat_v", "lon")
    sea_level = {"standard_name": "sea_surface_height_above_mean_sea_level", "units": "m"}
    return ms.StreamSchema(
        dims=dims_of(grid),
        time=ms.AppendTime(units="seconds since 2000-01-01", calendar="proleptic_gregorian"),
        variables={
            "eta": ms.Variable(dims, "float32", attrs={"long_name": "surface elevation", **sea_level}),
            "speed": ms.Variable(
                dims,
                "float32",
                attrs={"standard_name": "sea_water_speed", "long_name": "speed", "units": "m s-1"},
            ),
            "u": ms.Variable(on_u, "float32", attrs={"standard_name": "sea_water_x_velocity", "units": "m s-1"}),
            "v": ms.Variable(on_v, "float32", attrs={"standard_name": "sea_water_y_velocity", "units": "m s-1"}),
        },
        statics={
            "depth": ms.Variable(
                dims[1:],
                "float32",
                attrs={
                    "standard_name": "sea_floor_depth_below_mean_sea_level",
                    "long_name": "depth of the sea floor, negative on land",
                    "units": "m",
                },
            )
        },
        coords=coordinates(grid),
        shard_shape={"time": RECORDS_PER_ROW, **shard_shape(grid)},
        chunk_shape={"time": 1, **shard_shape(grid)},
        attrs={
            "Conventions": "CF-1.11",
            "title": "Tsunami in the Strait of Georgia",
            "source": "linear shallow water, Arakawa C-grid, explicit forward-backward steps",
            "time_step_seconds": grid.dt,
            "steps_per_record": steps_per_record,
        },
    )


def checkpoint_schema(grid: Grid) -> ms.StreamSchema:
    """Describe the state."""
    dims = ("time", "lat", "lon")
    return ms.StreamSchema(
        dims=dims_of(grid),
        time=ms.AppendTime(units="seconds since 2000-01-01", calendar="proleptic_gregorian"),
        variables={
            "eta": ms.Variable(dims, "float64", attrs={"long_name": "surface elevation", "units": "m"}),
            "hu": ms.Variable(
                ("time", "lat", "lon_u"), "float64", attrs={"long_name": "eastward transport", "units": "m2 s-1"}
            ),
            "hv": ms.Variable(
                ("time", "lat_v", "lon"), "float64", attrs={"long_name": "northward transport", "units": "m2 s-1"}
            ),
        },
        coords=coordinates(grid),
        shard_shape={"time": 1, **shard_shape(grid)},
        chunk_shape={"time": 1, **shard_shape(grid)},
        codec="checkpoint",
        attrs={"Conventions": "CF-1.11", "title": "State of a tsunami in the Strait of Georgia"},
    )


def coordinates(grid: Grid) -> dict[str, ms.Coordinate]:
    north = {"standard_name": "latitude", "units": "degrees_north", "axis": "Y"}
    east = {"standard_name": "longitude", "units": "degrees_east", "axis": "X"}
    return {
        "lat": ms.Coordinate(("lat",), grid.lat.centres, attrs=north),
        "lon": ms.Coordinate(("lon",), grid.lon.centres, attrs=east),
        "lat_v": ms.Coordinate(("lat_v",), grid.lat.edges, attrs=north),
        "lon_u": ms.Coordinate(("lon_u",), grid.lon.edges, attrs=east),
    }


def newest_state(url: str, comm: MPI.Comm) -> ms.StoreReader | None:
    """Open the checkpoints; None if the run was stopped before there was one. Collective."""
    try:
        reader = ms.open_reader(url, comm=comm)
    except ms.FormatError as error:
        if error.kind != "no_manifest":
            raise
        return None
    if reader.n_records:
        return reader
    reader.close()
    return None


def main() -> None:
    args = parse_arguments()
    # It would advise objects of 4 MiB, which so small a grid can't give to so many ranks.
    logging.getLogger("mpistream").setLevel(logging.ERROR)
    (ny, nx), steps_per_record = args.size, args.steps_per_record
    world = MPI.COMM_WORLD

    saved = newest_state(args.checkpoint, world) if args.resume else None
    if saved:  # what shaped the stopped run comes from its stores
        ny, nx = saved.schema.dims["lat"], saved.schema.dims["lon"]
        with ms.open_reader(args.out, comm=world) as results:
            steps_per_record = results.schema.attrs["steps_per_record"]

    cart = world.Create_cart(MPI.Compute_dims(world.size, 2))
    box = even_box(cart, ny, nx)
    grid = Grid.over(SeaFloor.load(cart), ny, nx)
    model = ShallowWater(grid, cart, box)
    if saved:
        restart = float(saved.times[-1])
        # Any box can be read: here the faces on all sides of this rank's cells.
        faces = {f"{dim}_{face}": (box[dim][0], box[dim][1] + 1) for dim, face in (("lat", "v"), ("lon", "u"))}
        boxes = {
            "eta": box,
            "hu": {"lat": box["lat"], "lon_u": faces["lon_u"]},
            "hv": {"lat_v": faces["lat_v"], "lon": box["lon"]},
        }
        model.restore({name: saved.read_record(name, -1, region=region) for name, region in boxes.items()})
        saved.close()
    else:
        restart = None
        model.start()

    def write(url: str, schema: ms.StreamSchema) -> ms.StreamWriter:
        if restart is None:
            return ms.write_open(url, schema, comm=cart, region=box, overwrite=args.resume)
        # The output may be ahead of the newest state: records after it are dropped and computed again.
        return ms.write_resume(url, schema=schema, comm=cart, region=box, at=restart, expect_last_t=restart)

    # The checkpoints are opened first: a stop between the two must not leave old ones beside a new output.
    with (
        write(args.checkpoint, checkpoint_schema(grid)) as states,
        write(args.out, output_schema(grid, steps_per_record)) as out,
    ):
        if restart is None:
            out.write_static("depth", model.depth)
        progress = Progress(cart, args.records, n_done=out.n_records)
        for record in range(out.n_records, args.records):
            began = time.perf_counter()
            if record:  # record 0 is the initial state
                model.advance(steps_per_record)
            t = record * steps_per_record * grid.dt
            out.write_record(t, {"eta": model.surface(), "speed": model.speed(), **model.velocities()})
            if (record + 1) % RECORDS_PER_COMMIT == 0:
                out.commit()
            if (record + 1) % RECORDS_PER_CHECKPOINT == 0:
                states.write_record(t, model.state())
                states.commit()
            time.sleep(max(0.0, args.pace - (time.perf_counter() - began)))
            progress.show(record + 1, t)


class Progress:
    """A line for each record, on rank 0."""

    def __init__(self, comm: MPI.Cartcomm, n_records: int, *, n_done: int) -> None:
        self._quiet = comm.rank != 0
        self._n_records, self._n_before = n_records, n_done
        self._began = time.perf_counter()
        how = f"going on after record {n_done}" if n_done else "from the start"
        self._print(f"{comm.size} ranks as {' x '.join(map(str, comm.dims))}, {how}")

    def show(self, n_done: int, t: float) -> None:
        pace = (time.perf_counter() - self._began) / (n_done - self._n_before)
        self._print(f"record {n_done:2d} of {self._n_records}   t = {t:7.1f} s   {pace:.2f} s a record")

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(f"tsunami: {line}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A tsunami in the Strait of Georgia.")
    add = parser.add_argument
    add("--out", required=True, metavar="URL", help="store of the results")
    add("--checkpoint", required=True, metavar="URL", help="store of the model's state")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--records", type=int, default=48, metavar="N", help="how many in total (48)")
    add("--steps-per-record", type=int, default=32, metavar="N", help="time steps between two records (32)")
    add("--size", type=grid_size, default=(1093, 1441), metavar="NYxNX", help="cells (1093x1441)")
    add("--pace", type=float, default=0.0, metavar="SECONDS", help="let every record take at least so long")
    return parser.parse_args()


def grid_size(text: str) -> tuple[int, int]:
    ny, nx = map(int, text.split("x"))
    return ny, nx


if __name__ == "__main__":
    main()
