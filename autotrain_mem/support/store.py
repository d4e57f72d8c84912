"""Caches JSON values by JSON keys on disk, in one small file each. A failure of the cache never fails its caller.

A file is ``{"kind": ..., "key": ..., "value": ...}`` in gzip, whose checksum detects damage. It is replaced in one
step, so that several processes can write the same key, but not flushed: a crash of the machine can damage it.

- A file that is damaged, unreadable or has another key is deleted and reported once.
- A folder that cannot be written (full disk, read-only, no home) is reported once, and not written to again.
- Beyond ``LIMIT_BYTES`` the first put of each store deletes the least recently used files.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from autotrain_mem.support.files import PARTIAL, read_start, replace_file
from autotrain_mem.support.units import KIB, MIB

LIMIT_BYTES = 200 * MIB
"""The largest size of the folder: thousands of rehearsals and profiles of some 10 KiB."""
KEPT_SHARE = 0.75
"""The share of the limit that remains after old files were deleted."""
PAGE_BYTES = 4 * KIB
"""The unit of disk usage: a file takes whole pages."""
ABANDONED_SECONDS = 3600.0
"""Age at which a half-written file is deleted."""

_SUFFIX = ".json.gz"
_GZIP = 31
"""zlib's ``wbits`` for gzip's header and checksum."""

FOLDER_VARIABLE = "AUTOFIT_CACHE"
"""The environment variable that names another folder; if it is empty, nothing is stored."""


def cache_folder() -> pathlib.Path | None:
    """Returns ``$AUTOFIT_CACHE``, else the user's cache folder (``$XDG_CACHE_HOME/autofit``); None to store nothing."""
    if (named := os.environ.get(FOLDER_VARIABLE)) is not None:
        return pathlib.Path(named) if named else None
    import platformdirs

    return platformdirs.user_cache_path("autofit", appauthor=False)


class Store:
    """Keeps values between runs. ``folder``: created when first needed. None keeps nothing. ``on_damage``: called with
    a message, once for damaged files and once for a folder that cannot be written."""

    def __init__(
        self,
        folder: pathlib.Path | None,
        *,
        on_damage: Callable[[str], None] = lambda message: None,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._folder = folder
        self._on_damage = on_damage
        self._limit_bytes = limit_bytes
        self._has_looked = False
        self._said: set[str] = set()
        self._writable = True

    def get(self, kind: str, key: Mapping[str, Any]) -> Any | None:
        """Returns the value of this kind and key, as JSON holds it (tuples become lists); None if there is none."""
        if self._folder is None:
            return None
        path, damage = _path(self._folder, kind, key), ""
        try:
            kept = json.loads(zlib.decompress(read_start(path, self._limit_bytes), wbits=_GZIP))
            if not isinstance(kept, dict) or _canonical([kept.get("kind"), kept.get("key")]) != _canonical([kind, key]):
                damage = "a file has another key"
        except FileNotFoundError:
            return None
        except OSError as error:
            damage = _reason(error)
        except (ValueError, RecursionError, zlib.error):
            damage = "a file is corrupt"
        if damage:
            with contextlib.suppress(OSError):
                path.unlink()
            self._say("damaged", f"the cache in {path.parent} was damaged ({damage}): rebuilt")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # marks it as used
        return kept.get("value")

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Stores a value. Raises TypeError if it cannot be JSON, and nothing else."""
        if self._folder is None or not self._writable:
            return
        body = json.dumps({"kind": kind, "key": key, "value": value}, separators=(",", ":")).encode()
        content = zlib.compress(body, level=1, wbits=_GZIP)  # 5 times as fast as the default, a fifth larger
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(_path(self._folder, kind, key), content, flushes=False)
        except OSError as error:
            self._writable = False
            self._say("unwritable", f"the cache in {self._folder} cannot be written ({_reason(error)})")
            return
        if not self._has_looked:
            self._has_looked = True
            drop_oldest(self._folder, self._limit_bytes)

    def _say(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._on_damage(message)


def _path(folder: pathlib.Path, kind: str, key: Mapping[str, Any]) -> pathlib.Path:
    digest = hashlib.blake2b(_canonical([kind, key]), digest_size=16).hexdigest()
    return folder / f"{kind}-{digest}{_SUFFIX}"


def _canonical(value: Any) -> bytes:
    """Returns the same text for equal values: sorted, without spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def drop_oldest(folder: pathlib.Path, limit_bytes: int) -> None:
    """Deletes the least recently used files if the folder exceeds its limit, down to three quarters of it."""
    # Our files: time of last use, size and path. Abandoned partial files are deleted.
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    pages = -(-status.st_size // PAGE_BYTES)
                    files.append((status.st_mtime, pages * PAGE_BYTES, entry.path))
                elif entry.name.endswith(PARTIAL) and time.time() - status.st_mtime > ABANDONED_SECONDS:
                    os.unlink(entry.path)
    if (total_bytes := sum(size_bytes for _, size_bytes, _ in files)) <= limit_bytes:
        return
    for _, size_bytes, path in sorted(files):
        if total_bytes <= KEPT_SHARE * limit_bytes:
            return
        with contextlib.suppress(OSError):  # another process may have been faster
            os.unlink(path)
        total_bytes -= size_bytes
