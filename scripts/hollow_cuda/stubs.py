"""Writes stand-ins for NVIDIA's libraries, in which every function that torch imports exists and returns "success".

Only functions that return something else are written by hand. The libraries' kernels and internal memory do not exist.
torch allocates cuBLAS workspaces itself, in its own allocator, so these are real.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)")
RUNTIME = "libcudart.so.13"
"""Built from C sources (``build.py``) and :func:`rest_of_runtime`."""
NOT_SUPPORTED = re.compile("Graph|Ipc|MemPool|MallocAsync|FreeAsync|PeerAccess|Capture")
"""Generated runtime functions that return "not supported"; the other generated ones return "success"."""
UNVERSIONED = {
    "libcuda.so.1": r"cu(?!File)[A-Z]",
    "libcufile.so.0": r"cuFile",
    "libcusparseLt.so.0": r"cusparseLt",
    "libnccl.so.2": r"p?nccl",
    "libnvshmem_host.so.3": r"nvshmem",
}
"""Libraries whose symbols have no version -> a pattern for the beginning of their names."""
VERSION_OF = {"libnvshmem_host.so.3": "NVSHMEM"}
"""The version of the symbols, for libraries in which it is not the library's name."""

HANDLES = ("cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusolverDnCreate", "cusparseCreate")
"""Functions that return a new handle in every call: torch keeps one workspace for each cuBLAS handle."""
TEXTS = ("cudnnGetErrorString", "ncclGetErrorString", "ncclGetLastError", "nvrtcGetErrorString")
BY_HAND = {
    "cuDevicePrimaryCtxGetState": "(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }",
    "cuGetErrorString": '(int error, const char **text) { *text = "stand-in"; return 0; }',
    # One heuristic, all zeros: cublasLtMatmulHeuristicResult_t has 96 bytes (cublasLt.h of CUDA 13.0).
    "cublasLtMatmulAlgoGetHeuristic": "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int most,"
    " char *result, int *found) { __builtin_memset(result, 0, 96); *found = 1; return 0; }",
    # The versions with which torch 2.13 was built; torch checks them.
    "cudnnGetCudartVersion": "(void) { return 13000; }",
    "cudnnGetProperty": "(int which, int *value) { *value = which == 0 ? 9 : which == 1 ? 20 : 0; return 0; }",
    "cudnnGetVersion": "(void) { return 92000; }",
    "ncclGetVersion": "(int *version) { *version = 22907; return 0; }",
    "nvrtcVersion": "(int *major, int *minor) { *major = 13; *minor = 0; return 0; }",
}


@dataclass(frozen=True, slots=True)
class Imports:
    libraries: frozenset[str]
    versioned: Mapping[str, frozenset[str]]
    """Symbols by version; for most of NVIDIA's libraries the version is the library's name."""
    unversioned: frozenset[str]


def imports_of(libraries: Iterable[Path]) -> Imports:
    """Collects the needed libraries and undefined symbols, with ``readelf`` and ``nm``."""
    needed, versioned, unversioned = set[str](), defaultdict[str, set[str]](set), set[str]()
    for library in libraries:
        needed.update(re.findall(r"NEEDED.*\[(.*?)\]", _said("readelf", "-dW", library)))
        for line in _said("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if version:
                versioned[version.lstrip("@")].add(name)
            elif not name.startswith("_Z"):
                unversioned.add(name)
    return Imports(
        frozenset(needed), {version: frozenset(names) for version, names in versioned.items()}, frozenset(unversioned)
    )


def rest_of_runtime(imports: Imports, defined: Iterable[Path]) -> str:
    """Returns C source for the runtime functions that are imported but not defined by these objects."""
    known = {line.split()[-1] for each in defined for line in _said("nm", "--defined-only", each).splitlines()}
    names = sorted(imports.versioned[RUNTIME] - known)
    return "".join(
        f"int {name}(void) {{ return {801 if NOT_SUPPORTED.search(name) else 0}; }}\n"  # cudaErrorNotSupported
        for name in names
    )


def write_stubs(imports: Imports, folder: Path) -> None:
    """Writes a stand-in for each of NVIDIA's libraries except the runtime."""
    for library in sorted(imports.libraries):
        if NVIDIA.match(library) and library != RUNTIME:
            _write_stub(library, imports, folder)


def _write_stub(library: str, imports: Imports, folder: Path) -> None:
    version = VERSION_OF.get(library, library)
    names = set(imports.versioned.get(version, ()))
    options = []
    if names:
        script = folder / f"{library}.map"
        script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
        options = [f"-Wl,--version-script={script}"]
    if library in UNVERSIONED:
        names |= {name for name in imports.unversioned if re.match(UNVERSIONED[library], name)}
    lines = []
    for name in sorted(names):
        if name in HANDLES:
            lines.append(f"int {name}(void **handle) {{ static long next; *handle = (void *)(next += 16); return 0; }}")
        elif name in TEXTS:
            lines.append(f'const char *{name}(void) {{ return "stand-in"; }}')
        else:
            lines.append(f"long {name}{BY_HAND.get(name, '(void) { return 0; }')}")
    source = folder / f"{library}.c"
    source.write_text("\n".join(lines), encoding="utf-8")
    shared = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", str(source), f"-Wl,-soname,{library}", *options]
    subprocess.run([*shared, "-o", str(folder / library)], check=True)


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
