"""Runs torch's CUDA build on a machine without a GPU: NVIDIA's libraries are stand-ins, all of torch is real."""
