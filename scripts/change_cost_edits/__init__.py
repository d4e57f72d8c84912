"""The changes whose files ``scripts/change_cost`` counts: a method, an on/off setting with a harm, a CUDA rule."""

import pathlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PACKAGE = pathlib.Path("autotrain_mem")


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of the package, and the commands that check it."""

    name: str
    most: int
    """How many files of the package it may touch."""
    make: Callable[[pathlib.Path], None]
    shown: Mapping[tuple[str, ...], str]
    """The arguments of an ``autofit`` command -> a text that it must print. ``{model}`` stands for a tiny model."""


def after(path: pathlib.Path, anchor: str, text: str) -> None:
    """Inserts a text after the anchor, which must occur once; with an empty anchor, appends the text."""
    source = path.read_text(encoding="utf-8")
    assert not anchor or source.count(anchor) == 1, f"{path} has {anchor!r} {source.count(anchor)} times"
    path.write_text(source.replace(anchor, anchor + text) if anchor else source + text, encoding="utf-8")


TRAINER = '''

class MirrorTrainer(Planned, trl.RewardTrainer, method="mirror", config_class=trl.RewardConfig):  # type: ignore[misc]
    """A trainer whose cost is counted."""
'''


def add_method(tree: pathlib.Path) -> None:
    """Adds a copy of TRL's reward modelling as a method with its own name."""
    package = tree / PACKAGE
    module = package / "methods" / "mirror.py"
    shutil.copy(package / "methods" / "reward.py", module)
    after(module, "from typing import Any\n", "from functools import partial\n")
    after(module, "from autotrain_mem.methods.configs import Configs", ", build, script_parser")
    own = 'make_parser = partial(script_parser, "reward")\nbuild_trainer = partial(build, "RewardTrainer")\n'
    source = module.read_text(encoding="utf-8")
    module.write_text(source.replace("\n\ndef worst_rows", f"{own}\n\ndef worst_rows", 1), encoding="utf-8")
    table = package / "types" / "methods_table.py"
    row = '\nMIRROR = replace(REWARD, name="mirror", title="Mirror")\n'
    after(table, 'trl/trainer/reward_trainer.py: _prepare_dataset``."""\n', row)
    after(table, "for row in (SFT, REWARD,", " MIRROR,")
    after(package / "drop_in" / "trainers.py", "", TRAINER)
    after(package / "__init__.py", "    from autotrain_mem.drop_in.trainers import (\n", "        MirrorTrainer,\n")
    after(package / "__init__.py", '__all__ += ["OnlineDPOTrainer",', ' "MirrorTrainer",')


SETTING = '''    empty_cache: bool = setting(
        False,
        where=TakenBy.OWN,
        help="give the cache back after each step",
        lever=LeverRow(
            harm=Harm.TIME,
            reason="the allocator's cache is given back after each step: the same training, slower",
            words="emptied cache",
            usual=Savings(slower=1.5),
        ),
    )
    """The cache is given back after each step."""
'''
ACTS = """    if knobs.empty_cache:
        trainer.args.torch_empty_cache_steps = 1
"""


def add_setting(tree: pathlib.Path) -> None:
    """Adds an on/off setting with a harm, which takes effect in ``trainers/finish.py``."""
    own = tree / PACKAGE / "settings" / "own.py"
    after(
        own,
        '"""Holds our own settings as a user sets them. None and False leave the choice to the plan."""\n\n',
        SETTING,
    )
    after(tree / PACKAGE / "trainers" / "finish.py", "        _widen_trained(trainer.model)\n", ACTS)


RULE = '''"""A rule whose cost is counted: it changes nothing but the list of what is not counted."""

from contextlib import nullcontext

from autotrain_mem.rehearsal.cuda.rules import CudaRule

RULES = (CudaRule(lambda recorder, card: nullcontext(), not_counted=lambda card: ("what a counted rule leaves out",)),)
'''


def add_rule(tree: pathlib.Path) -> None:
    (tree / PACKAGE / "rehearsal" / "cuda" / "counted_rule.py").write_text(RULE, encoding="utf-8")


ROWS = ("--gpu", "64MiB", "--max_length", "64", "--per_device_train_batch_size", "2")

CHANGES = (
    Change(
        name="method", most=4, make=add_method, shown={("plan", "mirror", "--model", "{model}", *ROWS): "fits 64MiB"}
    ),
    Change(
        name="setting",
        most=2,
        make=add_setting,
        shown={
            ("sft", "--help"): "--empty_cache",
            ("plan", "sft", "--model", "{model}", *ROWS, "--forbid", "empty_cache"): "fits 64MiB",
            ("plan", "sft", "--model", "{model}", *ROWS, "--empty_cache", "--verbose"): "* empty_cache",
        },
    ),
    Change(
        name="rule",
        most=1,
        make=add_rule,
        shown={("estimate", "sft", "--model", "{model}", *ROWS, "--verbose"): "what a counted rule leaves out"},
    ),
)
