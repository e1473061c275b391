#!/usr/bin/env bash
# A run on one host or several of a Slurm cluster; the run's folder has to be on a shared disk.
#
#   sbatch examples/cluster/slurm.sh run.yaml                # one host
#   sbatch --nodes 2 examples/cluster/slurm.sh run.yaml      # two hosts, each with the whole model
#
# Slurm sends SIGTERM two minutes before the end of its time. A run of short steps then saves itself;
# any other goes on from its last checkpoint. The same command again goes on.
#SBATCH --job-name=megatrain
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=megatrain-%j.log
set -euo pipefail

run=$1
folder=${2:-runs/$(basename "$run" .yaml)}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
resume=()
[ ! -d "$folder/checkpoints" ] || resume=(--resume)
ulimit -l unlimited # host memory is pinned

export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE / SLURM_GPUS_ON_NODE))

srun --cpus-per-task "$SLURM_CPUS_ON_NODE" torchrun \
	--nnodes "$SLURM_JOB_NUM_NODES" \
	--nproc-per-node "$SLURM_GPUS_ON_NODE" \
	--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
	-m megatrain train "$run" --set "output.folder=$folder" "${resume[@]}"
