"""``autofit push``: uploads the model that a run trained, with its card, to the Hugging Face Hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from autotrain_mem.cli.commands import warn
from autotrain_mem.cli.run_flags import parsed, run_parser
from autotrain_mem.errands.child import finish
from autotrain_mem.errands.errand import Errand
from autotrain_mem.errands.of_run import check_repository
from autotrain_mem.errands.trained_run import find_run
from autotrain_mem.report.terminal import Console, waiting
from autotrain_mem.support.errors import UsageError

ABOUT = """\
Uploads weights, configs, tokenizer and the model card, and nothing else: no checkpoints, no logs, no plan.json,
run.json or training_args.bin, which may name paths of this machine or hold tokens. The repository is made where there
is none, private unless --public is given.
"""


def push(argv: Sequence[str]) -> int:
    """Upload. Raises UsageError, OutputFolderError and TrainingError."""
    parser = run_parser("push", ABOUT)
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
