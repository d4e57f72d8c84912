"""Builds, probes and trains, in the one process that holds the device. Runs in the training process."""
