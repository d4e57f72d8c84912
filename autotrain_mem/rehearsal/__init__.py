"""The installed TRL trainer, run whole on fake tensors, and every allocation it makes recorded."""
