"""What ``scripts/throughput`` is made of: measured speeds beside predicted ones, and their order."""
