"""Check that imports between rooms (folders of nodes/ and engine/) go down only, without a cycle: python -m devtools.rooms"""

import ast
import sys

from .commands import ROOT

# From the top down: a room may import itself and rooms on lower floors. "engine" stands for the modules directly in engine/.
FLOORS = [
    {"nodes"},
    {"engine/host/nodes"},
    {"engine/host/model"},
    {"engine/host/graphs", "engine/benchmark"},
    {"engine/host/weights", "engine/cuda_graphs", "engine/messages"},
    {"engine/host", "engine/compile"},
    {"engine/compile_process", "engine/channels_last"},
    {"engine/background", "engine/blocks", "engine/cache", "engine/inductor", "engine/transformer_options"},
    {"engine", "engine/failures"},
    {"engine/torch_compat"},
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


def without_rule(root, modules):
    """Rooms whose __init__.py does not say what may be imported there."""
    lines = []
    for room in sorted({*map(room_of, modules)} - {"nodes"}):
        docstring = ast.get_docstring(ast.parse((root / room / "__init__.py").read_text(encoding="utf-8")))
        if "import" not in (docstring or "").lower():
            lines.append(f"{room}/__init__.py does not say what may be imported there")
    return lines


def check(root=ROOT):
    """What is wrong, a line each."""
    modules = modules_of(root)
    rooms = {room_of(module) for module in modules}
    if rooms != set(FLOOR):
        return [f"{room} is a room without a floor, or a floor without a room" for room in sorted(rooms ^ set(FLOOR))]
    return [
        *without_rule(root, modules),
        *upward(modules),
        *(f"{module} imports itself through others" for module in circles(modules)),
    ]


def main():
    lines = check()
    print("\n".join(lines) or f"{len(modules_of(ROOT))} modules in {len(FLOOR)} rooms on {len(FLOORS)} floors")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
