"""Decides what a report's page says: figures, tables and words, of a plan or of a run. Runs in the parent (pure)."""
