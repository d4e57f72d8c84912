"""Imitates each difference of CUDA from the CPU with one rule; ``rules`` collects them. Runs in the worker."""
