"""Reads a model's config by its name, and says why it cannot be: there is none, it is not given, nobody answers."""

from __future__ import annotations

from typing import Any

from autotrain_mem.support.errors import ModelNotFoundError, UnsupportedModelError
from autotrain_mem.support.sources import OFFLINE_HINT, no_id, no_model, unreachable
from autotrain_mem.types import Job

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


def load_config(model: str, **options: Any) -> Any:
    """The model's transformers config.

    Raises:
        ModelNotFoundError: there is none, or the hub does not give it.
        UnsupportedModelError: the installed transformers does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, **options)
    except OSError as error:
        raise not_loaded(model, error) from error
    except (ValueError, KeyError) as error:
        import transformers

        raise UnsupportedModelError(
            f"transformers {transformers.__version__} cannot read the config of {model}: {error}",
            hint="Update transformers, or pass --trust_remote_code true for a model that brings its own code.",
        ) from error


def revision_of(job: Job) -> dict[str, Any]:
    """Says which revision of a model is meant, and whether its own code may run, as ``from_pretrained`` takes it."""
    given = {
        "revision": job.arguments.get("model_revision"),
        "trust_remote_code": job.arguments.get("trust_remote_code"),
    }
    return {name: value for name, value in given.items() if value}
