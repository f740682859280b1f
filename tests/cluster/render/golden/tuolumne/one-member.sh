#!/bin/bash
# flux: --job-name=hetctl-digits-001-0-0a1b2c
# flux: --queue=pbatch
# flux: --nodes=1
# flux: --exclusive
# flux: --time-limit=7200s
# flux: --broker-opts=--setattr=tbon.topo=mincrit
# flux: --output=/shared/ann/digits/.hetctl/runs/digits-001/job-0000.log
# Written by hetctl: run the rounds of one job, then submit the next job.
started=$(date +%s)
umask 077
type module >/dev/null 2>&1 || . /etc/profile >/dev/null
module load rocm
module load rccl/fast-env-slows-mpi
set -u
export HETCTL_HOME=/shared/ann/digits/.hetctl
python=/shared/ann/venv/bin/python
run=digits-001
folder=/shared/ann/digits/.hetctl/runs/digits-001
stop=/shared/ann/digits/.hetctl/runs/digits-001/job-0000.stop
claim=/shared/ann/digits/.hetctl/runs/digits-001/job-0000.claim
next=/shared/ann/digits/.hetctl/runs/digits-001/job-0001.sh
batch_id=$(flux job id --to=f58plain "$FLUX_ENCLOSING_ID")

# Repeat a command for minutes if a file system does not answer, from which Python may not even start.
patiently() {
    local pause failed
    for pause in 5 10 20 40 60 60 0; do
        "$@" && return
        failed=$?
        [[ $failed =~ ^(8|1|126|127|135)$ && $pause != 0 ]] || return "$failed"
        sleep "$pause"
    done
}

advance() {
    patiently env FLUX_URI="$(flux getattr parent-uri)" "$python" -m hetctl advance "$@" -- "$run" && return
    local failed=$?
    echo "hetctl advance failed with exit code $failed; go on with: hetctl advance $run" >&2
    return "$failed"
}

# Of several scripts with this number, the first one to make the link is the job (ln is atomic). A requeued
# job finds its own number.
take_number() {
    [ -e "$claim" ] || { echo "$batch_id" >"$claim-$batch_id" && sync "$claim-$batch_id"; } || return 1
    [ -e "$claim" ] || ln "$claim-$batch_id" "$claim" || [ -e "$claim" ] || return 1
    claimed=$(cat "$claim") && [ -n "$claimed" ]
}
patiently take_number || exit 1
rm -f "$claim-$batch_id"
if [ "$claimed" != "$batch_id" ]; then
    echo "job $batch_id leaves: job $claimed is job 0 of run $run already" >&2
    exit 75
fi
# The batch system may requeue this job after it has submitted the next one; only one of them may train.
if [ -e "$next" ]; then
    echo "job $batch_id leaves: job 1 of run $run takes its place" >&2
    advance --after-job 0
    exit
fi
rm -f "$stop"

# The limit counts from the start of this script, or as the batch system reports it; training stops earlier.
left=7200
measured=
if [[ $(timeout 60 flux job timeleft) =~ ^([0-9]+)$ ]]; then
    measured=$((BASH_REMATCH[1] / 60)):$((BASH_REMATCH[1] % 60))
fi
if [[ $measured =~ ^((([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)$ ]]; then
    hours=$((10#0${BASH_REMATCH[3]} * 24 + 10#0${BASH_REMATCH[4]}))
    measured=$(((hours * 60 + 10#${BASH_REMATCH[5]}) * 60 + 10#${BASH_REMATCH[6]} + $(date +%s) - started))
    left=$((measured < left ? measured : left))
fi
deadline=$((started + left - 300))

# The driver ignores USR2: near the limit some batch systems signal all processes of the job.
trap '' USR2
"$python" -m hetctl.runtime.driver "$folder" --job 0 --deadline "$deadline" --batch-id "$batch_id" &
driver=$!

# The driver polls for this file, so that no signal has to reach it. On a full disk the file is empty.
tell() {
    [ -e "$stop" ] || { echo "$1" >"$stop.new"; mv "$stop.new" "$stop"; } || kill -TERM "$driver"
}

# Stop training before the limit, and kill a driver that hangs, so that the next job is submitted. The watch
# ends with this script.
watch() {
    nap=
    trap 'kill $nap 2>/dev/null; exit' TERM
    until_or_gone "$1" && tell deadline
    until_or_gone "$2" && kill -KILL "$driver"
}
until_or_gone() {
    # No $(..) here: bash loses a trap if the signal arrives during a command substitution.
    while printf -v now '%(%s)T' -1; [ "$now" -lt "$1" ]; do
        [ -e /proc/$$/exe ] || exit
        sleep 1 & nap=$!; wait "$nap"
    done
}
watch "$deadline" "$((deadline + 270))" &
watch=$!

# A signal interrupts bash's wait, hence the loop. Slurm may send its warning a minute early: the watch is exact.
signalled=no
trap 'signalled=yes; printf -v now "%(%s)T" -1; [ $((deadline - now)) -le 60 ] || tell signal' USR2
trap 'signalled=yes; tell signal' TERM INT  # LSF's bkill sends INT first
while true; do
    wait "$driver"
    code=$?
    [ "$signalled" = yes ] || break
    signalled=no
done
kill "$watch" 2>/dev/null; wait "$watch"

# Do not ignore USR2 here: a local job that advance starts would inherit that, and a shell cannot undo it.
trap : USR2
trap - TERM INT
rm -f "$stop"

# Submit the next job from here, so that the run continues without a login session.
advance --after-job 0
exit "$code"

# The driver starts one step: an agent on each node, which forks the ranks there.
PYTHONUNBUFFERED=1 \
    NCCL_SOCKET_IFNAME=hsi0 \
    flux \
    run \
    --job-name=agents \
    --nodes=1 \
    --tasks-per-node=1 \
    --exclusive \
    --setopt=exit-timeout=none \
    --setopt=cpu-affinity=off \
    --setopt=gpu-affinity=off \
    --unbuffered \
    env \
    'HETCTL_NODE={{node.name}}' \
    /shared/ann/venv/bin/python \
    -m \
    hetctl.runtime.agent \
    /shared/ann/digits/.hetctl/runs/digits-001/job-0000.driver.json \
    --step \
    agents \
    --threads \
    21 \
    --framework \
    tensorflow
# node-1: member-1 on 0
