"""What ``scripts/trl_suite`` runs TRL's tests with: stand-ins for models and rows of the hub, and our classes."""
