"""A rehearsal against the same training for real: the same allocations, in the same order, with the same bytes.

Here every two of trainer, weights, model and checkpointing meet at least once; ``scripts/parity`` runs all of them.
"""

import importlib.util
import itertools
import pathlib
from collections.abc import Callable

import pytest
from real_run import OF_METHOD, VARIANTS, assert_alike, case
from tiny import FAMILIES

pytestmark = pytest.mark.slow

HAS_PPO = importlib.util.find_spec("trl.experimental.ppo") is not None
NEEDS_PPO = pytest.mark.skipif(not HAS_PPO, reason="TRL 1.13 and later have no PPO")

Folder = Callable[[str], pathlib.Path]
Combination = tuple[str, str, str, bool]


def combinations() -> list[Combination]:
    """Every trainer with every model; weights and checkpointing go round."""
    variants = list(VARIANTS)
    return [
        (method, variants[(row + column) % len(variants)], family, (row + column // 2) % 2 == 0)
        for row, method in enumerate(OF_METHOD)
        for column, family in enumerate(FAMILIES)
    ]


def marks(one: Combination) -> list[pytest.MarkDecorator]:
    """On the newest TRL too: each trainer that it has with an adapter, and the reward model's without."""
    method, variant, _, _ = one
    if method == "ppo":
        return [NEEDS_PPO]
    return [pytest.mark.newest] if variant == ("full" if method == "reward" else "lora") else []


@pytest.mark.parametrize(
    ("method", "variant", "family", "checkpointing"),
    [pytest.param(*one, id="-".join(map(str, one)), marks=marks(one)) for one in combinations()],
)
def test_a_rehearsal_allocates_what_the_real_run_allocates(
    method: str, variant: str, family: str, checkpointing: bool, model_folder: Folder, tmp_path: pathlib.Path
) -> None:
    one = case(method, model_folder(family), gradient_checkpointing=checkpointing, **VARIANTS[variant])
    assert_alike(one, tmp_path)


def test_every_two_of_the_four_meet() -> None:
    values = (OF_METHOD, VARIANTS, FAMILIES, (True, False))
    for first, second in itertools.combinations(range(4), 2):
        met = {(one[first], one[second]) for one in combinations()}
        assert met == set(itertools.product(values[first], values[second]))


def test_the_newest_trl_is_rehearsed_with_all_its_trainers() -> None:
    assert {one[0] for one in combinations() if pytest.mark.newest in marks(one)} == set(OF_METHOD) - {"ppo"}
