"""Whether DeepSpeed can make what it has for the host, which it compiles at the first use on a machine."""

from __future__ import annotations

import ast
import os
import pathlib
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

OPTIMIZER = ("cpu_adam",)
NVME = ("pin_memory", "async_io")
"""DeepSpeed's operators for the host (``deepspeed/ops/op_builder/``): a step of Adam, and files on NVMe."""
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_LIBAIO = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")


def missing_to_compile(
    environment: Mapping[str, str], operators: tuple[str, ...] = OPTIMIZER
) -> Iterator[tuple[str, str]]:
    """Yields what is not here, and how to get it; nothing where all operators were built with DeepSpeed.

    ninja is asked for each time, the compiler where nothing was compiled before (``deepspeed/ops/op_builder/builder.py:
    jit_load``, ``torch/utils/cpp_extension.py: verify_ninja_availability, get_cxx_compiler``).

    Args:
        environment: Of the process that trains.
    """
    operators = tuple(name for name in operators if not _is_prebuilt(name))
    if not operators:
        return
    path = environment.get("PATH")
    if shutil.which("ninja", path=path) is None:
        beside = pathlib.Path(sys.executable).parent
        has_it = (beside / "ninja").exists()
        cure = (
            f'export PATH="{beside}:$PATH", where it is' if has_it else "pip install ninja, or apt install ninja-build"
        )
        yield "ninja is not found in PATH", cure
    if all(_was_compiled(environment, name) for name in operators):
        return
    compiler = shlex.split(environment.get("CXX", "c++"))[:1] or ["c++"]
    if shutil.which(compiler[0], path=path) is None:
        yield f"there is no C++ compiler ({compiler[0]})", "apt install g++, or name one: export CXX=..."
    elif not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "Python.h is missing", "apt install python3-dev"
    # Elsewhere than in these it is found by flags of the compiler's (``async_io.py: is_compatible``).
    if NVME[1] in operators and "CFLAGS" not in environment and not any(map(os.path.exists, _LIBAIO)):
        yield "libaio.h is missing", "apt install libaio-dev, or name its folder: export CFLAGS=-I... LDFLAGS=-L..."


def _is_prebuilt(operator: str) -> bool:
    """Whether it was compiled as DeepSpeed was installed (``DS_BUILD_CPU_ADAM=1``), on a machine with CUDA.

    ``deepspeed/git_version_info.py`` reads the same file, and ``builder.py: load`` asks for the accelerator too.
    """
    package = find_spec("deepspeed")
    if package is None or package.origin is None:
        return False
    try:
        text = pathlib.Path(package.origin).with_name("git_version_info_installed.py").read_text(encoding="utf-8")
        lines = (line.partition("=") for line in text.splitlines())
        said = {name.strip(): ast.literal_eval(value.strip()) for name, _, value in lines if value}
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(said.get("installed_ops", {}).get(operator)) and said.get("accelerator_name") == "cuda"


def _was_compiled(environment: Mapping[str, str], operator: str) -> bool:
    """Whether an earlier run did (``torch/utils/cpp_extension.py: _get_build_directory``)."""
    home = environment.get("XDG_CACHE_HOME") or pathlib.Path(environment.get("HOME") or pathlib.Path.home(), ".cache")
    folder = pathlib.Path(environment.get(EXTENSIONS) or pathlib.Path(home, "torch_extensions"))
    found = (folder.glob(f"{levels}{operator}/{operator}.so") for levels in ("", "*/"))
    return any(any(each) for each in found)
