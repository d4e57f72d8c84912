"""Refuses models and rows of the Hugging Face Hub that are not kept on this disk, where it cannot be asked for them.

Its own clients find that out too, after half a minute of trying again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from autotrain_mem.support.errors import DatasetNotFoundError, ModelNotFoundError
from autotrain_mem.support.local_files import WHAT_IS_READ, is_path

OFFLINE_HINT = (
    "Check the spelling and the connection. Offline, give the folder that holds config.json (weights are needed to "
    "train, not to plan)."
)
_PORTS = {"http": 80, "https": 443}
_SECONDS = 2.0
"""For an answer of the hub's host; where none comes, its clients are left to try for longer."""


def unreachable() -> str:
    """Says why the hub does not answer, as the end of a sentence."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps the hub from being asked for one"
    return f"the hub cannot be reached ({constants.ENDPOINT}) to look for one"


def why_not_asked() -> str:
    """Says the same before anybody asks; empty where the hub may answer."""
    from huggingface_hub import constants

    return unreachable() if constants.HF_HUB_OFFLINE or _is_away(constants.ENDPOINT) else ""


def _is_away(endpoint: str) -> bool:
    """Tells whether a host has no address, or refuses; what stands behind a proxy is not seen from here."""
    from urllib.request import getproxies  # 16 ms to import

    if getproxies():
        return False
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or _PORTS[parts.scheme]), _SECONDS):
            return False
    except (TimeoutError, KeyError):
        return False
    except OSError:  # no such host, no network, nobody listens
        return True


def no_model(model: str, why: str, hint: str) -> ModelNotFoundError:
    """Makes the error of a name that no folder has, and that the hub did not answer to either.

    Args:
        why: It did not, as the end of a sentence.
    """
    return ModelNotFoundError(f"No model {model!r}: there is no folder of that name here, and {why}.", hint=hint)


def no_id(model: str) -> ModelNotFoundError:
    """Makes the error of a name that the hub can have nothing under."""
    hint = "Give a folder, or a hub id such as Qwen/Qwen2.5-0.5B."
    return no_model(model, "no hub id is written so", hint)


def check_cached(model: str, revision: str | None) -> None:
    """Refuses what is no hub id, and one of a model of which nothing is kept, where the hub cannot be asked.

    Raises:
        ModelNotFoundError: so it is.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_kept = try_to_load_from_cache(model, "config.json", revision=revision) is not None
    except HFValidationError as error:
        raise no_id(model) from error
    if not is_kept and (why := why_not_asked()):
        raise no_model(model, why, OFFLINE_HINT)


def check_kept_rows(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuses a hub id of rows of which the datasets library keeps nothing, where the hub cannot be asked.

    Their folder is ``OWNER___NAME``, with capitals written otherwise (``datasets/load.py:
    CachedDatasetModuleFactory``); here any that differs by capitals and underscores alone is taken for it.

    Raises:
        DatasetNotFoundError: so it is.
    """
    if is_path(name) or Path(name).exists():
        return
    kept = _datasets_cache(environment)
    if kept.is_dir() and any(_plain(folder.name) == _plain(name) for folder in kept.iterdir()):
        return
    if why := why_not_asked():
        raise DatasetNotFoundError(
            f"No dataset {name!r}: there is no file or folder of that name here, none that was loaded from the hub "
            f"before lies in {kept}, and {why}.",
            hint=WHAT_IS_READ,
        )


def _datasets_cache(environment: Mapping[str, str]) -> Path:
    """Finds the folder in which the datasets library keeps rows (``datasets/config.py: HF_DATASETS_CACHE``)."""
    above = Path(environment.get("XDG_CACHE_HOME", "~/.cache"))
    home = Path(environment.get("HF_HOME", above / "huggingface"))
    return Path(environment.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()


def _plain(name: str) -> str:
    return name.replace("/", "").replace("_", "").lower()
