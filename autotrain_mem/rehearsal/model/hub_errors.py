"""Says why a model cannot be loaded by its name: there is none, it is not given to this user, or nobody answers."""

from __future__ import annotations

from autotrain_mem.errors import ModelNotFoundError
from autotrain_mem.hub import OFFLINE_HINT, unreachable

_LOG_IN = "hf auth login"


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
    if why := why_unreachable(error):
        return f"{missing}, and {why}.", OFFLINE_HINT
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return f"The model {model!r} cannot be loaded: {reason}.", OFFLINE_HINT


def _missing(model: str) -> str:
    return f"No model {model!r}: there is no folder of that name here"


def why_unreachable(error: Exception) -> str:
    """Says why the hub was not asked; empty where it was, or need not be."""
    from huggingface_hub import errors

    return unreachable() if isinstance(error.__cause__, errors.LocalEntryNotFoundError) else ""
