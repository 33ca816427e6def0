#!/bin/bash
#SBATCH --job-name=chat.head
#SBATCH --output=/svc/logs/head/chat.head.%j.batch.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=8192M
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=cpu
#SBATCH --time=2-00:00:00
#SBATCH --nice=100

# The batch shell outlives a warning: its step, or what it becomes, reacts to it.
told=
trap told=yes TERM
trap : USR1 USR2 CONT
# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.
unset SLURM_TRES_PER_TASK
export SUBMITIT_LOG_LEVEL=WARNING
export HF_HOME='/scratch/it'"'"'s mine'
export SUBMITIT_EXECUTOR=slurm
module load cuda
exec /opt/py/bin/python -P -u -m submitit.core._submit /svc/jobs
# arguments: []
