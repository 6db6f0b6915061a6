"""The rooms of engine/: imports go down only, nothing imports itself around a corner, and a room stays small."""

import ast
import shutil

import pytest
from support import ROOT

# From the nodes down; a room may import those below its floor, and itself. "engine" is what lies in engine/ itself.
FLOORS = [
    {"nodes"},
    {"engine/host/nodes"},
    {"engine/host/model", "engine/host/vae"},
    {"engine/host/graphs"},
    {"engine/host/weights", "engine/cuda_graphs", "engine/notices", "engine/benchmark"},
    {"engine/host", "engine/compile"},
    {"engine/background", "engine/blocks", "engine/cache", "engine/inductor", "engine/options", "engine/warmup"},
    {"engine", "engine/failures"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules_of(root):
    """Each module below nodes/ and engine/, as a tuple of its path's parts, and the modules that it imports."""
    files = [f for room in ("nodes", "engine") for f in (root / room).rglob("*.py") if f.name != "__init__.py"]
    known = {file.relative_to(root).with_suffix("").parts for file in files}
    return {
        file.relative_to(root).with_suffix("").parts: set(_imports(file, file.relative_to(root).parent.parts, known))
        for file in files
    }


def _imports(file, package, known):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) + 1 - node.level], *(node.module or "").split("."))
            base = tuple(part for part in base if part)
            yield from ({base} if base in known else {(*base, name.name) for name in node.names} & known)


def room_of(module):
    return "/".join(module[:-1])


def upward(modules):
    """Imports of a higher floor, or of another room on the same one."""
    pairs = [(here, there) for here, imported in modules.items() for there in imported if room_of(here) != room_of(there)]
    return [f"{'/'.join(a)} imports {'/'.join(b)}" for a, b in pairs if FLOOR[room_of(a)] >= FLOOR[room_of(b)]]


def circles(modules):
    """Modules that import themselves through others."""

    def reached(module):
        found, waiting = set(), [module]
        while waiting:
            new = modules[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return sorted("/".join(module) for module in modules if module in reached(module))


def test_imports_go_down_and_never_around():
    modules = modules_of(ROOT)
    assert {room_of(module) for module in modules} == set(FLOOR), "a room without its floor"
    assert not upward(modules) and not circles(modules)
    assert len(FLOORS) <= 8


def test_a_room_is_small_and_says_what_lives_there():
    modules = modules_of(ROOT)
    for room in set(FLOOR) - {"nodes"}:
        assert sum(room_of(module) == room for module in modules) <= 9, room
        docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text(encoding="utf-8")))
        assert docstring and "import" in docstring.lower(), f"{room}/__init__.py does not say what it may import"


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("engine/cache/disk.py", "from ..compile.compiled_code import BlockCode", upward),
        ("engine/cache/folders.py", "from ..options.filter import OptionsFilter", upward),
        ("engine/errors.py", "if TYPE_CHECKING:\n    from .settings import CompileSettings", circles),
    ],
)
def test_what_is_planted_is_found(tmp_path, file, line, found):
    for room in ("nodes", "engine"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    assert not found(modules_of(tmp_path))
    (tmp_path / file).write_text((tmp_path / file).read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    assert found(modules_of(tmp_path))
