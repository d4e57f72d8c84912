"""What ``scripts/zero`` is made of: an engine's own loop on fake tensors, as public runs were made."""
