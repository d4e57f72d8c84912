"""Changes TRL's experimental OnlineDPOTrainer: sampling and loss get methods of their own, as in TRL's other trainers.

TRL's own ``training_step`` samples, scores and calls backward in one method.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from accelerate.utils import DistributedType
from trl.data_utils import maybe_apply_chat_template
from trl.experimental.online_dpo import OnlineDPOTrainer as _OnlineDPOTrainer

SAMPLED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""The names of the results of TRL's ``_generate``. Each holds rows for the first completions of all prompts, then rows
for the second completions. From TRL 1.16 on, ``_generate`` also returns processed images."""


class OnlineDPOTrainer(_OnlineDPOTrainer):  # type: ignore[misc]  # TRL is untyped to mypy here
    """Averages gradients over all micro-batches of an optimizer step, which TRL's trainer does not do.

    TRL 1.12 and 1.16 leave the division by ``gradient_accumulation_steps`` to accelerate
    (``online_dpo_trainer.py: training_step``), but transformers 5 sets accelerate's number of steps to 1
    (``transformers/trainer.py: create_accelerator_and_postprocess``).
    """

    _sampled: tuple[Any, ...] | None = None
    _of_images: tuple[None, ...] = ()
    _metrics: dict[str, dict[str, list[float]]]

    @property
    def stats(self) -> dict[str, list[float]]:
        """Returns the metrics that are logged next. They are stored in ``_metrics``, as in TRL's other trainers."""
        return self._metrics["train"]

    @stats.setter
    def stats(self, numbers: dict[str, list[float]]) -> None:
        self._metrics = {"train": defaultdict(list, numbers)}

    @property
    def max_completion_length(self) -> int:
        """Returns the maximum tokens of a completion. TRL's other trainers have it under this name."""
        return int(self.args.max_new_tokens)

    def _prepare_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Samples two completions of each prompt, unless the inputs already have them."""
        prepared = super()._prepare_inputs(inputs)
        return prepared if SAMPLED[0] in prepared else self._generate_and_score_completions(prepared)

    def _generate_and_score_completions(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        sampled = super()._generate(self.model_wrapped, inputs["prompt"])
        self._of_images = sampled[len(SAMPLED) :]
        return {**inputs, **dict(zip(SAMPLED, sampled, strict=False))}

    def _generate(self, model: Any, prompts: Sequence[Any], images: Any = None) -> Any:
        if self._sampled is None:
            return super()._generate(model, prompts, images)
        return *self._sampled, *self._of_images

    def _tokenize_prompts(self, prompts: Sequence[Any]) -> tuple[list[list[int]]]:
        """Tokenizes prompts as ``_generate`` does. TRL's other trainers have such a method."""
        return ([prompt_ids(prompt, self.processing_class) for prompt in prompts],)

    def compute_loss(self, model: Any, inputs: Mapping[str, Any], **_: Any) -> Any:
        """Returns the loss that TRL's step has already computed."""
        return inputs["loss"]

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
        """Runs TRL's step on sampled completions, with the loss divided by the number of micro-batches per step."""
        model.train()
        prepared = self._prepare_inputs(inputs)
        sampled = tuple(prepared[name] for name in SAMPLED)
        rows = {name: value for name, value in prepared.items() if name not in SAMPLED}
        backward, losses = self.accelerator.backward, []

        def backward_of_mean(loss: Any, **options: Any) -> None:
            if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
                options["scale_wrt_gas"] = False  # as in transformers' Trainer.training_step
            share = self.compute_loss(model, {"loss": loss}) / self.current_gradient_accumulation_steps
            losses.append(share.detach())
            backward(share, **options)

        with patch.object(self, "_sampled", sampled), patch.object(self.accelerator, "backward", backward_of_mean):
            super().training_step(model, rows, num_items_in_batch)
        return losses[0]


def prompt_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Tokenizes a prompt as TRL's ``_generate`` does: only the chat template adds special tokens."""
    text = maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"]
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"])
