"""Imitates each difference between CUDA and the CPU by one rule; ``rules`` collects the rules. Runs in the worker."""
