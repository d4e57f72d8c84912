"""What holds for the package as a whole: who may import whom, sizes, cold start, names, exit codes."""

import ast
import dataclasses
import graphlib
import importlib
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

import autotrain_mem
from autotrain_mem.methods.interface import Method, method_of
from autotrain_mem.support import errors
from autotrain_mem.types.methods_table import METHODS, MethodFacts

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "autotrain_mem"

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


@dataclasses.dataclass(frozen=True)
class Part:
    """One module or folder of the package, and all that it may import beside the standard library."""

    layer: int
    ours: frozenset[str] = frozenset()
    """Parts of this package, each of a lower layer."""
    others: frozenset[str] = frozenset()
    """Third-party packages."""


def part(layer: int, ours: str = "", others: str = "") -> Part:
    return Part(layer, frozenset(ours.split()), frozenset(others.split()))


HUGGING_FACE = "torch transformers trl peft accelerate datasets tokenizers huggingface_hub bitsandbytes"

# A part may import itself, the standard library, and what stands in its row. A part that has no row fails the test.
LAYERS = {
    "__init__": part(0, "drop_in support training settings types verbs"),
    "support": part(0, "", "huggingface_hub msgspec platformdirs psutil yaml"),
    "settings": part(1, "support"),
    "allocator": part(1, "support"),
    "types": part(2, "settings support"),
    "estimator": part(3, "allocator settings types"),
    "parallel": part(3, "support settings types"),
    "exports": part(5, "allocator support methods parallel settings types", "yaml"),
    "machine": part(3, "allocator support settings types", "bitsandbytes huggingface_hub pynvml requests torch"),
    "search": part(5, "support methods settings types"),
    "report": part(6, "support search settings types", "jinja2 rich"),
    "trainers": part(
        3,
        "support settings types",
        "PIL accelerate bitsandbytes cloudpickle deepspeed huggingface_hub peft torch transformers trl",
    ),
    "methods": part(4, "support parallel settings types trainers", "datasets peft tokenizers torch transformers trl"),
    "rehearsal": part(
        8,
        "allocator support machine methods parallel search training settings types trainers",
        "accelerate bitsandbytes deepspeed peft torch transformers trl",
    ),
    "data": part(6, "support methods search settings types trainers", "PIL datasets huggingface_hub transformers trl"),
    "checks": part(
        7,
        "data support methods search settings types trainers",
        "huggingface_hub packaging peft torch transformers trl",
    ),
    "training": part(
        7,
        "allocator support data machine methods parallel settings types trainers",
        "accelerate deepspeed peft safetensors torch transformers trl",
    ),
    "worker": part(9, "checks data support methods rehearsal settings types trainers", "torch trl"),
    "planning": part(10, "allocator support estimator machine methods parallel search rehearsal settings types worker"),
    "run": part(
        11, "allocator support estimator machine methods parallel planning search report settings types training worker"
    ),
    "api": part(12, "allocator planning run support estimator machine search report settings types training worker"),
    "cli": part(
        13,
        "__init__ api data exports methods planning report run support settings types worker",
        "argcomplete datasets huggingface_hub peft rich tokenizers torch transformers",
    ),
    "drop_in": part(
        13,
        "allocator api checks planning support machine methods parallel search report settings types trainers training "
        "worker",
        "accelerate datasets rich torch transformers trl",
    ),
    "verbs": part(13, "api report support settings types"),
}

# Seconds to import: only where a process exists to run them. Everywhere else they stand inside functions.
SLOW_TO_IMPORT = frozenset(HUGGING_FACE.split()) | {"numpy"}
ROOMS_OF_TORCH = (
    *("rehearsal", "trainers", "training.process", "training.guard", "training.watch"),
    *("drop_in.trainers", "drop_in.experimental", "drop_in.experimental_ppo"),
    *("cli.adapter_merge", "checks.model_objects"),
)
"""They are imported in the worker, in the training process or in a user's script alone."""


def part_of(module: str) -> str:
    """``autotrain_mem.types.job`` -> ``types``; ``autotrain_mem`` itself is ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import: at module level, inside functions and under TYPE_CHECKING alike."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative imports hide the layer"
            for alias in node.names:
                # ``from autotrain_mem import errors`` names a module, ``from autotrain_mem import __version__`` not.
                deeper = f"{node.module}.{alias.name}"
                yield node.lineno, deeper if deeper in MODULES else str(node.module)


def import_time(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The imports that run when the module is imported: all but those in functions and under TYPE_CHECKING."""
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not _is_type_checking(node):
            yield from imports(node, "")


def at_run_time(tree: ast.Module) -> Iterator[str]:
    """Every import but those under TYPE_CHECKING; those in functions count."""
    body = [node for node in tree.body if not _is_type_checking(node)]
    yield from (name for _, name in imports(ast.Module(body=body, type_ignores=[]), ""))


def _is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_ours(name: str) -> bool:
    return name.split(".")[0] == "autotrain_mem"


def test_every_row_of_the_table_points_to_lower_layers_only() -> None:
    """So that no rooms import each other in a circle, but through the package's own names."""
    for name, row in LAYERS.items():
        not_below = [other for other in row.ours if LAYERS[other].layer >= row.layer and name != "__init__"]
        assert not not_below, f"{name} may not import {not_below}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: set(at_run_time(tree)) & set(MODULES) - {module, "autotrain_mem"} for module, tree in TREES.items()
    }
    assert circle(graph) == []
    assert circle({"one": {"other"}, "other": {"one"}}), "it can be found"


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one, each after one that it imports; none where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def imported_by(module: str) -> set[str]:
    """Modules of ours that are loaded with this one, sooner or later, under no TYPE_CHECKING."""
    found: set[str] = set()
    left = {module}
    while left:
        found |= (new := left)
        left = {name for each in new for name in at_run_time(TREES[each]) if name in MODULES} - found
    return found


def test_a_training_on_a_real_card_loads_nothing_that_rehearses_or_makes_faults() -> None:
    loaded = imported_by("autotrain_mem.training.process.main")
    simulated = imported_by("autotrain_mem.rehearsal.simulated_run")
    fake = ("autotrain_mem.rehearsal.", "autotrain_mem.machine.simulated_card", "autotrain_mem.machine.fault_")
    assert "autotrain_mem.training.guard.attach" in loaded
    assert {"autotrain_mem.machine.fault_injection", "autotrain_mem.rehearsal.fake_run"} <= simulated
    assert [module for module in loaded if module.startswith(fake)] == []


def test_every_part_has_a_row_in_the_table_of_layers() -> None:
    assert {part_of(module) for module in MODULES} == LAYERS.keys()


def test_a_module_imports_only_what_its_layer_may() -> None:
    every = [(module, line, name) for module, tree in TREES.items() for line, name in imports(tree, module)]
    assert [f"{module}:{line} imports {name}" for module, line, name in every if not may_import(module, name)] == []


def may_import(module: str, name: str) -> bool:
    own = part_of(module)
    if is_ours(name):
        return part_of(name) in {own, *LAYERS[own].ours}
    return name.split(".")[0] in sys.stdlib_module_names | LAYERS[own].others


def test_slow_libraries_are_imported_inside_functions() -> None:
    slow = tuple(f"autotrain_mem.{room}." for room in ROOMS_OF_TORCH)
    quick = {module: tree for module, tree in TREES.items() if not f"{module}.".startswith(slow)}
    every = [(module, line, name) for module, tree in quick.items() for line, name in import_time(tree)]
    assert [f"{module}:{line}: {name}" for module, line, name in every if name.split(".")[0] in SLOW_TO_IMPORT] == []


def test_every_third_party_import_is_a_declared_dependency() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    called = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
    names = {re.split(r"[\s<>=!;\[]", line)[0] for line in project["dependencies"]}
    of_extras = {"deepspeed", "PIL"}  # what asks for them says so (``checks.sharding``), or goes without
    of_transformers = {"tokenizers", "huggingface_hub", "packaging", "safetensors"}
    declared = {called.get(name, name) for name in names} | of_transformers | of_extras
    used = {name.split(".")[0] for module in MODULES for _, name in imports(TREES[module], module) if not is_ours(name)}
    assert sorted(used - set(sys.stdlib_module_names) - declared) == []


def method_names_asked(tree: ast.AST) -> Iterator[int]:
    """The lines where a method is told from another by its name: in a comparison, or as the keys of a mapping."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            constants = {inner.value for side in sides for inner in ast.walk(side) if isinstance(inner, ast.Constant)}
            if constants & METHODS.keys():
                yield node.lineno
        elif isinstance(node, ast.Dict):
            keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
            if len(keys & METHODS.keys()) > 1:
                yield node.lineno


ROOMS_OF_METHODS = ("autotrain_mem.methods.", "autotrain_mem.types.methods_table")


def test_a_method_is_compared_by_name_in_its_own_folder_alone() -> None:
    """Elsewhere a fact of its row is asked, so that a new method needs one row and one module of ``methods``."""
    others = [module for module in MODULES if not module.startswith(ROOMS_OF_METHODS)]
    assert not [f"{module}:{line}" for module in others for line in method_names_asked(TREES[module])]


def test_each_way_of_asking_for_a_method_is_seen() -> None:
    ways = ('x.method == "sft"', 'method not in ("grpo", "rloo")', 'if x.method != "ppo": ...', '{"sft": 1, "dpo": 2}')
    assert all([*method_names_asked(ast.parse(way))] for way in ways)


def test_every_method_has_a_module_with_the_same_functions_in_the_same_order() -> None:
    """But for those for which ``Method`` has a value, which may be left out."""
    offered = [name for name in vars(Method) if not name.startswith("_")]
    needed = {"worst_rows", "rows_editor", "row_lengths"}
    for method in METHODS:
        body = TREES[f"autotrain_mem.methods.{method}"].body
        bound = [name for node in body for name in names_bound(node) if name in offered]
        assert bound == [name for name in offered if name in bound], method
        assert needed <= vars(type(method_of(method))).keys(), method


def test_a_method_has_few_facts_beside_its_module() -> None:
    """Law 3: what differs by method is a question to its module, with a default in ``Method``."""
    assert len(dataclasses.fields(MethodFacts)) <= 20


def test_every_method_has_a_public_trainer() -> None:
    assert {row.trainer for row in METHODS.values()} <= {*autotrain_mem.__all__}


def names_bound(node: ast.stmt) -> list[str]:
    """``def f``: f; ``f = defaults.f``: f."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def loaded_by(code: str) -> tuple[set[str], str]:
    """(top-level modules that a fresh interpreter has loaded after running ``code``, what it printed)."""
    names = "sorted({name.split('.')[0] for name in sys.modules})"
    script = f"import sys\n{code}\nprint('\\nLOADED', *{names})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    said, _, loaded = done.stdout.partition("\nLOADED ")
    return set(loaded.split()), said


def test_help_loads_no_library_that_is_slow_to_import() -> None:
    loaded, said = loaded_by("from autotrain_mem.cli import main\nassert main.run(['--help']) == 0")
    assert said.startswith("usage: autofit")
    assert not loaded & (SLOW_TO_IMPORT | {"rich", "yaml", "pynvml", "psutil"})


SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}


def test_no_module_is_longer_than_400_lines() -> None:
    assert [module for module, source in SOURCES.items() if len(source.splitlines()) > 400] == []


BANNED_WORDS = {"util", "utils", "helper", "helpers", "common", "manager", "handler", "info", "cfg", "gb", "bs"}
"""As whole words of a name: ``device_info`` is banned, ``informed`` is not."""


def words(name: str) -> set[str]:
    """``GpuInfo_of`` -> {"gpu", "info", "of"}."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_no_module_class_or_function_has_a_banned_word_in_its_name() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = [module.split(".")[-1] for module in MODULES]
    names += [node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, kinds)]
    named = [name for name in names if words(name) & BANNED_WORDS or name.startswith("do_")]
    assert set(named) <= {"get_server_info"}
    assert (words("_GpuInfo_of"), words("MIN_BLOCK")) == ({"gpu", "info", "of"}, {"min", "block"})


def test_no_work_is_left_for_later() -> None:
    left = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [module for module, source in SOURCES.items() if left.search(source)] == []


def test_only_the_command_prints() -> None:
    """A child's stdout is a channel of JSON, and a library's is the user's."""
    silent = {module: tree for module, tree in TREES.items() if part_of(module) != "cli"}
    calls = [(module, node) for module, tree in silent.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    printing = [(module, call) for module, call in calls if ast.unparse(call.func) in ("print", "sys.stdout.write")]
    assert [f"{module}:{call.lineno}" for module, call in printing] == []


def test_every_console_is_one_that_spells_out_what_would_steer_a_terminal() -> None:
    for module, tree in TREES.items():
        if "rich.console.Console" in {name for _, name in imports(tree, module)}:
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            assert [call.lineno for call in calls if ast.unparse(call.func) == "Console"] == [], module


def test_the_package_says_that_it_is_typed_and_under_which_license() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_every_folder_of_the_package_has_an_init() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


INITS = [module for module, path in MODULES.items() if path.name == "__init__.py"]


def test_an_init_builds_nothing() -> None:
    """A docstring, imports, names of what is public and constants: nothing runs when a folder is imported."""
    nodes = [(module, node) for module in INITS for node in TREES[module].body]
    assert [f"{module}: {ast.unparse(node)}" for module, node in nodes if not _is_declaration(node)] == []


def test_a_folder_says_in_which_process_its_code_runs() -> None:
    first = {module: str(ast.get_docstring(TREES[module])).splitlines()[0] for module in INITS if "." in module}
    says = re.compile(r"[Rr]uns in (any process|the (parent|worker|training process))")
    assert [module for module, line in first.items() if not says.search(line)] == []


def _is_declaration(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)):
        return not any(isinstance(inner, ast.Call) for inner in ast.walk(node))
    if isinstance(node, ast.If) and _is_type_checking(node):
        return all(map(_is_declaration, (*node.body, *node.orelse)))
    return isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")


def error_classes(root: type[errors.AutofitError] = errors.AutofitError) -> list[type[errors.AutofitError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in error_classes(child))]


def drawn() -> dict[str, int | None]:
    """Class -> exit code (None for a group), as the module's docstring draws them."""
    rows = re.findall(r"^[ │├└─]*(\w+) *(\d+)?(?: .*)?$", str(errors.__doc__).split("::")[1], re.MULTILINE)
    return {name: int(code) if code else None for name, code in rows if name[0].isupper() and name in vars(errors)}


GROUPS = [kind for kind in error_classes() if kind.__subclasses__() and "exit_code" not in vars(kind)]


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    expected = {kind.__name__: None if kind in GROUPS else kind.exit_code for kind in error_classes()}
    assert drawn() == expected


def test_every_error_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in error_classes() if kind not in GROUPS]
    assert len(codes) == len(set(codes))
    assert all(0 < code < 256 for code in codes)
    assert (errors.MissingExtraError.exit_code, errors.RewardFunctionError.exit_code) == (3, 35), "as is promised"


def test_nobody_raises_a_group() -> None:
    """A group has no exit code of its own: whoever raises it leaves its reader with 1."""
    groups = {kind.__name__ for kind in GROUPS}
    for module, tree in TREES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        raised = [f"{module}:{call.lineno}" for call in calls if ast.unparse(call.func) in groups]
        assert not raised


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_to_another_process(kind: type[errors.AutofitError]) -> None:
    sent = kind("No model 'x'.", hint="Check the spelling.")
    received = errors.from_json(sent.to_json())
    assert type(received) is kind
    assert (received.message, received.hint, str(received)) == (sent.message, sent.hint, str(sent))


def test_every_module_can_be_imported() -> None:
    for module in MODULES:
        assert importlib.import_module(module).__doc__


def test_the_real_lies_below_the_fake_and_what_shows_on_top() -> None:
    """What trains knows nothing of what rehearses, plans or shows, and what plans nothing of what shows."""
    for rooms, above in (
        ("trainers training data checks", "rehearsal estimator planning run report"),
        ("rehearsal estimator search planning", "report cli"),
    ):
        assert [room for room in rooms.split() if LAYERS[room].ours & {*above.split()}] == []


def names_in(tree: ast.AST) -> set[str]:
    """All names, attributes, arguments and whole strings of a module."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, (ast.Name, ast.Attribute, ast.keyword, ast.arg)):
            found |= {str(getattr(node, kind, "")) for kind in ("id", "attr", "arg")}
    return found


MOST_FILES = {"max_length": 20}
"""Modules in which a setting's name may stand; 14 for any other."""
COUNTED = (
    *("max_length", "gradient_checkpointing", "expandable_segments", "optim", "packing", "cp_size", "sp_size"),
    *("max_pixels", "fsdp_offload_params", "activation_offloading", "learning_rate", "load_in_4bit"),
)


@pytest.mark.parametrize("setting", COUNTED)
def test_a_settings_name_stands_where_it_is_declared_and_where_it_acts(setting: str) -> None:
    stands = [module for module, tree in TREES.items() if setting in names_in(tree)]
    assert len(stands) <= MOST_FILES.get(setting, 14), stands


def repeated(names: Iterable[str]) -> set[str]:
    every = [*names]
    return {name for name in every if every.count(name) > 1}


def test_no_two_modules_have_the_same_name() -> None:
    """``main`` is what is run, in each process that is started."""
    assert repeated(module.split(".")[-1] for module in MODULES if module not in INITS) <= {"main"}


def test_no_two_public_classes_have_the_same_name() -> None:
    """But a drop-in trainer's, which is that of TRL's or of ours."""
    classes = [
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert repeated(classes) <= {*autotrain_mem.__all__}


BUDGETS = {
    room: int(lines.replace(",", ""))
    for room, lines in re.findall(
        r"^\| `([a-z_]+)/?` .*\| ([\d,]+) \|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.MULTILINE
    )
}


def test_every_room_keeps_its_budget_of_lines() -> None:
    lines: dict[str, int] = {}
    for module, source in SOURCES.items():
        lines[part_of(module)] = lines.get(part_of(module), 0) + len(source.splitlines())
    assert lines.keys() == BUDGETS.keys()
    assert {room: count for room, count in lines.items() if count > BUDGETS[room]} == {}


SMALL, CALLED_ONCE = 8, 268
"""Modules under 60 lines, and private functions that are called once; neither number rises."""


def test_no_more_small_modules_and_functions_that_are_called_once() -> None:
    small = [module for module, source in SOURCES.items() if len(source.splitlines()) < 60 and module not in INITS]
    once = [
        f"{module}: {node.name}"
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
        if len(re.findall(rf"\b{node.name}\b", SOURCES[module])) == 2
    ]
    assert len(small) <= SMALL, small
    assert len(once) <= CALLED_ONCE


def test_every_file_that_the_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = {path for path in re.findall(r"`([a-z_]+/[a-z_/]+(?:\.py|\.csv|\.json)?)", text) if "NAME" not in path}
    places = (PACKAGE, ROOT)
    assert named
    assert [path for path in sorted(named) if not any((place / path).exists() for place in places)] == []
