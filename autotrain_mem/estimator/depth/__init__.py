"""Extrapolates rehearsals of few layers to the whole model. Runs in the parent (pure)."""
