"""Cases of scripts/cuda_commands: whole commands on torch's CUDA build, over a stand-in device that computes."""
