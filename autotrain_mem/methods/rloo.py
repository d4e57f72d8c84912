"""REINFORCE leave-one-out with TRL's RLOOTrainer."""

from __future__ import annotations

from functools import partial

from autotrain_mem.methods import online
from autotrain_mem.methods.configs import fill, script_parser

make_parser = partial(script_parser, "rloo")
configs = partial(fill, make_parser)
rehearsal_changes = online.rehearsal_changes
build_trainer = partial(online.build_trainer, "RLOOTrainer")
worst_rows = online.worst_rows
rows_editor = online.rows_editor
worst_image_rows = online.worst_image_rows
image_rows_editor = online.image_rows_editor
training_patches = online.training_patches
row_lengths = online.row_lengths
image_texts = online.image_texts
check = online.check
logged_basis = online.logged_basis
