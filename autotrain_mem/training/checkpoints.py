"""Tells whole checkpoints from torn ones, and finds the one to go on from.

transformers writes a checkpoint in place, file by file, and takes the one with the highest number to go on from
(``trainer_utils.py: get_last_checkpoint``), whole or not. So whoever trains here writes a manifest of all files and
their sizes into it, last; and who goes on reads that first. A checkpoint without one, as TRL alone writes it, is looked
at file by file.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autotrain_mem.files import replace_file

MANIFEST = "autofit.checkpoint.json"
STATE = "trainer_state.json"
"""The file that transformers writes last (``trainer.py: _save_checkpoint``)."""
TORN = "torn-"
"""Before the name of one that was set aside: transformers counts whatever begins with ``checkpoint-``
(``trainer_utils.py: sort_checkpoints``), and would delete a whole one in its stead."""

_NUMBERED = re.compile(r"checkpoint-(\d+)")
_PICKLED = (".pt", ".pth", ".bin")
"""torch.save writes a zip archive, whose directory stands at its end (``torch/serialization.py: save``)."""
_ZIP = b"PK\x03\x04"
_HEADER_AT_MOST = 100_000_000
"""Bytes of a header of safetensors (``safetensors/src/tensor.rs: MAX_HEADER_SIZE``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is whole."""

    path: Path
    step: int
    """Optimizer steps that it holds."""


def write_manifest(checkpoint: Path, run: str = "") -> None:
    """Write it when all other files are written: whoever finds the manifest knows how long each has to be.

    The manifest waits for the disk, the others do not: after a power cut one of them may be shorter, which shows.

    Args:
        run: The id of the run that wrote the checkpoint, for :func:`run_of`.

    Raises:
        OSError: it cannot be written.
    """
    sizes = {str(file.relative_to(checkpoint)): file.stat().st_size for file in _files(checkpoint)}
    replace_file(checkpoint / MANIFEST, json.dumps({"run": run, "files": sizes}, indent=2).encode())


def why_torn(checkpoint: Path) -> str:
    """Say in a few words what of a checkpoint is not whole; empty for one that is.

    >>> why_torn(Path("checkpoint-that-is-not-there"))
    'trainer_state.json is missing'
    """
    try:
        if (checkpoint / MANIFEST).is_file():
            return next(_against_manifest(checkpoint), "")
        return next(_by_structure(checkpoint), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read: {type(error).__name__}: {error}"


def why_no_start(checkpoint: Path) -> str:
    """Say in a few words what keeps a training from going on with a checkpoint; empty for nothing.

    With a model alone (``save_only_model``) transformers starts optimizer and schedule afresh, and says nothing
    (``trainer.py: _load_optimizer_and_scheduler``): another training than the one that was asked for.
    """
    torn = why_torn(checkpoint)
    if torn or (any(checkpoint.glob("optimizer*")) and (checkpoint / "scheduler.pt").is_file()):
        return torn
    return "it holds no optimizer and no schedule, as --save_only_model leaves them out"


def newest_whole(output_dir: Path) -> Checkpoint | None:
    """Find the newest that holds all that was to be in it; None where there is none."""
    return next((each for each in _newest_first(output_dir) if not why_torn(each.path)), None)


def newest_start(output_dir: Path, run: str | None = None) -> Checkpoint | None:
    """Find the one to go on from; None where there is none.

    Args:
        run: The id of the run whose checkpoints count; None: anybody's.
    """
    own = (each for each in _newest_first(output_dir) if run is None or run_of(each.path) == run)
    return next((each for each in own if not why_no_start(each.path)), None)


def run_of(checkpoint: Path) -> str:
    """Read the id of the run that wrote a checkpoint; empty where the manifest has none, or there is no manifest."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return str(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).get("run", ""))
    return ""


def set_torn_aside(output_dir: Path) -> tuple[str, ...]:
    """Rename what is torn, so that nobody takes or counts it; returns, for each, what was wrong and where it is now."""
    return tuple(_set_aside(each.path, why) for each in _checkpoints(output_dir) if (why := why_torn(each.path)))


def discard(checkpoint: Path) -> None:
    """Remove one that was never finished. What cannot be removed stays, and is told to be torn later."""
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    """Read a checkpoint's step from its state, whatever the folder is called; 0 for one that does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["global_step"])
    return 0


def _newest_first(output_dir: Path) -> list[Checkpoint]:
    return sorted(_checkpoints(output_dir), key=lambda each: each.step, reverse=True)


def _checkpoints(output_dir: Path) -> Iterator[Checkpoint]:
    for path in output_dir.glob("checkpoint-*"):
        number = _NUMBERED.fullmatch(path.name)
        if number and path.is_dir():
            yield Checkpoint(path=path, step=int(number[1]))


def _set_aside(checkpoint: Path, why: str) -> str:
    names = itertools.chain([TORN + checkpoint.name], (f"{TORN}{checkpoint.name}-{n}" for n in itertools.count(2)))
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"{checkpoint.name} is torn ({why}), and cannot be moved aside: {error.strerror}"
    return f"{checkpoint.name} is torn ({why}): it was moved to {aside.name}"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def _against_manifest(checkpoint: Path) -> Iterator[str]:
    sizes: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} of {size} bytes"


def _by_structure(checkpoint: Path) -> Iterator[str]:
    if not (checkpoint / STATE).is_file():
        yield f"{STATE} is missing"
        return
    int(json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["global_step"])
    files = list(_files(checkpoint))
    if not any(file.suffix in (".safetensors", ".bin") for file in files):
        yield "it holds no weights"
    for file in files:
        if file.name.endswith(".index.json"):
            shards = sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))
            yield from (f"{shard} is missing" for shard in shards if not (file.parent / shard).is_file())
        elif not _is_complete(file):
            yield f"{file.name} is cut short"


def _is_complete(file: Path) -> bool:
    """Compare a file's length with what it says of it; one that says nothing is taken as it is."""
    if file.suffix == ".safetensors":
        return _ends_where_it_says(file)
    if file.suffix not in _PICKLED:
        return True
    with file.open("rb") as opened:
        start = opened.read(len(_ZIP))
    # A file that does not begin as an archive is older, and only reading it would tell.
    return bool(start) and (start != _ZIP or zipfile.is_zipfile(file))


def _ends_where_it_says(file: Path) -> bool:
    """A header's length in 8 bytes, the header, and the tensors, whose places it names (safetensors' README)."""
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _HEADER_AT_MOST:
            return False
        header_text = opened.read(length)
    if len(header_text) < length:
        return False
    header = json.loads(header_text)
    ends: list[int] = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)
