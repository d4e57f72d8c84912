"""Says why a model cannot be loaded by its name: there is none, it is not given to this user, or nobody answers."""

from __future__ import annotations

from autotrain_mem.errors import ModelNotFoundError

_OFFLINE = "Offline, give the folder that holds config.json (weights are needed to train, not to plan)."
_CHECK = "Check the spelling and the connection."
_NOT_ASKED = "HF_HUB_OFFLINE keeps the hub from being asked for one"
_LOG_IN = "hf auth login"


def check_cached(model: str, revision: str | None) -> None:
    """Refuses a hub id of which nothing is kept on this disk, where HF_HUB_OFFLINE keeps the hub from being asked.

    Raises:
        ModelNotFoundError: so it is.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE and not try_to_load_from_cache(model, "config.json", revision=revision):
        raise ModelNotFoundError(f"{_missing(model)}, and {_NOT_ASKED}.", hint=f"{_CHECK} {_OFFLINE}")


def not_loaded(model: str, error: OSError) -> ModelNotFoundError:
    """Makes an error of what ``from_pretrained`` raised, by its cause (``transformers/utils/hub.py: cached_files``)."""
    message, hint = _told(model, error)
    return ModelNotFoundError(message, hint=hint)


def _told(model: str, error: OSError) -> tuple[str, str]:
    from huggingface_hub import errors

    cause, missing = error.__cause__, _missing(model)
    if isinstance(cause, errors.GatedRepoError):
        page = f"https://huggingface.co/{model}"
        return f"{model} is gated: the hub does not give it to you.", f"Ask for access at {page}, then: {_LOG_IN}"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"The hub's {model} has no such --model_revision.", f"See https://huggingface.co/{model}/commits/main"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"{missing}, and the hub has no such model.", f"Check the spelling; where it is private: {_LOG_IN}"
    if isinstance(cause, errors.HFValidationError):
        return f"{missing}, and no hub id is written so.", "Give a folder, or a hub id such as Qwen/Qwen2.5-0.5B."
    if unreachable := why_unreachable(error):
        return f"{missing}, and {unreachable}.", f"{_CHECK} {_OFFLINE}"
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return f"The model {model!r} cannot be loaded: {reason}.", f"Check the spelling. {_OFFLINE}"


def _missing(model: str) -> str:
    return f"No model {model!r}: there is no folder of that name here"


def why_unreachable(error: Exception) -> str:
    """Says why the hub was not asked; empty where it was, or need not be."""
    from huggingface_hub import constants, errors

    if not isinstance(error.__cause__, errors.LocalEntryNotFoundError):
        return ""
    if constants.HF_HUB_OFFLINE:
        return _NOT_ASKED
    return f"the hub cannot be reached ({constants.ENDPOINT}) to look for one"
