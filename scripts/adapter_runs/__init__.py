"""What ``scripts/adapters`` is made of: a bare loop around a model of PEFT's on fake tensors."""
