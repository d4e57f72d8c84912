"""Reads a command's flags, rejects what it can before anything large is imported, and runs the command."""

import re
import sys
from collections.abc import Sequence

from autotrain_mem.cli import flags
from autotrain_mem.settings.old_names import notes
from autotrain_mem.support.errors import UsageError
from autotrain_mem.support.store import Store, cache_folder
from autotrain_mem.support.units import printable
from autotrain_mem.support.versions import TESTED, installed_versions, untested
from autotrain_mem.types.methods_table import METHODS

_WORDS = {"plan": "plan ", "estimate": "estimate ", "train": ""}
"""Functions of ``cli.commands`` -> the words before the method."""
_EXAMPLES = {
    "train": ("--dataset data.jsonl", "--dataset data.jsonl --max_length p99 --effective_batch_size 64"),
    "plan": ("--gpu rtx4090 --max_length 2048", "--gpu all", "--gpu l4 --max_length max --out plan.json"),
    "estimate": ("--gpu rtx4090 --max_length 2048", "--gpu 24GiB --use_peft --load_in_4bit --json"),
}
_EXPERIMENTAL = """\
TRL calls {0.trainer} experimental: it is in {0.module}, and may change or disappear in any release.

"""


def run(command: str, method: str, argv: Sequence[str]) -> int:
    """Runs ``autofit [plan | estimate] METHOD`` with the function of that name in ``cli.commands``."""
    prog = f"autofit {_WORDS[command]}{method}"
    request, output = flags.read(prog, argv)
    if output.help:
        _print_help(command, method, prog)
        return 0
    for sentence in (*untested(installed_versions(TESTED)), *notes({**request.flags, **request.config})):
        sys.stderr.write(f"note: {sentence}\n")
    # A typo in one of our flags is reported before these slow imports.
    from autotrain_mem.run.early import opened, refuse_to_follow

    to_train = command == "train" and not (request.plan_only or output.stops)
    if to_train:
        from autotrain_mem.run import several_machines

        request = several_machines.again(several_machines.placed(request), _say)
        if several_machines.follows(request):
            refuse_to_follow(request)
            several_machines.follow_first(request, _say)
            return 0
    # If a file is to be written and no card is named, contradictory flags are reported before a missing GPU.
    is_late = request.autofit.gpu is None and (output.stops or output.snapshot is not None)
    count = 1 if command == "estimate" else None
    reads_data = command != "estimate"
    try:
        with opened(request, to_train=to_train, reads_data=reads_data, is_late=is_late, count=count) as workers:
            from autotrain_mem.cli import commands  # while the workers import TRL

            return int(getattr(commands, command)(workers, request, output))
    except UsageError as error:
        for name, in_file in request.config_names.items():
            if name not in request.flags:
                error.message = re.sub(rf"--{name}\b", in_file, error.message)
        raise


def _say(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")


def _print_help(command: str, method: str, prog: str) -> None:
    from autotrain_mem.settings.trl_parser import kept_flags  # slow: a typo in our flags is reported first

    if (table := kept_flags(Store(cache_folder()), method)) is None:
        from autotrain_mem.worker.pool import Workers  # once per installation

        with Workers(1) as workers:
            workers.first.parse(method, (), {}, {}, ())  # raises if the installed TRL lacks the method
            table = workers.first.flags()[method]
    examples = "".join(f"  {prog} --model Qwen/Qwen2.5-0.5B {flags_given}\n" for flags_given in _EXAMPLES[command])
    home = _EXPERIMENTAL.format(METHODS[method]) if METHODS[method].is_experimental else ""
    trls = f"{home}TRL's own flags; those that cannot be rehearsed are refused, with an alternative:"
    sys.stdout.write(f"{flags.make_parser(prog).format_help()}\nexamples:\n{examples}\n{trls}\n\n{table.help}")
