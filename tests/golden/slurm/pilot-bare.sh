#!/bin/bash
#SBATCH --job-name=chat.a100-1
#SBATCH --output=/svc/logs/a100-1/chat.a100-1.%j.batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:l40s:1
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR1@120

# The batch shell outlives a warning: its step, or what it becomes, reacts to it.
told=
trap told=yes TERM
trap : USR1 USR2 CONT
# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.
unset SLURM_TRES_PER_TASK
export SUBMITIT_LOG_LEVEL=WARNING
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 --output=/svc/logs/a100-1/chat.a100-1.%j.%n.log --open-mode=append /opt/py/bin/python -P -u -m submitit.core._submit /svc/jobs
status=$?
if [ "$status" -eq 75 ] || [ "$status" -eq 143 ]; then
  sleep 1
  again=$((${SLURM_RESTART_COUNT:-0} < 1000))
  case "$told:$again:$(scontrol show job -o "$SLURM_JOB_ID")" in
    :1:*" JobState=RUNNING "*) scontrol requeue "$SLURM_JOB_ID" && sleep 60 ;;
  esac
fi
exit "$status"
# arguments: []
