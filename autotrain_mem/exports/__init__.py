"""A plan in the keys of other tools: pure functions from a plan and its job to the text of one file."""
