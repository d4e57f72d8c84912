"""Finds, names, measures or simulates the device. Runs in any process."""
