"""Find, by their syntax, the names of PyTorch and ComfyUI that the pack uses.

A name is what an import brings in, with the attributes that are read of it: after `from torch._inductor import config`, the
expression `config.triton.unique_kernel_names` is the name `torch._inductor.config.triton.unique_kernel_names`. So are the names
that are only looked up: in `getattr(torch._C, "name")`, `hasattr`, `importlib.import_module("comfy.ops")`, and where a module,
a class and a method are given as strings.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

HOST = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfy_aimdo", "comfy_kitchen", "comfyui_version")
HOST_MODULES = ("nodes", "execution", "server", "folder_paths", "main", "node_helpers", "latent_preview", "app")
MODULE = re.compile(rf"({'|'.join(('torch', 'triton', *HOST))})(\.\w+)+|comfyui_version")
# Functions that take an object or a module's name, and then names below it.
COMPUTED = "<computed>"
PATCHER = "comfy.model_patcher.ModelPatcher"
LOOKUPS = {"getattr", "hasattr", "setattr", "attribute", "attributes"}  # a name, or several
PATHS = {"late_method"}  # a module's name, and the way from there
PRIVATE = "torch_compat.private"  # the pack's module of PyTorch's private names


def private_names():
    """The names in that module, by what the pack calls them."""
    file = Path(__file__).resolve().parents[2] / "engine" / "torch_compat" / "private.py"
    spec = importlib.util.spec_from_file_location("torch_compile_kit_private", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass asks for it
    spec.loader.exec_module(module)
    return {name: entry.path.replace(":", ".") for name, entry in module.NAMES.items()}


PRIVATE_NAMES = private_names()


def is_private(name):
    """Whether PyTorch promises nothing about a name: one with a part that begins with `_`, or of its experimental parts."""
    parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
    private = private or "experimental" in parts or parts[:2] in (["triton", "knobs"], ["triton", "backends"])
    return parts[0] in ("torch", "triton") and private


def is_of_host(name):
    return name.partition(".")[0] in (*HOST, *HOST_MODULES) or name.startswith("torch.ops.comfy_kitchen")


class _Names(ast.NodeVisitor):
    """The names of one module of ours.

    Args:
        found: the full names.
        calls: (name, number of arguments, names of the others, whether there may be more) of each call.
        patcher: attributes of what is called a patcher, which is the host's ModelPatcher.
        private: PyTorch's names by those in `torch_compat.private`.
    """

    def __init__(self, tree, private):
        self.found, self.calls, self.patcher = set(), set(), set()
        self._aliases, self._private = {}, private
        # Imports inside functions come before their uses in no particular order of the walk.
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    self.found.add(name.name)
                    self._aliases[name.asname or name.name.partition(".")[0]] = (
                        name.name if name.asname else name.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for name in node.names:
                    self.found.add(f"{node.module}.{name.name}")
                    self._aliases[name.asname or name.name] = f"{node.module}.{name.name}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] == "torch_compat":
                self._aliases |= {name.asname or name.name: PRIVATE for name in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
        self.visit(tree)

    def _assign(self, target, value):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its)
        elif isinstance(target, ast.Name) and (name := self.full_name(value)):
            self._aliases.setdefault(target.id, name)

    def full_name(self, node):
        """The name that an expression is, if it is one."""
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.full_name(node.value)
            if node.attr == "private" and not owner:  # self.private
                return PRIVATE
            if owner == PRIVATE:
                return self._private.get(node.attr)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            return node.value
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            return self._module(node.slice)
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "_of_engine" and ast.literal_eval(node.args[0]) == PRIVATE:
                return PRIVATE
            if called in ("_module", "import_module", "get") and node.args:
                return self._module(node.args[0])
            if called == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
                owner = self.full_name(node.args[0])
                return owner and f"{owner}.{node.args[1].value}"
        return None

    @staticmethod
    def is_patcher(node):
        """Whether an expression is an attribute of what is called a patcher, or its clone."""
        owner = getattr(node, "value", None)
        owner = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
        return isinstance(node, ast.Attribute) and owner.lstrip("_") in ("patcher", "clone")

    def _module(self, node):
        value = getattr(node, "value", None)
        return value if isinstance(value, str) and value in HOST_MODULES else self.full_name(node)

    def visit_Attribute(self, node):
        if name := self.full_name(node):
            self.found.add(name)
        if self.is_patcher(node):
            self.patcher.add(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node):
        if name := self.full_name(node):
            self.found.add(name)

    def visit_Subscript(self, node):
        if name := self.full_name(node):
            self.found.add(name)
        self.generic_visit(node)

    def visit_Constant(self, node):
        if name := self.full_name(node):
            self.found.add(name)
        if isinstance(node.value, str) and node.value in self._private:  # private.switch("name")
            self.found.add(self._private[node.value])

    def visit_Call(self, node):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in LOOKUPS | PATHS and len(node.args) >= 2:
            self._below(node.args if called in PATHS else node.args[:2], computed=True)
        name = self.full_name(node.func)
        if self.is_patcher(node.func):
            name = f"{PATCHER}.{node.func.attr}"
        if name:
            keywords = tuple(sorted(k.arg for k in node.keywords if k.arg))
            given = [a for a in node.args if not isinstance(a, ast.Starred)]
            more = len(given) < len(node.args) or any(k.arg is None for k in node.keywords)
            self.calls.add((name, len(given), keywords, more))
        self.generic_visit(node)

    def visit_Tuple(self, node):
        self._below(node.elts)
        self.generic_visit(node)

    def _below(self, nodes, computed=False):
        """`(module, "Class", "method")`: a path of names; `(module, ("one", "other"))`: several names."""
        owner = nodes and self.full_name(nodes[0])
        if not owner:
            return
        for node in nodes[1:]:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                owner = f"{owner}.{node.value}"
                self.found.add(owner)
            elif isinstance(node, ast.Tuple):
                self.found |= {f"{owner}.{n.value}" for n in node.elts if isinstance(n, ast.Constant)}
                return
            else:  # which ones is decided elsewhere
                if computed:
                    self.found.add(f"{owner}.{COMPUTED}")
                return


class Found:
    """What all modules of the pack use.

    Args:
        names: name -> the files, without those that are only the way to a longer name.
        calls: name -> (number of arguments, names of the others, whether there may be more) of each call.
        patcher: attribute of what is called a patcher -> the files.
        foreign: attribute that begins with `_` and that no module of the pack gives to anything -> the files.
        private: PyTorch's names by those in `torch_compat.private`.
    """

    def __init__(self, sources, private=PRIVATE_NAMES):
        self.names, self.calls, self.patcher, self.foreign = {}, {}, {}, {}
        trees = {where: ast.parse(code) for where, code in sources.items()}
        ours = {name for tree in trees.values() for name in _defined(tree)}
        for where, tree in trees.items():
            found = _Names(tree, private)
            for name in found.found:
                self.names.setdefault(name, []).append(where)
            for name, *call in found.calls:
                self.calls.setdefault(name, set()).add(tuple(call))
            for name in found.patcher:
                self.patcher.setdefault(name, []).append(where)
            for name in _private(tree) - ours:
                self.foreign.setdefault(name, []).append(where)
        ways = {name for name in self.names if any(other.startswith(f"{name}.") for other in self.names)}
        self.names = {name: files for name, files in self.names.items() if name not in ways or name in self.calls}


def _defined(tree):
    """Names that a module defines, or gives to an object."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _private(tree):
    """Attributes that begin with `_`, also as strings."""
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in read if name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"}


def of_pack(root, private=PRIVATE_NAMES):
    """What the pack in that folder uses, but for the list of PyTorch's private names itself."""
    files = [*(root / "engine").rglob("*.py"), *(root / "nodes").rglob("*.py"), root / "__init__.py"]
    files = [file for file in sorted(files) if file.parent.name != "torch_compat"]
    return Found({file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files}, private)
