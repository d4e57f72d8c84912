"""Imitates what CUDA does otherwise than the CPU, a rule each; ``rules`` wires them. Runs in the worker."""
