#!/bin/bash
# A whole service in one allocation: the head in the batch step, an agent on every node.
#
#   sbatch sbatch/serve.sh SERVICE.yaml --site SITE.yaml [other options of flexslurm launch]
#
# The #SBATCH lines ask for 1 x a100:2, 2 x l40s:1: change them to the nodes you want.
# Each component of the job is one kind of node. Slurm starts all of them together and preempts all
# of them together: for a service that outlives its preemption piece by piece, use flexslurm launch
# from a login node instead.
# It ends with any node: it would outlive one only if each component had two or more.
#SBATCH --job-name=flexslurm
#SBATCH --output=flexslurm.%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --partition=scavenge --nodes=1 --ntasks-per-node=1 --no-kill --cpus-per-task=2 --gres=gpu:a100:2
#SBATCH hetjob
#SBATCH --partition=scavenge --nodes=2 --ntasks-per-node=1 --no-kill --cpus-per-task=1 --gres=gpu:l40s:1

# Without a shell in between, signals reach the launcher. The job ends with the service.
exec flexslurm launch "$@" --cluster allocation
