"""What ``scripts/throughput`` is made of: public rows, the older TRL that some of them ran, and records of a GPU."""
