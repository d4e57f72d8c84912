"""A predicted memory snapshot on disk, where ``torch.cuda.memory._dump_snapshot`` would have put a measured one."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from autotrain_mem.support.files import check_replaceable, read_start, refusal, replace_file
from autotrain_mem.support.units import format_bytes
from autotrain_mem.types import Estimate

_PROTOCOL = 4
"""The page reads pickles of protocols 2 to 4 (torch/utils/viz/MemoryViz.js: unpickle)."""

_PLACE = "--snapshot a file"
"""The flag that says where it goes, with what it takes."""


def check_snapshot(path: Path) -> None:
    """Refuses what :func:`write_snapshot` would refuse, as far as it can be told before there is a snapshot.

    Raises:
        OutputFolderError: it is a folder, a device or a file that is no pickle, or its folder is not there or cannot
            be written.
    """
    check_replaceable(path, _PLACE, "snapshot", lambda file: read_start(file, 1) in (b"", pickle.PROTO))


def write_snapshot(path: Path, snapshot: Mapping[str, Any]) -> None:
    """Replace ``path``, an earlier snapshot, in one step; a write that fails leaves it as it was.

    Raises OutputFolderError: the file cannot be written; the hint says what to do.
    """
    check_snapshot(path)
    try:
        replace_file(path.resolve(), pickle.dumps(snapshot, _PROTOCOL))
    except OSError as error:
        raise refusal(path, error, _PLACE) from error


def snapshot_view(path: Path, estimate: Estimate) -> Text:
    """Shows where it is, how to open it, and what it does not show."""
    vllm = estimate.vllm_share_bytes
    share = f", {format_bytes(vllm)} of it vLLM's," if vllm else ""
    lines = [
        f"Wrote the predicted history to {path} ({format_bytes(path.stat().st_size)}).",
        f"Drag it onto https://pytorch.org/memory_viz, or run python -m torch.cuda._memory_viz trace_plot {path}.",
        f"It shows torch's allocator; {format_bytes(estimate.outside_bytes)}{share} outside it are not in it.",
    ]
    if not estimate.reserved.fits:
        lines.append("The run does not fit: after each oom the history goes on as if there had been memory enough.")
    return Text("\n".join(lines))
