"""The child's side of a real run: what happens in the one process that holds the device, and ends."""
