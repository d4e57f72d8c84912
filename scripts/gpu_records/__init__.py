"""What ``scripts/record_gpu`` is made of: cases, the card that runs them, what is kept of a run, and comparisons."""
