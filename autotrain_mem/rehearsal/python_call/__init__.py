"""Carries a script's own call of a trainer to the rehearsal. Runs in the parent and the worker."""
