"""Errors are raised at once and as one, warnings are handed on."""

import pytest

from autotrain_mem.support.errors import TokenizerError, UsageError
from autotrain_mem.types.findings import Finding, settle

WARNING = Finding(kind="warning", message="Slow.", cure="Give --fast.")
USAGE = Finding(kind="error", message="Both.", cure="Give one.\nOr none.")
TOKENS = Finding(kind="error", error="TokenizerError", message="No end.", cure="Give --end.")


def test_warnings_come_back_and_a_single_error_is_raised_as_it_is() -> None:
    assert settle([WARNING, WARNING]) == (WARNING,)
    with pytest.raises(TokenizerError) as raised:
        settle([WARNING, Finding.of(TokenizerError("No end.", hint="Give --end."))])
    assert (raised.value.message, raised.value.hint) == ("No end.", "Give --end.")


def test_several_errors_are_one_of_the_class_of_the_first() -> None:
    with pytest.raises(UsageError) as raised:
        settle([USAGE, WARNING, TOKENS, USAGE])
    assert raised.value.message == "2 problems:"
    assert raised.value.hint == "1. Both.\n   Give one.\n   Or none.\n2. No end.\n   Give --end."
