"""Goes on with a checkpoint that is shared in another way than the training. Runs in the training process."""
