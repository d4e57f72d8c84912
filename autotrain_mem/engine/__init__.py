"""Where core meets edges: a job, a device and the workers become predictions and plans. What the three faces share."""
