"""Writes files atomically, and reads untrusted files."""

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from autotrain_mem.support.errors import OutputFolderError, PlanFileError
from autotrain_mem.support.host import NO_INODES, lacks_inodes

OUTPUT_FOLDER = "--output_dir a folder"
"""The place of a run's files, as hints name it: "Give --output_dir a folder in another place"."""

_ON_ANOTHER_DISK = "Remove some files, or give {place} on another disk."
_WRITABLE = "Give {place} that you may write to."
_THERE = "Make the folder first, or give {place} in another place."
_REASONS = {
    errno.ENOSPC: ("the disk is full", _ON_ANOTHER_DISK),
    errno.EDQUOT: ("the disk quota is used up", _ON_ANOTHER_DISK),
    errno.EFBIG: ("it is larger than the largest file allowed", "Raise the limit that ulimit -f shows."),
    errno.EACCES: ("writing there is not permitted", _WRITABLE),
    errno.EPERM: ("writing there is not permitted", _WRITABLE),
    errno.EROFS: ("the disk is read-only", _WRITABLE),
    errno.ENOENT: ("its folder does not exist, or is a file", _THERE),
    errno.ENOTDIR: ("its folder does not exist, or is a file", _THERE),
    errno.EISDIR: ("a folder of that name is in the way", "Move it away, or give {place} in another place."),
    errno.ENAMETOOLONG: ("its name is too long", "Give {place} with a shorter name."),
}
"""errno -> its meaning to the user, and the fix."""

LARGEST_JSON_BYTES = 1 << 30
"""More than any file of JSON that is read: ``trainer_state.json`` grows by some 200 bytes with each logged step."""
PARTIAL = ".partial"
"""Suffix of a file that is being written."""
NOT_ORDINARY = "it is a device, a pipe or a socket, not a file"
A_LINK = "it is a symbolic link, which is not followed"


def write_json(path: Path, payload: dict[str, Any], *, place: str = OUTPUT_FOLDER) -> None:
    """Replaces ``path`` in one step; if the write fails, the old file stays.

    Writes NaN, which JSON lacks, as ``"nan"``: null would look like a loss that was not measured. ``place``: the flag
    and value that select another place, for the hint. Raises OutputFolderError if the file cannot be written.
    """
    text = json.dumps(_finite(payload), indent=2, allow_nan=False) + "\n"
    with writing(path, place):
        replace_file(path, text.encode())


def replace_file(path: Path, content: bytes, mode: int = 0o666, *, flushes: bool = True) -> None:
    """Replaces a file in one step; if that raises OSError, the old one stays. ``flushes`` guards against power cuts."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with open(unfinished, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
            if flushes:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):  # the first error matters
            unfinished.unlink(missing_ok=True)


class JsonLines:
    """Appends JSON objects to a file, one a line; creates its folder.

    The file is opened for each line, so that a crash loses none. An incomplete last line gets a line break first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_mended = False

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends one line. Raises OSError if the disk is full or the folder is not writable."""
        if not self._is_mended:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+", opener=open_own) as file:
                if file.tell() and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
                    file.write(b"\n")
        self._is_mended = False  # until the line is complete
        with open(self.path, "a", encoding="utf-8", opener=open_own) as file:
            file.write(json.dumps(line) + "\n")
        self._is_mended = True


def open_own(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o666, *, follows_links: bool = False) -> int:
    """Opens a regular file in a folder that others may write to, without following links or waiting for a pipe.

    Raises OSError if it cannot be opened, and for devices, pipes, sockets and folders.
    """
    flags |= getattr(os, "O_NONBLOCK", 0) | (0 if follows_links else getattr(os, "O_NOFOLLOW", 0))
    try:
        file = os.open(path, flags, mode)
    except OSError as error:
        raise OSError(error.errno, A_LINK if error.errno == errno.ELOOP else error.strerror, path) from error
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    is_folder = stat.S_ISDIR(mode)
    raise OSError(*((errno.EISDIR, os.strerror(errno.EISDIR)) if is_folder else (errno.EINVAL, NOT_ORDINARY)), path)


def is_ordinary(path: Path) -> bool:
    """Returns whether a path is a regular file, a folder, a link to one, or nothing that can be opened."""
    return not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path)


def read_start(path: Path, most_bytes: int) -> bytes:
    """Returns a file's first bytes. Raises OSError if :func:`open_ordinary` does."""
    with open_ordinary(path) as file:
        return file.read(most_bytes)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a regular file. Raises OSError if it cannot be opened, ValueError for other content."""
    return parse_object(read_start(path, LARGEST_JSON_BYTES).decode("utf-8-sig"))


def parse_object(text: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ValueError for any other text, and for text that cannot be encoded."""
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if "\\ud" in text.lower():
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair cannot be written anywhere
    return content


@contextlib.contextmanager
def open_ordinary(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file, or a link to one, to read. Raises OSError for anything else: a device may be endless."""
    with os.fdopen(open_own(path, follows_links=True), "rb") as file:
        yield file


@contextlib.contextmanager
def writing(path: Path, place: str) -> Iterator[None]:
    """Within the block, an OSError becomes the OutputFolderError for a file that cannot be written."""
    try:
        yield
    except OSError as error:
        unforeseen = (error.strerror or str(error), "Give {place} in another place.")
        reason, hint = _REASONS.get(error.errno or 0, unforeseen)
        reason = NO_INODES if error.errno == errno.ENOSPC and lacks_inodes(path) else reason
        raise OutputFolderError(f"Cannot write {path}: {reason}.", hint=hint.format(place=place)) from error


def check_replaceable(
    file: Path,
    place: str,
    what: str,
    is_one: Callable[[Path], bool],
    error: type[OutputFolderError | PlanFileError] = OutputFolderError,
) -> None:
    """Checks early that a path is writable, and that a file which already exists there is a ``what``. ``is_one``:
    returns whether a file may be replaced. Raises OSError if it cannot be read. ``error``: the error for a file that
    may not be replaced. Raises OutputFolderError if its folder does not exist or is not writable, or the path is a
    folder, a device or a pipe."""
    with writing(file, place):
        if not file.parent.is_dir():
            raise OSError(errno.ENOENT, "")
        if not os.access(file.parent, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "")
        if lacks_inodes(file.parent):
            raise OSError(errno.ENOSPC, "")
        is_taken = file.exists() and not is_one(file)
    if is_taken:
        message = f"{file} exists and is not a {what}, so it is not overwritten."
        raise error(message, hint=f"Move it away, or give {place} in another place.")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
