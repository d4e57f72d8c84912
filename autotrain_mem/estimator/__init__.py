"""From a recorded run to a peak in bytes."""
