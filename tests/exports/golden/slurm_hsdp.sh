#!/bin/bash
# Made by autofit for Slurm: sft of Qwen/Qwen3-8B.
# Planned for 4 x rtx4090 on each of 2 machines, level of harm: lossless.
# Predicted peak: 18.2 GiB of a budget of 23.0 GiB (fixed-size segments) on each.
# Run: sbatch FILE
# Before it runs:
# - autofit, the model and the data are found by these names on every machine, and output_dir is on a file system that all machines share
# - partition, account and time limit: #SBATCH lines of your cluster, or flags of sbatch
# - when a node fails, Slurm starts the job again (--requeue), and the run resumes; to continue with at least N nodes: --min_nodes N in COMMAND, and --no-kill for both sbatch and srun
#SBATCH --job-name=autofit-sft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HOST=${HOSTS%%$'\n'*}  # the first one's name
PORT=$((20000 + SLURM_JOB_ID % 10000))
export HOST PORT

COMMAND=(autofit sft --model Qwen/Qwen3-8B --dataset org/data --gpus 4 --nodes 2 --sharding hsdp --fsdp_offload_params --lora_target_modules q_proj v_proj --output_dir run --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --gradient_checkpointing true --use_peft false --dtype float32 --optim adamw_torch_fused --learning_rate 2e-05 --max_length 1024 --packing false)
# shellcheck disable=SC2016  # each node has a number of its own, which is set only inside its task
srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 bash -c 'trap STOPPED=1 TERM INT HUP USR1  # the command gets these signals too, and saves
for TRY in {1..10}; do
  "$@" --machine_rank "$SLURM_NODEID" --main_process_ip "$HOST" --main_process_port "$PORT" && exit
  STATUS=$?
  (( STATUS <= 130 || STOPPED )) && exit $STATUS  # only a killed command starts again
  sleep 5
done
exit $STATUS' autofit "${COMMAND[@]}"
