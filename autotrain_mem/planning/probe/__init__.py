"""Probes a plan on the device and calibrates its prediction. Runs in the parent."""
