"""Example nouns that many tests start from; each changes what it is about with ``dataclasses.replace``."""

from autotrain_mem.types import Knobs

TRL_DEFAULTS = Knobs(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    max_length=1024,
    gradient_checkpointing=True,
    packing=False,
    use_peft=False,
    dtype="float32",
    optim="adamw_torch_fused",
    learning_rate=2e-5,
)
"""The defaults of TRL 1.12's SFTConfig and ModelConfig."""
