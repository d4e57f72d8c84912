"""What every room stands on: errors, files, processes, units. It knows nothing of training. Runs in any process."""
