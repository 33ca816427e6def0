#!/bin/sh
# flexslurm: all that SlurmUser may do as the owner of a service, by the rule in flexslurm.sudoers:
# tell the owner's own service one of six events. sudo starts it as that owner, never as root.
#   as_owner.sh EVENT SOURCE DIR JOB NODES RUNS        ('' for what is not known)
# DIR must be a directory of that owner, in the owner's home or where the site keeps services; all
# else is refused with status 64, and nothing of it is read.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
export PATH
LC_ALL=C
export LC_ALL
services=@SERVICES@
refuse() {
    echo "flexslurm as_owner: $*" >&2
    logger -t flexslurm "as_owner: $*" 2>/dev/null
    exit 64
}
[ $# = 6 ] || refuse "it takes six arguments, and got $#"
[ "$(id -u)" != 0 ] || refuse 'it does nothing as root'
case $1 in
job-start | job-leaving | job-end | node-down | node-drain | node-up) ;;
*) refuse 'there is no such event' ;;
esac
case $2 in
prolog-slurmctld | epilog-slurmctld | strigger) ;;
*) refuse 'there is no such hook' ;;
esac
case $4 in *[!0-9_+]*) refuse 'that is no job id' ;; esac
case $5 in *[!][A-Za-z0-9._,-]*) refuse 'that is no list of nodes' ;; esac
case $6 in *[!0-9]*) refuse 'that is no number of restarts' ;; esac
case $3 in /*) ;; *) refuse 'the directory is not an absolute path' ;; esac
directory=$(realpath -e -- "$3" 2>/dev/null) && [ -d "$directory" ] && [ -O "$directory" ] ||
    refuse "that is not a directory of $(id -un)"
home=$(realpath -e -- "$(getent passwd "$(id -u)" | cut -d: -f6)" 2>/dev/null)
[ -z "$services" ] || services=$(realpath -m -- "$services")
case $directory/ in
"$services"/*) ;; # without a place of the site: wherever the owner has it
"${home:-/nonexistent}"/*) ;;
*) refuse 'services are not kept there' ;;
esac
# sudo may be set up to keep SlurmUser's HOME, in which Python would look for modules
HOME=${home:-/nonexistent}
export HOME
exec @FLEXSLURM@ notify "$1" --within 4 --source "$2" --service-dir "$directory" \
    ${4:+--job "$4"} ${5:+--nodes "$5"} ${6:+--restarts "$6"}
