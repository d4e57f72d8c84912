"""Trainers and optimizers that TRL does not have, or whose promises it does not keep."""
