#!/usr/bin/env bash
# What the job array of part.py does, with processes of this machine: ./run.sh wave.zarr 4
set -euo pipefail
url=$1
parts=${2:-4}
here=$(dirname "$0")

pids=()
for ((i = 0; i < parts; i++)); do
    python "$here/part.py" "$url" --part "$i" --parts "$parts" --wait 60 &
    pids+=($!)
done
for pid in "${pids[@]}"; do
    wait "$pid" # ends here, without a commit, if a part has failed
done
python -m mpistream commit "$url" "$url".tokens/part-*.json
