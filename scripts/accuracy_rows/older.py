"""The TRL that some rows ran, beside the installed one."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autotrain_mem import api

OLDER_TRL = "trl==1.9.2"


def older_trl_folder(given: pathlib.Path | None) -> pathlib.Path:
    """Where the older TRL is; installed beside this environment, without what it depends on, if it is nowhere yet."""
    folder = given or pathlib.Path(sys.prefix) / OLDER_TRL.replace("==", "-")
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), OLDER_TRL]
        subprocess.run(command, check=True)
    return folder


@contextmanager
def older_worker(folder: pathlib.Path) -> Iterator[api.Worker]:
    """A worker that finds this folder's packages before the installed ones."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder.resolve()), before)))
    try:
        with api.Worker() as worker:
            yield worker
    finally:
        os.environ["PYTHONPATH"] = before
