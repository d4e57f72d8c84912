"""Adapts REINFORCE leave-one-out with TRL's RLOOTrainer."""

from functools import partial

from autotrain_mem.methods import online

liger_since = "1.16"
base = online
build_trainer = partial(online.build_trainer, "RLOOTrainer")
