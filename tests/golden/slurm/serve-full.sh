#!/bin/bash
# A whole service in one allocation: the head in the batch step, an agent on every node.
#
#   sbatch THIS_FILE [options of flexslurm launch]
#
# The #SBATCH lines ask for 2 x a100:4, 3 x slice:1, 1 x share:1, 1 x a100:2, 1 x a100:1: change them to the nodes you want.
# Each component of the job is one kind of node. Slurm starts all of them together and preempts all
# of them together: for a service that outlives its preemption piece by piece, use flexslurm launch
# from a login node instead.
# It ends with any node: it would outlive one only if each component had two or more.
#SBATCH --job-name=flexslurm.chat
#SBATCH --output=flexslurm.chat.%j.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@120
#SBATCH --time=0-02:00:00
#SBATCH --partition=spare --account=proj --qos=low --constraint='ib&nvme' --nodes=2 --ntasks-per-node=1 --no-kill --cpus-per-task=24 --gres=gpu:nvidia_a100_80gb:4 --comment=flexslurm:/shared/services/chat --comment='preempt me' --exclusive
#SBATCH hetjob
#SBATCH --partition=spare --account=proj --qos=low --constraint='ib&nvme' --nodes=3 --ntasks-per-node=1 --no-kill --cpus-per-task=6 --gres=gpu:a100_2g.20gb:1 --comment=flexslurm:/shared/services/chat --comment='preempt me' --exclusive
#SBATCH hetjob
#SBATCH --partition=spare --account=proj --qos=low --constraint='ib&nvme' --nodes=1 --ntasks-per-node=1 --no-kill --cpus-per-task=6 --gres=shard:4 --comment=flexslurm:/shared/services/chat --comment='preempt me' --exclusive
#SBATCH hetjob
#SBATCH --partition=cancelled --nodes=1 --ntasks-per-node=1 --no-kill --cpus-per-task=2 --gres=gpu:nvidia_a100_80gb:2 --comment=flexslurm:/shared/services/chat
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --no-kill --cpus-per-task=1 --gres=gpu:nvidia_a100_80gb:1 --comment=flexslurm:/shared/services/chat

# sbatch sets it beside SLURM_CPUS_PER_TASK from 23.11 on, and srun refuses both.
unset SLURM_TRES_PER_TASK
export HF_HOME='/scratch/it'"'"'s mine'
export FLEXSLURM_SERVICE_DIR=/shared/services/chat
module load cuda
# Without a shell in between, signals reach the launcher. The job ends with the service.
exec '/opt/my py/flexslurm' launch /home/me/chat.yaml --site /etc/site.yaml --service-dir /shared/services/chat "$@" --cluster allocation
