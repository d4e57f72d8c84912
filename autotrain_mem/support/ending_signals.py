"""Lists the signals that end a run beside Ctrl-C and SIGTERM. Pure: it runs in any process."""

from __future__ import annotations

import signal

ENDING_SIGNALS = tuple(signal.Signals[name] for name in ("SIGHUP", "SIGUSR1") if name in signal.Signals.__members__)
"""A terminal that closes, and Slurm's warning that the time is up (sbatch(1), ``--signal``), which reaches all
processes of a step. Windows has neither."""
