"""Shared by the scripts: import paths, quiet processes, command lines, and error figures with their limits."""

import argparse
import contextlib
import io
import logging
import os
import pathlib
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[1:1] = map(str, (ROOT, TESTS, TESTS / "allocator", TESTS / "rehearsal", TESTS / "report" / "page"))

ONE_THREAD = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""The environment of a process that uses one thread and no network."""


def on_cpu() -> None:
    """Prepares this process for rehearsals and for training on the CPU. Must run before transformers is imported."""
    os.environ |= {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discards what is printed inside."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help is the script's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_lists(parser: argparse.ArgumentParser, defaults: Mapping[str, Sequence[str]]) -> None:
    """Adds flags that take several values, separated by commas."""
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=[*default], help=",".join(default))


def holds_any(name: str, texts: Iterable[str] | None) -> bool:
    """Returns whether ``--only TEXT ...`` selects a case by its name; without texts, every case is selected."""
    return not texts or any(text in name for text in texts)


def compare_all(cases: Iterable[tuple[str, Callable[[], tuple[int, str]]]]) -> tuple[int, int]:
    """Runs cases that return (peak bytes, difference or an empty text), and prints a line for each.

    Returns how many were compared, and how many differ.
    """
    compared = different = 0
    for name, compare in cases:
        started = time.perf_counter()
        with silence():
            peak, found = compare()
        compared, different = compared + 1, different + bool(found)
        print(f"{name} {peak:>11,} {time.perf_counter() - started:7.1f} s  {found or 'none'}", flush=True)
    return compared, different


def within(name: str, errors: Sequence[float], median_bar: float, worst_bar: float) -> bool:
    """Prints the median and the worst of relative errors beside their limits; returns whether both are kept."""
    sizes = [abs(error) for error in errors]
    median, worst = statistics.median(sizes), max(sizes)
    print(
        f"{name}: {len(sizes)} figures, {median:.2%} off in the median (limit {median_bar:.1%}), "
        f"{worst:.2%} at most (limit {worst_bar:.1%})"
    )
    return median <= median_bar and worst <= worst_bar


def chromium(*flags: str) -> Any:
    """Starts headless Chromium; the caller must quit it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (binary and driver):
        sys.exit("error: chromium or chromedriver is not installed; scripts/browser installs them")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", *flags):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(driver))
