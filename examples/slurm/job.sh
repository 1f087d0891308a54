#!/bin/bash
# A job that is preempted, or comes to its time limit, and goes on where it was:  sbatch job.sh run.zarr 100
#SBATCH --ntasks=4
#SBATCH --time=01:00:00
#SBATCH --requeue               # preempted jobs are started again by SLURM itself
#SBATCH --open-mode=append      # one log for all runs of the job
#SBATCH --signal=B:USR1@120     # two minutes before the limit, to this script

mpiexec -n "${SLURM_NTASKS:-4}" python -m mpi4py model.py "$@" &
pid=$!
# The launcher hands signals on to the ranks; the guard in model.py takes it from there.
trap 'kill -USR1 "$pid"' USR1
trap 'kill -TERM "$pid"' TERM
# A signal ends `wait`, not the model; what the model ended with is told however long ago that was.
while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [ "$code" = 75 ]; then       # the guard's exit code: not finished, start it again
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
