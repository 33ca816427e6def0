#!/bin/bash
#SBATCH --job-name=chat.a100-1
#SBATCH --output=/svc/logs/a100-1/chat.a100-1.%j.batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:l40s:4
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --signal=USR1@120
#SBATCH --partition=cancelled

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
srun.tiny --unbuffered --overlap --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=4 --output=/svc/logs/a100-1/chat.a100-1.%j.%n.log --open-mode=append /opt/py/bin/python -P -u -m submitit.core._submit /svc/jobs
status=$?
exit "$status"
# arguments: []
