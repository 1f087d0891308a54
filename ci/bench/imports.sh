#!/bin/sh
# How many file-system calls a contributor rank makes from its start to the end of one committed record, beyond those of
# numpy and mpi4py:  sh ci/bench/imports.sh
#
# Thousands of ranks start at once, and every such call goes to the same metadata servers. Counted with strace are all
# calls that name a file (open, stat, access, readlink, rename ...) or read a folder, of rank 1 of two, in two jobs: one
# imports numpy and mpi4py.MPI, the other opens a store, writes one record, commits and closes. fstat asks about a file
# that is open already; it is printed apart (some C libraries make it a newfstatat with an empty name). Fails if the two
# jobs differ by more than LIMIT calls, or if the contributor imported zarr.
set -eu
cd "$(dirname "$0")/../.."
LIMIT=1200

if ! command -v strace >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing strace"
    { apt-get install -y strace || { apt-get update && apt-get install -y strace; }; } >/dev/null 2>&1 || true
fi
if ! strace -o /dev/null true 2>/dev/null; then
    echo "skipped: strace is not there or may not trace"
    exit 0
fi

EXTRAS=
. ci/venv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONDONTWRITEBYTECODE # as an installed package: with compiled files

cat >"$work/rank" <<'RANK'
trace=$1
shift
rank=${PMI_RANK:-${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-0}}}
[ "$rank" = 1 ] || exec python "$@"
exec strace -f -qq -e trace=%file,getdents64,fstat -o "$trace.raw" python "$@"
RANK

cat >"$work/contributor.py" <<'JOB'
import sys

import numpy as np
from mpi4py import MPI

import mpistream as ms

comm = MPI.COMM_WORLD
schema = ms.StreamSchema(
    dims={"time": None, "y": 2048, "x": 1024},
    time=ms.AppendTime(units="seconds since 2000-01-01", calendar="proleptic_gregorian"),
    variables={"temperature": ms.Variable(("time", "y", "x"), "float32")},
)
with ms.write_open(sys.argv[1], schema, comm=comm, overwrite=True) as w:
    shape = [stop - start for start, stop in w.region.values()]
    w.write_record(0.0, {"temperature": np.full(shape, comm.rank, dtype="float32")})
    w.commit()
if comm.rank == 1:
    sys.exit("a contributor imported zarr" if "zarr" in sys.modules else 0)
JOB

trace() { # trace NAME ARGUMENTS...: leaves the names of rank 1's calls, one a line, in a file of that name
    name=$1
    shift
    timeout -k 10 120 $MPIEXEC -n 2 sh "$work/rank" "$work/$name" "$@" </dev/null || return 1
    # A line is: pid call(arguments. One that was interrupted is resumed on another, which does not begin so.
    sed -nE 's/^[0-9]+ +newfstatat\([0-9]+, "", .*/fstat/p; t; s/^[0-9]+ +([a-z0-9_]+)\(.*/\1/p' "$work/$name.raw" |
        sort >"$work/$name"
}

base() { trace base -c "import numpy, mpi4py.MPI"; }
contributor() { trace contributor "$work/contributor.py" "$work/run.zarr"; }
number() { grep -vcx fstat "$work/$1"; }

# Twice: the first time compiled files are written.
base
base
contributor 2>"$work/said" || { cat "$work/said"; exit 1; }
contributor 2>"$work/said" || { cat "$work/said"; exit 1; }

difference=$(($(number contributor) - $(number base)))
echo "calls of numpy and mpi4py.MPI  $(number base)"
echo "calls of a contributor         $(number contributor)"
echo "difference                     $difference, at most $LIMIT"
echo "by call:"
for name in base contributor; do
    uniq -c "$work/$name" | awk '{ print $2, $1 }' >"$work/$name.calls"
done
join -a 2 -e 0 -o 0,1.2,2.2 "$work/base.calls" "$work/contributor.calls" |
    awk '$3 > $2 { printf "  %-10s %6d%s\n", $1, $3 - $2, $1 == "fstat" ? "  (not counted)" : "" }'
[ "$difference" -le $LIMIT ]
