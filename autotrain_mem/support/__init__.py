"""The base of every room: errors, files, processes, units. It does not know about training. Runs in any process."""
