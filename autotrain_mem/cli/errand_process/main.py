"""Does one job (``python -m autotrain_mem.cli.errand_process.main``), and ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from autotrain_mem.cli.errands import Errand, Receive, Send
from autotrain_mem.support import codec
from autotrain_mem.support.errors import AutofitError, TrainingError, UsageError
from autotrain_mem.support.processes import Channel

UPLOADED = (
    *("README.md", "config.json", "generation_config.json", "adapter_config.json", "*.safetensors"),
    *("*.safetensors.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "*processor_config.json"),
)
"""All else stays here: ``training_args.bin`` and checkpoints may hold tokens, plan and logs name paths of this
machine."""

_LOG_IN = "Run `hf auth login` with a token that may write, or set HF_TOKEN."


def push(errand: Errand, send: Send, receive: Receive, api: Any = None) -> dict[str, Any]:
    """Make the repository where there is none, private unless asked otherwise, and upload in one commit.

    Args:
        api: The hub's client; given by tests.

    Raises:
        UsageError: nobody is logged in, the hub may not be used from here, or the repository's name cannot be used;
            it holds files already.
        TrainingError: the hub refused, or cannot be reached.
    """
    api = HfApi() if api is None else api
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be uploaded.", hint="Unset it, and run this again.")
    if not get_token():
        raise UsageError("Nobody is logged in to the Hugging Face Hub here.", hint=_LOG_IN)
    try:
        return _pushed(errand, send, api)
    except HFValidationError as error:
        raise UsageError(f"{errand.to!r} cannot be the name of a repository: {error}", hint="--to ORG/NAME") from error
    except HfHubHTTPError as error:
        raise _refused(errand, error) from error
    except (OSError, RuntimeError) as error:  # whatever client is beneath has errors of its own
        reason = " ".join(str(error).split())[:300]
        raise TrainingError(
            f"The Hugging Face Hub cannot be reached, or broke off: {reason}",
            hint="Run this again when the network is there: files that arrived are not sent twice.",
        ) from error


def _pushed(errand: Errand, send: Send, api: Any) -> dict[str, Any]:
    private = not errand.public
    is_there = api.repo_exists(errand.to)
    if is_there and not errand.update and {*api.list_repo_files(errand.to)} - {".gitattributes"}:
        raise UsageError(
            f"The repository {errand.to} holds files already.",
            hint="Give --to another name, or add --update: a commit is put on top, and older ones stay.",
        )
    if not is_there:
        api.create_repo(errand.to, private=private)
    kind = "" if is_there else " (private)" if private else " (public)"
    send({"event": "note", "message": f"uploading to {errand.to}{kind}"})
    commit = api.upload_folder(
        repo_id=errand.to,
        folder_path=errand.folder,
        allow_patterns=[*UPLOADED],
        commit_message=f"Upload the model trained in {Path(errand.folder).resolve().name}",
    )
    return {"event": "end", "url": f"https://huggingface.co/{errand.to}", "commit": getattr(commit, "oid", "")}


def _refused(errand: Errand, error: HfHubHTTPError) -> TrainingError | UsageError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    reason = " ".join(str(error).split())[:300]
    if status in (401, 403):
        message = f"The hub does not let this token write to {errand.to}: {reason}"
        return UsageError(message, hint=f"{_LOG_IN} --to takes a user or an organisation that is yours.")
    return TrainingError(f"The hub refused: {reason}", hint="Run this again later.")


def columns(errand: Errand, send: Send, receive: Receive) -> dict[str, Any]:
    """Load the dataset as a training does, and name the columns of its first split.

    Raises DatasetError: it is not there, or cannot be read.
    """
    from autotrain_mem.data.load import load_named

    splits = load_named(errand.dataset, None)
    first = next(iter(splits.values()))
    return {"event": "end", "columns": list(first.column_names), "rows": len(first)}


def _job(errand: Errand) -> Callable[[Errand, Send, Receive], dict[str, Any]]:
    if errand.task in ("push", "columns"):
        return {"push": push, "columns": columns}[errand.task]
    from autotrain_mem.cli.errand_process import trained_model  # torch and transformers, which the others go without

    return trained_model.chat if errand.task == "chat" else trained_model.merge


def main() -> None:
    """Receive the errand, do it, and answer with its last event or an error."""
    channel = Channel(ignore_interrupt=True)
    errand = codec.from_json(Errand, channel.receive())
    try:
        channel.send(_job(errand)(errand, channel.send, channel.receive))
    except AutofitError as error:
        channel.send(error.to_json())
    except Exception as error:  # whatever a library raises is the user's to read, in one line
        traceback.print_exc()
        reason = " ".join(str(error).split())
        channel.send(TrainingError(f"{type(error).__name__}: {reason}").to_json())


if __name__ == "__main__":
    main()
