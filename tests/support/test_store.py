"""Files are written whole or not at all; so is the cache, and what it holds counts until its versions change."""

import errno
import gzip
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotrain_mem.support import files, versions
from autotrain_mem.support import store as module
from autotrain_mem.support.errors import OutputFolderError
from autotrain_mem.support.files import A_LINK, NOT_ORDINARY, JsonLines, write_json
from autotrain_mem.support.processes import Child
from autotrain_mem.support.store import PAGE_BYTES, Store, cache_folder, drop_oldest
from autotrain_mem.support.versions import PACKAGES, content_digest, installed_versions, versions_key

KEY = {"model": "tiny", "batch": 4}
LARGE = list(range(16_000))


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: pathlib.Path, messages: list[str]) -> Store:
    return Store(tmp_path / "cache", on_damage=messages.append)


def only_file(tmp_path: pathlib.Path) -> pathlib.Path:
    (path,) = (tmp_path / "cache").iterdir()
    return path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=30)
@given(kind=st.sampled_from(["rehearsal", "profile"]), key=st.dictionaries(st.text(), JSON, max_size=4), value=JSON)
def test_a_later_process_gets_the_value(
    tmp_path_factory: pytest.TempPathFactory, kind: str, key: dict[str, Any], value: Any
) -> None:
    folder, messages = tmp_path_factory.mktemp("store"), list[str]()
    Store(folder, on_damage=messages.append).put(kind, key, value)
    assert Store(folder, on_damage=messages.append).get(kind, key) == value
    assert Store(folder, on_damage=messages.append).get("another", key) is None
    assert Store(folder, on_damage=messages.append).get(kind, {**key, "more": 1}) is None
    assert messages == []


def test_values_are_compressed_and_gzip_shows_them(store: Store, tmp_path: pathlib.Path) -> None:
    store.put("kind", KEY, LARGE)
    assert only_file(tmp_path).stat().st_size < len(json.dumps(LARGE)) / 2
    assert json.loads(gzip.decompress(only_file(tmp_path).read_bytes())) == {"kind": "kind", "key": KEY, "value": LARGE}
    assert store.get("kind", dict(reversed(KEY.items()))) == LARGE, "the order of the key's names does not matter"
    store.put("kind", {"pair": (2, 3)}, "value")
    assert store.get("kind", {"pair": [2, 3]}) == "value"


@settings(max_examples=100)
@given(data=st.data())
def test_a_damaged_file_gives_no_other_value_and_is_deleted_reported_once_and_written_again(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder, messages, value = tmp_path_factory.mktemp("store"), list[str](), {"bytes": 12345}
    Store(folder, on_damage=messages.append).put("kind", KEY, value)
    (path,) = folder.iterdir()
    content = bytearray(path.read_bytes())
    place, is_cut = data.draw(st.integers(0, len(content) - 1)), data.draw(st.booleans())
    content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
    path.write_bytes(content[:place] if is_cut else content)
    reader = Store(folder, on_damage=messages.append)
    found = reader.get("kind", KEY)
    assert reader.get("kind", KEY) == found
    if found is None:
        assert not path.exists()
        assert messages == [f"the cache in {folder} was damaged (a file is corrupt): rebuilt"]
    else:
        assert (is_cut, found, messages) == (False, value, []), "a date in gzip's header means nothing"
    reader.put("kind", KEY, value)
    assert reader.get("kind", KEY) == value


def test_a_value_kept_under_another_key_is_not_taken(store: Store, tmp_path: pathlib.Path, messages: list[str]) -> None:
    store.put("kind", KEY, "mine")
    path = only_file(tmp_path)
    store.put("kind", {"model": "other"}, "another's")
    (other,) = set(path.parent.iterdir()) - {path}
    os.replace(other, path)
    assert store.get("kind", KEY) is None
    assert messages == [f"the cache in {path.parent} was damaged (a file has another key): rebuilt"]
    os.mkfifo(path)
    assert store.get("kind", KEY) is None, "without waiting for a writer"
    assert not path.exists()


@pytest.mark.parametrize("call", ["pathlib.Path.mkdir", "builtins.open", "os.replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_is_reported_once_and_leaves_no_file(
    store: Store, tmp_path: pathlib.Path, messages: list[str], monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    store.put("kind", {"old": 1}, "old")
    with monkeypatch.context() as patch:
        patch.setattr(call, Mock(side_effect=OSError(number, os.strerror(number))))
        store.put("kind", KEY, 1)
        store.put("kind", KEY, 2)
    assert len(messages) == 1
    assert os.strerror(number) in messages[0]
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no half of a file stays"
    assert store.get("kind", {"old": 1}) == "old", "what was kept before can still be read"


HAMMER = """
    import pathlib, sys
    from autotrain_mem.support.store import Store
    messages = []
    wrong = 0
    for turn in range(25):
        store = Store(pathlib.Path(sys.argv[1]), on_damage=messages.append, limit_bytes=6 * 4096)
        for number in range(8):
            found = store.get("kind", {"number": number})
            wrong += found is not None and (found["number"] != number or len(set(found["rows"])) != 1)
            store.put("kind", {"number": number}, {"number": number, "rows": [turn] * 3000})
    print(wrong, messages)
"""


def hammer(folder: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(HAMMER), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_two_processes_neither_reads_a_torn_value_and_a_killed_one_leaves_none(
    tmp_path: pathlib.Path, messages: list[str]
) -> None:
    both = [hammer(tmp_path), hammer(tmp_path)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert said == ["0 []\n"] * 2
    Store(tmp_path, limit_bytes=6 * PAGE_BYTES).put("kind", KEY, 1)
    assert len(list(tmp_path.glob("*.json.gz"))) <= 6, "what was too much is dropped"
    for wait_seconds in (0.1, 0.2):
        folder = tmp_path / f"{wait_seconds} s"
        process = hammer(folder)
        deadline = time.monotonic() + 30
        while not list(folder.glob("*.json.gz")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(wait_seconds)
        process.kill()
        process.communicate()
        store = Store(folder, on_damage=messages.append)
        found = [store.get("kind", {"number": number}) for number in range(8)]
        assert any(found)
        assert messages == []


def aged(path: pathlib.Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_least_recently_used_file_is_deleted_first(tmp_path: pathlib.Path, messages: list[str]) -> None:
    limited = Store(tmp_path, on_damage=messages.append)
    for number in range(8):
        before = set(tmp_path.iterdir())
        limited.put("kind", {"number": number}, number)
        (new,) = set(tmp_path.iterdir()) - before
        aged(new, 1000 - number)
    assert limited.get("kind", {"number": 0}) == 0, "used just now"
    Store(tmp_path, on_damage=messages.append, limit_bytes=8 * PAGE_BYTES).put("kind", {"number": 8}, 8)
    kept = [number for number in range(9) if limited.get("kind", {"number": number}) is not None]
    assert kept == [0, 4, 5, 6, 7, 8], "three quarters of eight pages"
    assert messages == []


def test_only_old_partial_files_are_deleted(tmp_path: pathlib.Path) -> None:
    young, old, foreign = (tmp_path / name for name in ("a.1.partial", "a.2.partial", "README"))
    for path in (young, old, foreign):
        path.write_text("half")
    aged(old, 2 * module.ABANDONED_SECONDS)
    aged(foreign, 2 * module.ABANDONED_SECONDS)
    drop_oldest(tmp_path, 0)
    assert sorted(tmp_path.iterdir()) == sorted([young, foreign])


def test_the_folder_is_the_users_cache_or_the_variables_or_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, messages: list[str]
) -> None:
    monkeypatch.delenv("AUTOFIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "autofit"
    monkeypatch.setenv("AUTOFIT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("AUTOFIT_CACHE", "")
    assert cache_folder() is None
    (nowhere := Store(None, on_damage=messages.append)).put("kind", KEY, 1)
    assert nowhere.get("kind", KEY) is None
    assert messages == []


OLD = {"steps": 1}


@pytest.fixture
def written(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run.json"
    write_json(path, OLD)
    return path


def read(path: pathlib.Path) -> object:
    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_json_is_read_back_and_a_diverged_loss_is_a_text(written: pathlib.Path) -> None:
    with pytest.raises(TypeError):
        write_json(written, {"steps": object()})
    assert read(written) == OLD
    write_json(written, {"model": "größe", "last_loss": float("nan"), "losses": [1.5, None, float("inf")]})
    assert read(written) == {"model": "größe", "last_loss": "nan", "losses": [1.5, None, "inf"]}
    assert os.listdir(written.parent) == ["run.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("refusal", "raised"),
    [(errno.ENOSPC, OutputFolderError), (errno.EFBIG, OutputFolderError), (None, KeyboardInterrupt)],
)
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(
    written: pathlib.Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None, raised: type[BaseException], call: str
) -> None:
    error = KeyboardInterrupt() if refusal is None else OSError(refusal, os.strerror(refusal))
    monkeypatch.setattr(files.os, call, Mock(side_effect=error))
    with pytest.raises(raised):
        write_json(written, {"steps": 2})
    assert read(written) == OLD
    assert os.listdir(written.parent) == ["run.json"]


def test_a_path_that_cannot_be_written_is_refused_with_the_flag(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path, reason, way_out in (
        ("missing/run.json", "its folder does not exist", "Make the folder first"),
        ("file/run.json", "or is a file", "Make the folder first"),
        ("folder", "in the way", "Move it away"),
    ):
        with pytest.raises(OutputFolderError, match=reason) as raised:
            write_json(tmp_path / path, OLD, place="--out a file")
        assert raised.value.hint == f"{way_out}, or give --out a file in another place."


@pytest.mark.parametrize(
    ("make", "reason"), [(pathlib.Path.symlink_to, A_LINK), (lambda path, _: os.mkfifo(path), NOT_ORDINARY)]
)
def test_lines_and_logs_are_written_to_regular_files_only(
    tmp_path: pathlib.Path, make: Callable[[pathlib.Path, pathlib.Path], None], reason: str
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "events.jsonl"
    victim.write_text("mine\n")
    make(path, victim)
    for write in (lambda: JsonLines(path).write({}), lambda: Child("no_module", {}, path)):
        with pytest.raises(OSError, match=reason):
            write()
    assert victim.read_text() == "mine\n"


@pytest.fixture
def package(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "module.py").write_text("x = 1\n")
    (tmp_path / "main.py").write_text("y = 1\n")
    return tmp_path


def test_every_library_that_a_rehearsal_runs_is_named_with_its_version() -> None:
    import torch
    import trl

    key = versions_key()
    assert key["torch"] == str(torch.__version__)
    assert key["trl"] == trl.__version__
    assert key["trl files"]
    assert key["autotrain_mem"] == content_digest(pathlib.Path(versions.__file__).parents[1])


def test_a_changed_file_changes_the_digest(package: pathlib.Path) -> None:
    before = content_digest(package)
    os.utime(package / "main.py", (1, 1))
    (package / "notes.txt").write_text("no code")
    assert content_digest(package) == before
    (package / "inner" / "module.py").write_text("x = 2\n")
    changed = content_digest(package)
    (package / "inner" / "module.py").rename(package / "inner" / "renamed.py")
    assert len({before, changed, content_digest(package)}) == 3


def test_an_edited_trl_or_checkout_is_noticed(package: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(versions, "PACKAGES", ("edited_checkout", "edited_release"))
    monkeypatch.setattr(versions, "OFTEN_EDITED", ())
    for installed in ("edited_checkout-1.2.dev0", "edited_release-1.2"):
        (package.parent / f"{installed}.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(package.parent))
    package = package.rename(package.parent / "edited_checkout")
    before = versions_key.__wrapped__()
    (package / "main.py").write_text("y = 22\n")
    after = versions_key.__wrapped__()
    assert {name for name in before if before[name] != after[name]} == {"edited_checkout files"}


def test_versions_equal_those_of_the_metadata(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_older.layout-1.5-py3.11.egg-info").write_text("Metadata-Version: 1.0\nName: x\nVersion: 1.5\n")
    (tmp_path / "Shadowed_By-2.0.dist-info").mkdir()
    (tmp_path / "trl-0.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed_versions([*PACKAGES, "an-older-layout", "shadowed.by", "not-there"])
    known = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    assert found == {
        **{package: known.get(package) for package in PACKAGES},
        "trl": "0.1",
        "an-older-layout": "1.5",
        "shadowed.by": "2.0",
        "not-there": None,
    }
