"""Lists installed versions for the keys of the cache: results of other versions are not reused."""

import contextlib
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping

PACKAGES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "datasets", "tokenizers"),
    *("torch-optimi", "liger-kernel", "flash-attn", "kernels", "vllm"),
)
"""Packages whose code a rehearsal runs or replaces, or whose presence changes what runs."""
TESTED = {
    "torch": ((2, 10), (2, 15)),
    "transformers": ((5, 15), (5, 23)),
    "trl": ((1, 10), (1, 16)),
    "peft": ((0, 18), (0, 21)),
    "accelerate": ((1, 12), (1, 15)),
    "datasets": ((4, 7), (5, 2)),
    "bitsandbytes": ((0, 50), (0, 50)),
}
"""Package whose private names are used -> the oldest and the newest tested minor version. The whole suite runs on the
versions of scripts/constraints.txt, its core also on trl 1.16 (scripts/newest), torch 2.14.1 and the oldest versions
(scripts/versions); torch 2.15 was tested with plans only."""
OFTEN_EDITED = ("trl",)
"""Packages that users patch in place, small enough to read (13 ms): their digest is the same on every machine."""
DEVELOPMENT = ".dev"
"""Marks a checkout, whose files change without its version."""

OURS = pathlib.Path(__file__).parents[1]


@functools.cache
def versions_key() -> dict[str, str | None]:
    """Returns ``{"python": "3.11.9", "torch": "2.13.0", ..., "flash-attn": None, "autotrain_mem": "<digest>"}``.

    Equal for equal code on any machine. Imports none of the packages; takes about 30 ms.
    """
    versions = installed_versions(PACKAGES)
    key: dict[str, str | None] = {"python": sys.version.partition(" ")[0], "autotrain_mem": content_digest(OURS)}
    for package, version in versions.items():
        key[package] = version
        if version is not None and (package in OFTEN_EDITED or DEVELOPMENT in version):
            spec = importlib.util.find_spec(package.replace("-", "_"))
            folders = (spec.submodule_search_locations or ()) if spec else ()
            digests = [content_digest(pathlib.Path(folder), read=package in OFTEN_EDITED) for folder in folders]
            key[f"{package} files"] = " ".join(digests)
    return key


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Reads versions from folders such as ``torch-2.13.0+cu130.dist-info``; None for a package that is not installed.

    The first on ``sys.path`` counts (packaging.python.org, "Recording installed projects"). ``importlib.metadata``,
    which reads all descriptions in 30 ms, is used only for the older layout ``.egg-info``.
    """
    known: dict[str, str] = {}
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder or "."):
                if match := _INSTALLED.fullmatch(entry):
                    known.setdefault(_normal(match["name"]), match["version"] or _OTHERWISE)
    versions = {package: known.get(_normal(package)) for package in packages}
    for package in [package for package, version in versions.items() if version == _OTHERWISE]:
        import importlib.metadata  # slow

        versions[package] = importlib.metadata.version(package)
    return versions


_INSTALLED = re.compile(r"(?P<name>[^-]+)(?:-(?P<version>[^-]+)\.dist-info|.*\.egg-info)")
_OTHERWISE = "egg-info"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def untested(installed: Mapping[str, str | None]) -> list[str]:
    """Returns advice on each installed package that is older or newer than the tested versions.

    >>> untested({"torch": "2.99.0", "trl": "1.12.0", "peft": None})
    ['torch 2.99.0 is newer than 2.15, the newest that autofit was tested with: plans may fail or be off']
    """
    sentences = []
    for package, (oldest, newest) in TESTED.items():
        version = installed.get(package)
        if (numbers := version_of(version or "")[:2]) and numbers < oldest:
            wanted = ".".join(map(str, oldest))
            sentences.append(f"{package} {version} is older than {wanted}: pip install --upgrade '{package}>={wanted}'")
        elif numbers > newest:
            limit = ".".join(map(str, newest))
            so = "the newest that autofit was tested with: plans may fail or be off"
            sentences.append(f"{package} {version} is newer than {limit}, {so}")
    return sentences


def version_of(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: ``version_of("2.13.0+cu130") == (2, 13, 0)``."""
    return tuple(map(int, match[0].split("."))) if (match := re.match(r"\d+(?:\.\d+)*", text)) else ()


def content_digest(folder: pathlib.Path, *, read: bool = True) -> str:
    """Digests the names and contents of all Python files of a folder; without ``read``, their sizes and dates."""
    digest = hashlib.blake2b(digest_size=16)
    found = (os.path.join(parent, name) for parent, _, names in os.walk(str(folder)) for name in names)
    for path in sorted(path for path in found if path.endswith(".py")):
        status = os.stat(path)
        content = pathlib.Path(path).read_bytes() if read else f"{folder} {status.st_mtime_ns}".encode()
        digest.update(f"{path[len(str(folder)) + 1 :]}\0{status.st_size}\0".encode() + content)
    return digest.hexdigest()
