"""Declares our own settings, which a user can set or leave to a plan. A new setting is one field here.

The field becomes a flag, a field of ``AutoFit`` and of ``Knobs``, a YAML key and a column of the docs. With a lever, it
also becomes a name for ``--forbid`` and a choice of the search. Code that reads ``knobs.NAME`` applies it.
"""

from __future__ import annotations  # ``settings_of`` reads annotations as text

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autotrain_mem.settings import declaration
from autotrain_mem.settings.declaration import Harm, LeverRow, Savings, TakenBy, setting, settings_of
from autotrain_mem.settings.optimizer_verdicts import OF_TORCH

Sharding = Literal["ddp", "fsdp2-no-reshard", "fsdp2", "hsdp", "zero1", "zero2", "zero3"]
"""How processes divide a model: not at all (DDP), or each parameter, gradient and optimizer state into shards (FSDP).
``fsdp2-no-reshard`` keeps gathered weights from a layer's forward to its backward; ``hsdp`` has a whole set of shards
in each of several groups of processes. DeepSpeed's stages divide the optimizer's state (``zero1``), also gradients
(``zero2``), and also weights (``zero3``)."""

OffloadDevice = Literal["cpu"]
"""DeepSpeed's name of the device to which it offloads; NVMe is not supported."""

_BY_DEEPSPEED: dict[str, Any] = {
    **{"kind": str, "takes": "'cpu'", "where": TakenBy.LAUNCH, "of_deepspeed": True},
    **{"choices": get_args(OffloadDevice), "check": declaration.one_of(get_args(OffloadDevice))},
}
"""What the settings of DeepSpeed's offload have in common."""

SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
UNSHARDED = (None, "ddp")
"""Values of ``sharding`` for levers that need whole parameters."""


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """Holds our own settings as a user sets them. None and False leave the choice to the plan."""

    optimizer_offload: bool = setting(
        False,
        where=TakenBy.OWN,
        help="keep the optimizer's state in host memory, and step there",
        lever=LeverRow(
            harm=Harm.TIME,
            suits=lambda method: not method.builds_early,
            needs={"optim": OF_TORCH, "sharding": UNSHARDED},
            instead_of=("8bit_optimizer", "kahan_sum"),
            not_sharded=(
                # trainers/host_optimizer.py makes its copies before accelerate divides the parameters
                "it holds copies of whole parameters on the host",
                "--fsdp_offload_params keeps shards, their gradients and the optimizer's state there.",
            ),
            reason="optimizer state and step are on the host: the same updates, with copies of gradients and weights",
            words="optimizer offloaded",
            offloads=True,
            steps_on_host=True,
            usual=Savings(taken=1.0, slower=1.5),
            at_best=Savings(taken=1.0),
            not_counted=("host memory: it holds pinned copies of weights and gradients, and the optimizer's state",),
        ),
    )
    """Whether optimizer state and step are on the host; the device holds weights and gradients."""
    expandable_segments: bool = setting(
        False,
        where=TakenBy.OWN,
        help="let the allocator's segments grow (PYTORCH_ALLOC_CONF)",
        lever=LeverRow(
            harm=Harm.NONE,
            reason="segments that grow page by page leave fewer gaps between tensors: the same training",
            words="expandable segments",
        ),
    )
    """Whether segments grow page by page; a plan turns this on by itself if that makes it fit."""
    max_pixels: int | None = setting(
        where=TakenBy.OWN,
        before="optimizer_offload",
        help="shrink larger images to N pixels",
        check=declaration.up_to(10**9, "pixels"),
        lever=LeverRow(
            harm=Harm.DATA,
            suits=lambda method: method.reads_images,
            reason="larger images are shrunk and take fewer tokens: small details may be lost",
        ),
    )
    """The most pixels of an image. None: the limit of the model's processor, or fewer if nothing else fits."""
    sharding: Sharding | None = setting(
        where=TakenBy.LAUNCH,
        choices=SHARDINGS,
        help="how several GPUs divide the model: not at all (ddp), or into shards; default: what fits and is fastest",
        check=declaration.one_of(SHARDINGS),
        lever=LeverRow(
            harm=Harm.TIME,
            knobs=("sharding", "dp_replicate_size"),
            # PPO prepares two models as one (trl/experimental/ppo/ppo_trainer.py: PolicyAndValueWrapper)
            suits=lambda method: not method.holds_models_whole,
            reason="weights, gradients and optimizer state are divided among the GPUs",
        ),
    )
    """How processes divide the model; None: the fastest way that fits, or a single process."""
    cp_size: int | None = setting(
        where=TakenBy.LAUNCH,
        accelerate="parallelism_config_cp_size",
        help="number of GPUs among which each row's tokens are divided (SFT, FSDP2); default: 1, or the fewest of "
        "2, 4, ... that fit, if rows of 32,768 tokens or more do not fit otherwise without harm",
        check=declaration.up_to(1_024, "GPUs"),
        lever=LeverRow(
            harm=Harm.TIME,
            suits=lambda method: method.shares_tokens,
            reason="each row's tokens are divided among GPUs, which pass keys and values in a ring: the same gradients",
        ),
    )
    """Number of GPUs among which a row's tokens are divided (context parallelism, FSDP2). None: a plan may choose."""
    sp_size: int | None = setting(
        where=TakenBy.LAUNCH,
        accelerate="parallelism_config_sp_size",
        help="like --cp_size, in DeepSpeed (SFT, ZeRO), which divides heads instead of tokens during attention",
        check=declaration.up_to(1_024, "GPUs"),
        lever=LeverRow(
            harm=Harm.TIME,
            suits=lambda method: method.shares_tokens,
            reason="each row's tokens are divided among GPUs, but during attention the heads: the same gradients",
        ),
    )
    """Like ``cp_size``, in DeepSpeed (sequence parallelism, with ZeRO)."""
    fsdp_offload_params: bool = setting(
        False,
        where=TakenBy.LAUNCH,
        accelerate="fsdp_offload_params",
        help="keep shards in host memory, where the optimizer steps too (FSDP)",
        lever=LeverRow(
            harm=Harm.TIME,
            needs={"sharding": ("fsdp2", "hsdp"), "load_in_8bit": (False,)},
            reason="shards of weights, gradients and optimizer state are in host memory, where the optimizer steps too",
            words="shards offloaded",
            offloads=True,
            pays_for_adapters=True,
            steps_on_host=True,
            usual=Savings(slower=2.0),
            not_counted=(
                "host memory beside the pinned shards: gradients, the optimizer's state, and a whole 4-bit base in "
                "each process until it is sharded",
            ),
        ),
    )
    """Whether shards of parameters, gradients and optimizer state are offloaded to the host (FSDP)."""
    offload_optimizer_device: OffloadDevice | None = setting(
        **_BY_DEEPSPEED, help="keep the optimizer's state and step in host memory (ZeRO)"
    )
    """``cpu``: the optimizer's state and step are on the host (ZeRO); None: on the GPU."""
    offload_param_device: OffloadDevice | None = setting(
        **_BY_DEEPSPEED, help="keep shards of weights in host memory (ZeRO-3)"
    )
    """``cpu``: shards of weights are offloaded to the host (ZeRO-3); None: on the GPU."""
    peft_config: str | Path | Mapping[str, Any] | None = setting(
        takes="the path of a file, or its keys",
        where=TakenBy.OWN,
        group=declaration.Group.JOB,
        before="prompt_length",
        metavar="FILE",
        help="PEFT's adapter_config.json, or its folder, which sets what is trained (DoRA, VeRA, IA3, ...)",
    )
    """A PEFT config: its path or content. Drop-in trainers also take PEFT's object; a plan holds it as JSON."""

    @property
    def token_shards(self) -> int:
        """Counts the processes that share the tokens of one row."""
        return max(self.cp_size or 1, self.sp_size or 1)


OWN = settings_of(OwnSettings)
SHARE_TOKENS = tuple(name for name, each in OWN.items() if each.accelerate.startswith("parallelism_config_"))
"""Settings that divide each row's tokens among GPUs; at most one is above 1."""
OF_DEEPSPEED = tuple(name for name, each in OWN.items() if each.of_deepspeed)
OFFLOADED = tuple(name for name, each in OWN.items() if each.accelerate.startswith("fsdp_") or each.of_deepspeed)
"""Settings that offload shards to the host."""
SWITCHES_OF_OURS = tuple(name for name, each in OWN.items() if each.is_switch)
"""Our own settings whose flag needs no value."""


def flag_words(settings: Mapping[str, Any]) -> Iterator[str]:
    """Lists the words of a command for these settings, unquoted.

    >>> [*flag_words({"optimizer_offload": True, "packing": False, "max_length": None, "report_to": ["none"]})]
    ['--optimizer_offload', '--packing', 'false', '--max_length', 'none', '--report_to', 'none']
    """
    for name, value in settings.items():
        if name in SWITCHES_OF_OURS:  # TRL's take true or false
            yield from [f"--{name}"] * bool(value)
            continue
        yield f"--{name}"
        for each in value if isinstance(value, list | tuple) else [value]:
            yield each if isinstance(each, str) else "none" if each is None else json.dumps(each)
