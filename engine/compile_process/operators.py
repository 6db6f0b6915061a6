"""Define in the compile process the operators that packs, attention libraries and this pack register in ComfyUI's process.

A graph is sent with the schemas of its operators and, for each call, the outputs that Dynamo's trace found. The compile process
defines missing operators without an implementation: lowered code calls operators by name, in the process that loads the code.
Lowering only asks for the outputs of a call, and gets those of the traced call with the same inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import fx

from ..out_of_place import overloads
from ..torch_compat import private
from .artefact import LowerInline

# The tag to keep the layout of inputs: with another layout an operator may return outputs of another layout.
_LAYOUT = "needs_exact_strides" if hasattr(torch.Tag, "needs_exact_strides") else "needs_fixed_stride_order"
_LAYOUTS = {"needs_exact_strides", "needs_fixed_stride_order", "needs_contiguous_strides", "flexible_layout"}
# Keeps the definitions alive.
_libraries: list[torch.library.Library] = []
# Name of an operator defined here -> its calls in the graph that is being lowered: (inputs, outputs).
_calls: dict[str, list[tuple[Any, Any]]] = {}
# Name of an operator -> its outputs in the call that runs in `noting`, until the operator is called.
_next_outputs: dict[str, Any] = {}


def is_custom(node: fx.Node) -> bool:
    """Whether `node` calls an operator that is not PyTorch's own."""
    return bool(overloads(node.target)) and not str(node.target).startswith("aten.")


def described(target: Any) -> list[list]:
    """Schema and tags of each overload, as JSON, except overloads that return a view of an input: these need their code."""
    without_views = [o for o in overloads(target) if not any(value.alias_info for value in o._schema.returns)]
    return [[str(o._schema), sorted(tag.name for tag in o.tags if tag.name not in _LAYOUTS)] for o in without_views]


def forget_calls() -> None:
    for calls in _calls.values():
        calls.clear()


def forget_definitions() -> None:
    """Called before imports: a module cannot register an operator while that operator is defined here."""
    for library in _libraries:
        library._destroy()
    _libraries.clear()
    _calls.clear()


def define(schema: str, tags: list[str]) -> None:
    """Define an operator, if PyTorch has none of this name. Raises what PyTorch does for a schema that it cannot read."""
    name = _name(schema)
    with suppress(AttributeError):
        _operator(name)
        return
    namespace, _, rest = schema.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(rest, tags=[getattr(torch.Tag, tag) for tag in [*tags, _LAYOUT]])
    torch.library.register_fake(name, functools.partial(_outputs, name), lib=library)
    _libraries.append(library)
    _calls[name] = []


@contextmanager
def noting(target: Any, outputs: Any) -> Iterator[None]:
    """A context to run a call of the graph in: an operator defined here returns `outputs`, also later for these inputs."""
    _next_outputs.update({_name(str(overload._schema)): outputs for overload in overloads(target)})
    try:
        yield
    finally:
        _next_outputs.clear()


def is_changed(target: Any, value: Any, outputs: Any) -> bool:
    """Whether a call's value differs from `outputs` after the whole graph has run: `unsqueeze_` and others change tensors in
    place, and the trace recorded `outputs` after that."""
    is_ours = any(_name(str(overload._schema)) in _calls for overload in overloads(target))
    return is_ours and _form(value) != _form(outputs)


def _outputs(name: str, *args: Any, **kwargs: Any) -> Any:
    """The outputs of an operator that was defined here, for fake inputs. PyTorch has brought all calls into one form."""
    if name in _next_outputs:
        _calls[name].append(((args, kwargs), _next_outputs.pop(name)))
    form = _form((args, kwargs))
    for inputs, outputs in _calls[name]:
        if _form(inputs) == form:
            return private.pytree.tree_map_only(torch.Tensor, _like, outputs)
    raise LowerInline(f"lowering calls {name} with other inputs than the graph")


def _name(schema: str) -> str:
    """`namespace::operator`, or `namespace::operator.overload`."""
    return schema.partition("(")[0]


def _operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _form(value: Any) -> Any:
    """A value in a form to compare: sizes, strides, dtype and device of a tensor, the expression of a size that varies."""
    if isinstance(value, torch.Tensor):
        # The stride of a dimension of size 1 means nothing, and inductor sets another.
        sizes, steps = ([_form(n) for n in numbers] for numbers in (value.shape, value.stride()))
        return sizes, [None if n == 1 else step for n, step in zip(sizes, steps, strict=True)], value.dtype, value.device
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.expr
    if isinstance(value, dict):
        return {name: _form(one) for name, one in value.items()}
    return [_form(one) for one in value] if isinstance(value, list | tuple) else value


def _like(output: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
