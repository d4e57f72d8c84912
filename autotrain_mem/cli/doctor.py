"""``autofit doctor``: what of this machine works, what is missing, and the command that mends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from autotrain_mem import api
from autotrain_mem.cli.run_flags import flag_parser, parsed
from autotrain_mem.report.machine_view import doctor_view, issue_text
from autotrain_mem.report.terminal import Console, waiting
from autotrain_mem.types import codec

ABOUT = """\
Examines this machine: driver, GPUs, torch's build, packages, the Hugging Face Hub, disks, container and system. Says
what works, what does not, and the command that mends it. Ends with status 1 where something is broken, else with 0: a
machine without a GPU is not broken, since planning needs none.

  autofit doctor --issue | xclip
"""


def doctor(argv: Sequence[str]) -> int:
    """Examines the machine, and prints what was found."""
    parser = flag_parser("doctor", ABOUT)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--issue", action="store_true", help="a text to paste into an issue, without names or secrets")
    parser.add_argument("--debug", action="store_true", help="a traceback with an error")
    if (options := parsed(parser, argv)) is None:
        return 0
    with waiting(Console(stderr=True), "looking at the GPU") as say:
        found = api.health(say)
    if options.json:
        sys.stdout.write(json.dumps(codec.to_json(found), indent=2) + "\n")
    elif options.issue:
        sys.stdout.write(issue_text(found, api.versions_key()))
    else:
        Console().print(doctor_view(found))
    return 1 if found.broken else 0
