#!/bin/bash
# sbatch slurm.sh: one process for each GPU, on two nodes of four.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue                  # a lost node: Slurm starts it again, and it goes on from its checkpoint
srun --kill-on-bad-exit=1 python job.py --rounds 10000 --out "$SLURM_SUBMIT_DIR/runs/large"
