"""Limits the time, the memory and the output of chat templates, which are programs that come with a tokenizer.

jinja's sandbox, in which transformers runs them, forbids calls, but neither loops without end nor texts that double.
"""

import functools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from autotrain_mem.support.errors import TokenizerError
from autotrain_mem.support.units import GIB, MIB, format_bytes

SECONDS = 10.0
"""A conversation of a million tokens takes less than a second."""
MEMORY_BYTES = 2 * GIB
MOST_CHARACTERS = 64 * MIB
"""Some 16 million tokens; no model's context is longer."""


def limit_templates(*, memory: bool) -> None:
    """Limits the templates that this process compiles from now on. ``memory``: whether their memory is limited, too,
    which is unsafe in a process whose other threads allocate meanwhile."""
    from transformers.utils import chat_template_utils

    compile_template = chat_template_utils._compile_jinja_template

    @functools.lru_cache
    def compiled(text: str) -> Any:
        with _limits(memory=memory):
            template = compile_template(text)
        generate = template.generate

        def limited(*args: Any, **values: Any) -> Iterator[str]:
            length = 0
            with _limits(memory=memory):
                for block in generate(*args, **values):
                    length += len(block)
                    if length > MOST_CHARACTERS:
                        raise stopped(f"wrote more than {MOST_CHARACTERS:,} characters")
                    yield block

        template.generate = limited
        template.render = lambda *args, **values: "".join(limited(*args, **values))
        return template

    chat_template_utils._compile_jinja_template = compiled


def stopped(why: str = "") -> TokenizerError:
    """Returns the error for a template that exceeds a limit."""
    return TokenizerError(
        f"The chat template {why or f'took more than {SECONDS:g} s'} for one conversation, and was stopped.",
        hint="It is a program that comes with the tokenizer (chat_template.jinja or tokenizer_config.json), or with "
        "--chat_template_path.\nRead it, and use another one.",
    )


class _Expired(BaseException):
    """Not an Exception: jinja's optimizer would catch that (``jinja2/nodes.py: Expr.as_const``)."""


@contextmanager
def _limits(*, memory: bool) -> Iterator[None]:
    """Raises TokenizerError in a block that exceeds a limit. Some code in C, such as a dict of equal hashes, cannot be
    interrupted: SIGVTALRM ends the process after twice the processor time."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield  # only a main thread gets signals
        return
    import resource

    began = time.thread_time()

    def expire(*_: Any) -> None:
        if (left := SECONDS - (time.thread_time() - began)) <= 0:
            raise _Expired
        signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))  # the process was suspended, or the machine is busy

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 * SECONDS)
        if memory and soft == resource.RLIM_INFINITY:
            with open("/proc/self/statm", "rb", buffering=0) as pages:  # a third of the time of Path.read_text
                used_bytes = int(pages.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, hard))
        yield
    except _Expired:
        raise stopped() from None
    except MemoryError:
        raise stopped(f"needed more than {format_bytes(MEMORY_BYTES)} of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
