"""The command ``autofit``: flags in, one exit code out."""
