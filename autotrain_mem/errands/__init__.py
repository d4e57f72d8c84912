"""Small jobs beside planning and training: chat, merge, push, columns of a dataset. Runs in the parent; no torch."""
