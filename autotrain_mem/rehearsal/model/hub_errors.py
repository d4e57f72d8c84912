"""Says why a model cannot be loaded by its name: there is none, it is not given to this user, or nobody answers."""

from __future__ import annotations

from autotrain_mem.support.errors import ModelNotFoundError
from autotrain_mem.support.hub import OFFLINE_HINT, no_id, no_model, unreachable

_LOG_IN = "hf auth login"


def not_loaded(model: str, error: OSError) -> ModelNotFoundError:
    """Makes an error of what ``from_pretrained`` raised, by its cause (``transformers/utils/hub.py: cached_files``)."""
    from huggingface_hub import errors

    cause = error.__cause__
    if isinstance(cause, errors.GatedRepoError):
        hint = f"Ask for access at https://huggingface.co/{model}, then: {_LOG_IN}"
        return ModelNotFoundError(f"{model} is gated: the hub does not give it to you.", hint=hint)
    if isinstance(cause, errors.RevisionNotFoundError):
        hint = f"See https://huggingface.co/{model}/commits/main"
        return ModelNotFoundError(f"The hub's {model} has no such --model_revision.", hint=hint)
    if isinstance(cause, errors.RepositoryNotFoundError):
        hint = f"Check the spelling; where it is private: {_LOG_IN}"
        return no_model(model, "the hub has no such model", hint)
    if isinstance(cause, errors.HFValidationError):
        return no_id(model)
    if why := why_unreachable(error):
        return no_model(model, why, OFFLINE_HINT)
    reason = str(error).strip().splitlines()[0].rstrip(".")
    return ModelNotFoundError(f"The model {model!r} cannot be loaded: {reason}.", hint=OFFLINE_HINT)


def why_unreachable(error: Exception) -> str:
    """Says why the hub was not asked; empty where it was, or need not be."""
    from huggingface_hub import errors

    return unreachable() if isinstance(error.__cause__, errors.LocalEntryNotFoundError) else ""
