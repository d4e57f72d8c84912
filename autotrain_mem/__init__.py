"""Finds the best TRL configuration that fits a GPU, before anything is loaded, and trains with it.

The command is ``autofit`` (``autotrain_mem.cli``); the engine's three verbs are in ``autotrain_mem.api``. Importing
this package loads no torch.
"""

__version__ = "0.1.0"
