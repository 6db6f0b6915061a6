"""Tell whether code is the host's or another pack's.

A CUDA graph repeats what code did once, so all that the code depends on must be known. For ComfyUI's own code that is known.
Other code may keep state anywhere: in a closure, an object or a wrapper. So no module of this pack analyses other code: code in
a file outside of ComfyUI, PyTorch and the packages of TRUSTED is foreign (`pack_of_file`). The only exception is a function
whose bytecode shows that it passes its arguments on and at most stores them (`noted_for`).

A call of a network may run foreign code at three places; the first pack found is named:

1. in what the prompt hands to the model: patches, overrides, wrappers, callbacks (`foreign_in_options`);
2. on the stack, between ComfyUI's `KSAMPLER.sample` and the call: wrappers of any kind, samplers, guiders (`foreign_around`);
3. in the network (`Survey`): classes, methods replaced in a class or on an object, hooks, attributes, and the functions that
   the network's code names in Python modules.
"""

from __future__ import annotations

import argparse
import collections
import dis
import functools
import inspect
import itertools
import os
import re
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .per_model import Same
from .torch_compat import private
from .torch_settings import compile_scope, original

# Packages beside ComfyUI whose code counts as the host's, and why.
TRUSTED = {
    "torch": "what others exchange in it is found where the network's code names it",
    "triton": "launches kernels",
    "comfy_kitchen": "ComfyUI's kernels",
    "comfy_aimdo": "ComfyUI's memory manager",
    "sageattention": "kernels that ComfyUI calls with --use-sage-attention",
    "sageattn3": "the same for Blackwell",
    "flash_attn": "kernels that ComfyUI calls with --use-flash-attention",
    "xformers": "kernels that ComfyUI calls where they are installed",
    **dict.fromkeys(
        (
            *("av", "cv2", "einops", "kornia", "numpy", "PIL", "psutil", "safetensors", "scipy", "sentencepiece", "spandrel"),
            *("tokenizers", "torchaudio", "torchsde", "torchvision", "torch_directml", "torch_mlu", "torch_npu", "tqdm"),
            *("transformers", "trimesh", "typing_extensions", "yaml"),
        ),
        "files of ComfyUI import it, so that code names it",
    ),
}
# Parts of packs' names, and why they count as the host's.
TRUSTED_PACKS = {"gguf": "layers of ComfyUI-GGUF and its forks keep weights and LoRA on tensors, whose addresses are compared"}
# File and name of the host's wrappers around the network that change nothing inside the network, and what they do.
TRUSTED_WRAPPERS = {("nodes_easycache.py", "easycache_forward_wrapper"): "decides around the network whether it is called"}
_OURS = tuple(os.path.normcase(Path(__file__).parent.parent / room) + os.sep for room in ("engine", "nodes"))
_LIBRARY = os.path.normcase(os.path.join(sysconfig.get_path("stdlib"), "os.py"))
_INSTALLED = ("site-packages", "dist-packages")
# Attributes of modules under dynamic VRAM: LoRA for weights on their way into pages, the pages (their addresses stay), and
# memory for transfers to them. The host sets them to new objects in each run, and some of them in each step. Also what patchers
# note on their model (comfy/model_patcher.py): a ControlNet's model is the network itself.
OF_PAGES = frozenset(
    {"weight_lowvram_function", "bias_lowvram_function", "_v", "_v_weight", "_v_bias", "_v_signature", "_pin_state", "_pins"}
    | {"_prefetch", "dynamic_vbars", "dynamic_pins", "dynamic_patchers", "model_loaded_weight_memory"}
    | {"model_offload_buffer_memory", "model_lowvram", "lowvram_patch_counter", "current_weight_patches_uuid"}
)
# The host's memory management, on which no kernel depends. These modules change often: packs replace functions there at import,
# there are counters of pinned memory, and the host sets another callback for each prompt (execution.py, `execute_async`).
_MEMORY = re.compile(r"comfy\.\w*(_management|_memory|_prefetch)")
# Types whose `repr` tells the whole value, also the sign of a zero, which `==` ignores.
PLAIN = frozenset(
    {type(None), type(...), bool, int, float, complex, str, bytes, range, uuid.UUID}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_CONTAINERS = dict, list, tuple, set, frozenset, collections.deque
_MAY_HOLD_TENSORS = (torch.Tensor, *_CONTAINERS)
_HOLDERS = types.SimpleNamespace | argparse.Namespace
_WRAPPERS: Mapping[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
    functools.partialmethod: ("func", "args", "keywords"),
    type(functools.cache(len)): ("__wrapped__",),
}
# The names of attributes that this pack sets on modules begin so.
_PREFIX = "torch_compile_kit"
# How deep functions are followed: a function that is named in another's code is one level deeper.
DEPTH = 4
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LOOKED_INTO = tuple(name for name in sorted(_OF_EVERY_MODULE) if name == "_modules" or name.endswith("_hooks"))
# Methods that make a layer, or restore a copy: no call of a layer runs them. PyTorch's compiler wraps them when it first runs.
_MAKE_LAYERS = frozenset({"__init__", "__new__", "__setstate__"})
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
# Hooks that PyTorch calls for all modules.
GLOBAL_HOOKS = [
    table for name, table in vars(nn.modules.module).items() if name.startswith("_global_forward") and isinstance(table, dict)
]
_NOWHERE = "code without a module"


class OwnForward(functools.partial):
    """A forward that this pack puts on a module for training or replays; `given_forward` ignores these.

    Arguments may be weak references to modules: if a module is copied with its forward, the copy's refer to the copied modules.
    Other arguments are shared.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnForward:
        are_copied = [isinstance(arg, weakref.ref) and id(arg()) in memo for arg in self.args]
        args = (weakref.ref(memo[id(arg())]) if copied else arg for arg, copied in zip(self.args, are_copied, strict=True))
        return type(self)(self.func, *args, **self.keywords)


@functools.cache
def pack_of_file(file: str) -> str | None:
    """The pack that a file of code is from: its folder in custom_nodes, its package, or the file's name; None: the host's."""
    path = os.path.normcase(os.path.abspath(file))
    if path.startswith(_host_roots()):
        return None
    comfy, library = _comfy_folder(), os.path.dirname(_LIBRARY) + os.sep
    # custom_nodes may lie in ComfyUI's folder, and ComfyUI's folder in another one called custom_nodes.
    is_packs = f"custom_nodes{os.sep}" in path.removeprefix(comfy or "")
    is_installed = is_packs or any(f"{folder}{os.sep}" in path for folder in _INSTALLED)
    # ComfyUI's own folders: comfy, comfy_extras and so on. A venv there may be called comfy-env.
    is_hosts = comfy is not None and (path.startswith(os.path.join(comfy, "comfy")) or os.path.dirname(path) == comfy)
    if (is_hosts or path.startswith(library)) and not is_installed:
        return None
    name = _name_in(file)
    return None if any(part in name.lower() for part in TRUSTED_PACKS) else name


def _name_in(file: str) -> str:
    parts = Path(file).parts
    for folder in ("custom_nodes", *_INSTALLED):
        if folder in parts[:-1]:
            return parts[len(parts) - parts[::-1].index(folder)]
    return parts[-2] if parts[-1] == "__init__.py" and len(parts) > 1 else parts[-1]


def _host_roots() -> tuple[str, ...]:
    """The prefixes of the paths of this pack's code and of TRUSTED packages."""
    modules = [module for name in TRUSTED if (module := sys.modules.get(name)) is not None]
    folders = [os.path.join(folder, "") for module in modules for folder in getattr(module, "__path__", ())]
    files = [file for module in modules if not hasattr(module, "__path__") and (file := getattr(module, "__file__", None))]
    return (*_OURS, *map(os.path.normcase, folders + files))


def _comfy_folder() -> str | None:
    place = next(iter(getattr(sys.modules.get("comfy"), "__path__", ())), None)
    return None if place is None else os.path.normcase(os.path.dirname(os.path.abspath(place)))


def _file_of_module(name: str) -> str:
    """The file of a Python module (one for the whole standard library); its name if it has no file, or was made by hand."""
    top = (name or _NOWHERE).partition(".")[0]
    places = (getattr(sys.modules.get(module), "__file__", None) for module in (name, top) if module)
    place = next(filter(None, places), "")
    if _is_of_python(top, place):
        return _LIBRARY
    return place or (torch.__file__ if top in TRUSTED else name or _NOWHERE)  # operators have modules without a file


def _is_of_python(top: str, file: str) -> bool:
    """Whether code from `file`, of a module in the package `top`, is the standard library's. Decided by name, as the library
    may lie in a zip file, whose code has relative paths (Windows portable)."""
    return top in sys.stdlib_module_names and not any(f"{folder}{os.sep}" in file for folder in ("custom_nodes", *_INSTALLED))


def file_of(value: Any, file_of_module: Callable[[str], str] = _file_of_module) -> str:
    """The file with the code of a function, method, `functools.partial` or class; for any other object, that of its class."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return _file_of_code(value.__code__, value.__globals__)
    if isinstance(value, types.BuiltinFunctionType):
        return file_of_module(value.__module__ or "builtins")
    return file_of_module((value if isinstance(value, type) else type(value)).__module__)


def _file_of_code(code: types.CodeType, module: dict) -> str:
    name = module.get("__name__") or ""
    if not code.co_filename.startswith("<"):
        return _LIBRARY if _is_of_python(name.partition(".")[0], code.co_filename) else code.co_filename
    # Code made by `exec`, such as the methods of dataclasses and named tuples.
    return _LIBRARY if name.startswith("namedtuple_") else _file_of_module(name)


def pack_of(value: Any) -> str | None:
    """The pack that the code of a value is from, see `file_of`; None: the host's."""
    return pack_of_file(file_of(value))


def is_ours(value: Any) -> bool:
    """Whether the code of a value is this pack's, see `file_of`."""
    return _is_our_file(file_of(value))


@functools.cache
def _is_our_file(file: str) -> bool:
    return os.path.normcase(os.path.abspath(file)).startswith(_OURS)


def survey_of(modules: Iterable[nn.Module]) -> Survey:
    """Survey the modules of a network, and what PyTorch calls for all modules and tensors: hooks, modes, methods of tensors."""
    return Survey((*modules, *GLOBAL_HOOKS, torch.Tensor, *private.function_modes(), *private.dispatch_modes()))


def foreign_in_options(options: Mapping, in_wrapper: bool = False) -> str | None:
    """The first pack in what a prompt hands to the model (`transformer_options`, or a patcher's `model_options`).

    Patches, an attention override and wrappers around the network run inside the network, keep state there, and are told the
    step. So even the host's own count as foreign, except TRUSTED_WRAPPERS in a call that one of these makes (`in_wrapper`).
    """
    inside = [
        *_leaves((options.get("patches"), options.get("patches_replace"), options.get("optimized_attention_override"))),
        *_leaves((options.get("wrappers") or {}).get("diffusion_model")),
    ]
    for value in inside:
        if not is_ours(value) and not (in_wrapper and is_trusted_wrapper(value)):
            return Survey((value,), inside=False).pack or Path(file_of(value)).stem
    return Survey(_leaves(options), inside=False).pack


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested containers, except tensors and values of the types in PLAIN."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple | set):
        for item in value:
            yield from _leaves(item)
    elif type(value) not in PLAIN and not isinstance(value, torch.Tensor):
        yield value


def is_trusted_wrapper(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and pack_of(value) is None and (Path(code.co_filename).name, code.co_name) in TRUSTED_WRAPPERS


def foreign_around() -> str | None:
    """The first pack with a function on the stack between ComfyUI's sampler and here.

    Wrappers around `KSAMPLER.sample` do not count: they act before the first call of the model and after the last, and some
    packs wrap it at import, whether or not the workflow has a node of theirs. If such a wrapper, or a node before the sampler,
    sets a callback that changes numbers in layers between two steps, that is not seen here: only checks of replays see it.
    """
    samplers, packs = os.path.join(_comfy_folder() or "", "comfy", "samplers.py"), list[str]()
    frame: types.FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        pack = pack_of_file(_file_of_code(code, frame.f_globals))
        if pack is not None:
            packs.append(pack)
        elif os.path.normcase(code.co_filename) == samplers and (packs or _is_sampler(code)):
            break
        frame = frame.f_back
    return packs[0] if packs and frame is not None else None


def _is_sampler(code: types.CodeType) -> bool:
    """Whether code of comfy/samplers.py is that of `KSAMPLER.sample`, which alone has this parameter."""
    return code.co_name == "sample" and "model_wrap" in code.co_varnames[: code.co_argcount]


class Survey:
    """Walk through what values consist of, hold and call, up to the first foreign value.

    Args:
        inside: look also into objects and classes, and at what code names; else only at what `roots` contain and close over.

    Attributes:
        pack: the pack of the first foreign value, or None.
        values: what the host's code depends on beside arguments and weights: plain values that objects, classes and Python
            modules hold, and addresses of tensors, in an order that is the same each time.
        tensors: attributes that hold tensors, or may get some: (a function that returns the owner, name).
    """

    def __init__(self, roots: Iterable[object], inside: bool = True):
        self.pack: str | None = None
        self.values: list[Hashable] = []
        self.tensors: list[tuple[Callable[[], Any], str]] = []
        # A network has thousands of layers of few classes.
        self._inside, self._seen, self._file_of_module = inside, dict[int, int](), functools.cache(_file_of_module)
        # Values to look at, by how many names in code led to them. The fewest first, as those values are followed furthest.
        waiting: list[list[object]] = [[*roots], *([] for _ in range(DEPTH + 1))]
        depth = 0
        while self.pack is None and depth <= DEPTH + 1:
            if not waiting[depth]:
                depth += 1
                continue
            for value, names in self._look_at(waiting[depth].pop(), depth):
                if (cls := type(value)) in PLAIN:  # most values are plain
                    self.values.append((cls, repr(value) if cls is float or cls is complex else value))
                    continue
                self.values.append(None)  # keeps the order of plain values; `_look_at` notes this one
                if self._is_new(value, names):
                    waiting[names].append(value)
                    depth = min(depth, names)

    def _is_new(self, value: object, names: int) -> bool:
        """Whether so few names have not led to `value` before. `_seen`: `id` -> the fewest; other references keep ids valid."""
        return self._seen.get(id(value), DEPTH + 2) > names

    def _look_at(self, value: Any, depth: int) -> Iterable[tuple[object, int]]:
        """Note a value; returns what it holds, each with the number of names in code that led to it."""
        if not self._is_new(value, depth):  # looked at meanwhile
            return ()
        self._seen[id(value)], cls = depth, type(value)
        if isinstance(value, _CONTAINERS):
            items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            return [(cls, DEPTH + 1), *((item, depth) for item in items)]
        if cls in _WRAPPERS:
            if cls is functools.partial and is_ours(value):
                return ()
            return [(getattr(value, name, None), depth) for name in _WRAPPERS[cls]]
        if (inner := noted_for(value)) is not None:
            return [(inner, depth), (value.__defaults__, depth)]
        file = file_of(value, self._file_of_module)
        self.pack = pack_of_file(file)
        if self.pack is not None or _is_our_file(file):
            return ()
        if isinstance(value, torch.Tensor):
            self.values.append(address_of(value))
            return [(item, depth) for item in getattr(value, "__dict__", {}).values()]
        if isinstance(value, types.FunctionType):
            self.values.append(Same(value))
            held = (*contents_of(value), value.__defaults__, value.__kwdefaults__, vars(value))
            return [*((item, depth) for item in held), *(self._named(value, depth) if self._inside else ())]
        if isinstance(value, type):  # whatever its metaclass: pybind11 has one of its own
            return self._members(value, depth) if self._inside else ()
        if isinstance(value, _HOLDERS) or (self._inside and (isinstance(value, nn.Module) or not is_library(cls.__module__))):
            self.values.append(Same(value))
            return [*self._attributes(value), (cls, depth)]
        return ()

    def _attributes(self, owner: Any) -> Iterator[tuple[object, int]]:
        """The attributes of an object that differ from its class's. Sorted, as the host removes some and puts them back."""
        entries: dict[str, Any] = vars(owner)
        names: Iterable[str] = entries
        if isinstance(owner, nn.Module):
            for table in ("_parameters", "_buffers"):
                tensors = entries.get(table, {}).values()
                yield from ((type(tensor), DEPTH) for tensor in tensors if type(tensor) not in _PLAIN_TENSORS)
            for name in _LOOKED_INTO:
                if held := entries.get(name):
                    yield from ((child, 0) for child in [*held.values()]) if type(held) is dict else ((held, 0),)
            names = entries.keys() - _OF_EVERY_MODULE
        cls = type(owner)
        for name in sorted(names):
            value = entries[name]
            if name in OF_PAGES or name.startswith(_PREFIX) or getattr(cls, name, entries) is value:
                continue
            if isinstance(value, _MAY_HOLD_TENSORS):
                is_cache = isinstance(value, dict) and not value
                if is_cache or any(addresses_in(value)):
                    self.tensors.append((_reference(owner), name))
            yield value, 0

    def _members(self, cls: type, depth: int) -> Iterator[tuple[object, int]]:
        """The methods of a class and of its bases, and values that a class of the host holds."""
        of_library = is_library(cls.__module__)
        if depth > DEPTH or (depth and of_library):
            return
        yield from ((base, depth) for base in cls.__mro__[1:])
        is_layer = issubclass(cls, nn.Module)
        for name, member in [*vars(cls).items()]:
            if is_layer and name in _MAKE_LAYERS:
                continue
            is_method = isinstance(member, types.FunctionType) or type(member) in _WRAPPERS
            if is_method or not (of_library or name.startswith("__")):
                yield member, depth

    def _named(self, function: types.FunctionType, depth: int) -> Iterator[tuple[object, int]]:
        """What the code of a function of the host, or of a layer of PyTorch, names in Python modules."""
        module = function.__globals__.get("__name__", "")
        is_layers = module.startswith("torch.nn.modules.") and module != nn.Module.__module__ and not depth
        if depth > DEPTH or (is_library(module) and not is_layers):
            return
        for code in codes_in(function.__code__):
            for _entries, name, value in named_by(code, function.__globals__):
                if type(value) in (bool, int, float, str):
                    self.values.append((name, repr(value)))
                elif isinstance(value, types.FunctionType | type) or type(value) in _WRAPPERS:
                    if not _MEMORY.fullmatch(str(getattr(original(value), "__module__", None))):
                        yield original(value), depth + 1
                else:
                    yield type(value), DEPTH + 1


def named_by(code: types.CodeType, module: dict) -> Iterator[tuple[dict, str, object]]:
    """What code names in Python modules, except those of `_MEMORY`: (the module's dict, the name, the value)."""
    modules = [module]
    for entries in modules:
        if _MEMORY.fullmatch(str(entries.get("__name__"))):
            continue
        for name in code.co_names:
            value = entries.get(name)
            if isinstance(value, types.ModuleType):  # `comfy.ops.cast_to`
                if not any(vars(value) is other for other in modules):
                    modules.append(vars(value))
            elif value is not None:
                yield entries, name, value


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes_in(const)


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:  # a plain namespace
        return lambda: owner


def is_library(module: str) -> bool:
    """Whether a module belongs to Python or to a package of TRUSTED, so that `Survey` does not look into its objects."""
    top = module.partition(".")[0]
    return top in TRUSTED or top in sys.stdlib_module_names


def addresses_in(value: Any, depth: int = 0) -> Iterator[Hashable]:
    """The addresses of the tensors in containers, which may be nested to a depth of ten."""
    if isinstance(value, torch.Tensor):
        yield address_of(value)
    elif isinstance(value, _CONTAINERS) and depth < 10:
        for item in [*value.values()] if isinstance(value, dict) else value:
            yield from addresses_in(item, depth + 1)


def address_of(tensor: Any) -> Hashable:
    """What a CUDA graph keeps of a tensor: the address of its data (of all parts, if it is quantised) and its layout. Also the
    number in a scalar on the CPU, as PyTorch passes that to kernels, and the LoRA that a tensor of GGUF may hold."""
    if type(tensor) not in _PLAIN_TENSORS or tensor.is_meta:
        if hasattr(tensor, "__tensor_flatten__"):
            return tuple(address_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
        return Same(tensor), None if tensor.is_meta else tensor.data_ptr(), *map(_identity, vars(tensor).values())
    with suppress(RuntimeError):  # it has no data: sparse, or made while tracing
        number = repr(tensor.item()) if tensor.ndim == 0 and tensor.device.type == "cpu" else None
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, number
    return Same(tensor)


def _identity(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return (Same(value), address_of(value)) if isinstance(value, torch.Tensor) else Same(value)


def is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """Whether `value`, from the module's `__dict__`, is the class's own method of that name: the host leaves such a method
    there when it takes back a patch (weight_adapter/bypass.py, object patches)."""
    return getattr(value, "__self__", None) is module and value.__func__ is getattr(type(module), name, None)


def callables_of(module: nn.Module) -> list[tuple[str, object]]:
    """Attributes beside `forward` that the module's code may call: (name, value). None counts: it may be replaced later."""
    return [
        (name, value)
        for name, value in [*vars(module).items()]
        if (value is None or callable(value)) and name != "forward" and name not in _OF_EVERY_MODULE | OF_PAGES
    ]


def forward_of_class(cls: type) -> object | None:
    """The forward in the dict of the class or a base. Not by `getattr`, which raises an error on a class of `torch.jit`."""
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


# The bytecode of a function that only passes its arguments on, beside `LOAD_FAST...` and one `CALL...`.
_HANDING_ON = {
    *("COPY_FREE_VARS", "KW_NAMES", "LOAD_CONST", "LOAD_DEREF", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_VALUE", "STORE_ATTR"),
    *("BUILD_LIST", "BUILD_MAP", "BUILD_TUPLE", "DICT_MERGE", "LIST_EXTEND", "LIST_TO_TUPLE"),
}


def noted_for(function: Any) -> types.FunctionType | None:
    """The function that another pack's `function` wraps, if `function` only passes on its arguments, returns the result, and
    stores arguments in classes of packs; else None.

    ComfyUI-layerdiffuse and Easy-Use put such functions around methods of the host as soon as they are installed. A replay
    stores no arguments, but only code of packs would read these, and that code is foreign itself.
    """
    if not isinstance(function, types.FunctionType) or pack_of(function) is None:
        return None
    functions = [value for value in contents_of(function) if isinstance(value, types.FunctionType)]
    others = [value for value in contents_of(function) if not isinstance(value, types.FunctionType)]
    if len(functions) != 1 or any(not isinstance(value, type) or pack_of(value) is None for value in others):
        return None
    *steps, call, last = (step.opname for step in dis.get_instructions(function))
    is_handed_on = call.startswith("CALL") and last == "RETURN_VALUE"
    is_handed_on &= all(step in _HANDING_ON or step.startswith("LOAD_FAST") for step in steps)
    # Not in attributes of an argument, such as the module that is called: the host's code might read those.
    are_kept = all(before == "LOAD_DEREF" for before, step in itertools.pairwise(steps) if step == "STORE_ATTR")
    return functions[0] if is_handed_on and are_kept else None


def forward_inside(cls: type) -> Any:
    """The host's forward of a class, taken out of functions that other packs have put around it; any other forward as it is."""
    methods = [(base.__module__, f"{base.__qualname__}.forward") for base in cls.__mro__]

    def search(function: object, depth: int = DEPTH) -> types.FunctionType | None:
        if not isinstance(function, types.FunctionType) or depth < 0:
            return None
        if pack_of(function) is None:
            return function if (function.__module__, function.__qualname__) in methods else None
        sets = {step.argval for step in dis.get_instructions(function) if step.opname == "STORE_DEREF"}
        if not sets.isdisjoint(function.__code__.co_freevars):  # a copy would not share the variables that it sets
            return None
        return next(filter(None, (search(value, depth - 1) for value in contents_of(function))), None)

    forward = forward_of_class(cls)
    return forward if pack_of(forward) is None else search(forward) or forward


def rewrapped(function: Any, inner: object, replacement: Callable, path: tuple = ()) -> Any:
    """A copy of another pack's function that calls `replacement` where `function` calls `inner`, through closures; for
    `inner` itself `replacement`; else None. `path`: the functions whose closures led here, as these may hold themselves."""
    if function is inner:
        return replacement
    if not isinstance(function, types.FunctionType) or function in path or len(path) > DEPTH or pack_of(function) is None:
        return None
    cells, path = function.__closure__ or (), (*path, function)
    others = [None if cell == _UNSET else rewrapped(cell.cell_contents, inner, replacement, path) for cell in cells]
    if not any(others):
        return None
    closure = tuple(cell if other is None else types.CellType(other) for cell, other in zip(cells, others, strict=True))
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__dict__ = function.__kwdefaults__, function.__dict__
    return copy


def given_forward(module: nn.Module) -> object | None:
    """The forward that another node has put over that of the module's class, or None."""
    forward = module.__dict__.get("forward")
    ours = forward is None or isinstance(forward, OwnForward) or is_of_class(module, "forward", forward)
    return None if ours else forward


def is_compiled_elsewhere(module: object) -> bool:
    """Whether another node compiles the module itself (`torch.compile`, `Module.compile`), or runs something else in its place
    (ComfyUI_TensorRT)."""
    if not isinstance(module, nn.Module):
        return True
    return isinstance(module, private.OptimizedModule) or module._compiled_call_impl is not None


TORCH_COMPILE = "torch.compile"


def named_origin(function: Any) -> str:
    """The name of another node's function, with its pack or file; empty for None."""
    if function is None:
        return ""
    if hasattr(function, "_torchdynamo_orig_callable"):  # another node compiles; PyTorch does not tell which
        return TORCH_COMPILE
    file, function = file_of(function), getattr(function, "func", function)  # of functools.partial
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__qualname__.rpartition('<locals>.')[2]} ({_name_in(file)})"


@contextmanager
def exchanged(forwards: Mapping[nn.Module, Callable], name: str = "forward") -> Iterator[None]:
    """A context in which these modules have these forwards. If another node replaces a forward meanwhile, the replacement
    stays, and may go on calling ours, which after the context must do what the class's forward does."""
    before = {module: module.__dict__.get(name) for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__[name] = forward
        yield
    finally:
        for module, forward in before.items():
            if module.__dict__.get(name) is not forwards[module]:
                continue
            if forward is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = forward


_MARK = "torch_compile_kit_foreign"
_of_thread = threading.local()


@contextmanager
def errors_marked() -> Iterator[None]:
    """Call other packs' code outside of graphs, under the settings from before ours; mark its errors for `is_of_another`."""
    _of_thread.depth = depth_of_foreign() + 1
    try:
        with compile_scope.suspended():
            yield
    except BaseException as error:
        with suppress(Exception):
            error.__dict__[_MARK] = True
        raise
    finally:
        _of_thread.depth -= 1


def depth_of_foreign() -> int:
    """How many contexts of `errors_marked` this thread is in."""
    return getattr(_of_thread, "depth", 0)


def is_of_another(error: BaseException) -> bool:
    """Whether code of another pack raised the error within `errors_marked`: it is no error of compiling."""
    return _MARK in getattr(error, "__dict__", ())


def contents_of(function: types.FunctionType) -> list[Any]:
    """The values of the variables in a closure, except those that are not set yet."""
    return [cell.cell_contents for cell in function.__closure__ or () if cell != _UNSET]


_UNSET = types.CellType()  # equal to other empty cells
