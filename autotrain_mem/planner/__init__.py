"""Which settings to try, in which order, and when to stop. Pure: prediction is an argument."""
