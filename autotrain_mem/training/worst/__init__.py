"""The longest rows before the first step, of which nothing stays."""
