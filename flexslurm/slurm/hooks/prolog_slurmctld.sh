#!/bin/sh
# flexslurm: PrologSlurmctld. Tells the job's service that its job begins, from slurmctld's host.
# Returns at once, with status 0, whatever happens: the telling goes on without it, and only for
# some seconds.
# SlurmUser is not the service's owner: sudo lets it tell as the owner, by as_owner.sh beside this
# (see docs/hooks.md); without that rule nothing is told, and the service polls as ever.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
service=${SPANK_FLEXSLURM_SERVICE:-}
case ${SLURM_JOB_COMMENT:-} in flexslurm:/*) service=${SLURM_JOB_COMMENT#flexslurm:} ;; esac
[ -n "$service" ] || exit 0
job=${SLURM_JOB_ID:-} user=${SLURM_JOB_UID:-}
me=$(id -u)
if [ "$me" = 0 ] || [ "$me" = "$user" ]; then
    set -- @FLEXSLURM@ notify job-start --within 4 --source prolog-slurmctld \
        --service-dir "$service" --job "$job" ${user:+--uid "$user"}
else
    set -- sudo -n -u "#$user" @HERE@/as_owner.sh job-start prolog-slurmctld \
        "$service" "$job" '' ""
fi
# Slurm kills this script's process group at its end: the substitution waits until the new process,
# in a session of its own, has let go of the output.
away='exec </dev/null >/dev/null 2>&1; exec "$@"'
: "$(setsid -f sh -c "$away" sh timeout -k 1 5 "$@")"
exit 0
