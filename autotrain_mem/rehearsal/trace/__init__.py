"""Records allocations, phases and FLOPs of a run. Runs in the worker."""
