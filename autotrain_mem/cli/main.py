"""Runs the command ``autofit``: picks the subcommand. Only this module catches errors."""

import contextlib
import errno
import functools
import importlib
import os
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType

from autotrain_mem import __version__
from autotrain_mem.support.errors import AutofitError, InterruptedByUser, UsageError, described
from autotrain_mem.support.processes import ENDING_SIGNALS
from autotrain_mem.support.units import printable
from autotrain_mem.types.methods_table import METHODS

_METHOD_IS = textwrap.fill(f"METHOD is one of {', '.join(METHODS)}.", 80)
HELP = f"""\
usage: autofit COMMAND [FLAGS]

Finds the best TRL configuration that fits the memory (VRAM) of your GPU, before
anything is loaded, and trains with it.

Train
  autofit METHOD --model MODEL --dataset DATA      plan, and train here
  autofit METHOD --recipe NAME                     with built-in settings
  autofit METHOD --plan FILE                       with a plan made before

    autofit sft --model Qwen/Qwen2.5-0.5B --dataset data.jsonl

Plan, without training and without a GPU
  autofit plan METHOD --model MODEL --gpu NAME     what fits that GPU best
  autofit plan METHOD ... --out FILE               write the plan to a file
  autofit plan METHOD ... --max_length max         the longest rows that fit
  autofit plan METHOD ... --within 8h --budget 20  within a time and budget
  autofit plan METHOD ... --export TOOL            settings for another tool
  autofit estimate METHOD --model MODEL --gpu NAME what one configuration needs

    autofit plan sft --model meta-llama/Llama-3.1-8B --gpu rtx4090

Compare
  autofit plan METHOD --model MODEL --gpu all      which GPUs fit, and prices

    autofit plan sft --model meta-llama/Llama-3.1-8B --gpu rtx4090,l40s

Look
  autofit report PLAN|RUN                          a page for the browser
  autofit watch RUN                                a run while it trains
  autofit explain PLAN|RUN                         a plan in full detail

    autofit watch Qwen2.5-0.5B-SFT

Use the trained model
  autofit chat RUN                                 chat with it
  autofit merge RUN                                adapter and base as one model
  autofit push RUN --to ORG/NAME                   upload it to the Hub

This machine
  autofit doctor                                   what works, how to fix it
  autofit gpus                                     GPUs known by name
  autofit recipes [NAME]                           built-in recipes
  autofit quickstart                               a first run, without a GPU
  autofit completion bash|zsh|fish                 tab completion

{_METHOD_IS}
Every flag and YAML key of `trl METHOD` works too. A flag that you give is never
changed.

  autofit METHOD --help      all flags
  autofit --version
"""

WITHOUT_METHOD = {
    "completion": "completion",
    "quickstart": "quickstart",
    **dict.fromkeys(("doctor", "explain", "recipes", "report", "watch"), "inspect_commands"),
    **dict.fromkeys(("chat", "merge", "push"), "trained_model_commands"),
    "gpus": "commands",
}
"""Commands without a method -> the module with the function of that name, imported when the command runs."""


def main() -> None:
    """Entry point: runs the command line, and exits with its code."""
    if "_ARGCOMPLETE" in os.environ:
        from autotrain_mem.cli.completion import answer_shell

        answer_shell([*WITHOUT_METHOD], run)
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file gets the number of a closed stream
        pass
    os.close(opened)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter flushes again at exit
        if not isinstance(error, BrokenPipeError):
            code = code or _report(_unwritten(error), sys.argv)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Prints each error as one message."""
    for each in (signal.SIGTERM, *ENDING_SIGNALS):
        if signal.getsignal(each) is not signal.SIG_IGN:  # ignored signals stay ignored, as under nohup
            signal.signal(each, _interrupt_once)
    try:
        return _command(argv)()
    except AutofitError as error:
        return _report(error, argv)
    except KeyboardInterrupt as interrupt:
        hint = "Files written so far are kept. Run the command again at any time."
        return _report(InterruptedByUser("Interrupted.", hint=hint), argv, interrupt)
    except SystemExit as end:  # argparse's, after --help
        return int(end.code or 0)
    except BrokenPipeError:
        return 0  # the reader of our output, such as `head`, has closed the pipe
    except Exception as unforeseen:
        if isinstance(unforeseen, OSError) and unforeseen.errno in (errno.ENOSPC, errno.EDQUOT):
            return _report(_unwritten(unforeseen), argv, unforeseen)
        # Any other exception is a defect of autofit.
        defect = AutofitError(
            f"Unforeseen: {described(unforeseen)}",
            hint="This is a bug in autofit. Run again with --debug and report the traceback.",
        )
        return _report(defect, argv, unforeseen)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Interrupts the process as Ctrl-C does, but only once: these signals often arrive in pairs. Both the shell and the
    kernel report a closed terminal; Slurm sends a warning, and then SIGTERM."""
    for each in (signal.SIGTERM, *ENDING_SIGNALS):
        signal.signal(each, signal.SIG_IGN)
    signal.default_int_handler(number, frame)


def _command(argv: Sequence[str]) -> Callable[[], int]:
    if len(argv) > 1 and argv[0] == "help":
        return _command([*argv[1:], "--help"])
    if not argv or argv[0] in ("--help", "-h", "help"):
        return lambda: _say(HELP)
    if argv[0] == "--version":
        return lambda: _say(f"autofit {__version__}\n")
    name, *rest = argv
    if name in WITHOUT_METHOD:
        module = importlib.import_module(f"autotrain_mem.cli.{WITHOUT_METHOD[name]}")
        return functools.partial(getattr(module, name), rest)
    if name in METHODS or name in ("plan", "estimate"):
        if name not in METHODS and rest and rest[0] in ("--help", "-h"):
            return lambda: _say(HELP)
        from autotrain_mem.cli import method_command

        if name in METHODS:
            return functools.partial(method_command.run, "train", name, rest)
        if not rest or rest[0].startswith("-"):
            raise UsageError(f"autofit {name} needs a method.", hint=f"autofit {name} sft --model MODEL --gpu NAME")
        if rest[0] not in METHODS:
            meant = _meant(f"autofit {name}", rest[0], METHODS)
            raise UsageError(f"Unknown method {rest[0]!r}.", hint=f"{meant}Known: {', '.join(METHODS)}.")
        return functools.partial(method_command.run, name, rest[0], rest[1:])
    meant = _meant("autofit", name, (*METHODS, "plan", "estimate", *WITHOUT_METHOD))
    raise UsageError(f"Unknown command {name!r}.", hint=f"{meant}See autofit --help.")


def _meant(before: str, name: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {before} {near[0]}? " if near else ""


def _say(text: str) -> int:
    sys.stdout.write(text)
    return 0


def _unwritten(error: OSError) -> AutofitError:
    what, hint = error.filename or "The output", "Free some space, or write to another disk."
    return AutofitError(f"{what} cannot be written: {error.strerror}.", hint=hint)


def _report(error: AutofitError, argv: Sequence[str], cause: BaseException | None = None) -> int:
    error.__cause__ = cause or error.__cause__
    if "--debug" in argv:
        sys.stderr.write(printable("".join(traceback.format_exception(error))))
    from autotrain_mem.report.error_text import print_error

    with contextlib.suppress(OSError):  # the terminal may be closed
        print_error(error, sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    main()
