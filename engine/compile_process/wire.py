"""Serialize a graph of Dynamo's and its fake inputs to JSON, and rebuild them in another process.

The text holds what determines the compiled code and nothing else, so its digest names the code: nodes and inputs by number, not
by the names that Dynamo gives them; sizes that vary as symbols numbered by their first use, with range and hint; functions and
classes by module and name, with a digest of the module's file if that is not PyTorch's, as such code is traced into the graph.
Operators are written with their schemas and outputs (operators.py), and attention with its kernel (torch_compat/attention.py),
without the nodes that set the order of kernels. Nothing is pickled.

`dumps` raises `LowerInline` for a graph that cannot be serialized: with a submodule (gradient checkpointing), a function
without a name, a constant tensor, floats that vary, a sparse tensor. Such graphs are lowered in the call that traced them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..out_of_place import overloads, written_by
from ..tensor_spec import hint
from ..torch_compat import attention, private
from . import operators
from .artefact import LowerInline

# The prefix of attention kernels' names.
_ATTENTION = "attention"
_VERSIONED = {"torch", *sys.stdlib_module_names}
# Inductor's GPU_ALIGN_BYTES (torch/_inductor/utils.py).
ALIGNED_BYTES = 16
_OF_TORCH = torch.dtype, torch.layout, torch.memory_format


def dumps(graph: fx.GraphModule, fakes: Sequence[Any]) -> dict[str, Any]:
    """The graph and its inputs (fake tensors, SymInts and numbers, as Dynamo hands them to a backend) as an object of JSON."""
    return _Writer(graph).request(fakes)


def loads(request: dict[str, Any]) -> tuple[fx.GraphModule, list[Any], Any]:
    """The graph, with an `example_value` on each node, its fake inputs, and their FakeTensorMode.

    Raises:
        LowerInline: code that the graph names was changed since the graph was traced, or is not found.
    """
    if any(module not in sys.modules for module in request["sources"]):
        operators.forget_definitions()
    for module, digest in request["sources"].items():
        try:
            importlib.import_module(module)
        except Exception as error:
            raise LowerInline(f"the compile process cannot import {module} ({error})") from error
        if digest_of(module) != digest:
            raise LowerInline(f"{module} was changed since ComfyUI was started")
    operators.forget_calls()
    for schema, tags in request["operators"]:
        try:
            operators.define(schema, tags)
        except Exception as error:  # a default, say, that PyTorch prints but cannot read
            raise LowerInline(f"the compile process cannot define {schema} ({error})") from error
    return _Reader(request).graph()


def guards_of(inputs: Sequence[Any], mode: Any) -> str | None:
    """The guards of code that was lowered for inputs of `loads`, for `ShapeEnv.evaluate_guards_expression`; None: no guards.
    Guards from before lowering are included: other traces with the same text use the code, and their sizes may differ."""
    guards, sizes = mode.shape_env.guards, [value for value in inputs if isinstance(value, torch.SymInt)]
    return mode.shape_env.produce_guards_expression(placeholders=sizes, guards=guards) if guards else None


def _written_by(graph: fx.Graph) -> set[int] | None:
    """The storages of all operands that are written to; None: an operand has no example value."""
    operands = [operand for node in graph.nodes for operand in written_by(node)]
    written: set[int] = set()
    for value in private.pytree.tree_leaves([operand.meta.get("example_value", ...) for operand in operands]):
        if value is ...:
            return None
        written |= _memory_of(value)
    return written


def _returned_by(graph: fx.Graph) -> set[int]:
    """The storages of a graph's outputs: PyTorch rebuilds views of inputs, by their offset."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    return set().union(*(_memory_of(node.meta.get("example_value")) for node in output.all_input_nodes))


def _memory_of(value: object) -> set[int]:
    if not isinstance(value, torch.Tensor):
        return set()
    if private.is_traceable_wrapper_subclass(value):
        return set().union(*(_memory_of(getattr(value, name)) for name in value.__tensor_flatten__()[0]))
    return {value.untyped_storage()._cdata} if value.layout is torch.strided else set()


class _Writer:
    def __init__(self, graph: fx.GraphModule):
        self._graph = graph
        self._numbers: dict[fx.Node, int] = {}
        self._symbols: dict[Any, Any] = {}  # PyTorch's -> ours
        self._described: list[list] = []
        self._sources: dict[str, str] = {}  # digests by module
        self._operators: list[list] = []
        # The kernels of attention that may run, the preferred first; `_order`: all kernels in this order.
        self._kernels = private.sdpa_backends(with_priority=True)
        self._order = list(self._kernels)
        self._written, self._returned = _written_by(graph.graph), _returned_by(graph.graph)
        self._storages: dict[int, tuple[int, torch.dtype]] = {}

    def request(self, fakes: Sequence[Any]) -> dict[str, Any]:
        for fake in fakes:  # first the sizes that are inputs: their hints are known
            if isinstance(fake, torch.SymInt):
                self._number(fake)
        inputs = [self._input(fake) for fake in fakes]
        nodes = [self._node(node) for node in self._graph.graph.nodes if not self._is_order_of_kernels(node)]
        sources = dict(sorted(self._sources.items()))
        described = {"inputs": inputs, "symbols": self._described, "nodes": nodes, "sources": sources}
        return {**described, "operators": self._operators}

    def _name_of(self, named: Any) -> str:
        """The name of `named`; notes the digest of the file that defines it."""
        if (digest := digest_of(getattr(named, "__module__", None))) is not None:
            self._sources[named.__module__] = digest
        return name_of(named)

    def _input(self, fake: Any) -> Any:
        if isinstance(fake, torch.Tensor):
            return self._tensor(fake)
        if isinstance(fake, torch.SymInt | int) and not isinstance(fake, bool):
            return {"size": self._number(fake)}
        raise LowerInline(f"an input is a {type(fake).__name__}")

    def _tensor(self, fake: torch.Tensor) -> dict[str, Any]:
        sizes = self._sizes(fake)
        if private.is_traceable_wrapper_subclass(fake):
            attributes, context = fake.__tensor_flatten__()
            inner = [[name, self._tensor(getattr(fake, name))] for name in attributes]
            return {"wrapper": self._name_of(type(fake)), "inner": inner, "context": self._value(context), **sizes}
        if fake.layout is not torch.strided or fake.is_nested or fake.is_quantized or fake.is_conj() or fake.is_neg():
            raise LowerInline(f"an input is a tensor of layout {fake.layout}, nested, quantized, conjugate or negated")
        return {
            **sizes,
            "offset": self._number(self._offset(fake)),
            "dtype": str(fake.dtype),
            "device": str(fake.device),
            "memory": self._memory(fake),
        }

    def _sizes(self, fake: torch.Tensor) -> dict[str, list]:
        return {"shape": [self._number(n) for n in fake.shape], "stride": [self._number(n) for n in fake.stride()]}

    def _offset(self, fake: torch.Tensor) -> Any:
        """A tensor's offset; 0 for an aligned weight that the graph neither writes nor returns, as the code is the same
        wherever the weight lies in a run (memory of its own, a page of dynamic VRAM, a buffer for all weights of a block)."""
        offset = fake.storage_offset()
        if not isinstance(fake, torch.nn.Parameter) or type(offset) is not int or offset * fake.itemsize % ALIGNED_BYTES:
            return offset
        return 0 if self._memory(fake) is None and not self._returned & _memory_of(fake) else offset

    def _memory(self, fake: torch.Tensor) -> int | None:
        """A number for an input's memory, which other inputs may share; None if the graph does not write to that memory."""
        address = fake.untyped_storage()._cdata
        if self._written is not None and address not in self._written:
            return None
        number, dtype = self._storages.setdefault(address, (len(self._storages), fake.dtype))
        if dtype is not fake.dtype:
            raise LowerInline("it writes to inputs that share memory and have several dtypes")
        return number

    def _number(self, value: Any) -> Any:
        """A number as it is, an expression of symbols as [function, argument, ...]."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_Integer:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                self._add_symbol(symbol, value)
        return _described(expression.xreplace(self._symbols))

    def _add_symbol(self, symbol: Any, seen_in: torch.SymInt) -> None:
        shapes = seen_in.node.shape_env
        number = hint(seen_in) if seen_in.node.expr == symbol else hint(shapes.create_symintnode(symbol, hint=None))
        if number is None:
            raise LowerInline(f"the size {symbol} depends on data")
        ours = private.sympy.Symbol(f"k{len(self._symbols)}", integer=True, positive=symbol.is_positive or None)
        limits = shapes.var_to_range[symbol]
        bounds = [int(limit) if limit.is_Integer else None for limit in (limits.lower, limits.upper)]
        self._symbols[symbol] = ours
        self._described.append([bool(symbol.is_positive), int(number), *bounds])

    def _node(self, node: fx.Node) -> list:
        self._numbers[node] = len(self._numbers)
        if node.op == "placeholder":
            return [node.op]
        if node.op == "call_module":
            raise LowerInline("it calls a module")
        target: Any = node.target
        if node.op == "get_attr":  # PyTorch's artefact would lack it; Dynamo turns nearly all attributes into inputs
            raise LowerInline("it holds a constant or a graph")
        if isinstance(node.target, private.HigherOrderOperator):  # a user's Triton kernel is an index into a table
            raise LowerInline(f"it calls {node.target}, which PyTorch keeps in a table of its own")
        if node.op == "call_function":
            kernel = attention.kernel_for(node, self._kernels) if node.target in attention.FUNCTIONS else None
            target = self._name_of(node.target) if kernel is None else f"{_ATTENTION}.{kernel}"
        written = [node.op, target, self._value(tuple(node.args)), self._value(dict(node.kwargs))]
        if not operators.is_custom(node):
            return written
        self._operators += [one for one in operators.described(node.target) if one not in self._operators]
        with suppress(LowerInline):  # then it must be an operator that the compile process has
            nothing = None if not any(overload._schema.returns for overload in overloads(node.target)) else ...
            written.append(self._outputs(node.meta.get("example_value", nothing)))
        return written

    def _outputs(self, value: Any) -> Any:
        """An operator's outputs, as the trace found them."""
        if isinstance(value, list | tuple):
            written = [self._outputs(one) for one in value]
            return written if isinstance(value, list) else {"tuple": written}
        if value is None or isinstance(value, int | float | torch.SymInt):
            return {"size": self._number(value)}
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        if not is_plain or private.is_traceable_wrapper_subclass(value):
            raise LowerInline(f"an operator gives a {type(value).__name__}")
        return {**self._sizes(value), "dtype": str(value.dtype), "device": str(value.device)}

    def _is_order_of_kernels(self, node: fx.Node) -> bool:
        """Whether `sdpa_kernel` has put this node into the graph; if so, use its kernels for the attention that follows."""
        if node.target is private.sdpa_kernel:
            kernels, *in_order = node.args
            named = [kernel.args[0] if isinstance(kernel, fx.Node) else kernel.name for kernel in kernels]
            self._kernels = [getattr(torch.nn.attention.SDPBackend, name) for name in named]
            others = [kernel for kernel in self._order if kernel not in self._kernels]
            if any(in_order):
                self._order = self._kernels + others
            else:
                self._kernels.sort(key=(self._order + self._kernels).index)
        return node.target in (private.sdpa_kernel, private.backend_from_string)

    def _value(self, value: Any) -> Any:
        """An argument: JSON's own values as they are, others as {kind: ...}."""
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, fx.Node):
            return {"node": self._numbers[value]}
        if isinstance(value, torch.SymInt):
            return {"size": self._number(value)}
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self._value(key), self._value(item)] for key, item in value.items()]}
        if isinstance(value, tuple) and not hasattr(value, "_fields"):  # torch.Size as well
            return {"tuple": [self._value(item) for item in value]}
        if (arguments := _arguments_of(value)) is not None:
            return {self._name_of(type(value)): self._value(arguments)}
        return {"name": self._name_of(value)}


def _arguments_of(value: Any) -> list | None:
    """The arguments with which its class rebuilds a value; None: the value is written by its name."""
    if isinstance(value, tuple):  # a named tuple
        return list(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [str(value)] if type(value) in (float, complex, torch.device) else None


class _Reader:
    def __init__(self, request: dict[str, Any]):
        self._request = request
        self._shapes = private.ShapeEnv()
        self._mode = private.FakeTensorMode(shape_env=self._shapes)
        self._nodes: list[fx.Node] = []
        self._symbols: dict[str, tuple[Any, int]] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._outputs: dict[fx.Node, Any] = {}  # of operators

    def graph(self) -> tuple[fx.GraphModule, list[Any], Any]:
        for i, described in enumerate(self._request["symbols"]):
            self._add_symbol(f"k{i}", *described)
        with self._mode:
            self._make_shared_memory()
            inputs = [self._input(described) for described in self._request["inputs"]]
        graph = fx.Graph()
        for op, *rest in self._request["nodes"]:
            if op == "placeholder":
                node = graph.placeholder(f"input_{len(self._nodes)}")
            else:
                target, args, kwargs, *outputs = rest
                args, kwargs = self._value(args), self._value(kwargs)
                if op == "call_function":
                    root, _, kernel = target.partition(".")
                    target = attention.KERNELS[kernel] if root == _ATTENTION else _found(target)
                node = graph.output(args[0]) if op == "output" else graph.create_node(op, target, args, kwargs)
                if outputs:
                    self._outputs[node] = outputs[0]
            self._nodes.append(node)
        module = fx.GraphModule(torch.nn.Module(), graph)
        self._note_values(module, inputs)
        return module, inputs, self._mode

    def _add_symbol(self, name: str, positive: bool, number: int, lower: int | None, upper: int | None) -> None:
        symbol = self._shapes.create_symbol(
            number,
            source=private.ConstantSource(name),
            dynamic_dim=private.DimDynamic.DYNAMIC,
            constraint_dim=None,
            positive=positive or None,
            do_not_specialize_zero_one=True,
        )
        infinite = private.int_oo
        self._shapes.constrain_symbol_range(symbol, -infinite if lower is None else lower, infinite if upper is None else upper)
        self._symbols[name] = symbol, number

    def _number(self, value: Any) -> Any:
        if not isinstance(value, list | str):  # a symbol is its name
            return value
        expression, number = (_expression(value, {name: of[i] for name, of in self._symbols.items()}) for i in (0, 1))
        return self._shapes.create_symintnode(expression, hint=int(number))

    def _input(self, described: dict[str, Any]) -> Any:
        return self._number(described["size"]) if "size" in described else self._tensor(described)

    def _tensor(self, described: dict[str, Any]) -> torch.Tensor:
        shape, stride = ([self._number(n) for n in described[key]] for key in ("shape", "stride"))
        if "wrapper" in described:
            inner = {name: self._tensor(part) for name, part in described["inner"]}
            cls: Any = _found(described["wrapper"])
            return cls.__tensor_unflatten__(inner, self._value(described["context"]), tuple(shape), tuple(stride))
        kind = _kind_of(described)
        offset, memory = self._number(described["offset"]), described["memory"]
        if memory in self._bases:
            return self._bases[memory].as_strided(shape, stride, offset)
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(shape, stride, **kind)
        return torch.empty(self._end(described), **kind).as_strided(shape, stride, offset)

    def _end(self, described: dict[str, Any]) -> Any:
        """The number of elements from the beginning of a tensor's memory to its end."""
        shape, stride = ([self._number(n) for n in described[key]] for key in ("shape", "stride"))
        return self._number(described["offset"]) + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))

    def _make_shared_memory(self) -> None:
        """Allocate memory that several inputs share, of any size that holds all of them."""
        inside: dict[int, list[dict[str, Any]]] = {}
        for described in self._request["inputs"]:
            if described.get("memory") is not None:
                inside.setdefault(described["memory"], []).append(described)
        for memory, tensors in inside.items():
            if len(tensors) > 1:
                self._bases[memory] = torch.empty(sum(map(self._end, tensors)), **_kind_of(tensors[0]))

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "node":
            return self._nodes[content]
        if kind == "size":
            return self._number(content)
        if kind == "name":
            return _found(content)
        content = self._value(content)
        if kind == "dict":
            return dict(content)
        return tuple(content) if kind == "tuple" else _found(kind)(*content)

    def _output(self, described: Any) -> Any:
        """What `_Writer._outputs` described."""
        if isinstance(described, list):
            return [self._output(one) for one in described]
        if "tuple" in described:
            return tuple(self._output(described["tuple"]))
        if "size" in described:
            return self._number(described["size"])
        shape, stride = ([self._number(n) for n in described[key]] for key in ("shape", "stride"))
        return torch.empty_strided(shape, stride, **_kind_of(described))

    def _note_values(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        """Put `example_value` on each node, as Dynamo does: without, AOTAutograd refuses to cache graphs with method calls."""
        values, outputs, output = iter(inputs), self._outputs, self._output

        class Noting(fx.Interpreter):
            def run_node(self, node: fx.Node) -> Any:
                with operators.noting(node.target, output(outputs[node])) if node in outputs else nullcontext():
                    value = next(values) if node.op == "placeholder" else super().run_node(node)
                node.meta["example_value"] = value
                return value

        with self._mode, private.enable_python_dispatcher():
            Noting(module).run()
            for node, described in outputs.items():
                if operators.is_changed(node.target, node.meta["example_value"], output(described)):
                    raise LowerInline(f"what {node.target} gives is changed in place")


def _found(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise LowerInline(f"the compile process does not find {name} ({error})") from error


def _described(expression: Any) -> Any:
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return expression.name
    if not expression.args:
        raise LowerInline(f"a size is {expression}")
    return [type(expression).__name__, *map(_described, expression.args)]


def _expression(described: Any, symbols: dict[str, Any]) -> Any:
    if isinstance(described, list):
        function = getattr(private.sympy_functions, described[0], None) or getattr(private.sympy, described[0])
        return function(*(_expression(argument, symbols) for argument in described[1:]))
    return private.sympy.Integer(described) if isinstance(described, int) else private.sympy.sympify(symbols[described])


def _kind_of(described: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": pkgutil.resolve_name(described["dtype"]), "device": torch.device(described["device"])}


@functools.cache
def digest_of(module: str | None) -> str | None:
    """The digest of the file that a module was loaded from, as the file is at the first call; None for PyTorch's and Python's
    own modules, whose versions are in the name of all code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None or str(module).partition(".")[0] in _VERSIONED:
        return None
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def name_of(named: Any) -> str:
    """The name under which `pkgutil.resolve_name` finds a function, a class or a constant, here and in another process."""
    for name in _lookup_names(named):
        with suppress(AttributeError, ImportError, ValueError):
            value = pkgutil.resolve_name(name)
            if value == named or getattr(value, "__wrapped__", None) is named:
                return name
    raise LowerInline(f"it holds {repr(named)[:200]}, which cannot be found by a name")


def _lookup_names(named: Any) -> Iterator[str]:
    if isinstance(named, type):
        module, outer = named.__module__, vars(sys.modules.get(named.__module__, sys))
        yield from (f"{module}:{path}" for path in (named.__qualname__, named.__name__))
        # A dataclass that was recreated for slots has lost the name of the class around it; SDPBackend is an alias.
        yield from [f"{module}:{name}.{named.__name__}" for name, value in list(outer.items()) if isinstance(value, type)]
    elif isinstance(named, _OF_TORCH):
        yield str(named).replace(".", ":")
    elif named is ...:
        yield "builtins.Ellipsis"
    elif isinstance(named, enum.Enum) or (type(named).__module__.startswith("torch") and hasattr(type(named), "__members__")):
        yield from (f"{name}.{named.name}" for name in _lookup_names(type(named)))
    elif callable(named):
        name = private.pretty_print_target(named).removeprefix("_")
        # The loader of modules would take `torch.ops` for a package.
        yield name.replace("torch.ops.", "torch:ops.") if "." in name else f"builtins.{name}"
