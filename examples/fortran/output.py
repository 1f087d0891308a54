"""Build liboutput.so, the C functions that main.f90 calls, with cffi:  python output.py FOLDER

The Python below runs inside the Fortran program: cffi starts the interpreter at the first call.
"""

import sys

import cffi

EMBEDDED = """
from output import ffi
import os
import mpistream as ms

writer = None


@ffi.def_extern(error=1)  # an exception is printed, and the call returns 1
def put_record(comm, start, stop, nx, t, field):
    global writer
    if writer is None:
        schema = ms.StreamSchema(
            dims={"time": None, "y": 64, "x": nx},
            time=ms.AppendTime(units="seconds since 2000-01-01"),
            variables={"temperature": ms.Variable(("time", "y", "x"), "float64", attrs={"units": "K"})},
        )
        # comm is a Fortran handle, which is an int.
        writer = ms.write_open(os.environ["OUTPUT"], schema, comm=comm, region={"y": (start, stop)}, overwrite=True)
    import numpy as np

    nbytes = 8 * (stop - start) * nx
    block = np.frombuffer(ffi.buffer(field, nbytes), "float64").reshape(stop - start, nx)
    writer.write_record(t, {"temperature": block})
    return 0


@ffi.def_extern(error=1)
def end_output():
    writer.close()
    return 0
"""

if len(sys.argv) != 2:
    sys.exit("usage: python output.py FOLDER")
builder = cffi.FFI()
builder.embedding_api(
    "int put_record(int comm, int start, int stop, int nx, double t, double *field); int end_output(void);"
)
builder.set_source("output", "")
builder.embedding_init_code(EMBEDDED)
builder.compile(tmpdir=sys.argv[1], target="liboutput.so", verbose=False)
