"""Runs ``autofit chat``, ``merge`` and ``push``, which use the model that a run trained."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.cli.tiny_model import quiet_libraries
from autotrain_mem.cli.trained_run import find_run, merge_target, quantized_note, with_base
from autotrain_mem.report.terminal import Console, waiting, warn
from autotrain_mem.support.errors import TrainingError, UsageError

if TYPE_CHECKING:
    from autotrain_mem.cli.trained_model import Chat

MAX_NEW_TOKENS = 256

_CHAT = """\
Loads the model that a run trained, with the base of an adapter, on the GPU if it fits there, and answers: --prompt TEXT
or piped input once; on a terminal line by line, as a conversation, until Ctrl-C or an empty line. A reward model gives
a score: of --prompt with --answer, or of one text.
"""


def chat(argv: Sequence[str]) -> int:
    """Chats with a trained model. Raises UsageError, OutputFolderError, ModelNotFoundError and HostMemoryError.

    Replaces ``transformers chat``, whose ``transformers serve`` loads no adapter folder (transformers 5.23: it asks for
    a config.json) and no reward model.
    """
    parser = CommandParser("chat", _CHAT)
    parser.add_run(loads=True)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this, and end")
    parser.add_argument("--answer", metavar="TEXT", help="reward models: score this answer to the prompt")
    parser.add_argument("--max_new_tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="of an answer at most")
    parser.add_argument("--plain", action="store_true", help="continue the text as it is, without a chat template")
    parser.add_argument("--use_cpu", action="store_true", help="leave the GPU alone")
    options = parser.read(argv)
    run = replace(with_base(find_run(options.run), options.base), trust_remote_code=options.trust_remote_code)
    prompt, answer, gives_score = options.prompt, options.answer, run.method.has_score_head
    if options.max_new_tokens < 1:
        raise UsageError(f"--max_new_tokens {options.max_new_tokens} is less than 1.", hint="--max_new_tokens 256")
    if answer is not None and not gives_score:
        raise UsageError("--answer is for reward models, which score it.", hint="Remove --answer.")
    if answer is not None and prompt is None:
        raise UsageError("--answer needs the prompt that it answers.", hint="Add --prompt TEXT.")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise UsageError("The prompt is empty.", hint="autofit chat RUN --prompt TEXT")
    if note := quantized_note(run):
        warn(note)
    with waiting(Console(stderr=True), "loading the model"), quiet_libraries():
        from autotrain_mem.cli.trained_model import Chat  # torch and transformers

        loaded = Chat(run, max_new_tokens=options.max_new_tokens, plain=options.plain, use_cpu=options.use_cpu)
    if prompt is not None:
        turns = [_turn("user", prompt)] + ([] if answer is None else [_turn("assistant", answer)])
        _reply(loaded, turns, gives_score)
        return 0
    sys.stdout.write(f"{run.folder} on {loaded.device}; an empty line or Ctrl-C ends.\n")
    messages: list[dict[str, str]] = []
    try:
        while (line := input("> ")).strip():
            messages = [*([] if gives_score else messages), _turn("user", line)]  # a reward model scores one text
            messages.append(_turn("assistant", _reply(loaded, messages, gives_score)))
    except (EOFError, KeyboardInterrupt):
        sys.stdout.write("\n")
    return 0


def _reply(loaded: Chat, messages: list[dict[str, str]], gives_score: bool) -> str:
    """Prints an answer as it is generated, or a score; returns the answer."""
    if gives_score:
        sys.stdout.write(f"score {loaded.score(messages):.4f}\n")
        return ""
    text: str = loaded.answer(messages, functools.partial(print, end="", flush=True))
    print(flush=True)
    return text


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


_MERGE = """\
Merges the adapter that a run trained into its base model's weights, in the base's own type, and writes the model to a
new folder, which any tool can load that loads the base. Works in host memory, and checks first that memory and disk
suffice. Nothing is overwritten.
"""


def merge(argv: Sequence[str]) -> int:
    """Merges an adapter into its base. Raises UsageError, OutputFolderError, ModelNotFoundError and HostMemoryError."""
    parser = CommandParser("merge", _MERGE)
    parser.add_run(loads=True)
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (default: RUN-merged, beside the run)")
    options = parser.read(argv)
    run = find_run(options.run)
    target = merge_target(run, options.out)
    run = replace(with_base(run, options.base), trust_remote_code=options.trust_remote_code)
    if note := quantized_note(run):
        warn(note)
    with waiting(Console(stderr=True), "merging the adapter into its base"), quiet_libraries():
        from autotrain_mem.cli import trained_model  # torch and transformers

        size = trained_model.merge(run, target, warn)
    sys.stdout.write(f"{target}: {size}\n")
    return 0


_PUSH = """\
Runs `hf upload` for weights, configs, tokenizer and the model card, and nothing else: no checkpoints, no logs, no
plan.json, run.json or training_args.bin, which may name paths of this machine or hold tokens. A missing repository is
created, private unless --public is given; an existing one gets a new commit.
"""
UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.safetensors"),
    *("*.safetensors.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "*processor_config.json"),
)
"""No other files are uploaded: ``training_args.bin`` and checkpoints may hold tokens, plan and logs contain paths of
this machine."""


def push(argv: Sequence[str]) -> int:
    """Uploads with ``hf upload``. Raises UsageError, OutputFolderError and TrainingError."""
    parser = CommandParser("push", _PUSH)
    parser.add_run()
    parser.add_argument("--to", metavar="ORG/NAME", help="the repository")
    parser.add_argument("--public", action="store_true", help="make it public, where it is made")
    options = parser.read(argv)
    if options.to is None:
        raise UsageError("autofit push needs the name of a repository.", hint="autofit push RUN --to ORG/NAME")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.to):
        raise UsageError(
            f"--to {options.to!r} is not the name of a repository.", hint="--to ORG/NAME, or --to USER/NAME"
        )
    run = find_run(options.run)
    if run.is_adapter and Path(run.base).expanduser().is_dir():
        warn(f"the adapter names its base by a folder of this machine, {run.base}: others cannot load it from there")
    words = ["upload", options.to, str(run.folder), ".", f"--{'no-' * options.public}private"]
    words += [f"--include={pattern}" for pattern in UPLOADED]
    words += ["--exclude=*/*", f"--commit-message=Upload the model trained in {run.folder.resolve().name}"]
    sys.stderr.write(f"{shlex.join(['hf', *words])}\n")
    code = subprocess.run([sys.executable, "-m", "huggingface_hub.cli.hf", *words], check=False).returncode
    if code:
        raise TrainingError(
            f"hf upload failed with exit status {code}.",
            hint="Run `hf auth login` with a token that may write, or set HF_TOKEN. --to takes a user or an "
            "organisation that is yours. Where the network broke off, run this again: what arrived is not sent twice.",
        )
    sys.stdout.write(f"https://huggingface.co/{options.to}\n")
    return 0
