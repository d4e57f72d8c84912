"""A stranger's chat template ends, whatever it does."""

import os
import signal
import sys
import time
from contextlib import suppress

import pytest
from transformers.utils import chat_template_utils

from autotrain_mem.support.errors import TokenizerError
from autotrain_mem.trainers import template_limits

CHAT = [{"role": "user", "content": "Hello"}]
DOUBLES = "{% set x = namespace(t='x') %}{% for n in range(40) %}{% set x.t = x.t ~ x.t %}{% endfor %}"
EQUAL_HASHES = f"{{{{ dict.fromkeys(range(0, {100_000 * sys.hash_info.modulus}, {sys.hash_info.modulus})|list) }}}}"


@pytest.fixture(autouse=True)
def _limited(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_compile_jinja_template"
    monkeypatch.setattr(chat_template_utils, name, chat_template_utils._cached_compile_jinja_template)
    monkeypatch.setattr(template_limits, "SECONDS", 1.0)
    monkeypatch.setattr(template_limits, "MEMORY_BYTES", 1 << 26)
    monkeypatch.setattr(template_limits, "MOST_CHARACTERS", 1000)
    template_limits.limit_templates(memory=True)


def test_a_template_is_stopped_and_the_limits_end_with_it() -> None:
    for template, why in (
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than 1 s"),
        (DOUBLES, "needed more than 64.0 MiB"),
        ("{{ 'x' * 2000 }}", "wrote more than 1,000 characters"),
    ):
        with pytest.raises(TokenizerError, match=why) as stopped:
            chat_template_utils.render_jinja_template([CHAT], chat_template=template)
        assert "--chat_template_path" in stopped.value.hint, template
        assert signal.getitimer(signal.ITIMER_REAL) == signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), template
        sound = "{{ messages[0].content }}{% generation %}!{% endgeneration %}"
        options = {"chat_template": sound, "return_assistant_tokens_mask": True}
        assert chat_template_utils.render_jinja_template([CHAT], **options) == (["Hello!"], [[(5, 6)]]), template


def test_a_process_that_was_suspended_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.1)
    began = time.monotonic()
    with template_limits._limits(memory=False):
        time.sleep(0.3)
    assert time.monotonic() - began >= 0.3


def test_a_template_that_cannot_be_interrupted_ends_its_process() -> None:
    if not (child := os.fork()):
        with suppress(BaseException):
            chat_template_utils.render_jinja_template([CHAT], chat_template=EQUAL_HASHES)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGVTALRM
