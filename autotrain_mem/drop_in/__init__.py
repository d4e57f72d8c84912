"""Plans inside TRL's own trainer classes, in a user's script. Runs in the training process, its parent."""
