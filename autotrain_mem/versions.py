"""Tells what is installed, for a cache's key: with other libraries or another autofit what was kept counts no more."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
from collections.abc import Iterator

PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "tokenizers"),
    *("liger-kernel", "flash-attn", "kernels", "vllm"),
)
"""Whose code a rehearsal runs or stands in for, and which are looked for to choose what runs."""
OFTEN_EDITED = ("trl",)
"""Patched in place by those who try things out, and small enough to read each file: 13 ms, and the same digest wherever
it is installed, so that a plan can be carried to another machine."""
DEVELOPMENT = ".dev"
"""In the version of a checkout, which stays the same while its files change: those are looked at too."""

OURS = pathlib.Path(__file__).parent


@functools.cache
def versions_key() -> dict[str, str | None]:
    """``{"python": "3.11.9", "torch": "2.13.0", ..., "flash-attn": None, "autotrain_mem": "<digest of its files>"}``.

    Imports none of them; about 32 ms.
    """
    key: dict[str, str | None] = {"python": platform.python_version(), "autotrain_mem": content_digest(OURS)}
    for package in PACKAGES:
        version = installed_version(package)
        key[package] = version
        if version is not None and (package in OFTEN_EDITED or DEVELOPMENT in version):
            key[f"{package} files"] = _files_digest(package, read=package in OFTEN_EDITED)
    return key


def installed_version(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def content_digest(folder: pathlib.Path) -> str:
    """Digests the names and the content of all its Python files: a copy elsewhere has the same."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(_python_files(str(folder))):
        content = pathlib.Path(path).read_bytes()
        digest.update(f"{os.path.relpath(path, folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files_digest(package: str, *, read: bool) -> str:
    """Digests the content of its Python files, or their sizes and dates, which is quicker than reading them."""
    digest = hashlib.blake2b(digest_size=16)
    spec = importlib.util.find_spec(package.replace("-", "_"))
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if read:
            digest.update(content_digest(pathlib.Path(folder)).encode())
            continue
        for path in sorted(_python_files(folder)):
            status = os.stat(path)
            digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _python_files(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names if name.endswith(".py"))
