#!/bin/sh
# flexslurm: program of a strigger, named after what it watches (node-down, node-drain, node-up).
# Slurm gives it the nodes. It tells every service that has jobs; each knows whether the nodes are
# its own. Returns at once, with status 0: the telling goes on without it, for some seconds only.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
# Slurm may kill this script's process group at its end: the substitution below waits until the new
# process, in a session of its own, has let go of the output.
away='exec </dev/null >/dev/null 2>&1; exec "$@"'
if [ "${2:-}" != telling ]; then
    : "$(setsid -f sh -c "$away" sh timeout -k 1 20 "$0" "${1:-}" telling)"
    exit 0
fi
nodes=$1
event=$(basename "$0" .sh)
me=$(id -u)
@SQUEUE@ --noheader --all --format='%U %k' | sort -u | while read -r user comment; do
    case $comment in flexslurm:/*) ;; *) continue ;; esac
    service=${comment#flexslurm:}
    if [ "$me" = 0 ] || [ "$me" = "$user" ]; then
        set -- @FLEXSLURM@ notify "$event" --within 4 --source strigger \
            --nodes "$nodes" --service-dir "$service" --uid "$user"
    else # as the service's owner, by sudo: see docs/hooks.md
        set -- sudo -n -u "#$user" @HERE@/as_owner.sh "$event" strigger "$service" '' "$nodes" ''
    fi
    timeout -k 1 5 "$@" </dev/null &
done
wait
exit 0
