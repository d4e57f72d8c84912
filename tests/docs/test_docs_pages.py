"""The pages as they are written: every block of code is run by a test that its mark names, or read by the parser that
would run it; every link leads somewhere; every flag of TRL's that is refused or does nothing is named."""

import ast
import importlib
import re
import shlex
from typing import Any

import pytest
import yaml

from autotrain_mem.cli import flags, main
from autotrain_mem.settings.flag_verdicts import GROUPS, REFUSED, REFUSED_WHEN_OFF, Verdict
from autotrain_mem.types.methods_table import METHODS
from tests.docs.pages import DOCS, PAGES, README, ROOT, Block, anchors, blocks, commands, links
from tests.place import Autofit, SharedWorkers

EVERY = list(blocks())
WORDS = {"MODEL": "tiny", "DATA": "data.jsonl"}

OTHER_PROGRAMS = ("source ", "docker ", "pip ", "pipx ", "python ", "accelerate launch", "AUTOFIT_", "sudo ", "uv")


def of_language(name: str) -> Any:
    return pytest.mark.parametrize("block", [block for block in EVERY if block.language == name], ids=str)


def test_every_block_says_its_language_and_every_mark_is_known() -> None:
    unknown = [block for block in EVERY if block.language not in ("sh", "python", "yaml", "text", "")]
    assert unknown == []
    for block in EVERY:
        kind, _, name = block.mark.partition(": ")
        assert kind in ("", "run", "transcript"), block
        if kind == "run" and name:
            assert (ROOT / name).is_file(), f"{block} is run by no test"
        if kind == "transcript":
            assert (DOCS / "transcripts" / f"{name}.txt").is_file(), block


@of_language("sh")
def test_every_command_is_one_with_flags_that_it_takes(block: Block, autofit: Autofit, trls: Any) -> None:
    for command in commands(block.text):
        if command.startswith("scripts/"):
            assert (ROOT / command.split()[0]).is_file(), command
            continue
        if command.startswith(OTHER_PROGRAMS):
            continue
        name, *words = shlex.split(command.split(" > ")[0])
        assert name == "autofit", command
        verb, *rest = words
        if verb in main.WITHOUT_METHOD:
            said = autofit(verb, "--help").out
            flagged = {word.split("=")[0] for word in rest if word.startswith("--")} - {"--help"}
            assert [word for word in flagged if word not in said] == [], command
            continue
        method = rest.pop(0) if verb in ("plan", "estimate") else verb
        assert method in METHODS, command
        prog = "autofit" + (f" {verb}" if verb in ("plan", "estimate") else "")
        _, others = flags.make_parser(f"{prog} {method}").parse_known_args([WORDS.get(word, word) for word in rest])
        of_trl = {name for flag in trls[method].flags for name in flag.names}
        assert {word for word in others if word.startswith("--")} - of_trl == set(), command


@pytest.fixture(scope="module")
def trls(workers: SharedWorkers) -> Any:
    return workers.first.flags()


@of_language("python")
def test_every_piece_of_python_compiles_and_imports_names_that_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and node.module == "autotrain_mem":
            package = importlib.import_module(node.module)
            assert {name.name for name in node.names} <= set(package.__all__)


@of_language("yaml")
def test_every_piece_of_yaml_is_read_by_the_command(block: Block, tmp_path, workers: SharedWorkers) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(block.text)
    assert yaml.safe_load(block.text)
    request, _ = flags.read("autofit sft", ["--config", str(file)])
    workers.first.parse("sft", request.argv, request.config, request.environment, flags.own_names())


def test_the_readme_is_short_leads_to_every_how_to_and_names_the_commands_that_set_a_fresh_machine_up() -> None:
    assert README.stat().st_size <= 8_192
    assert {str(page.relative_to(ROOT)) for page in (DOCS / "howto").glob("*.md")} <= set(links(README))
    (run_by_ci,) = re.findall(r"exec .*/(scripts/\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    for command in ("scripts/quickstart", run_by_ci):
        assert f"| `{command}` |" in README.read_text(encoding="utf-8")
        assert "/environment" in (ROOT / command).read_text(encoding="utf-8"), "it installs what is missing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("../contributing/"):  # the pages at the root, taken in as they are built
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_the_page_of_flags_holds_every_refused_and_every_idle_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from docs_pages.hook import filled

    page = filled((DOCS / "reference" / "flags.md").read_text(encoding="utf-8"))
    _, _, page = page.partition("## TRL's flags that are refused")
    refused, _, idle = page.partition("## TRL's flags that do nothing")
    for name, cure in {**REFUSED, **REFUSED_WHEN_OFF}.items():
        assert f"| `--{name}" in refused
        assert cure[1:] in refused
    names = {name for group in GROUPS if group.verdict is Verdict.IDLE for name in group.names}
    assert [name for name in sorted(names) if f"`--{name}`" not in idle] == []
