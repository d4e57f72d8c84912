"""Reserves an output folder for one run: refuses a folder with another run's work, and locks it while a run is alive.

The lock (flock(2)) belongs to an open file that the training process inherits: it lasts until parent and child exit."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.support.files import A_LINK, NOT_ORDINARY, open_own
from autotrain_mem.support.host import NO_INODES, lacks_inodes
from autotrain_mem.types.report import RUN_NAME

if sys.platform != "win32":  # Windows has no flock: runs there are not locked
    import fcntl

LOCK_NAME, KEY_NAME = "_autofit.lock", "_autofit.key"
"""Files whose names begin with ``_`` are not pushed to the hub (``transformers/trainer.py: push_to_hub``). The machines
of a run authenticate each other with the key (``training.machines``)."""

LOCK_SECONDS = 1.0
"""The longest wait for a lock. A command can hold it for a moment, only to check the folder."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")
"""Weight files and shard indices. ``save_pretrained`` deletes those that it does not write itself
(``transformers/modeling_utils.py: save_pretrained``, "Clean the folder from a previous save")."""

WRITTEN = (
    "plan.json report.html events.jsonl memory.jsonl memory.rank*.jsonl train.log train.rank*.log probe.log "
    "probe.rank*.log README.md config.json generation_config.json adapter_config.json preprocessor_config.json "
    "processor_config.json video_preprocessor_config.json chat_template.json chat_template.jinja "
    "additional_chat_templates tokenizer_config.json special_tokens_map.json added_tokens.json tokenizer.json "
    "tokenizer.model vocab.json vocab.txt merges.txt spiece.model sentencepiece.bpe.model spm*.model modeling_*.py "
    "configuration_*.py trainer_state.json latest zero_to_*.py completions"
)
"""A run's files beside weights and checkpoints, written by autofit; transformers (``utils/hub.py, utils/__init__.py,
tokenization_utils_base.py``, its models' ``VOCAB_FILES_NAMES``, ``dynamic_module_utils.py: custom_object_save``); PEFT;
DeepSpeed (``engine.py: save_checkpoint``); TRL (``grpo_trainer.py: log``). TensorBoard overwrites no file."""


OnEvent = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    number: str
    """The run's id, which its checkpoints contain."""
    start: Path | None
    """The checkpoint that the run resumed from; None if it began from scratch."""
    command: tuple[str, ...] = ()
    """The arguments with which all machines of the run were started; empty for a single machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """An output folder locked for this run."""

    path: Path
    lock: int
    """The open file that holds the lock; the training process inherits it."""

    @property
    def identity(self) -> str:
        """Identifies the lock file, for :func:`check_in_place`."""
        return _identity(os.fstat(self.lock))

    def last_run(self) -> LastRun | None:
        """Returns the last run here; None if none is recorded."""
        record = _read_record(self.lock)
        if not record.get("run"):
            return None
        return LastRun(number=str(record["run"]), start=Path(record["start"]) if record.get("start") else None)

    def begin(self, run: LastRun) -> None:
        """Records a run as the last one here. Raises OutputFolderError if the record cannot be written."""
        start = None if run.start is None else str(run.start.resolve())
        try:
            record = {**_read_record(self.lock), "run": run.number, "start": start, "command": _digest(run.command)}
            _write_record(self.lock, record | {"has_ended": False})
        except OSError as error:
            raise unwritable(self.path, str(error.strerror)) from error

    def end(self) -> None:
        """Records that the run has ended and must not be resumed."""
        with contextlib.suppress(OSError):  # the model is already written
            _write_record(self.lock, {**_read_record(self.lock), "has_ended": True})


def is_left_by(output_dir: str, command: Sequence[str]) -> bool:
    """Returns whether a folder has checkpoints of an unfinished run that this multi-machine command started."""
    record = _record_in(Path(output_dir))
    is_same = record.get("command") == _digest(command) and not record.get("has_ended", True)
    return is_same and any(Path(output_dir).glob("checkpoint-*"))


@contextlib.contextmanager
def hold_folder(
    output_dir: str, *, resuming: bool, overwrite: bool = False, on_event: OnEvent = lambda event: None
) -> Iterator[RunFolder]:
    """Makes the output folder, and locks it against other runs until the block ends. Raises OutputFolderError if it
    cannot be written, is in use, or holds another run's work.

    Args:
        resuming: Whether to resume the run in the folder.
        overwrite: Whether to move another run's folder aside first.
        on_event: Gets ``moved_aside`` with the new ``path``, and a ``note`` if the filesystem has no locks.
    """
    folder = Path(output_dir)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(lock_folder(output_dir, on_event))
        aside = move_aside(output_dir) if overwrite else None
        if aside is not None:
            on_event({"event": "moved_aside", "path": str(aside)})
            lock = stack.enter_context(lock_folder(output_dir))
            with contextlib.suppress(FileNotFoundError):  # it is the key of this run's machines
                (aside / KEY_NAME).rename(folder / KEY_NAME)
        elif not resuming:
            _check_is_free(folder)
        try:
            _write_record(lock, {"run": "", **_read_record(lock)})
            with tempfile.TemporaryFile(dir=folder, buffering=0) as trial:
                trial.write(bytes(4096))
        except OSError as error:
            raise unwritable(folder, str(error.strerror)) from error
        yield RunFolder(path=folder, lock=lock)


@contextlib.contextmanager
def lock_folder(output_dir: str, on_event: OnEvent = lambda event: None) -> Iterator[int]:
    """Makes a folder, locks it against other runs, and yields the open file that holds the lock. Raises
    OutputFolderError if another run is using the folder, or the folder or its lock file cannot be made."""
    folder, give_up = Path(output_dir), time.monotonic() + LOCK_SECONDS
    while (file := _try_lock(folder, on_event)) is None:
        if time.monotonic() >= give_up:
            record = _record_in(folder)
            who = f" (process {record['pid']} on {record.get('host')})" if record.get("pid") else ""
            raise OutputFolderError(
                f"Another run is under way in the output folder {folder}{who}.",
                hint="Wait until it has ended, or give another --output_dir.",
            )
        time.sleep(LOCK_SECONDS / 20)
    with contextlib.closing(os.fdopen(file, "rb+", buffering=0)):  # the lock ends when the last process closes the file
        with contextlib.suppress(OSError):  # one machine needs pid and host for error messages only
            _write_record(file, {**_read_record(file), "pid": os.getpid(), "host": socket.gethostname()})
        yield file


def move_aside(output_dir: str) -> Path | None:
    """Renames the folder of another run to ``NAME.previous-1`` or the next free number; returns the new path, or None
    if there is no run to move. Raises OutputFolderError if it cannot be renamed, or holds the working directory."""
    folder = Path(output_dir).absolute()
    if not folder.is_dir() or not _holds(folder):
        return None
    if folder.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise OutputFolderError(
            f"The output folder {output_dir} is the working directory or contains it, and cannot be moved.",
            hint="Start autofit in another directory, or give another --output_dir.",
        )
    numbers = itertools.count(1)
    aside = next(path for n in numbers if not (path := folder.with_name(f"{folder.name}.previous-{n}")).exists())
    try:
        return folder.rename(aside)
    except OSError as error:
        raise OutputFolderError(
            f"The run in {output_dir} cannot be moved to {aside.name}: {error.strerror}.",
            hint="Give another --output_dir, or move that folder yourself.",
        ) from error


def check_folder(output_dir: str, *, resuming: bool, overwrite: bool = False) -> None:
    """Raises the errors of :func:`hold_folder` that can be found without creating anything."""
    folder = Path(output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        reason = "is not writable" if nearest.is_dir() else "is a file"
        raise unwritable(output_dir, f"{nearest} {reason}")
    if lacks_inodes(nearest):
        raise unwritable(output_dir, NO_INODES)
    if os.path.lexists(folder / LOCK_NAME):
        with lock_folder(output_dir):
            pass
    if not resuming:
        _check_is_free(Path(output_dir), overwrite=overwrite)


def check_in_place(output_dir: str, identity: str) -> None:
    """Raises OutputFolderError if the run's folder (:attr:`RunFolder.identity`) was moved and another run has begun at
    the same path."""
    with contextlib.suppress(FileNotFoundError):  # moved away and not replaced: the folder is created again
        if _identity(os.stat(Path(output_dir) / LOCK_NAME)) != identity:
            raise OutputFolderError(
                f"The run's output folder was moved away, and another run has begun in {output_dir}.",
                hint="The earlier files are in the moved folder. Resume there: "
                "--output_dir THAT_FOLDER --resume_from_checkpoint.",
            )


def identity_of(folder: Path) -> str:
    """Returns the identity of a folder's lock file on this machine; empty if there is none."""
    with contextlib.suppress(OSError):
        return _identity(os.stat(folder / LOCK_NAME))
    return ""


def is_held_by(folder: Path, pid: int, host: str) -> bool:
    """Returns whether the lock file names process ``pid`` on machine ``host`` as its last holder."""
    record = _record_in(folder)
    return (record.get("pid"), record.get("host")) == (pid, host)


def unwritable(folder: str | Path, reason: str) -> OutputFolderError:
    """Returns the error for an output folder that cannot be written to."""
    if reason.endswith(os.strerror(errno.ENOSPC)) and lacks_inodes(folder):
        reason = NO_INODES
    return OutputFolderError(
        f"Cannot write to the output folder {folder}: {reason}.",
        hint="Remove the file of that name, or give another --output_dir."
        if reason.endswith((A_LINK, NOT_ORDINARY))
        else "Give --output_dir a folder that you can write to, on a disk with room for the model.",
    )


def _holds(folder: Path) -> list[str]:
    """Lists the files that would be lost: those of a run, and weights."""
    weights = sorted({path.name for kind in WEIGHTS for path in folder.glob(kind)})
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
    return [*([RUN_NAME] if (folder / RUN_NAME).exists() else []), *checkpoints, *weights]


def _check_is_free(folder: Path, *, overwrite: bool = False) -> None:
    """Refuses a folder with files that would be overwritten, or with a run or weights that will not be moved aside."""
    if (names := _holds(folder)) and not overwrite:
        checkpoints = [name for name in names if name.startswith("checkpoint-")]
        what = "a run" if checkpoints or RUN_NAME in names else "weights"
        go_on = "\nTo continue it, add --resume_from_checkpoint." if checkpoints else ""
        raise OutputFolderError(
            f"The output folder {folder} already holds {what} ({', '.join(names[:3])}).",
            hint="Give another --output_dir, or add --overwrite_output_dir: "
            f"the old folder is then renamed, and nothing in it is lost.{go_on}",
        )
    own = [] if names else sorted(path.name for path in folder.glob("*") if any(map(path.match, WRITTEN.split())))
    if own and "run" not in _record_in(folder):
        raise OutputFolderError(
            f"The output folder {folder} holds files that this run would overwrite and no earlier run of autofit wrote "
            f"({', '.join(own[:3])}{', ...' * (len(own) > 3)}).",
            hint="Give another --output_dir: a new folder, or one without files of these names.",
        )


def is_under_way(folder: Path) -> bool | None:
    """Returns whether a process holds a run's folder; None if that is unknown, as on another machine than the run's,
    which a lock need not reach. Changes nothing."""
    if sys.platform == "win32":
        return None
    try:
        file = open_own(folder / LOCK_NAME)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False if _read_record(file).get("host") == socket.gethostname() else None
    finally:
        os.close(file)


def _try_lock(folder: Path, on_event: OnEvent) -> int | None:
    """Locks the lock file; returns None if another process holds it, or has just moved the folder away."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise unwritable(folder, f"{Path(error.filename).name}: {error.strerror}") from error
    try:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            message = f"{folder} cannot be locked ({error.strerror}): make sure that no other run writes there"
            on_event({"event": "note", "message": message})
            return file
        os.close(file)
        raise unwritable(folder, f"{LOCK_NAME}: {error.strerror}") from error
    os.close(file)
    return None


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}"


def _digest(command: Sequence[str]) -> str:
    """Hashes a command for the lock file, which other users can read: the command may contain a token."""
    return hashlib.sha256(json.dumps([*command]).encode()).hexdigest()


def _record_in(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError), os.fdopen(open_own(folder / LOCK_NAME), "rb") as file:
        return _read_record(file.fileno())
    return {}


def _read_record(file: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return record if isinstance(record := json.loads(os.pread(file, 65536, 0)), dict) else {}
    return {}


def _write_record(file: int, record: Mapping[str, Any]) -> None:
    """Writes in place, since the lock belongs to the file; truncates last."""
    content = json.dumps(record).encode()
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
