"""Distinguishes whole checkpoints from torn ones by a manifest that is written last, and finds the one to resume from.

transformers resumes from the highest number, torn or not (``trainer_utils.py: get_last_checkpoint``)."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autotrain_mem.support.errors import OutputFolderError, described
from autotrain_mem.support.files import is_ordinary, read_object, replace_file

MANIFEST = "autofit.checkpoint.json"
STATE = "trainer_state.json"
"""The file that transformers writes last (``trainer.py: _save_checkpoint``)."""
TORN = "torn-"
"""Prefix of a torn checkpoint's new name. transformers counts names that begin with ``checkpoint-``
(``trainer_utils.py: sort_checkpoints``), and would delete a whole checkpoint to keep a torn one."""

_NUMBERED = re.compile(r"checkpoint-(\d+)")
_WEIGHTS = (
    *("model*.safetensors", "pytorch_model*.bin", "adapter_model.*"),
    *("pytorch_model_fsdp*/*.distcp", "global_step*/*_model_states.pt"),
)
"""Weights of a model or adapter (``transformers/utils/__init__.py: WEIGHTS_NAME``), of FSDP and of DeepSpeed."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems that cannot sync (``man 2 fsync``), some for folders only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint folder and its step."""

    path: Path
    step: int
    """Optimizer steps done."""


def reach_disk(checkpoint: Path) -> dict[str, int]:
    """Waits until all files of a checkpoint are on disk; returns the CRC-32 of each, computed meanwhile.

    The checksums take no extra time: after the write, 3 GB took 1.04 to 1.17 s to reach the disk with checksums, and
    1.01 to 1.19 s without; with SHA-256 it was 2.1 to 2.3 s (2 cores of a Xeon, Python 3.11, 2026-11).
    """
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.name != MANIFEST]
    folders = [path for path in checkpoint.rglob("*") if path.is_dir()]
    with ThreadPoolExecutor(1) as pool:
        sums = pool.submit(lambda: {str(file.relative_to(checkpoint)): _checksum(file) for file in files})
        sync_all([*files, *folders, checkpoint, checkpoint.parent])
        return sums.result()


def sync_all(paths: Iterable[Path]) -> None:
    """Waits until files, or the entries of folders, are on disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(opened)


def write_manifest(checkpoint: Path, sums: Mapping[str, int], run: str = "", order: Mapping[str, str] = {}) -> None:
    """Writes the manifest, with the size and checksum of each file. Call it when all other files are on disk.

    Args:
        sums: The checksums that :func:`reach_disk` returned.
        run: The id of the run that wrote the checkpoint.
        order: The values that the row order depends on (``training.process.checkpointing: order_of``).
    """
    sizes = {name: (checkpoint / name).stat().st_size for name in sums}
    content = {"run": run, "order": {**order}, "files": sizes, "crc32": sums}
    replace_file(checkpoint / MANIFEST, json.dumps(content, indent=2).encode())
    sync_all([checkpoint])


def rotate(output_dir: Path, *, step: int, limit: int | None, best: str | None) -> None:
    """Removes the checkpoints with the fewest steps, until ``limit`` (``save_total_limit``) are left.

    transformers sorts by modification time, and deletes the newest if the clock was set back (``trainer_utils.py:
    rotate_checkpoints``). The checkpoint of ``step`` and the ``best`` one stay, and so do those beyond ``step``, which
    belong to the run that this run branched off.
    """
    if limit is None or limit <= 0:
        return
    spared = {f"checkpoint-{step}", Path(best or "").name}
    earlier = [each.path for each in newest_first(output_dir) if each.step <= step]
    removable = [path for path in earlier if path.name not in spared]
    for path in removable[max(0, limit - (len(earlier) - len(removable))) :]:
        discard(path)


def why_torn(checkpoint: Path) -> str:
    """Returns what is missing in a checkpoint, judged by file names, and by the sizes in its manifest, if it has one;
    empty for a complete one.

    >>> why_torn(Path("checkpoint-that-is-not-there"))
    'trainer_state.json is missing'
    """
    if odd := [path.name for path in checkpoint.rglob("*") if not is_ordinary(path)]:
        return f"{odd[0]} is not a regular file"  # torch would read a pipe or a device for ever
    return _first_of(_against_manifest if (checkpoint / MANIFEST).is_file() else _by_structure, checkpoint)


def why_not_whole(checkpoint: Path) -> str:
    """Returns why a checkpoint is incomplete or differs from its checksums; empty if it is whole."""
    return why_torn(checkpoint) or _first_of(_against_checksums, checkpoint)


def why_no_start(checkpoint: Path) -> str:
    """Returns why a run cannot resume from a checkpoint; empty if it can.

    From a checkpoint with weights only (``save_only_model``) transformers silently resumes with a new optimizer and
    schedule (``trainer.py: _load_optimizer_and_scheduler``).
    """
    without = "it has no optimizer state or no schedule, as written with --save_only_model"
    return why_not_whole(checkpoint) or ("" if _has_state(checkpoint) else without)


def newest_whole(output_dir: Path) -> Checkpoint | None:
    """Returns the newest whole checkpoint; None if there is none."""
    return next((each for each in newest_first(output_dir) if not why_not_whole(each.path)), None)


def newest_start(
    output_dir: Path, run: str | None = None, on_torn: Callable[[str], None] = lambda message: None
) -> Checkpoint | None:
    """Returns the newest checkpoint to resume from, or None; renames torn ones, so that nothing uses or counts them.

    Sizes are compared in all checkpoints, contents only in candidates, newest first. ``run``: the id of the run
    whose checkpoints count; None for any run.
    """
    for each in newest_first(output_dir):
        if why := why_torn(each.path):
            on_torn(_set_aside(each.path, why))
    for each in newest_first(output_dir):
        if run not in (None, run_of(each.path)) or not _has_state(each.path):
            continue
        if not (why := why_not_whole(each.path)):
            return each
        on_torn(_set_aside(each.path, why))
    return None


def run_of(checkpoint: Path) -> str:
    """Returns the id of the run that wrote a checkpoint, from its manifest; empty if it has none."""
    with contextlib.suppress(OSError, ValueError):
        return str(read_object(checkpoint / MANIFEST).get("run", ""))
    return ""


def is_deepspeeds(checkpoint: Path) -> bool:
    """Returns whether a checkpoint has DeepSpeed's files: each rank's part, beside the files of transformers
    (``deepspeed/runtime/engine.py: save_checkpoint, _get_ckpt_name``)."""
    return any(checkpoint.glob("global_step*/*mp_rank_00_model_states.pt"))


def processes_of(checkpoint: Path) -> int:
    """Counts the processes that wrote a checkpoint: each saves its random state (``trainer.py: _save_rng_state``)."""
    return max(1, len(list(checkpoint.glob("rng_state_*.pth"))))


def instead_of(checkpoint: Path) -> str:
    """Returns the hint for an unreadable checkpoint: resume from the newest whole one before it, or start again."""
    older = (each.path for each in newest_first(checkpoint.parent) if each.step < step_of(checkpoint))
    found = next((path for path in older if not why_no_start(path)), None)
    again = "Start again: give another --output_dir, and no --resume_from_checkpoint."
    return again if found is None else f"Resume from an older one: --resume_from_checkpoint {found}."


def check_order(checkpoint: Path, order: Mapping[str, str]) -> None:
    """Raises OutputFolderError if a checkpoint's row order differs from this run's (``order``, as returned by
    :func:`training.process.checkpointing.order_of`): resuming skips as many rows as were trained."""
    before = order
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before = dict(read_object(checkpoint / MANIFEST)["order"])
    if other := {name: was for name, was in before.items() if was != order.get(name, was)}:
        changes = "; ".join(f"{name} {was} in the checkpoint, {order[name]} now" for name, was in other.items())
        flags = ", ".join(f"no {name}" if was == "None" else f"{name} {was}" for name, was in other.items())
        raise OutputFolderError(
            f"{checkpoint} was trained on rows in another order: {changes}. This epoch would train on some rows "
            "twice and skip others.",
            hint=f"Resume with the values of the first run: {flags}.\n"
            "Or add --ignore_data_skip true, which starts the epoch again with this run's rows.",
        )


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint. Files that cannot be removed stay, and the checkpoint counts as torn."""
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint)


def step_of(checkpoint: Path) -> int:
    """Reads a checkpoint's step from its state, not from its name; 0 if the state names no step."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        return int(read_object(checkpoint / STATE)["global_step"])
    return 0


def newest_first(output_dir: Path) -> list[Checkpoint]:
    """Lists a folder's checkpoints, whole or not, the newest first."""
    found = ((path, _NUMBERED.fullmatch(path.name)) for path in output_dir.glob("checkpoint-*") if path.is_dir())
    numbered = [Checkpoint(path=path, step=int(number[1])) for path, number in found if number]
    return sorted(numbered, key=lambda each: each.step, reverse=True)


def _has_state(checkpoint: Path) -> bool:
    has_optimizer = any(checkpoint.glob("optimizer*")) or is_deepspeeds(checkpoint)
    return has_optimizer and (checkpoint / "scheduler.pt").is_file()


def _first_of(problems: Callable[[Path], Iterator[str]], checkpoint: Path) -> str:
    try:
        return next(problems(checkpoint), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"it cannot be read: {described(error)}"


def _set_aside(checkpoint: Path, why: str) -> str:
    names = itertools.chain([TORN + checkpoint.name], (f"{TORN}{checkpoint.name}-{n}" for n in itertools.count(2)))
    aside = next(path for path in map(checkpoint.with_name, names) if not path.exists())
    try:
        checkpoint.rename(aside)
    except OSError as error:
        return f"{checkpoint.name} is incomplete ({why}), and cannot be moved aside: {error.strerror}"
    return f"{checkpoint.name} is incomplete ({why}): it was moved to {aside.name}"


def _checksum(file: Path) -> int:
    value, chunk = 0, memoryview(bytearray(1 << 20))
    with file.open("rb", buffering=0) as opened:
        while length := opened.readinto(chunk):
            value = zlib.crc32(chunk[:length], value)
    return value


def _against_manifest(checkpoint: Path) -> Iterator[str]:
    for name, size in read_object(checkpoint / MANIFEST)["files"].items():
        file = checkpoint / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != size:
            yield f"{name} has {file.stat().st_size} of {size} bytes"


def _against_checksums(checkpoint: Path) -> Iterator[str]:
    """Compares contents with the checksums. There are none without a manifest."""
    sums = read_object(checkpoint / MANIFEST)["crc32"] if (checkpoint / MANIFEST).is_file() else {}
    for name, value in sums.items():
        if _checksum(checkpoint / name) != value:
            yield f"{name} differs from its checksum"


def _by_structure(checkpoint: Path) -> Iterator[str]:
    """Looks for weights and the state, which transformers writes last, in a checkpoint of another tool."""
    if not (checkpoint / STATE).is_file():
        yield f"{STATE} is missing"
        return
    step = int(read_object(checkpoint / STATE)["global_step"])
    if _NUMBERED.fullmatch(checkpoint.name) and checkpoint.name != f"checkpoint-{step}":
        yield f"{STATE} has step {step}"
    if not any(any(checkpoint.rglob(kind)) for kind in _WEIGHTS):
        yield "it holds no weights"
