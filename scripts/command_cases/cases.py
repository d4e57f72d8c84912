"""The commands that are run, with their cards, their injected faults, and the results that they must show."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from command_cases.material import LENGTH

MIB = 1 << 20
CAPACITY_MIB = 1500
"""The card's capacity: transformers keeps 1.2 GiB free while it loads (``modeling_utils.caching_allocator_warmup``)."""
STEPS = 4
SHARED = f"--model model --max_steps {STEPS} --logging_steps 1 --learning_rate 1e-3"
GENERATED = "--num_generations 4 --max_completion_length 16"
LONG = f"--max_length {LENGTH} --effective_batch_size 16"
"""So large that a 20 MiB segment (``c10/core/AllocatorConfig.h: kLargeBuffer``) is at most 4 % of reserved bytes."""
METHODS: Mapping[str, str] = {
    "sft": f"--dataset text_rows {LONG}",
    "reward": f"--dataset pairs_rows {LONG}",
    "dpo": f"--dataset pairs_rows {LONG}",
    "kto": f"--dataset pairs_rows {LONG}",
    "grpo": f"--dataset prompts_rows --reward_funcs judging.short {GENERATED}",
    "rloo": f"--dataset prompts_rows --reward_funcs judging.short {GENERATED}",
    "ppo": "--dataset prompts_rows --reward_model_path judge --response_length 16 --num_ppo_epochs 1",
}
MODES: Mapping[str, str] = {
    "full": "--use_peft false --load_in_4bit false",
    "lora": "--use_peft --load_in_4bit false",
    "4bit": "--use_peft --load_in_4bit",
}
GUARDED: Mapping[str, tuple[str, str, str]] = {
    "forward": ("sft", "forward:4:refuse:2", "out of memory in forward"),
    "backward": ("dpo", "backward:4:refuse:2", "out of memory in backward"),
    "optimizer step": ("sft", "optimizer_step:2:refuse:2", "out of memory in optimizer step"),
    "evaluation": ("sft", "evaluate:1:refuse:2", "out of memory in evaluat"),
    "generation": ("grpo", "generate:3:refuse:2", "out of memory in generat"),
    "forward, by another process": ("sft", "forward:4:fill:1000", "survived|released|trained"),
}
"""Where memory runs out -> method, HOLLOW_FAULT, and a pattern of the command's output."""
FLOAT32 = ("--bf16", "false")
"""In bfloat16, rounding in a micro-batch that is split in two changes DPO's loss by 2e-3 at this learning rate."""
TORCHRUN = "-m torch.distributed.run --nproc_per_node 2 -m autotrain_mem.cli.main"
EVALUATED = "--eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One command and the result that it must have."""

    name: str
    argv: tuple[str, ...]
    """The arguments after ``autofit``, or after ``python`` for a user's script."""
    is_script: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the stand-ins and the command."""
    code: int = 0
    """The exit code (``autotrain_mem/support/errors.py``); a script that raises an error exits with 1."""
    shows: tuple[str, ...] = ()
    """Regular expressions that must match its output, besides ``trained N steps`` if it must succeed."""
    kill_at: str = ""
    """The training process is killed once the output contains this; empty for never."""
    same_losses_as: str = ""
    """Another case whose losses must be equal: to the printed digits after a kill, else to a relative 1e-3."""


def cases() -> list[Case]:
    """Returns all cases; those that others are compared with come first."""
    plain = [
        Case(name=f"{method} {mode}", argv=_training(method, mode=mode))
        for method, mode in itertools.product(METHODS, MODES)
    ]
    float32 = Case(name="dpo full, float32", argv=_training("dpo", *FLOAT32))
    return [*plain, float32, *_survivors(), *_cards(), *_scripts()]


def _training(method: str, *more: str, mode: str = "full") -> tuple[str, ...]:
    return (method, *f"{SHARED} {METHODS[method]} {MODES[mode]}".split(), *more)


def _survivors() -> Iterator[Case]:
    for method in METHODS:
        yield Case(
            name=f"kill -9, resumed: {method}",
            argv=_training(method, "--save_steps", "2", "--no_probe"),
            kill_at=f"\nstep 3/{STEPS}",
            shows=(r"continues\s+from\s+step\s+2\b",),
            same_losses_as="" if method == "ppo" else f"{method} full",  # even two undisturbed runs of PPO differ
        )
    for phase, (method, fault, shows) in GUARDED.items():
        more = (
            "--no_probe",
            *(EVALUATED.split() if phase == "evaluation" else ()),
            *(FLOAT32 if method == "dpo" else ()),
        )
        like = "" if phase == "generation" else f"{method} full" + (", float32" if method == "dpo" else "")
        yield Case(
            name=f"full in {phase}: {method}",
            argv=_training(method, *more),
            environment={"HOLLOW_FAULT": fault},
            shows=(shows,),
            same_losses_as=like,
        )
    for when, more, count, shows in (
        ("in backward, expandable segments", ("--expandable_segments",), 2, "out of memory in backward"),
        ("permanently, restarted with another plan", ("--save_steps", "2"), 100_000, "restart"),
    ):
        yield Case(
            name=f"full {when}: sft",
            argv=_training("sft", "--no_probe", *more),
            environment={"HOLLOW_FAULT": f"backward:4:refuse:{count}"},
            shows=(shows,),
            same_losses_as="sft full",
        )


def _cards() -> Iterator[Case]:
    sft = _training("sft")
    two = {"HOLLOW_CARDS": "2", "HOLLOW_CAPACITY_1": str(1400 * MIB)}
    yield Case(name="a card that others use", argv=sft, environment={"HOLLOW_OTHERS": str(600 * MIB)})
    yield Case(
        name="a card with less memory than it reports: probes change the plan",
        argv=_training("sft", "--per_device_train_batch_size", "8", mode="full"),
        environment={"HOLLOW_TOTAL": str(2000 * MIB), "HOLLOW_CAPACITY": str(500 * MIB)},
        shows=("probe: .*does not fit|probe: .*refused",),
    )
    yield Case(name="no process is listed, as in a container", argv=sft, environment={"HOLLOW_BLIND": "1"})
    yield Case(name="a lost card beside a good one", argv=sft, environment={**two, "HOLLOW_REFUSED": "0"})
    yield Case(name="the second of two cards", argv=sft, environment={**two, "CUDA_VISIBLE_DEVICES": "1"})
    yield Case(name="memory that NVML does not report", argv=sft, environment={"HOLLOW_UNIFIED": "1"})
    yield Case(
        name="a driver that is too old",
        argv=sft,
        environment={"HOLLOW_DRIVER": "12020"},
        code=12,
        shows=("driver", "too old|insufficient"),
    )
    yield Case(
        name="a vGPU without expandable segments",
        argv=_training("sft", "--expandable_segments"),
        environment={"HOLLOW_VGPU": "1"},
        code=12,
        shows=("refuses expandable segments", "--forbid expandable_segments"),
    )
    yield Case(name="expandable segments", argv=_training("sft", "--expandable_segments"))
    yield Case(name="gradient checkpointing", argv=_training("sft", "--gradient_checkpointing", "true"))
    yield Case(name="evaluation", argv=_training("sft", *EVALUATED.split()))


def _scripts() -> Iterator[Case]:
    for which in ("drop-in", "watch"):
        yield Case(
            name=f"a script: {which}",
            argv=("drop_in.py", which, f"runs/script-{which}"),
            is_script=True,
            shows=(r"loss \S+ -> \S+ in 6 steps",),
        )
    yield Case(
        name="a script: drop-in with two cards in its process",
        argv=("drop_in.py", "drop-in", "runs/script-two"),
        is_script=True,
        environment={"HOLLOW_CARDS": "2"},
        code=1,
        shows=("This process sees 2 GPUs", "CUDA_VISIBLE_DEVICES=0"),
    )
    yield Case(
        name="the command under torchrun",
        argv=(*TORCHRUN.split(), *_training("sft")),
        is_script=True,
        environment={"HOLLOW_CARDS": "2"},
        code=1,
        shows=("torchrun",),
    )
