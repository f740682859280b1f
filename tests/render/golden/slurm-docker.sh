#!/bin/bash
#SBATCH --job-name=digits-1-2
#SBATCH --partition=normal
#SBATCH --nodes=2
#SBATCH --mincpus=2
#SBATCH --mem=2048M
#SBATCH --time=01:30:30
#SBATCH --signal=B:USR2@90
#SBATCH --no-requeue
#SBATCH --output=/home/ann/digits/.hetctl/runs/digits-1/round-0007/logs/job.log
#SBATCH --open-mode=append
# Written by hetctl: drives one job's rounds, then hands the run on.
started=$(date +%s)
umask 077
set -u
export HETCTL_HOME=/home/ann/digits/.hetctl
python=/opt/hetctl/bin/python
run=digits-1

# The driver is born deaf to USR2, so that it cannot die of one before it listens.
trap '' USR2
"$python" -m hetctl.runtime.driver /home/ann/digits/.hetctl/runs/digits-1 --round 7 --job 2 --started "$started" &
driver=$!

# Near the limit the batch system signals this shell alone. A signal also ends bash's wait, so wait again.
signalled=no
trap 'signalled=yes; kill -USR2 "$driver" 2>/dev/null' USR2
trap 'signalled=yes; kill -TERM "$driver" 2>/dev/null' TERM
while true; do
    wait "$driver"
    code=$?
    [ "$signalled" = yes ] || break
    signalled=no
done

# Not ignored: a local job started by advance would inherit that, and no shell can undo it.
trap : USR2
trap - TERM

# The next job is submitted from here, so that the run goes on without anybody logged in.
"$python" -m hetctl advance --after-job 2 -- "$run" ||
    echo "hetctl advance failed with exit code $?; go on with: hetctl advance $run" >&2
exit "$code"
