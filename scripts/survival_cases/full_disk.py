"""``autofit`` on a disk that fills up while it trains, for the supervisor too.

``AUTOFIT_MISHAPS`` befalls the training process; this module is run in the place of the command, and has the supervisor
meet the same disk, from the time when that process has marked it to the end of the training.
"""

from __future__ import annotations

import pathlib
import sys

from autotrain_mem.cli import main as cli
from autotrain_mem.machine.fault_injection import MARKS_NAME, full_disk, parse_mishaps


def main() -> None:
    """Run the command that the arguments are of."""
    folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
    with full_disk(folder, lambda: is_full(folder / MARKS_NAME)):
        cli.main()


def is_full(marks: pathlib.Path) -> bool:
    """Whether the mishap has come and is not over."""
    lines = marks.read_text(encoding="utf-8").splitlines() if marks.is_file() else []
    come = parse_mishaps(" ".join(line for line in lines if " " not in line))
    return any(each.over not in lines for each in come if each.kind == "disk" and each.lasts)


if __name__ == "__main__":
    main()
