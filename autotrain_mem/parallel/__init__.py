"""Describes how several processes are launched: accelerate's config and environments. Runs in any process (pure)."""
