#!/bin/sh
# flexslurm: Epilog. Tells the job's service that its job has ended on this node. Returns at once,
# with status 0, whatever happens: the telling goes on without it, and only for some seconds.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
service=${SPANK_FLEXSLURM_SERVICE:-}
case ${SLURM_JOB_COMMENT:-} in flexslurm:/*) service=${SLURM_JOB_COMMENT#flexslurm:} ;; esac
[ -n "$service" ] || exit 0
job=${SLURM_JOB_ID:-} user=${SLURM_JOB_UID:-} runs=${SLURM_RESTART_COUNT:-}
set -- notify job-end --within 4 --source epilog --service-dir "$service" \
    --job "$job" ${runs:+--restarts "$runs"} ${user:+--uid "$user"}
# Slurm kills this script's process group at its end: the substitution waits until the new process,
# in a session of its own, has let go of the output.
away='exec </dev/null >/dev/null 2>&1; exec "$@"'
: "$(setsid -f sh -c "$away" sh timeout -k 1 5 @FLEXSLURM@ "$@")"
exit 0
