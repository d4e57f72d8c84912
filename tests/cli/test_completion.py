"""A tab press gives what may stand there, without TRL; the scripts work in the shells that are here."""

import io
import os
import subprocess
import sys
from pathlib import Path

import argcomplete
import pytest

from autotrain_mem.cli import completion, main


def test_the_last_word_becomes_what_may_stand_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"": "1", "_IFS": "\n", "_SUPPRESS_SPACE": "1"}.items():
        monkeypatch.setenv(f"_ARGCOMPLETE{name}", value)
    for words, some, none in (
        ([""], {"sft", "plan", "report", "completion"}, {"rtx3060"}),
        (["sft", "--gpu", "rtx306"], {"rtx3060", "rtx3060ti"}, {"l4"}),
        (["plan", "sft", "--fit", ""], {"all", "rounding", "lossless"}, {"--fit"}),
        (["sft", "--forbid", ""], {"lora", "4bit_base"}, {"sft"}),
        (["sft", "--recipe", "sft-q"], {"sft-qwen2.5-0.5b"}, {"ppo-qwen2.5-0.5b"}),
        (["estimate", "sft", "--sn"], {"--snapshot"}, {"--export"}),
        (["explain", "--"], {"--debug"}, {"--gpu"}),
    ):
        line, out = " ".join(["autofit", *words]), io.StringIO()
        monkeypatch.setenv("COMP_LINE", line)
        monkeypatch.setenv("COMP_POINT", str(len(line)))
        finder = argcomplete.CompletionFinder()
        monkeypatch.setattr(finder, "_init_debug_stream", lambda: None)  # file descriptor 9 is pytest's here
        parser = completion.parser_for(words, [*main.WITHOUT_METHOD], main.run)
        with pytest.raises(SystemExit):
            finder(parser, always_complete_options="long", exit_method=sys.exit, output_stream=out)
        found = {*out.getvalue().split("\n")}
        assert some <= found
        assert not none & found, words


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    command = tmp_path / "autofit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m autotrain_mem.cli.main "$@"\n')
    command.chmod(0o755)
    script = (
        'eval "$(autofit completion bash)"; COMP_WORDS=(autofit plan s); COMP_CWORD=2; COMP_LINE="autofit plan s"; '
        'COMP_POINT=14; _python_argcomplete autofit; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["sft"]


def test_each_shell_has_a_script_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in completion.SHELLS:
        assert main.run(["completion", shell]) == 0
    assert "compdef" in capsys.readouterr().out
    assert main.run(["completion", "powershell"]) == 2
    assert main.run(["completion"]) == 0
