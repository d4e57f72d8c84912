"""What is decorated with torch.compile as it is imported is compiled when it is first called."""

import pytest
import torch

from autotrain_mem.worker.deferred_compile import deferred_compile


def test_a_function_is_compiled_at_its_first_call_and_a_module_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_now(model: object, **options: object) -> object:
        compiled.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_now)

    def double(number: int) -> int:
        """Twice as much."""
        return 2 * number

    module = torch.nn.Identity()
    with deferred_compile():
        plain, with_options, whole = torch.compile(double), torch.compile(dynamic=False)(double), torch.compile(module)
    assert torch.compile is compile_now
    assert compiled == [(module, {})]
    assert whole is module
    assert plain.__doc__ == "Twice as much."
    assert [plain(2), plain(3), with_options(4)] == [4, 6, 8]
    assert compiled == [(module, {}), (double, {}), (double, {"dynamic": False})]
