"""Cases of scripts/cuda_commands: whole commands on torch's CUDA build, whose device computes and is no GPU."""
