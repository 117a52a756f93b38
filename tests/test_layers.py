"""Project rules that linters do not check: which room may import which, and length limits.

A room is a top-level module or folder of the package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "slipstream"
ROOT = Path(__file__).resolve().parents[1] / "src" / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))
NATIVE_FILES = sorted(path for suffix in ("cpp", "h", "hpp") for path in ROOT.rglob(f"*.{suffix}"))

# A room may import the rooms of the tiers before its own; the tiers after the surface (`__init__`) use it as
# external code would.
TIERS = (
    {"errors"},
    {"role", "branches"},
    {"frames"},
    {"spec", "config"},
    {"devices", "ops"},
    {"kernels", "formats", "parallel", "profile"},
    {"weights"},
    {"families"},
    {"model"},
    {"engine"},
    {"__init__"},
    {"cli", "compat"},
    {"__main__"},
)
# Rooms that may import less than their tier allows, so that they can be read and tested alone.
NARROWER = {
    "weights": {"errors", "spec", "config", "ops", "formats", "parallel"},
    "families": {"errors", "spec", "weights"},
}
KERNELS_ROOTS = ("engine/build.py", "engine/settings.py")
OPTIONAL = {"gguf", "accelerate", "triton"}


def allowed(room: str) -> set[str]:
    """Return the rooms that a room may import."""
    tier = next((index for index, rooms in enumerate(TIERS) if room in rooms), None)
    assert tier is not None, f"'{room}' is in no tier of this test; give it one"
    return NARROWER.get(room, set().union(*TIERS[:tier]))


def modules_imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the absolute dotted name and statement of each import; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = [*base, *([node.module] if node.module else [])]
            yield from ((".".join([*prefix, alias.name]), node) for alias in node.names)


def wrong_imports(source: str, name: str) -> list[str]:
    """Return a line for each import of the file `name` (inside the package) that does not point down."""
    path = Path(name)
    room = path.parts[0].removesuffix(".py")
    wrong = []
    for module, node in modules_imported(ast.parse(source), (PACKAGE, *path.parts[:-1])):
        first, _, rest = module.partition(".")
        if first != PACKAGE:
            continue
        other = rest.partition(".")[0]
        if not any(other in rooms for rooms in TIERS):
            other = "__init__"  # `from slipstream import init_inference`: the surface
        outside_root = other == "kernels" and room != "kernels" and name not in KERNELS_ROOTS
        if other != room and (other not in allowed(room) or outside_root):
            wrong.append(f"{name}:{node.lineno} {room} -> {other}")
    return wrong


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(params=FILES, ids=relative)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_imports_point_down(file: Path) -> None:
    assert not wrong_imports(file.read_text(), relative(file))


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("ops/norm.py", "from slipstream.model import block", 1),
        ("ops/norm.py", "from ..model.block import Block", 1),
        ("ops/norm.py", "from .. import model", 1),
        ("ops/norm.py", "def f():\n    import slipstream.engine.engine", 1),
        ("ops/norm.py", "from slipstream import init_inference", 1),
        ("ops/norm.py", "from slipstream.devices import cpu", 1),
        ("ops/norm.py", "from .bind import choose\nfrom slipstream.errors import WeightError", 0),
        ("engine/engine.py", "from slipstream.kernels import triton", 1),
        ("engine/build.py", "from slipstream.kernels import kernels_for", 0),
        ("engine/settings.py", "from slipstream.kernels import kernels_for", 0),
        ("families/llama.py", "from slipstream.ops import norm", 1),
        ("weights/gguf.py", "from slipstream.config.environment import cache_dir", 0),
        ("kernels/cpu/norm.py", "from slipstream.kernels.cpu import library", 0),
        ("compat.py", "from slipstream import init_inference", 0),
        ("__init__.py", "from slipstream.cli import app", 1),
    ],
)
def test_the_import_rule_can_fail(name: str, source: str, count: int) -> None:
    assert len(wrong_imports(source, name)) == count


@pytest.mark.parametrize("path", [p for p in FILES if relative(p).startswith("families/")], ids=relative)
def test_families_are_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = [module for module, _ in modules_imported(tree, (PACKAGE, "families"))]
    wrong = [m for m in imported if m.split(".")[0] == "transformers" or m.startswith("torch.nn")]
    wrong += [ast.unparse(node) for node in ast.walk(tree) if is_attribute_of(node, "torch", {"nn"})]
    assert not wrong


def test_the_environment_is_read_in_config_alone(file: Path) -> None:
    if relative(file).startswith("config"):
        pytest.skip("the place where it is read")
    tree = ast.parse(file.read_text())
    wrong = [n.lineno for n in ast.walk(tree) if is_attribute_of(n, "os", {"environ", "getenv", "putenv"})]
    wrong += [n.lineno for m, n in modules_imported(tree, (PACKAGE,)) if m in {"os.environ", "os.getenv"}]
    assert not wrong, f"lines {wrong}: take it from slipstream.config.environment"


def test_optional_packages_are_imported_where_they_are_needed() -> None:
    """Allow one file per package, inside functions; `kernels/triton/` may import Triton at module level."""
    users: dict[str, set[str]] = {name: set() for name in OPTIONAL}
    at_top = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        deferred = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) or is_for_types(node)]
        inside = {id(node) for outer in deferred for node in ast.walk(outer)}
        for module, node in modules_imported(tree, (PACKAGE, *path.relative_to(ROOT).parts[:-1])):
            package = module.partition(".")[0]
            if package not in OPTIONAL:
                continue
            if package == "triton" and relative(path).startswith("kernels/triton/"):
                continue
            users[package].add(relative(path))
            if id(node) not in inside:
                at_top.append(f"{relative(path)}:{node.lineno} {package}")
    assert not at_top
    assert not {package: files for package, files in users.items() if len(files) > 1}


@pytest.mark.parametrize("path", FILES + NATIVE_FILES, ids=relative)
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_a_function_has_at_most_60_lines_and_8_arguments(file: Path) -> None:
    wrong = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, FUNCTIONS):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        count = len(names) + len(node.args.kwonlyargs) - (names[:1] in (["self"], ["cls"]))
        # Arguments of a Triton kernel are pointers and numbers, which cannot be grouped into an object.
        jitted = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if lines > 60 or (count > 8 and not jitted):
            wrong.append(f"{relative(file)}:{node.lineno} {node.name}: {lines} lines, {count} arguments")
    assert not wrong


def test_what_is_public_has_a_docstring(file: Path) -> None:
    tree = ast.parse(file.read_text())
    wrong = [
        f"{relative(file)}:{node.lineno} {node.name}"
        for node in tree.body
        if isinstance(node, (*FUNCTIONS, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert ast.get_docstring(tree) or not tree.body, f"{relative(file)} does not say what it is for"
    assert not wrong


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_attribute_of(node: ast.AST, owner: str, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    )
