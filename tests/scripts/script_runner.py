"""Runs a script as a user does, but in this process."""

import contextlib
import importlib.machinery
import importlib.util
import io
import pathlib
import sys
from dataclasses import dataclass
from typing import Any

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str

    def assert_says(self, *texts: str, code: int = 0) -> None:
        assert self.code == code, self.out
        assert [text for text in texts if text not in self.out] == [], self.out


class Script:
    """A script, loaded anew, with some of its names replaced."""

    def __init__(self, name: str, **replaced: Any) -> None:
        loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(SCRIPTS / name))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        self.names: Any = importlib.util.module_from_spec(spec)
        sys.modules[loader.name] = self.names  # dataclasses look for theirs
        loader.exec_module(self.names)
        self.replace(**replaced)

    def replace(self, **names: Any) -> None:
        """Replaces some of its names, which nobody else shares."""
        vars(self.names).update(names)

    def run(self, *arguments: object) -> Ran:
        """``scripts/NAME ARGUMENTS``."""
        code: Any = 0
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(sys, "argv", [self.names.__file__, *map(str, arguments)])
            try:
                self.names.main()
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int), code
        return Ran(int(code), out.getvalue())
