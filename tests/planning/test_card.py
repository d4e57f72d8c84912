"""Levers that a card lacks."""

import pytest

from autotrain_mem.planning.card import absent_levers
from autotrain_mem.types.hardware import ARCHITECTURES, lacks_bf16

BITSANDBYTES = {"8bit_optimizer", "8bit_base", "4bit_base"}


def test_no_lever_is_absent_from_nvidias_cards() -> None:
    assert absent_levers((7, 5), bitsandbytes_for_rocm=False) == frozenset()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_segments_never_grow_on_amds_cards_and_bitsandbytes_needs_a_library_for_them(architecture: str) -> None:
    assert absent_levers(architecture, bitsandbytes_for_rocm=True) == {"expandable_segments"}
    assert absent_levers(architecture, bitsandbytes_for_rocm=False) == {"expandable_segments", *BITSANDBYTES}
    assert not lacks_bf16(architecture)


def test_an_architecture_that_is_not_known_has_no_bitsandbytes() -> None:
    assert absent_levers("gfx1030", bitsandbytes_for_rocm=True) == {"expandable_segments", *BITSANDBYTES}
