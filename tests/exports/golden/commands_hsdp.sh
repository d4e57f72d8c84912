# Made by autofit for a shell: sft of Qwen/Qwen3-8B.
# Planned for 4 x rtx4090 on each of 2 machines, level of harm: lossless.
# Predicted peak: 18.2 GiB of a budget of 23.0 GiB (fixed-size segments) on each.
# Run: each command on its machine
# Before it runs:
# - autofit, the model and the data are found by these names on every machine, and output_dir is on a file system that all machines share
# - write the address of the first machine in place of FIRST_MACHINE, in every command
# - start all of them: each waits for the others

# machine 0 of 2
autofit sft --model Qwen/Qwen3-8B --dataset org/data --gpus 4 --nodes 2 --sharding hsdp --fsdp_offload_params --lora_target_modules q_proj v_proj --output_dir run --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --gradient_checkpointing true --use_peft false --dtype float32 --optim adamw_torch_fused --learning_rate 2e-05 --max_length 1024 --packing false --machine_rank 0 --main_process_ip FIRST_MACHINE --main_process_port 29500

# machine 1 of 2
autofit sft --model Qwen/Qwen3-8B --dataset org/data --gpus 4 --nodes 2 --sharding hsdp --fsdp_offload_params --lora_target_modules q_proj v_proj --output_dir run --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --gradient_checkpointing true --use_peft false --dtype float32 --optim adamw_torch_fused --learning_rate 2e-05 --max_length 1024 --packing false --machine_rank 1 --main_process_ip FIRST_MACHINE --main_process_port 29500
