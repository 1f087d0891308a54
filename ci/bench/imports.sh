#!/bin/sh
# How many file-system calls a contributor rank makes from its start to the end of one committed record, beyond those of
# numpy and mpi4py:  sh ci/bench/imports.sh
#
# Thousands of ranks start at once, and every call goes to the same metadata servers. Counted with strace are all calls
# that name a file (open, stat, access, readlink, rename ...) or read a folder, of rank 1 of two, in two jobs: one imports
# numpy and mpi4py.MPI, the other opens a store, writes one record, commits and closes. Fails if they differ by more than
# LIMIT calls, or if the contributor imported zarr.
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
exec strace -f -qq -e trace=%file,getdents64,fstat -o "$trace" python "$@"
RANK

cat >"$work/contributor.py" <<'JOB'
import sys

import numpy as np
from mpi4py import MPI

import mpistream as ms

comm = MPI.COMM_WORLD
schema = ms.StreamSchema(
    dims={"time": None, "y": 512, "x": 512},
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

count() { # count NAME ARGUMENTS...: the calls of rank 1 in a job of two
    name=$1
    shift
    timeout -k 10 120 $MPIEXEC -n 2 sh "$work/rank" "$work/$name" "$@" </dev/null >&2 || return 1
    grep -cE '^[0-9]+ +[a-z0-9_]+\(' "$work/$name"
}

base() { count base -c "import numpy, mpi4py.MPI"; }
contributor() { count contributor "$work/contributor.py" "$work/run.zarr"; }

base >/dev/null        # compiled files are written now
contributor >/dev/null #
n_base=$(base)
n_contributor=$(contributor)

echo "file-system calls of numpy and mpi4py.MPI    $n_base"
echo "file-system calls of a contributor's record  $n_contributor"
echo "difference                                   $((n_contributor - n_base)), at most $LIMIT"
echo "of these, by call:"
for name in base contributor; do
    sed -nE 's/^[0-9]+ +([a-z0-9_]+)\(.*/\1/p' "$work/$name" | sort | uniq -c | sort -k2 >"$work/$name.calls"
done
join -1 2 -2 2 -a 2 -e 0 -o 0,1.1,2.1 "$work/base.calls" "$work/contributor.calls" |
    awk '$3 > $2 { printf "  %-12s %6d\n", $1, $3 - $2 }'
[ $((n_contributor - n_base)) -le $LIMIT ]
