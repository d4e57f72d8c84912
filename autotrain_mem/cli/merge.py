"""``autofit merge``: writes an adapter into its base model, as a new folder that needs no PEFT."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autotrain_mem.cli.commands import warn
from autotrain_mem.cli.run_flags import model_flags, parsed, run_parser
from autotrain_mem.errands.child import finish
from autotrain_mem.errands.of_run import errand_of, merge_errand, quantized_note
from autotrain_mem.errands.trained_run import find_run
from autotrain_mem.report.terminal import Console, waiting
from autotrain_mem.support.units import format_bytes

ABOUT = """\
Writes the adapter that a run trained into its base model's weights, in the base's own type, and the whole into a new
folder, which any tool loads that loads the base. Works in host memory, and says first where there is too little of it,
or of the disk. Nothing is written over.
"""


def merge(argv: Sequence[str]) -> int:
    """Merge. Raises UsageError, OutputFolderError, ModelNotFoundError and HostMemoryError."""
    parser = run_parser("merge", ABOUT)
    parser.add_argument("--out", metavar="FOLDER", help="a new folder (default: RUN-merged, beside the run)")
    model_flags(parser)
    if (options := parsed(parser, argv)) is None:
        return 0
    run = find_run(options.run)
    errand = merge_errand(
        run,
        errand_of(
            run, "merge", base=options.base if run.is_adapter else None, trust_remote_code=options.trust_remote_code
        ),
        options.out,
    )
    if note := quantized_note(errand):
        warn(note)
    with waiting(Console(stderr=True), "merging the adapter into its base"):
        end = finish(errand, lambda event: warn(event["message"]))
    sys.stdout.write(f"{end['path']}: {format_bytes(end['bytes'])} in {end['dtype']}\n")
    return 0
