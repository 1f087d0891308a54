#!/bin/sh
# Build and run:  sh examples/fortran/run.sh out.zarr [ranks]
# It needs mpif90, and a python that has mpistream, mpi4py for the same MPI, cffi and setuptools.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
python "$here/output.py" "$build"
${FC:-mpif90} -o "$build/heat" "$here/main.f90" -J "$build" -L "$build" -loutput -Wl,-rpath,"$build"
export OUTPUT="$1" PYTHONPATH="$(python -c 'import sys; print(":".join(sys.path[1:]))')"
${MPIEXEC:-mpiexec} -n "${2:-2}" "$build/heat"
