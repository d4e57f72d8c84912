#!/bin/bash
# Made by autofit for Slurm: sft of Qwen/Qwen3-8B.
# Planned for one rtx4090, level of harm: QLoRA.
# Predicted peak: 18.2 GiB of a budget of 23.0 GiB (expandable segments).
# Run: sbatch FILE
# Before it runs:
# - autofit, the model and the data are found by these names on the machine
# - partition, account and time limit: #SBATCH lines of your cluster, or flags of sbatch
#SBATCH --job-name=autofit-sft
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail

srun --nodes=1 --ntasks-per-node=1 --kill-on-bad-exit=1 autofit sft --model Qwen/Qwen3-8B --dataset org/data --gpus 1 --expandable_segments --lora_target_modules q_proj v_proj --output_dir run --per_device_train_batch_size 4 --gradient_accumulation_steps 4 --gradient_checkpointing true --use_peft true --dtype bfloat16 --optim adamw_torch_fused --lora_r 16 --lora_alpha 32 --learning_rate 2e-05 --max_length 2048 --packing false --load_in_4bit true --use_bnb_nested_quant true
