#!/bin/sh
# flexslurm: Prolog. Tells the job's service that its job begins on this node. Returns at once,
# with status 0, whatever happens: the telling goes on without it, and only for some seconds.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
service=${SPANK_FLEXSLURM_SERVICE:-}
case ${SLURM_JOB_COMMENT:-} in flexslurm:/*) service=${SLURM_JOB_COMMENT#flexslurm:} ;; esac
[ -n "$service" ] || exit 0
job=${SLURM_JOB_ID:-} user=${SLURM_JOB_UID:-}
setsid -f timeout -k 1 5 @FLEXSLURM@ notify job-start --source prolog --service-dir "$service" \
    --job "$job" ${user:+--uid "$user"} </dev/null >/dev/null 2>&1
exit 0
