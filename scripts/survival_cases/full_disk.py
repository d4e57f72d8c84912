"""Runs ``autofit`` on a disk that becomes full for the supervisor, too.

``AUTOFIT_MISHAPS`` affects only the training process. This module replaces the command, and makes the supervisor's
writes fail as well, from the moment that the training process marks the fault until it marks its end.
"""

import pathlib
import sys

from autotrain_mem.cli import main as cli
from autotrain_mem.machine.fault_injection import MARKS_NAME, full_disk, parse_mishaps


def main() -> None:
    """Runs the command with this process's arguments."""
    folder = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
    with full_disk(folder, lambda: is_full(folder / MARKS_NAME)):
        cli.main()


def is_full(marks: pathlib.Path) -> bool:
    """Returns whether the fault has begun and has not ended."""
    lines = marks.read_text(encoding="utf-8").splitlines() if marks.is_file() else []
    come = parse_mishaps(" ".join(line for line in lines if " " not in line))
    return any(each.over not in lines for each in come if each.kind == "disk" and each.lasts)


if __name__ == "__main__":
    main()
