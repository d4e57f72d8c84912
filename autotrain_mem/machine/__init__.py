"""The device: found, named, imagined or simulated."""
