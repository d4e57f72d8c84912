"""Makes a complete tiny model folder: random weights, its own tokenizer, its own chat template.

It is Qwen2 in everything but size, so a run takes the whole path of a real model (config, weights, tokenizer, template,
generation settings) in seconds, without network or GPU.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY_SIZE = 2048
"""Rows of the embedding. The tokenizer may need fewer; a fixed size keeps memory independent of the texts."""
INITIALIZER_RANGE = 0.06
"""Standard deviation of the first weights. Qwen2's own 0.02 is meant for wider layers: at hidden size 128 and learning
rate 3e-3, 60 steps of 8 quickstart rows end at a loss of 2.3 with 0.02 and of 1.0 with 0.06 (torch 2.13, CPU)."""
CONTEXT_LENGTH = 2048
END_OF_TEXT, TURN_START, TURN_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, PAD)
"""Their token ids are their indices in this tuple."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML. assistant_only_loss counts the tokens between the generation marks, including the end of the turn."""


def build(folder: Path, texts: Iterable[str]) -> None:
    """Writes a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load offline; equal texts give equal folders.

    The model has about a million parameters (4 MB in float32). ``texts`` train the tokenizer; a few hundred are enough.
    """
    from transformers import Qwen2Config  # seconds to import

    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        **special_token_ids(),
    )
    write_model(folder, config, train_tokenizer(texts))


def special_token_ids() -> dict[str, int]:
    """Returns the ids that :func:`train_tokenizer` gives the special tokens, by their names in a model's config."""
    return {
        "bos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
    }


def train_tokenizer(texts: Iterable[str]) -> Any:
    """Trains a byte-level BPE tokenizer of at most ``VOCABULARY_SIZE`` tokens; each digit is a token.

    It pads on the right, with a separate pad token: if pad and end of turn were one token, a trainer would mask both.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast  # seconds to import

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=CONTEXT_LENGTH,
        padding_side="right",
        chat_template=CHAT_TEMPLATE,
    )


def write_model(folder: Path, config: Any, tokenizer: Any) -> None:
    """Writes a float32 model of ``config`` with fixed random weights, and its tokenizer. The caller's random state is
    unchanged: only the CPU's generator is seeded, and then restored."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=256, **special_token_ids())
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hides progress bars and warnings of libraries. DeepSpeed warns on stdout that there is no GPU."""
    from transformers.utils import logging as progress

    disabled, shown = logging.root.manager.disable, progress.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    progress.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled)
        if shown:
            progress.enable_progress_bar()
