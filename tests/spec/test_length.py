"""``max_length`` as a number, as no limit, and as what the data are to say."""

from __future__ import annotations

import pytest

from autotrain_mem.spec.job import is_wish, read_length, wished_share, without_wish


@pytest.mark.parametrize(
    ("text", "value"),
    [("512", 512), (" Auto", "auto"), ("none", None), ("p99", "p99"), ("P99.9", "p99.9"), ("p100", "p100")],
)
def test_a_length_is_a_number_a_wish_or_none(text: str, value: object) -> None:
    assert read_length(text) == value


@pytest.mark.parametrize("text", ["p0", "p101", "p100.1", "pfoo", "p", "99%", "-1", "0", "1.5", "p-1", "pauto"])
def test_anything_else_is_refused_with_its_own_words(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read_length(text)


@pytest.mark.parametrize(("value", "share"), [("auto", 1.0), (None, 1.0), ("p99.9", 0.999), ("p50", 0.5)])
def test_a_percentile_is_a_share_of_the_rows(value: object, share: float) -> None:
    assert wished_share(value) == pytest.approx(share)


def test_only_a_wish_is_kept_from_trl() -> None:
    assert without_wish({"max_length": "p99", "dtype": "auto"}) == {"dtype": "auto"}
    assert without_wish({"max_length": 9}) == {"max_length": 9}
    assert without_wish({"max_length": None}) == {"max_length": None}
    assert not is_wish(None)
