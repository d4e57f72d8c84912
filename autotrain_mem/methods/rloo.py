"""Adapts REINFORCE leave-one-out with TRL's RLOOTrainer."""

from functools import partial

from autotrain_mem.methods import image_rows, online

liger_since = "1.16"
rehearsal_changes = online.rehearsal_changes
build_trainer = partial(online.build_trainer, "RLOOTrainer")
worst_rows = online.worst_rows
rows_editor = online.rows_editor
worst_image_rows = image_rows.prompts
image_rows_editor = online.rows_editor
training_patches = online.training_patches
micro_steps_per_generation = online.micro_steps_per_generation
row_lengths = online.row_lengths
image_texts = online.image_texts
check = online.check
