#!/bin/bash
#BSUB -J hetctl-digits-001-3-0a1b2c
#BSUB -q batch
#BSUB -nnodes 2
#BSUB -W 2:00
#BSUB -wa 'USR2'
#BSUB -wt 5
#BSUB -w 'ended(4711)'
#BSUB -R "select[hname!='node-8']"
#BSUB -R "select[hname!='node-9']"
#BSUB -o /shared/ann/digits/.hetctl/runs/digits-001/job-0003.log
#BSUB -alloc_flags smt1
# Written by hetctl: drives one job's rounds, then hands the run on.
started=$(date +%s)
umask 077
set -u
export HETCTL_HOME=/shared/ann/digits/.hetctl
unset TMPDIR
python=/shared/ann/venv/bin/python
run=digits-001
folder=/shared/ann/digits/.hetctl/runs/digits-001
stop=/shared/ann/digits/.hetctl/runs/digits-001/job-0003.stop
claim=/shared/ann/digits/.hetctl/runs/digits-001/job-0003.claim
next=/shared/ann/digits/.hetctl/runs/digits-001/job-0004.sh
batch_id=${SLURM_JOB_ID:-${LSB_JOBID:-$$}}

# Whoever comes first is this job: a link is made whole or not at all. A requeued job finds its own number.
echo "$batch_id" >"$claim-$batch_id" || exit 1
ln "$claim-$batch_id" "$claim" 2>/dev/null || [ -e "$claim" ] || exit 1
rm -f "$claim-$batch_id"
if [ "$(cat "$claim")" != "$batch_id" ]; then
    echo "job $batch_id leaves: job $(cat "$claim") is job 3 of run $run already" >&2
    exit 0
fi
# The batch system may requeue this job after it has submitted the next one: two must not train at a time.
if [ -e "$next" ]; then
    echo "job $batch_id leaves: job 4 of run $run takes its place" >&2
    "$python" -m hetctl advance --after-job 3 -- "$run"
    exit
fi
rm -f "$stop"

# The limit counts from the start, or from when the batch system says; training stops before it.
left=7200
# LSF counts whole minutes, from a little before this script began: what agrees so far is no news.
measured=
if [[ $(timeout 60 bjobs -noheader -o time_left "$LSB_JOBID") =~ ^\ *([0-9]{1,6}):([0-9]{1,2})\ +L ]]; then
    minutes=$((10#${BASH_REMATCH[1]} * 60 + 10#${BASH_REMATCH[2]}))
    [ $((left - $(date +%s) + started)) -lt $((minutes * 60 + 70)) ] || measured=$minutes:00
fi
if [[ $measured =~ ^((([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)$ ]]; then
    hours=$((10#0${BASH_REMATCH[3]} * 24 + 10#0${BASH_REMATCH[4]}))
    measured=$(((hours * 60 + 10#${BASH_REMATCH[5]}) * 60 + 10#${BASH_REMATCH[6]} + $(date +%s) - started))
    left=$((measured < left ? measured : left))
fi
deadline=$((started + left - 300))

# USR2 is ignored in the driver: near the limit some batch systems signal whatever belongs to the job.
trap '' USR2
"$python" -m hetctl.runtime.driver "$folder" --job 3 --deadline "$deadline" --batch-id "$batch_id" &
driver=$!

# The driver looks for this file, so that no signal has to reach it. On a full disk it is empty.
tell() {
    [ -e "$stop" ] || { echo "$1" >"$stop.new"; mv "$stop.new" "$stop"; } || kill -TERM "$driver"
}

# Tells them in time, and ends a driver that hangs, so that the run goes on. It ends with this script.
watch() {
    nap=
    trap 'kill $nap 2>/dev/null; exit' TERM
    until_or_gone "$1" && tell deadline
    until_or_gone "$2" && kill -KILL "$driver"
}
until_or_gone() {
    # Without a $(..): bash loses a trap whose signal comes while it reads one.
    while printf -v now '%(%s)T' -1; [ "$now" -lt "$1" ]; do
        [ -e /proc/$$/exe ] || exit
        sleep 1 & nap=$!; wait "$nap"
    done
}
watch "$deadline" "$((deadline + 270))" &
watch=$!

# A signal ends bash's wait, so wait again. Slurm's warning may come a minute early: the watch knows better.
signalled=no
trap 'signalled=yes; printf -v now "%(%s)T" -1; [ $((deadline - now)) -le 60 ] || tell signal' USR2
trap 'signalled=yes; tell signal' TERM INT  # LSF's bkill comes as INT first
while true; do
    wait "$driver"
    code=$?
    [ "$signalled" = yes ] || break
    signalled=no
done
kill "$watch"; wait "$watch"

# Not ignored: a local job started by advance would inherit that, and no shell can undo it.
trap : USR2
trap - TERM INT
rm -f "$stop"

# The next job is submitted from here, so that the run goes on without anybody logged in.
"$python" -m hetctl advance --after-job 3 -- "$run" ||
    echo "hetctl advance failed with exit code $?; go on with: hetctl advance $run" >&2
exit "$code"

# The driver starts one step: an agent on each node, which forks the ranks there.
PYTHONUNBUFFERED=1 \
    jsrun \
    --nrs=2 \
    --rs_per_host=1 \
    --tasks_per_rs=1 \
    --cpu_per_rs=20 \
    --gpu_per_rs=4 \
    --launch_distribution=packed \
    --bind=none \
    --latency_priority=gpu-cpu \
    --exit_on_error=0 \
    /shared/ann/venv/bin/python \
    -m \
    hetctl.runtime.agent \
    /shared/ann/digits/.hetctl/runs/digits-001/job-0003.driver.json \
    --step \
    agents \
    --threads \
    5 \
    --framework \
    pytorch
# node-1: member-1 on 0, 1, 2, 3
# node-2: member-2 on 0, 1, 2, 3
