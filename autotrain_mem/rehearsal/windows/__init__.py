"""Rehearses window attention of image towers: one trial per shape, repeated for all layers. Runs in the worker."""
