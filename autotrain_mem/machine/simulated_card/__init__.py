"""A card that is not there, and what goes wrong on it when asked. Runs in the training process; syntax in any."""
