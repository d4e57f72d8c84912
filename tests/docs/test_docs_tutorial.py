"""The tutorial, as a newcomer types it: its blocks marked ``run``, in their order. The pages show what they print;
``AUTOFIT_UPDATE_GOLDEN=1 scripts/test tests/docs/test_docs_tutorial.py`` writes it anew, into the README too."""

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotrain_mem.cli import main, quickstart
from tests.docs.pages import DOCS, README, blocks, commands
from tests.forked import Forge
from tests.golden import kept
from tests.place import SharedWorkers, a_user_in

pytestmark = pytest.mark.slow

TUTORIAL = DOCS / "tutorial.md"
TRANSCRIPTS = DOCS / "transcripts"
SECONDS = re.compile(r"\b(\d+ min )?\d+(\.\d+)? s\b")


@pytest.fixture(scope="module")
def printed(place: Path, workers: SharedWorkers, forge: Forge) -> Iterator[dict[str, str]]:
    """Command -> what it printed on stdout. The quickstart's folder is made, and its own test runs the rest of it."""
    before, texts = set(place.iterdir()), dict[str, str]()
    with a_user_in(place, workers, forge):
        Path("quickstart-run").mkdir()
        quickstart.make_material(Path("quickstart-run"))
        for block in (block for block in blocks(TUTORIAL) if block.mark == "run"):
            if block.language == "python":
                exec(compile(block.text, str(TUTORIAL), "exec"), {})
                continue
            for command in commands(block.text):
                with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
                    code = main.run(shlex.split(command)[1:])
                assert code == 0, f"{command}\n{err.getvalue()}"
                texts[command] = out.getvalue()
        assert (place / "my-run" / "report.html").is_file()
        yield texts
    for path in set(place.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def of(printed: dict[str, str], *words: str) -> str:
    [text] = [text for command, text in printed.items() if all(word in command.split() for word in words)]
    return text


def assert_kept(name: str, text: str) -> None:
    """But for the times and the last digit of a loss, which are the machine's."""

    def everywhere(shown: str) -> str:
        return re.sub(r"\b(\d+\.\d\d)\d\b", r"\1", SECONDS.sub("… s", shown))

    assert everywhere(kept(TRANSCRIPTS / f"{name}.txt", text)) == everywhere(text)


def test_the_plan_is_as_the_tutorial_and_the_readme_show_it(printed: dict[str, str]) -> None:
    plan = of(printed, "plan")
    assert plan.startswith("fits 104MiB")
    assert_kept("plan", plan)
    shown = (TRANSCRIPTS / "plan.txt").read_text(encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    before, mark, after = readme.partition("<!-- transcript: plan -->\n```text\n")
    wanted = before + mark + shown + after[after.index("```\n") :]
    assert mark
    assert kept(README, wanted) == wanted


def test_the_training_ends_as_the_tutorial_shows_it_and_can_be_watched_and_explained(printed: dict[str, str]) -> None:
    trained = of(printed, "sft", "--simulate")
    end = trained[trained.index("  trained   ") :]
    assert "error +0.0 %" in end
    assert_kept("train", end)
    assert "20 of 20" in of(printed, "watch", "my-run")
    first, _, _ = of(printed, "plan").partition("\n")
    assert first in of(printed, "explain", "my-run")
