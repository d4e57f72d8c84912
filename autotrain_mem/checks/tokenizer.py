"""Checks that the tokenizer goes with the model, the data and the trainer: padding, vocabulary, chat template."""

from __future__ import annotations

from autotrain_mem.checks.collect import Problems
from autotrain_mem.checks.preflight import Setup
from autotrain_mem.data.load import columns_read
from autotrain_mem.methods.configs import Configs
from autotrain_mem.methods.interface import method_of
from autotrain_mem.support.errors import AutofitError
from autotrain_mem.types.preflight import Finding

LOOKED_AT_ROWS = 4
"""Rows in which a conversation is looked for: the trainers look at the first alone."""


# -- padding -------------------------------------------------------------------------------------------------------


def special_tokens(setup: Setup) -> Problems:
    """Trainers refuse, as they are built, an end or a padding token that is not in the vocabulary.

    ``trl/trainer/sft_trainer.py: __init__``, and those of reward and DPO; for padding the vocabulary of a template
    taken from elsewhere counts too. The last resort for padding is the end token.
    """
    filled, tokenizer = setup.filled, setup.tokenizer
    if tokenizer is None:
        return
    for name in ("eos_token",) if _resizes(filled) else ("eos_token", "pad_token"):
        token = getattr(filled.training, name, None)
        if token is not None and token not in tokenizer.get_vocab():
            yield Finding(
                kind="error",
                message=f"--{name} {token!r} is not in the vocabulary of the tokenizer.",
                cure=f"Remove --{name}, which takes {getattr(tokenizer, name)!r}, or give a token that it holds.",
            )
    given = getattr(filled.training, "pad_token", None) or getattr(filled.training, "eos_token", None)
    saved = "set tokenizer.pad_token and save the tokenizer with the model."
    if not given and tokenizer.pad_token is None and tokenizer.eos_token is None:
        yield Finding(
            kind="error",
            error="TokenizerError",
            message="The tokenizer has neither a padding token nor an end token, so that no batch can be padded.",
            cure=f"Give --pad_token TOKEN, one of its vocabulary, or {saved}"
            if hasattr(filled.training, "pad_token")
            else saved.capitalize(),
        )


def padding_of_method(setup: Setup) -> Problems:
    """Trainers that tell padding from text by its id need a padding token of its own."""
    if setup.tokenizer is not None:
        yield from method_of(setup.job.method).tokenizer_findings(setup.filled, setup.tokenizer)


# -- vocabulary ----------------------------------------------------------------------------------------------------


def vocabulary(setup: Setup) -> Problems:
    """Ids without a row in the embeddings: on a GPU an assertion within a kernel, which names nothing.

    Some tokenizers hold special tokens that no text has (Gemma 3's, that of an image, which the text models have no row
    for): of these only those count that padding, ends or the chat template would use.
    """
    tokenizer = setup.tokenizer
    if tokenizer is None or _resizes(setup.filled):
        return
    rows = setup.config.get_text_config().vocab_size
    added = {str(token.content): token.special for token in tokenizer.added_tokens_decoder.values()}
    numbers = tokenizer.get_vocab()
    beyond = sorted((token for token, number in numbers.items() if number >= rows), key=numbers.__getitem__)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    used = {token for token in tokenizer.get_added_vocab() if token in template}
    used |= {tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token}
    sure = [token for token in beyond if token not in added or token in used]
    perhaps = [token for token in beyond if not added.get(token, True)]
    if not sure and not perhaps:
        return
    enough = max(numbers.values()) + 1
    named = sure or perhaps
    some = ", ".join(map(repr, named[:2])) + (", ..." if len(named) > 2 else "")
    yield Finding(
        kind="error" if sure else "warning",
        error="TokenizerError",
        message=f"The embeddings of {setup.job.model} have {rows} rows, and {len(beyond)} of the tokenizer's tokens "
        f"are beyond them ({some}): the first batch that holds one ends the training.",
        cure="Take the tokenizer that the model was trained with, or call "
        f"model.resize_token_embeddings({enough}) once, save model and tokenizer in a folder, and give it to --model.",
    )


def _resizes(filled: Configs) -> bool:
    """A template taken from another tokenizer brings its tokens and makes room for them
    (``trl/chat_template_utils.py: clone_chat_template``)."""
    path = getattr(filled.training, "chat_template_path", None)
    return path is not None and not str(path).endswith((".jinja", ".j2"))


# -- chat template -------------------------------------------------------------------------------------------------


def chat_template(setup: Setup) -> Problems:
    """Conversations need a chat template, of the tokenizer or given."""
    from trl import is_conversational

    filled, tokenizer, rows = setup.filled, setup.tokenizer, setup.rows
    if tokenizer is None or rows is None or isinstance(rows, AutofitError):
        return
    if tokenizer.chat_template is not None or getattr(filled.training, "chat_template_path", None):
        return
    columns = columns_read(setup.job.method, rows.column_names, filled)
    looked_at = [{name: rows[index][name] for name in columns} for index in range(min(LOOKED_AT_ROWS, len(rows)))]
    if "conversations" not in columns and not any(is_conversational(row) for row in looked_at):
        return
    flag = "--chat_template_path FILE (a .jinja file, or a model whose template is taken), "
    yield Finding(
        kind="error",
        error="DatasetFormatError",
        message=f"The data hold conversations, and the tokenizer of {setup.job.model} has no chat template.",
        cure=f"Give {flag if hasattr(filled.training, 'chat_template_path') else ''}a model tuned for chat, or data as "
        "plain text.",
    )
