"""Every optimizer that transformers has is rehearsed, or refused with the reason and with what is not."""

from collections import Counter
from unittest.mock import patch

import pytest
from transformers.training_args import OptimizerNames

from autotrain_mem.checks import flag_checks
from autotrain_mem.checks.flag_checks import Flags
from autotrain_mem.settings.optimizer_verdicts import PACKAGES, REFUSED, REHEARSED
from autotrain_mem.types.findings import collect

pytestmark = pytest.mark.newest


def test_every_optimizer_has_one_verdict() -> None:
    verdicts = Counter([*REHEARSED, *PACKAGES, *REFUSED])
    assert [name for name, times in verdicts.items() if times > 1] == []
    known = {name.value for name in OptimizerNames}
    assert known - verdicts.keys() == set(), "read its code, rehearse it beside a real run, give it a row"
    assert verdicts.keys() - known == set()


def test_a_verdict_is_said_before_anything_is_rehearsed() -> None:
    for name in (each.value for each in OptimizerNames):
        given = {"optim": name, "optim_target_modules": ["q_proj"]}
        with patch.object(flag_checks.importlib.util, "find_spec", lambda package: None):
            findings = collect([flag_checks.optimizer], Flags(method="sft", given=given))
        assert len(findings) == (name not in REHEARSED), name
        for finding in findings:
            assert f"--optim {name} " in finding.message
            assert ("pip install" in finding.cure) is (name in PACKAGES)


def test_what_projects_gradients_asks_for_their_layers() -> None:
    with patch.object(flag_checks.importlib.util, "find_spec", lambda package: package):
        (finding,) = collect([flag_checks.optimizer], Flags(method="sft", given={"optim": "apollo_adamw"}))
    assert "--optim_target_modules" in finding.message
