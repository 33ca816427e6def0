#!/bin/bash
#SBATCH --job-name=chat.a100-1
#SBATCH --output=/svc/logs/a100-1/chat.a100-1.%j.batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=24
#SBATCH --gres=gpu:nvidia_a100_80gb:4
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR1@120
#SBATCH --partition=spare
#SBATCH --time=0-01:30:00
#SBATCH --account=proj
#SBATCH --qos=low
#SBATCH --constraint='ib&nvme'
#SBATCH --comment='preempt me'
#SBATCH --exclusive

# The batch shell outlives a warning: its step, or what it becomes, reacts to it.
told=
trap told=yes TERM
trap : USR1 USR2 CONT
# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.
unset SLURM_TRES_PER_TASK
export SUBMITIT_LOG_LEVEL=WARNING
export HF_HOME='/scratch/it'"'"'s mine'
export GREETING='$HOME; rm -rf /'
export SUBMITIT_EXECUTOR=slurm
module load cuda
srun.tiny --unbuffered --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=24 --output=/svc/logs/a100-1/chat.a100-1.%j.%n.log --open-mode=append /opt/py/bin/python -P -u -m submitit.core._submit /svc/jobs
status=$?
if [ "$status" -eq 75 ] || [ "$status" -eq 143 ]; then
  sleep 1
  again=$((${SLURM_RESTART_COUNT:-0} < 1000))
  case "$told:$again:$(scontrol.tiny show job -o "$SLURM_JOB_ID")" in
    :1:*" JobState=RUNNING "*) scontrol.tiny requeue "$SLURM_JOB_ID" && sleep 60 ;;
  esac
fi
exit "$status"
# arguments: []
