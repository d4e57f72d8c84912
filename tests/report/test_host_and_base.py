"""An estimate says which bytes of a 4-bit base stay as they were, and what waits in host memory."""

import io
from dataclasses import replace
from typing import Any

import report_examples as examples
from rich.console import Console

from autotrain_mem.report.estimate_view import estimate_view
from autotrain_mem.support.units import GIB
from autotrain_mem.types import Estimate


def of_experts(**knobs: Any) -> Estimate:
    shown = examples.estimate()
    memory = replace(shown.memory, unquantized_bytes=54 * GIB)
    return replace(shown, memory=memory, knobs=replace(shown.knobs, use_peft=True, **knobs))


def test_bytes_that_bitsandbytes_leaves_are_told_where_a_quantized_base_is_asked_for() -> None:
    four = of_experts(load_in_4bit=True, dtype="bfloat16")
    assert four.unquantized.startswith("54.0 GiB of the base are not quantized to 4 bits")
    assert four.unquantized.endswith("stays in bfloat16")
    assert of_experts(load_in_8bit=True, dtype="float32").unquantized.endswith("(--dtype bfloat16 halves it)")
    assert of_experts().unquantized == ""
    assert replace(four, memory=replace(four.memory, unquantized_bytes=0)).unquantized == ""


def test_what_waits_in_host_memory_is_shown() -> None:
    shown = examples.estimate()
    offloaded = replace(shown, memory=replace(shown.memory, pinned_host_bytes=3 * GIB))
    assert "host      3.00 GiB of pinned host memory" in text(offloaded)
    assert "pinned" not in text(shown)


def text(shown: Estimate) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(estimate_view(shown))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
