"""Notes what several tools have in common that they cannot say."""

from __future__ import annotations

from autotrain_mem.exports.case import NO_LIMIT_TOKENS, Case
from autotrain_mem.exports.part import Part


def host_optimizer(case: Case, instead: str) -> Part:
    """Optimizer state on the host is autofit's own."""
    if not case.knobs.optimizer_offload:
        return Part()
    why = "optimizer_offload true: optimizer state and step on the host are autofit's own, and without them"
    return Part(notes=(f"{why} the run needs more than is predicted; {instead}",))


def allocator(case: Case) -> Part:
    """A variable is no key."""
    if not case.knobs.expandable_segments:
        return Part()
    return Part(notes=("expandable_segments true: a variable of the process, which the command above sets",))


def environment(case: Case) -> Part:
    """The job's own variables."""
    given = case.job.environment
    if not given:
        return Part()
    return Part(notes=(f"env {' '.join(given)}: variables of the process, which the command above sets",))


def whole_logits(case: Case, tool: str, batch: str) -> Part:
    """TRL goes over the tokens in chunks (``trl/trainer/sft_trainer.py``, loss_type None or chunked_nll)."""
    has_chunks = case.method_facts.has_chunked_loss and case.settings.get("loss_type") != "nll"
    if not has_chunks or case.settings.get("use_liger_kernel"):
        return Part()
    why = f"the loss: TRL makes logits for some tokens at a time, {tool} for all of a micro-batch at once, which takes"
    rows = case.knobs.per_device_train_batch_size
    tokens = "longest row" if case.length == NO_LIMIT_TOKENS else case.length
    return Part(notes=(f"{why} at least {rows} x {tokens} x vocabulary x 4 bytes more: lower {batch} if full",))


def no_limit(case: Case, key: str) -> Part:
    """A tool that takes a number only."""
    if case.job.is_online or case.knobs.max_length is not None:
        return Part()
    return Part(notes=(f"max_length none: {key} takes a number only, so it is that of the longest row or larger",))
