"""Guards PPO's loop, cut at the models' outputs. Runs in the training process."""
