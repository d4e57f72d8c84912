"""Does one small job. Runs in any process that may import torch: for commands that is a child of their own."""
