"""Plans inside TRL's trainer classes, in a user's script. Runs in the training process, which starts the workers."""
