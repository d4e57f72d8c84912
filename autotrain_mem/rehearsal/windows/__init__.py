"""Attention that goes window by window, as image towers do, seen once and told from memory. Runs in the worker."""
