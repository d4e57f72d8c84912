"""What each command prints: the keys of its JSON, its table and CSV, and help that needs no GPU and no network; what it
makes of the allocator's two modes."""

import io
import json
import math
import os
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import argcomplete
import pytest

from autotrain_mem.cli import completion, main
from autotrain_mem.machine import choose
from autotrain_mem.machine.catalog import named
from autotrain_mem.report.terminal import lasting_console
from autotrain_mem.support.units import MIB
from autotrain_mem.types.hardware import HEADROOM_FRACTION
from tests.place import Autofit

ESTIMATE = ["estimate", "sft", "--model", "tiny", "--gpu", "300MiB", "--max_length", "64", "--json"]
SIMPLE = ("--fit", "lossless", "--forbid", "activation_offloading,optimizer_offload")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_what_asks_a_command_to_end_ends_it_and_a_second_request_waits(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def command() -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(20)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), number)
        return 0

    signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr(main, "_command", lambda argv: command)
    ran = autofit()
    assert (ran.code, ran.err.splitlines()[0]) == (130, "error: Interrupted.")


def test_a_signal_that_is_ignored_as_under_nohup_stays_so(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(main, "_command", lambda argv: lambda: os.kill(os.getpid(), signal.SIGHUP))
    assert autofit().code is None


def test_a_terminal_that_is_gone_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as gone:
        monkeypatch.setattr(sys, "stderr", gone)
        console = lasting_console(stderr=True)
        console.print("step 1")
        console.print("step 2")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            gone.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())


@pytest.mark.parametrize(("redirection", "code"), [("> /dev/full", 1), (">&-", 0), ("<&- >&- 2>&-", 0)])
def test_an_output_that_is_full_or_closed_is_no_defect(redirection: str, code: int) -> None:
    command = f"{sys.executable} -m autotrain_mem.cli.main gpus {redirection}"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    said = ["error: The output cannot be written: No space left on device."] if code else []
    assert (ran.returncode, ran.stderr.splitlines()[:1]) == (code, said)


def test_an_estimate_is_one_object_whose_figures_add_up(autofit: Autofit) -> None:
    ran = autofit(*ESTIMATE)
    found = json.loads(ran.out)
    assert ran.code == 0
    assert found["knobs"]["max_length"] == 64
    assert found["peak_reserved_bytes"] == found["reserved"]["native"]["peak_reserved_bytes"]
    assert found["required_bytes"] == found["peak_reserved_bytes"] + found["non_torch_bytes"]
    assert all(mode["peak_reserved_bytes"] > found["peak_allocated_bytes"] for mode in found["reserved"].values())
    assert sum(found["owners_at_peak"].values()) == found["peak_allocated_bytes"]
    assert max(phase["peak_bytes"] for phase in found["phases"]) == found["peak_allocated_bytes"]
    assert found["fits"]
    assert found["budget_bytes"] < 300 * 2**20


def test_at_a_given_length_no_tokenizer_is_needed(autofit: Autofit) -> None:
    given = "--gpu 300MiB --json --dataset data.jsonl --max_length 64 --report_to clearml"  # which only a run needs
    pins = "--per_device_train_batch_size 2 --gradient_checkpointing true"
    ran = autofit("plan", "sft", "--model", "no_tokenizer", *f"{given} {pins}".split(), *SIMPLE)
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["data"] is None
    why = "The tokens of the data were not counted: no_tokenizer has no tokenizer that can be loaded."
    assert found["warnings"] == [why]


def test_gpus_lists_at_least_25_cards_with_their_sources(autofit: Autofit) -> None:
    found = json.loads(autofit("gpus", "--json").out)
    assert len(found["gpus"]) >= 25
    assert all(card["source"] and card["total_bytes"] > 0 for card in found["gpus"])
    table = autofit("gpus").out.split()
    assert all(card["name"] in table for card in found["gpus"])


def test_help_lists_our_flags_and_trls_and_plan_and_estimate_have_their_own(autofit: Autofit) -> None:
    own = {"sft": "--packing", "estimate dpo": "--precompute_ref_log_probs", "plan ppo": "--response_length"}
    for command, flag in own.items():
        ran = autofit(*command.split(), "--help")
        assert ran.code == 0
        said = set(ran.out.replace(",", " ").split())
        assert {"--gpu", "--simulate", "--forbid", "--learning_rate", "--lora_r", flag} <= said
    (text,) = {autofit(*argv).out for argv in (("--help",), ("plan", "--help"), ("help", "estimate"))}
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "autofit chat" in text
    for argv in ((), ("explain", "--help"), ("--version",)):
        ran = autofit(*argv)
        assert (ran.code, ran.err, "autofit" in ran.out) == (0, "", True)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """``autofit gpus | head -1``: the pipe is closed before everything is written."""
    command = [sys.executable, "-m", "autotrain_mem.cli.main", "gpus"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_all_cards_are_compared_and_one_may_fit_nothing(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "catalog", lambda **_: (named("300MiB"), named("2MiB")))
    line = ["plan", "sft", "--model", "tiny", "--max_length", "16", "--gpu", "all", "--fit", "lossless"]
    ran = autofit(*line, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["schema"], found["smallest_lossless"]) == ("autofit.cards/1", "300MiB")
    none, fits = found["cards"]
    assert (none["gpu"], none["refusal"]) == ("2MiB", "nothing fits")
    assert [none[name] for name in ("level", "knobs", "tokens_per_second")] == [None] * 3
    assert (fits["gpu"], fits["level"], fits["knobs"]["max_length"]) == ("300MiB", "lossless", 16)
    assert fits["required_bytes"] <= fits["budget_bytes"] < fits["total_bytes"]
    ran = autofit(*line)
    assert (ran.code, ran.err) == (0, "card 1 of 2: 2MiB\ncard 2 of 2: 300MiB\n")
    large, _, small = ran.out.splitlines()[3:6]
    assert small.startswith("nothing fits on 2MiB: ")
    assert large.startswith(">  300MiB")


def test_the_history_is_written_with_its_settings_and_goes_on_after_an_oom(autofit: Autofit, tmp_path: Path) -> None:
    path = tmp_path / "run.pickle"
    ran = autofit(*ESTIMATE, "--dtype", "bfloat16", "--expandable_segments", "--snapshot", str(path))
    assert ran.code == 0
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    names = {frame["name"] for entry in snapshot["device_traces"][0][:-1] for frame in entry["frames"]}
    assert names >= {"model.layers.1.self_attn.q_proj", "load", "forward", "backward", "optimizer_step"}
    assert f"Wrote the predicted history to {path} (" in ran.err
    larger = autofit(*ESTIMATE, "--per_device_train_batch_size", "64", "--gpu", "20MiB", "--snapshot", str(path))
    assert "The run does not fit: after each oom the history continues" in larger.err
    assert "oom" in {entry["action"] for entry in pickle.loads(path.read_bytes())["device_traces"][0]}


SETTLED = "--model tiny --max_length 512 --per_device_train_batch_size 4 --gradient_checkpointing true"


def test_segments_are_expandable_where_only_that_fits_unless_the_user_fixed_them_and_the_shells_settings_count(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = shlex.split(f"estimate sft {SETTLED} --gpu 300MiB --json")
    before = json.loads(autofit(*line).out)
    modes = before["reserved"]
    fixed_bytes, expanded_bytes = (modes[name]["peak_reserved_bytes"] for name in ("native", "expandable_segments"))
    size = math.ceil(expanded_bytes / (1 - HEADROOM_FRACTION) / MIB)
    assert expanded_bytes <= size * MIB * (1 - HEADROOM_FRACTION) < fixed_bytes, "too small for fixed-size segments"
    plan = f"plan sft {SETTLED} {' '.join(SIMPLE)} --gpu {size}MiB --json"
    found = json.loads(autofit(*shlex.split(plan)).out)
    (lever,) = found["levers"]
    assert lever["name"] == "expandable_segments"
    assert (lever["before"], lever["after"], lever["harm"]) == (False, True, 0)
    assert lever["why"].startswith("with fixed-size segments it needs")
    estimate = found["estimate"]
    assert estimate["fits"]
    assert estimate["peak_reserved_bytes"] == expanded_bytes
    fixed = autofit(*shlex.split(f"estimate sft {SETTLED} --gpu {size}MiB"))
    assert (fixed.code, fixed.out[:12]) == (41, "does not fit")
    assert "expandable segments would need" in fixed.out
    ran = autofit(*shlex.split(f"{plan} --config fixed_segments.yaml"))
    assert (ran.code, ran.out) == (41, "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    by_shell = json.loads(autofit(*shlex.split(plan)).out)
    assert (by_shell["levers"], by_shell["knobs"]["expandable_segments"]) == ([], True), "which is no change"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "large_segment_size_mb:64")
    after = json.loads(autofit(*line).out)
    assert after["peak_allocated_bytes"] == before["peak_allocated_bytes"]
    assert after["peak_reserved_bytes"] > before["peak_reserved_bytes"]


# A tab press gives what may stand there, without TRL; the scripts work in the shells that are here.


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
