"""``autofit chat``, ``merge`` and ``push``: what is done with the model that a run trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotrain_mem.cli.errands import (
    Errand,
    ErrandProcess,
    check_repository,
    errand_of,
    find_run,
    finish,
    merge_errand,
    quantized_note,
    started,
)
from autotrain_mem.cli.run_flags import model_flags, parsed, run_parser
from autotrain_mem.report.terminal import Console, waiting, warn
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.units import format_bytes, printable

MAX_NEW_TOKENS = 256

_CHAT = """\
Loads the model that a run trained, with the base where it is an adapter, on the GPU where there is room, and answers:
--prompt TEXT, or what comes through a pipe, once; on a terminal one line after the other, as a conversation, until
Ctrl-C or an empty line. A reward model gives its score: of --prompt with --answer, or of one text.
"""

Messages = list[dict[str, str]]


def chat(argv: Sequence[str]) -> int:
    """Answer prompts. Raises UsageError, OutputFolderError, ModelNotFoundError and HostMemoryError."""
    parser = run_parser("chat", _CHAT)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this, and end")
    parser.add_argument("--answer", metavar="TEXT", help="reward models: score this answer to the prompt")
    parser.add_argument("--max_new_tokens", type=int, default=MAX_NEW_TOKENS, metavar="N", help="of an answer at most")
    parser.add_argument("--plain", action="store_true", help="continue the text as it is, without a chat template")
    parser.add_argument("--use_cpu", action="store_true", help="leave the GPU alone")
    model_flags(parser)
    if (options := parsed(parser, argv)) is None:
        return 0
    run = find_run(options.run)
    errand = errand_of(run, "chat", base=options.base, trust_remote_code=options.trust_remote_code)
    errand = replace(errand, max_new_tokens=options.max_new_tokens, plain=options.plain, use_cpu=options.use_cpu)
    prompt, answer = options.prompt, options.answer
    if errand.max_new_tokens < 1:
        raise UsageError(f"--max_new_tokens {errand.max_new_tokens} is less than 1.", hint="--max_new_tokens 256")
    if answer is not None and not errand.gives_score:
        raise UsageError("--answer is for reward models, which score it.", hint="Remove --answer.")
    if answer is not None and prompt is None:
        raise UsageError("--answer needs the prompt that it answers.", hint="Add --prompt TEXT.")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise UsageError("The prompt is empty.", hint="autofit chat RUN --prompt TEXT")
    if note := quantized_note(errand):
        warn(note)
    with started(errand) as process:
        with waiting(Console(stderr=True), "loading the model"):
            device = process.receive()["device"]
        if prompt is None:
            _converse(process, errand, device)
        else:
            _reply(process, [_turn("user", prompt), *([_turn("assistant", answer)] if answer is not None else [])])
    return 0


def _converse(process: ErrandProcess, errand: Errand, device: str) -> None:
    """Hold a conversation on the terminal; each prompt of a reward model stands for itself."""
    sys.stdout.write(f"{errand.folder} on {device}; an empty line or Ctrl-C ends.\n")
    messages: Messages = []
    while True:
        try:
            if not (line := input("> ")).strip():
                return
            messages = [*([] if errand.gives_score else messages), _turn("user", line)]
            messages.append(_turn("assistant", _reply(process, messages)))
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _reply(process: ErrandProcess, messages: Messages) -> str:
    """Print an answer as it comes; returns all of it."""
    process.send({"messages": messages})
    while True:
        event = process.receive()
        if event["event"] == "score":
            sys.stdout.write(f"score {event['score']:.4f}\n")
            return ""
        if event["event"] == "answer":
            sys.stdout.write("\n")
            sys.stdout.flush()
            return str(event["text"])
        sys.stdout.write(printable(event["text"]))
        sys.stdout.flush()


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


_MERGE = """\
Writes the adapter that a run trained into its base model's weights, in the base's own type, and the whole into a new
folder, which any tool loads that loads the base. Works in host memory, and says first where there is too little of it,
or of the disk. Nothing is written over.
"""


def merge(argv: Sequence[str]) -> int:
    """Merge. Raises UsageError, OutputFolderError, ModelNotFoundError and HostMemoryError."""
    parser = run_parser("merge", _MERGE)
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (default: RUN-merged, beside the run)")
    model_flags(parser)
    if (options := parsed(parser, argv)) is None:
        return 0
    run = find_run(options.run)
    base = options.base if run.is_adapter else None
    errand = errand_of(run, "merge", base=base, trust_remote_code=options.trust_remote_code)
    errand = merge_errand(run, errand, options.out)
    if note := quantized_note(errand):
        warn(note)
    with waiting(Console(stderr=True), "merging the adapter into its base"):
        end = finish(errand, lambda event: warn(event["message"]))
    sys.stdout.write(f"{end['path']}: {format_bytes(end['bytes'])} in {end['dtype']}\n")
    return 0


_PUSH = """\
Uploads weights, configs, tokenizer and the model card, and nothing else: no checkpoints, no logs, no plan.json,
run.json or training_args.bin, which may name paths of this machine or hold tokens. The repository is made where there
is none, private unless --public is given.
"""


def push(argv: Sequence[str]) -> int:
    """Upload. Raises UsageError, OutputFolderError and TrainingError."""
    parser = run_parser("push", _PUSH)
    parser.add_argument("--to", metavar="ORG/NAME", help="the repository")
    parser.add_argument("--public", action="store_true", help="make it public, where it is made")
    parser.add_argument("--update", action="store_true", help="put a commit on a repository that holds files already")
    if (options := parsed(parser, argv)) is None:
        return 0
    if options.to is None:
        raise UsageError("autofit push needs the name of a repository.", hint="autofit push RUN --to ORG/NAME")
    check_repository(options.to)
    run = find_run(options.run)
    if run.is_adapter and Path(run.base).expanduser().is_dir():
        warn(f"the adapter names its base by a folder of this machine, {run.base}: others cannot load it from there")
    errand = Errand(task="push", folder=str(run.folder), to=options.to, public=options.public, update=options.update)
    with waiting(Console(stderr=True), f"uploading to {options.to}"):
        end = finish(errand, lambda event: warn(event["message"]))
    sys.stdout.write(f"{end['url']}\n")
    return 0
