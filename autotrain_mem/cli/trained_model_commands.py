"""Runs ``autofit chat``, ``merge`` and ``push``, which use the model that a run trained."""

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotrain_mem.cli.flags import CommandParser
from autotrain_mem.cli.tiny_model import quiet_libraries
from autotrain_mem.cli.trained_run import TrainedRun, find_run
from autotrain_mem.report.terminal import Console, LiveLine, warn
from autotrain_mem.support.errors import ModelNotFoundError, OutputFolderError, TrainingError, UsageError
from autotrain_mem.support.versions import installed_versions

_CHAT = """\
Starts `transformers serve` with the model that a run trained, and `transformers chat` to talk to it. Merge an adapter
first, with `autofit merge RUN`: `transformers serve` cannot load adapters.
"""


def chat(argv: Sequence[str]) -> int:
    """Chats with a trained model through ``transformers serve`` (5.23), which needs a config.json and only generates
    text. Raises UsageError for a reward model, an adapter that is not merged, missing packages or a folder without a
    run, OutputFolderError if the run is not finished, and TrainingError if the server fails."""
    parser = CommandParser("chat", _CHAT)
    parser.add_run()
    run = find_run(parser.read(argv).run)
    if run.method.has_score_head:
        raise UsageError(f"{run.folder} holds a reward model, which scores texts and writes none.")
    folder = merged_folder(run) if run.is_adapter else run.folder
    if not folder.is_dir():
        hint = f"autofit merge {run.folder}  writes the whole model to {folder}; then run this again."
        raise UsageError(f"{run.folder} holds an adapter, which transformers serve does not load.", hint=hint)
    serve, talk = ["serve", str(folder)], ["chat", str(folder)]
    if None in installed_versions(("fastapi", "uvicorn", "openai")).values():
        hint = f"pip install 'transformers[serving]'\n{shlex.join(['transformers', *serve])}   in one terminal\n"
        raise UsageError(
            "transformers serve lacks packages.", hint=f"{hint}{shlex.join(['transformers', *talk])}   in another"
        )
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address, program = f"http://localhost:{port}", [sys.executable, "-m", "transformers.cli.transformers"]
    with subprocess.Popen([*program, *serve, "--port", str(port)]) as server:
        try:
            with LiveLine(Console(stderr=True), "loading the model"):
                while not answers(f"{address}/health"):
                    if server.poll() is not None:
                        raise TrainingError(f"transformers serve failed with exit status {server.returncode}.")
                    time.sleep(0.2)
            # In offline mode, huggingface_hub's client rejects even local servers; the chat contacts no other.
            online = {**os.environ, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
            return subprocess.run([*program, *talk, address], env=online, check=False).returncode
        finally:
            server.terminate()


def answers(url: str) -> bool:
    """Returns whether a server answers at this address."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


_MERGE = """\
Merges the adapter that a run trained into its base model's weights, in the base's dtype, and writes the model to a new
folder. Any tool that loads the base can load it. The merge runs in host memory, and first checks that memory and disk
suffice. Nothing is overwritten.
"""


def merge(argv: Sequence[str]) -> int:
    """Merges an adapter into its base. Raises UsageError if the run trained no adapter; otherwise UsageError,
    OutputFolderError, ModelNotFoundError and HostMemoryError as ``adapter_merge.merge_adapter`` does."""
    parser = CommandParser("merge", _MERGE)
    parser.add_run()
    base_help = "where the base model is now: a folder or a hub id (default: the base that the run was trained from)"
    parser.add_argument("--base", metavar="MODEL", help=base_help)
    code_help = "let the model's own code run, if it has any"
    parser.add_argument("--trust_remote_code", action="store_true", help=code_help)
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (default: RUN-merged, beside the run)")
    options = parser.read(argv)
    run = find_run(options.run)
    if not run.is_adapter:
        raise UsageError(
            f"{run.folder} holds the whole model: all of its weights were trained, so there is nothing to merge.",
            hint=f'Use it as it is: AutoModelForCausalLM.from_pretrained("{run.folder}"), or autofit push {run.folder}',
        )
    target = Path(options.out).expanduser() if options.out else merged_folder(run)
    if target.exists():
        raise OutputFolderError(f"{target} exists already.", hint="Give --out a new folder.")
    if not target.absolute().parent.is_dir():
        raise OutputFolderError(
            f"There is no folder {target.absolute().parent} to write to.", hint="Create it, or give another --out."
        )
    run = with_base(run, options.base)
    if run.base_bits is not None:
        warn(
            f"the adapter was trained on the base quantized to {run.base_bits} bits, and is merged into unquantized "
            "weights, which differ a little: compare a few answers before and after"
        )
    with LiveLine(Console(stderr=True), "merging the adapter into its base"), quiet_libraries():
        from autotrain_mem.cli.adapter_merge import merge_adapter  # torch and transformers

        size = merge_adapter(run, target, warn, trust_remote_code=options.trust_remote_code)
    sys.stdout.write(f"{target}: {size}\n")
    return 0


def merged_folder(run: TrainedRun) -> Path:
    """Returns where ``autofit merge`` writes by default: beside the run, with ``-merged`` appended to its name."""
    folder = run.folder.resolve()
    return folder.with_name(f"{folder.name}-merged")


def with_base(run: TrainedRun, base: str | None) -> TrainedRun:
    """Returns the run with the base model that the user names; raises ModelNotFoundError if its folder is missing."""
    place = base or run.base
    if place.startswith((".", "/", "~")) or place.count("/") != 1:  # it looks like a folder
        if not Path(place).expanduser().is_dir():
            raise ModelNotFoundError(
                f"The adapter in {run.folder} belongs to the model {place}, and there is no such folder.",
                hint="Give --base the folder or the hub id where that model is now.",
            )
        place = str(Path(place).expanduser())
    return replace(run, base=place, revision=None if base is not None else run.revision)


_PUSH = """\
Runs `hf upload` for weights, configs, tokenizer and the model card only. Checkpoints, logs, plan.json, run.json and
training_args.bin stay here: they may name paths of this machine or hold access tokens. A missing repository is
created, private unless --public is given; an existing one gets a new commit.
"""
UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.safetensors"),
    *("*.safetensors.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "*processor_config.json"),
)
"""The files to upload. Others may hold access tokens (``training_args.bin``) or paths of this machine (plan, logs)."""


def push(argv: Sequence[str]) -> int:
    """Uploads with ``hf upload``. Raises UsageError for a wrong ``--to`` or a folder without a run, OutputFolderError
    if the run is not finished, and TrainingError if the upload fails."""
    parser = CommandParser("push", _PUSH)
    parser.add_run()
    parser.add_argument("--to", metavar="ORG/NAME", help="the repository")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    options = parser.read(argv)
    if options.to is None:
        raise UsageError("autofit push needs the name of a repository.", hint="autofit push RUN --to ORG/NAME")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", options.to):
        raise UsageError(
            f"--to {options.to!r} is not the name of a repository.", hint="--to ORG/NAME, or --to USER/NAME"
        )
    run = find_run(options.run)
    if run.is_adapter and Path(run.base).expanduser().is_dir():
        warn(f"the adapter names a folder of this machine as its base, {run.base}: nobody else can load it")
    words = ["upload", options.to, str(run.folder), ".", f"--{'no-' * options.public}private"]
    words += [f"--include={pattern}" for pattern in UPLOADED]
    words += ["--exclude=*/*", f"--commit-message=Upload the model trained in {run.folder.resolve().name}"]
    sys.stderr.write(f"{shlex.join(['hf', *words])}\n")
    code = subprocess.run([sys.executable, "-m", "huggingface_hub.cli.hf", *words], check=False).returncode
    if code:
        raise TrainingError(
            f"hf upload failed with exit status {code}.",
            hint="Run `hf auth login` with a token that may write, or set HF_TOKEN. --to takes your user name or one "
            "of your organisations. If the network failed, run this again: uploaded files are not sent twice.",
        )
    sys.stdout.write(f"https://huggingface.co/{options.to}\n")
    return 0
