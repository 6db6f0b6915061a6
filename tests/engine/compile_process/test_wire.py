"""A graph and its inputs go over to another process and come back the same, and the name of its code tells what is in it."""

import collections
import hashlib
import importlib.util
import json
import math
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).parent))
import traced_graphs
from traced_graphs import Attention, Colour, Name, Pair, keep, key_of_attention, request, traced, what_is_named


@pytest.fixture(scope="module")
def wire(engine):
    return engine("compile_process.wire")


def over(wire, graph, fakes):
    """The graph and its inputs as another process makes them of the text."""
    return wire.loads(json.loads(json.dumps(wire.dumps(graph, fakes))))


def graph_of(*calls, inputs=1):
    """A graph of calls (op, target, args, kwargs) in which "x" stands for the first input; the last call is the output."""
    graph = fx.Graph()
    given = [graph.placeholder(f"input_{i}") for i in range(inputs)]
    node = given[0]
    for op, target, args, kwargs in calls:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda a: given[0] if isinstance(a, str) and a == "x" else a)
        node = graph.create_node(op, target, args, kwargs)
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def fake(*shape, mode=None, **kind):
    with mode or FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(*shape, **kind)


def symbols(*hints, environment=None, **kind):
    """Sizes that vary."""
    environment = environment or ShapeEnv()
    made = []
    for number in hints:
        source = ConstantSource(f"size_{len(environment.var_to_range)}")
        symbol = environment.create_symbol(number, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True, **kind)
        made.append(environment.create_symintnode(symbol, hint=number, source=source))
    return environment, made


def argument_back(wire, value):
    """What becomes of an argument of a call. FX itself writes some of them as code that cannot be run: no graph here."""
    written = wire._Writer(graph_of())._value(fx.node.map_aggregate(value, lambda a: a))
    return wire._Reader({})._value(json.loads(json.dumps(written)))


VALUES = {
    "None": None,
    "bools": [True, False],
    "whole numbers": [0, -1, 2**70],
    "text": "a\n\u00fc\"'",
    "floats": [0.1, -0.0, 1e-300, 2.0, math.inf, -math.inf],
    "complex": [1 + 2j, complex(0.1, -0.0)],
    "slices": [slice(None), slice(1, None, 2), slice(None, -1)],
    "ellipsis": (..., None, slice(None)),
    "dtypes": [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64],
    "layouts and formats": [torch.strided, torch.sparse_coo, torch.channels_last, torch.preserve_format],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "torch.Size": torch.Size([2, 3]),
    "tuples in lists in dicts": {"a": [(1, (2.5, None))], "b": {}, 3: ()},
    "named tuples": Pair(1, Pair(torch.float16, [None])),
    "enums": [Colour.RED, Name.SHORT, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "classes": [int, torch.Tensor, torch.nn.Linear, Colour, Attention],
    "functions": [torch.relu, operator.add, math.floor, len, torch.nn.functional.gelu, keep],
    "operators": [torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.ops.aten.sum.dim_IntList],
}


@pytest.mark.parametrize("name", VALUES)
def test_arguments(wire, name):
    back = argument_back(wire, VALUES[name])
    assert back == VALUES[name] and repr(back).replace("(2, 3)", "torch.Size([2, 3])") == repr(VALUES[name])


def test_a_float_that_is_no_number(wire):
    assert math.isnan(argument_back(wire, math.nan))


class TextOfAClass(str):
    pass


REFUSED = {
    "a set": {1},
    "a generator of random numbers": torch.Generator(),
    "a range": range(3),
    "a function without a name": lambda x: x,
    "a class without a name": type("Nowhere", (), {}),
    "text of a class": TextOfAClass("a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_travel_are_named(wire, name):
    with pytest.raises(wire.LowerInline) as raised:
        argument_back(wire, REFUSED[name])
    assert len(str(raised.value)) > 10


@torch.library.custom_op("torch_compile_kit_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)


def test_custom_operators(wire):
    for target in (torch.ops.torch_compile_kit_tests.doubled, torch.ops.torch_compile_kit_tests.doubled.default):
        back, _inputs, _mode = over(wire, graph_of(("call_function", target, ("x",), {})), [fake(2, 3)])
        (node,) = back.graph.find_nodes(op="call_function", target=target)
        assert node.meta["example_value"].shape == (2, 3)


@torch.library.custom_op("torch_compile_kit_tests::parts", mutates_args=())
def parts(x: torch.Tensor, dim: int = 0, scale: float = 1.0) -> list[torch.Tensor]:
    return [part * scale for part in x.unbind(dim)]


@torch.library.custom_op("torch_compile_kit_tests::counted", mutates_args={"count"})
def counted(x: torch.Tensor, count: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    count += 1
    return x.to(dtype).T.contiguous(), x.sum()


@torch.library.custom_op("torch_compile_kit_tests::added", mutates_args={"count"})
def added(count: torch.Tensor, number: int) -> None:
    count += number


@torch.library.custom_op("torch_compile_kit_tests::cast", mutates_args=())
def cast(x: torch.Tensor, dtype: torch.dtype = torch.float32, scale: int = 1) -> torch.Tensor:
    return x.to(dtype) * scale


added.register_fake(lambda count, number: None)
cast.register_fake(lambda x, dtype=torch.float32, scale=1: torch.empty_like(x, dtype=dtype))
parts.register_fake(lambda x, dim=0, scale=1.0: [part.clone() for part in x.unbind(dim)])
counted.register_fake(lambda x, count, dtype=None: (x.new_empty((x.shape[1], x.shape[0]), dtype=dtype), x.new_empty(())))


def use_operators(x, count):
    first, total = torch.ops.torch_compile_kit_tests.counted(doubled(x[:, :4]), count, dtype=torch.float64)
    added(count, 2)
    return doubled(first), parts(x, scale=0.5, dim=1)[1] * total, cast(cast(x, torch.float32), scale=2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_that_only_this_process_has(engine, wire, dynamic):
    def lower(graph, fakes):
        text = json.dumps(wire.dumps(graph, fakes)).replace("torch_compile_kit_tests", f"only_here_{dynamic}")
        back, inputs, mode = wire.loads(json.loads(text))
        (output,) = back.graph.find_nodes(op="output")
        (expected,) = graph.graph.find_nodes(op="output")
        sizes = [[described(node.meta["example_value"]) for node in one.all_input_nodes] for one in (output, expected)]
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            code = engine("inductor.backend").inductor(back, list(inputs))
        return sizes, {node.target for node in back.graph.nodes}, code

    def described(fake):
        return [*map(int, fake.shape)], [*map(int, fake.stride())], fake.dtype, fake.device

    x, count = torch.randn(6, 5), torch.zeros(())
    ((sizes, targets, code),) = traced(engine, use_operators, x, count, use=lower, dynamic=dynamic)
    assert sizes[0] == sizes[1] and getattr(torch.ops, f"only_here_{dynamic}").doubled.default in targets and code is not None


@torch.library.custom_op("torch_compile_kit_tests::placed", mutates_args=())
def placed(x: torch.Tensor, device: torch.device = torch.device("cpu")) -> torch.Tensor:  # noqa: B008
    return x.to(device) + 1


placed.register_fake(lambda x, device=None: torch.empty_like(x))
VIEWS = torch.library.Library("torch_compile_kit_tests", "FRAGMENT")
VIEWS.define("same(Tensor(a) x) -> Tensor(a)")
VIEWS.impl("same", lambda x: x.view(x.shape), "CompositeImplicitAutograd")
NOT_ELSEWHERE = {
    "its output is changed in place": lambda x: doubled(x).unsqueeze_(0) * 2,
    "it is transposed in place": lambda x: doubled(x).t_() * 2,
    "PyTorch cannot read its schema": lambda x: placed(x),
    "it gives a view": lambda x: torch.ops.torch_compile_kit_tests.same(x) * 2,
}


@pytest.mark.parametrize("what", NOT_ELSEWHERE)
def test_operators_that_another_process_cannot_stand_in_for(engine, wire, what):
    def lower(graph, fakes):
        text = json.dumps(wire.dumps(graph, fakes)).replace("torch_compile_kit_tests", "nowhere_" + what.replace(" ", "_"))
        with pytest.raises(wire.LowerInline):
            wire.loads(json.loads(text))
        return True

    assert traced(engine, NOT_ELSEWHERE[what], torch.randn(3, 3), use=lower) == [True]


REGISTERING = """import torch
@torch.library.custom_op("registered_later::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2
doubled.register_fake(torch.empty_like)
def act(x):
    return torch.ops.registered_later.doubled(x)
"""


def test_a_module_that_registers_an_operator_which_another_graph_had(wire, tmp_path, monkeypatch):
    """That graph named no module of the pack, so its operator was defined from the schema."""
    first = json.dumps(wire.dumps(graph_of(("call_function", doubled._opoverload, ("x",), {})), [fake(2)]))
    with pytest.raises(wire.LowerInline):  # what it gives is not written there
        wire.loads(json.loads(first.replace("torch_compile_kit_tests", "registered_later")))
    (tmp_path / "registers_an_operator.py").write_text(REGISTERING)
    monkeypatch.syspath_prepend(str(tmp_path))
    second = json.dumps(wire.dumps(graph_of(("call_function", keep, ("x",), {})), [fake(2)]))
    second = json.loads(second.replace("traced_graphs", "registers_an_operator").replace("keep", "act"))
    second["sources"] = {"registers_an_operator": hashlib.sha256(REGISTERING.encode()).hexdigest()[:16]}
    graph, _inputs, _mode = wire.loads(second)
    assert graph(torch.ones(2))[0].tolist() == [2, 2]


def test_an_operator_that_only_this_process_has_and_of_which_the_outputs_are_not_known(wire):
    """The other process says so, and the graph is lowered here."""
    text = wire.dumps(graph_of(("call_function", doubled._opoverload, ("x",), {})), [fake(2)])
    described = json.loads(json.dumps(text).replace("doubled", "nowhere"))
    with pytest.raises(Exception) as raised:
        wire.loads(described)
    assert any(isinstance(error, wire.LowerInline) for error in (raised.value, raised.value.__cause__))


def test_a_function_that_only_this_process_has(wire):
    text = json.dumps(wire.dumps(graph_of(("call_function", keep, ("x",), {})), [fake(2)]))
    with pytest.raises(wire.LowerInline, match="traced_graphs"):
        wire.loads(json.loads(text.replace("keep", "nowhere")))


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A function: a module of a host, loaded from its file after that was written."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(text):
        sys.modules.pop("of_a_host", None)
        importlib.invalidate_caches()
        (tmp_path / "of_a_host.py").write_text(text)
        return importlib.import_module("of_a_host")

    yield load
    sys.modules.pop("of_a_host", None)


NAMED = {
    "function": lambda m: graph_of(("call_function", m.act, ("x",), {})),
    "argument": lambda m: graph_of(("call_function", keep, ("x", m.Params(1)), {})),
}


@pytest.mark.parametrize("what", NAMED)
def test_the_file_of_code_that_a_graph_names_is_part_of_the_name(engine, wire, foreign, monkeypatch, what):
    """As ComfyUI's quantised layouts, whose operations are traced into the code."""
    monkeypatch.setattr(wire, "digest_of", wire.digest_of.__wrapped__)
    request_for = engine("compile_process.obtain").request_for
    text = "import collections\nParams = collections.namedtuple('Params', 'a')\ndef act(x):\n    return x\n"

    def made():
        return request_for(NAMED[what](foreign(text)), [fake(2)], {}, torch.device("cpu"))

    first, again = made(), made()
    assert first.key == again.key
    text += "# another\n"
    assert made().key != first.key
    with pytest.raises(wire.LowerInline, match="of_a_host was changed"):
        wire.loads(json.loads(first.text)["graph"])


def test_what_modules_register_by_a_name_is_part_of_the_name_of_code_that_may_ask_for_it(engine, wire, monkeypatch):
    """A layout of quantised weights: ComfyUI registers it, the graph has text."""
    monkeypatch.setattr(wire, "digest_of", wire.digest_of.__wrapped__)
    request_for, process = engine("compile_process.obtain").request_for, engine("compile_process.client").compile_process
    monkeypatch.setattr(process, "modules", lambda: ["traced_graphs", "sys"])
    packet = torch.ops.kit_test.scale_  # as Dynamo leaves it in a graph
    for target, expected in ((doubled._opoverload, {"traced_graphs"}), (packet, {"traced_graphs"}), (torch.relu, set())):
        graph = graph_of(("call_function", target, ("x",), {}))
        made = json.loads(request_for(graph, [fake(2)], {}, torch.device("cpu")).text)
        assert set(made["graph"]["sources"]) == expected


def test_variables_of_inductor_and_triton_are_part_of_the_name_but_places(engine, monkeypatch):
    """The compile process inherits them."""
    request_for = engine("compile_process.obtain").request_for

    def key():
        return request_for(graph_of(("call_function", torch.relu, ("x",), {})), [fake(2)], {}, torch.device("cpu")).key

    before = key()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    assert key() == before
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    assert key() != before


def test_a_graph_that_left_autocast_on_changes_no_other(engine):
    settings = engine("compile_process.lowering_settings")
    plain = settings.now(torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16), settings.for_graph(plain):
        assert not torch.is_autocast_enabled("cpu")


def test_attention_under_another_packs_is_known(engine, monkeypatch):
    """A pack that was imported first may have put its own in the place of PyTorch's function, and call that."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: None)
    attention = engine("torch_compat.attention")
    spec = importlib.util.spec_from_file_location("attention_imported_late", attention.__file__)
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    assert torch._C._nn.scaled_dot_product_attention in late.FUNCTIONS


def test_methods_and_nodes(wire):
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    view = graph.call_method("view", (b, -1), {})
    total = graph.call_function(torch.cat, ([a, view], 0))
    graph.output((total, a, None))
    graph = fx.GraphModule(torch.nn.Module(), graph)
    back, inputs, mode = over(wire, graph, [fake(3), fake(2, 2)])
    ours, theirs = ([(node.op, node.target) for node in g.graph.nodes if node.op != "placeholder"] for g in (graph, back))
    assert ours == theirs
    names = {node: i for i, node in enumerate(graph.graph.nodes)}, {node: i for i, node in enumerate(back.graph.nodes)}
    for one, other in zip(graph.graph.nodes, back.graph.nodes, strict=True):
        assert [names[0][n] for n in one.all_input_nodes] == [names[1][n] for n in other.all_input_nodes]
    values = [node.meta["example_value"] for node in back.graph.nodes]
    assert [v.shape for v in values[:4]] == [(3,), (2, 2), (4,), (7,)]
    assert all(value.fake_mode is mode for value in values[:4]) and values[:2] == inputs
    x, y = torch.randn(3), torch.randn(2, 2)
    assert all(map(torch.equal, back(x, y)[:2], graph(x, y)[:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint8, torch.int64])
@pytest.mark.parametrize("how", ["contiguous", "transposed", "offset", "expanded", "channels last", "empty", "scalar"])
def test_inputs(wire, dtype, how):
    with FakeTensorMode(shape_env=ShapeEnv()):
        whole = torch.empty(2, 4, 3, 5, dtype=dtype)
        given = {
            "contiguous": whole,
            "transposed": whole.transpose(0, 3),
            "offset": whole[:, 1:, :, 2],
            "expanded": whole[:1].expand(7, 4, 3, 5),
            "channels last": torch.empty(2, 4, 3, 5, dtype=dtype).to(memory_format=torch.channels_last),
            "empty": whole[:0],
            "scalar": torch.empty((), dtype=dtype),
        }[how]
    _graph, (back,), _mode = over(wire, graph_of(("call_method", "detach", ("x",), {})), [given])
    seen = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device) for t in (back, given)]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:0", "cuda:1"])
def test_the_device_of_inputs(wire, device, monkeypatch):
    """As in the compile process, which may see no GPU."""
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda *_: None)
    given = fake(2, 3, device=device)
    back, (tensor,), _mode = over(wire, graph_of(("call_function", keep, ("x", 1), {})), [given])
    assert tensor.device == torch.device(device) == list(back.graph.nodes)[1].meta["example_value"].device


def test_numbers_among_the_inputs(wire):
    environment, (size,) = symbols(5)
    tensor = fake(size, 3, mode=FakeTensorMode(shape_env=environment))
    _graph, (number, constant, back), _mode = over(wire, graph_of(inputs=3), [size, 4, tensor])
    assert constant == 4 and isinstance(number, torch.SymInt) and back.shape[0].node.expr == number.node.expr
    assert number.node.hint == 5


def numbers_of(tensor):
    """Sizes, strides and offset, each as an expression and the number that it was."""
    numbers = *tensor.shape, *tensor.stride(), tensor.storage_offset()
    return [(n.node.expr, n.node.hint) if isinstance(n, torch.SymInt) else (sympy.Integer(n), n) for n in numbers]


def test_sizes_that_vary(wire):
    """Products, sums and quotients of sizes are the same expressions of the same symbols; ranges and hints stay."""
    environment, (batch, length) = symbols(2, 12)
    environment.constrain_symbol_range(batch.node.expr, 2, math.inf)
    environment.constrain_symbol_range(length.node.expr, 8, 4096)
    with FakeTensorMode(shape_env=environment):
        tensor = torch.empty(batch, length * 3, length // 4 + batch).transpose(0, 1)
        part = torch.empty(batch, length, 8)[:, 1:]
    text = wire.dumps(graph_of(inputs=4), [batch, length, tensor, part])
    _graph, (b, n, back, back_part), mode = wire.loads(json.loads(json.dumps(text)))
    renamed = {batch.node.expr: b.node.expr, length.node.expr: n.node.expr}
    for one, other in ((tensor, back), (part, back_part)):
        before, after = numbers_of(one), numbers_of(other)
        assert [(expr.xreplace(renamed), hint) for expr, hint in before] == after
    limits = mode.shape_env.var_to_range
    assert (limits[n.node.expr].lower, limits[n.node.expr].upper) == (8, 4096)
    assert (limits[b.node.expr].lower, limits[b.node.expr].upper) == (2, environment.var_to_range[batch.node.expr].upper)
    assert not mode.shape_env.guards


def test_memory_that_inputs_share_is_told_where_the_graph_writes(wire):
    with FakeTensorMode(shape_env=ShapeEnv()):
        memory = torch.empty(24)
        views = [memory[:12].view(3, 4), memory[6:18], memory.as_strided((2, 2), (4, 1), 20), torch.empty(3)]
    reads = graph_of(("call_function", torch.relu, ("x",), {}), inputs=4)
    writes = graph_of(("call_method", "add_", ("x", 1), {}), inputs=4)
    _graph, apart, _mode = over(wire, reads, views)
    assert len({t.untyped_storage()._cdata for t in apart}) == 4
    _graph, shared, _mode = over(wire, writes, views)
    assert len({t.untyped_storage()._cdata for t in shared[:3]}) == 1
    assert shared[3].untyped_storage()._cdata != shared[0].untyped_storage()._cdata
    seen = [[(t.shape, t.stride(), t.storage_offset()) for t in tensors] for tensors in (shared, views)]
    assert seen[0] == seen[1]
    assert shared[0].untyped_storage().nbytes() >= memory.nbytes - 4


@pytest.mark.parametrize("how", ["in a page", "not aligned", "no weight", "written", "returned"])
def test_where_a_weight_lies_is_not_in_the_text(wire, how):
    """Not where it makes no difference to kernels: a bias lies behind the weight, in a page of dynamic VRAM."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        page = torch.empty(64)
        weight = page[3:7] if how == "not aligned" else page[16:20]
        weight = weight if how == "no weight" else torch.nn.Parameter(weight, requires_grad=False)
    call = ("call_method", "mul_", ("x", 2), {}) if how == "written" else ("call_function", torch.relu, ("x",), {})
    graph = graph_of(call)
    for node in graph.graph.nodes:
        view = weight[1:] if how == "returned" else torch.empty(0)
        node.meta["example_value"] = weight if node.op == "placeholder" else view
    (described,) = wire.dumps(graph, [weight])["inputs"]
    assert described["offset"] == (0 if how == "in a page" else weight.storage_offset())


CALLS = {
    "a method": ("call_method", "mul_", ("x", 2), {}),
    "an operator of Python": ("call_function", operator.iadd, ("x", 1), {}),
    "an item": ("call_function", operator.setitem, ("x", 0, 1.0), {}),
    "out": ("call_function", torch.add, ("x", 1), {"out": "x"}),
    "an overload": ("call_function", torch.ops.aten.relu_.default, ("x",), {}),
    "a function that is told to": ("call_function", torch.nn.functional.silu, ("x",), {"inplace": True}),
    "a function that is told to by place": ("call_function", torch.nn.functional.leaky_relu, ("x", 0.1, True), {}),
    "what only reads": ("call_function", torch.nn.functional.leaky_relu, ("x", 0.1, False), {}),
}


@pytest.mark.parametrize("how", CALLS)
def test_each_way_to_write_is_one(wire, how):
    with FakeTensorMode(shape_env=ShapeEnv()):
        memory = torch.empty(6)
        views = [memory[:4], memory[2:]]
    _graph, (a, b), _mode = over(wire, graph_of(CALLS[how], inputs=2), views)
    assert (a.untyped_storage()._cdata == b.untyped_storage()._cdata) is (how != "what only reads")


def test_what_is_written_to_is_told_from_what_lies_beside_other_types(engine, wire):
    """A block's quantised weights lie in one memory, and rotary embeddings are applied in place."""
    memory = torch.zeros(64, dtype=torch.uint8)
    weight, scale = memory[:32].view(torch.int8), memory[32:].view(torch.float32)

    def rotates(x, y, weight, scale):
        product = x * (weight[:8] * scale)
        product.mul_(2)
        return product + y

    def writes(x, y, weight, scale):
        return x.mul_(2) * weight[:8] * scale + y

    def memory_by_name(graph, fakes):
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        return {n: told["memory"] for n, told in zip(names, wire.dumps(graph, fakes)["inputs"], strict=True)}

    def writes_by_an_operator(x, y, weight, scale):
        torch.ops.kit_test.scale_(x, weight[:8])
        return x * scale + y

    def writes_by_an_overload(x, y, weight, scale):
        torch.ops.kit_test.scale_.default(x, weight[:8])
        return x * scale + y

    both = torch.ones(12)
    functions = (rotates, None), (writes, 0), (writes_by_an_operator, 0), (writes_by_an_overload, 0)
    for function, number in functions:
        (told,) = traced(engine, function, both[:8], both[4:], weight, scale, use=memory_by_name)
        assert told == {"l_x_": number, "l_y_": number, "l_weight_": None, "l_scale_": None}


@torch.library.custom_op("kit_test::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, weight: torch.Tensor) -> None:
    x *= weight


def held(value):
    graph = fx.Graph()
    graph.placeholder("x")
    graph.output((graph.get_attr("held"),))
    holder = torch.nn.Module()
    holder.held = value
    return fx.GraphModule(holder, graph)


def calling_a_module():
    graph = fx.Graph()
    graph.output((graph.call_module("layer", (graph.placeholder("x"),)),))
    holder = torch.nn.Module()
    holder.layer = torch.nn.Linear(2, 2)
    return fx.GraphModule(holder, graph)


def of_several_types():
    memory = torch.empty(8)
    return [memory[:4], memory.view(torch.int32)]


KERNEL = torch._higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper_mutation
KERNEL_CALL = "call_function", KERNEL, (), {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)]}
# Its graph, its inputs and the words. A constant, or a graph, would be an input to PyTorch's artefact.
REFUSED_GRAPHS = {
    "a constant": (lambda: held(torch.arange(3)), lambda: [torch.empty(2)], "constant or a graph"),
    "a graph in it": (lambda: held(graph_of()), lambda: [torch.empty(2)], "constant or a graph"),
    "a kernel that is a number of this process": (
        *(lambda: graph_of(KERNEL_CALL), lambda: [torch.empty(2)], "triton_kernel_wrapper_mutation"),
    ),
    "a module that is called": (calling_a_module, lambda: [torch.empty(2)], "calls a module"),
    "a sparse tensor": (graph_of, lambda: [torch.empty(2, 2).to_sparse()], "layout"),
    "a conjugate view": (graph_of, lambda: [torch.empty(2, dtype=torch.complex64).conj()], "layout"),
    "memory of several types": (lambda: graph_of(CALLS["a method"], inputs=2), of_several_types, "several dtypes"),
    "a size that depends on data": (graph_of, lambda: [ShapeEnv().create_unbacked_symint()], "data"),
    "a number": (graph_of, lambda: [0.5], "float"),
    "a bool": (graph_of, lambda: [True], "bool"),
    "text": (graph_of, lambda: ["text"], "str"),
}


@pytest.mark.parametrize(("make", "inputs", "words"), REFUSED_GRAPHS.values(), ids=REFUSED_GRAPHS)
def test_graphs_that_cannot_travel_are_named(wire, make, inputs, words):
    graph = make()
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = inputs()
    with pytest.raises(wire.LowerInline, match=words):
        wire.dumps(graph, fakes)


def kernels_of(engine, function, *more):
    """The attention kernels in what goes over of a function of tensors."""
    wire, inputs = engine("compile_process.wire"), (torch.randn(1, 2, 8, 16), *more)
    (described,) = traced(engine, function, *inputs, use=wire.dumps, dynamic=False)
    assert "sdpa_kernel" not in json.dumps(described)
    graph, _fakes, _mode = wire.loads(json.loads(json.dumps(described)))
    torch.testing.assert_close(graph(*inputs), function(*inputs))
    kernels = engine("torch_compat.attention").KERNELS.values()
    return [node.target.__name__ for node in graph.graph.nodes if node.target in kernels]


def test_attention_goes_over_with_the_kernel_that_it_gets_here(engine):
    def plain(q):
        return functional.scaled_dot_product_attention(q, q, q)

    def chosen(q):
        with sdpa_kernel([SDPBackend.MATH]):
            first = plain(q)
        return (plain(first),)

    assert kernels_of(engine, lambda q: (plain(q),)) == ["flash_attention"]
    assert kernels_of(engine, chosen) == ["math", "flash_attention"]
    with sdpa_kernel([SDPBackend.MATH]):
        assert kernels_of(engine, lambda q: (plain(q),)) == ["math"]


@pytest.mark.parametrize("in_order", [False, True])
def test_an_order_of_kernels_holds_where_it_was_asked_for(engine, in_order):
    order, within = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], []
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    note = lambda _node, enabled: within.append(list(enabled)) or "math"  # noqa: E731

    def chosen(q):
        with sdpa_kernel(order, set_priority=in_order):
            first = functional.scaled_dot_product_attention(q, q, q)
        return (functional.scaled_dot_product_attention(first, q, q),)

    attention = engine("torch_compat.attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "kernel_for", note)
        kernels_of(engine, chosen)
    assert within == [order if in_order else [k for k in before if k in order], before]


def test_attention_under_autocast(engine):
    def plain(q):
        return (functional.scaled_dot_product_attention(q, q, q, scale=0.3),)

    with torch.autocast("cpu", torch.bfloat16):
        assert kernels_of(engine, plain) == ["flash_attention"]
        q = torch.randn(1, 2, 8, 16)
        kernel = engine("torch_compat.attention").KERNELS["math"]
        assert kernel(q, q, q).dtype is plain(q)[0].dtype is torch.bfloat16


def test_a_mask_of_bools_is_what_pytorch_makes_of_it(engine):
    mask = torch.rand(1, 1, 8, 8) > 0.5
    mask[..., 0] = True

    def masked(q, mask):
        return (functional.scaled_dot_product_attention(q, q, q, mask, scale=0.3),)

    assert kernels_of(engine, masked, mask) == ["flash_attention"]


def quantised(width=64):
    from comfy_kitchen.tensor import QuantizedTensor

    return QuantizedTensor.from_float(torch.randn(width, width), "TensorCoreFP8Layout")


def test_quantised_weights_are_taken_apart(wire, engine):
    pytest.importorskip("comfy_kitchen")
    weight = quantised()

    def block(x, weight):
        return torch.nn.functional.linear(x, weight.dequantize())

    def there_and_back(graph, fakes):
        _graph, back, _mode = over(wire, graph, fakes)
        (one,), (other,) = ([t for t in tensors if type(t) is type(weight)] for tensors in (fakes, back))
        (names, context), (their_names, their_context) = one.__tensor_flatten__(), other.__tensor_flatten__()
        assert names == their_names and repr(context) == repr(their_context)
        for name in names:
            inner = [getattr(tensor, name) for tensor in (one, other)]
            assert len({(t.shape, t.stride(), t.dtype, t.device) for t in inner}) == 1
        return [type(t) for t in back]

    assert traced(engine, block, torch.randn(3, 64), weight, use=there_and_back)


class TestTheKey:
    """The same for the same graph, whatever Dynamo calls its inputs; another for whatever the code depends on."""

    def test_names_and_sizes_are_not_in_it(self, engine):
        def first(x, y, scale):
            z = torch.relu(x) * scale
            return z @ y

        def same(another, name, factor):
            longer = torch.relu(another) * factor
            return longer @ name

        class Holder(torch.nn.Module):
            def __init__(self, attribute):
                super().__init__()
                setattr(self, attribute, torch.nn.Parameter(torch.ones(4, 4), requires_grad=False))
                self.attribute = attribute

            def forward(self, x, scale):
                z = torch.relu(x) * scale
                return z @ getattr(self, self.attribute)

        inputs = torch.ones(3, 4), torch.ones(4, 4), torch.ones(4)
        keys = {request(engine, function, *inputs).key for function in (first, same)}
        assert len(keys) == 1
        keys = {request(engine, Holder(name), inputs[0], inputs[2]).key for name in ("weight", "some_other")}
        assert len(keys) == 1
        sizes = (2, 6, 3), (2, 6, 3), (5, 7, 9)
        assert len({key_of_attention(engine, size) for size in sizes}) == 1

    def test_the_file_and_the_place_of_the_code_are_not_in_it(self, engine, tmp_path):
        keys = set()
        for name, before in (("one", ""), ("other", "\n\n\nimport os\n")):
            file = tmp_path / f"{name}.py"
            file.write_text(f"{before}import torch\ndef block(x):\n    return torch.sin(x) + 1\n")
            space = {"__name__": f"pack_{name}"}
            exec(compile(file.read_text(), file, "exec"), space)  # noqa: S102
            keys.add(request(engine, space["block"], torch.ones(3)).key)
        assert len(keys) == 1

    def test_what_the_code_depends_on_is_in_it(self, engine, monkeypatch):
        def block(x):
            return torch.relu(x) * 2.5

        def other_number(x):
            return torch.relu(x) * 2.25

        def other_operator(x):
            return torch.sigmoid(x) * 2.5

        def key(function=block, x=None, **more):
            return request(engine, function, torch.ones(4, 6) if x is None else x, **more).key

        plain = key()
        others = {
            "number": key(other_number),
            "operator": key(other_operator),
            "dtype": key(x=torch.ones(4, 6, dtype=torch.bfloat16)),
            "shape": key(x=torch.ones(4, 7)),
            "strides": key(x=torch.ones(6, 4).t()),
            "offset": key(x=torch.ones(7, 6)[3:]),
            "dynamic": key(dynamic=True),
            "option": key(options={"max_autotune": True}),
            "grad mode": key(inference=False),
        }
        with torch.autocast("cpu", torch.bfloat16):
            others["autocast"] = key()
        for name, get, put, value in (
            ("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float64),
            ("threads", torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
            ("deterministic", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        ):
            before = get()
            try:
                put(value)
                others[name] = key(x=torch.ones(4, 6, dtype=torch.float32))
            finally:
                put(before)
        environment = engine("compile_process.obtain").environment
        for name in environment():
            with monkeypatch.context() as patch:
                changed = {**environment(), name: "another"}
                patch.setattr(engine("compile_process.obtain"), "environment", lambda changed=changed: changed)
                others[name] = key()
        counted = collections.Counter([plain, *others.values()])
        assert all(count == 1 for count in counted.values()), [n for n, k in others.items() if counted[k] > 1]
        assert key() == plain

    def test_the_range_of_a_size_is_in_it(self, engine, wire):
        keys = set()
        for upper in (64, 128):
            environment, (size,) = symbols(5)
            environment.constrain_symbol_range(size.node.expr, 2, upper)
            tensor = fake(size, 3, mode=FakeTensorMode(shape_env=environment))
            made = engine("compile_process.obtain").request_for(graph_of(inputs=2), [size, tensor], {}, torch.device("cpu"))
            assert made.sizes == (5,)
            keys.add(made.key)
        assert len(keys) == 2

    def test_a_switch_that_was_on_and_off_again_changes_nothing(self, engine):
        products, before = torch.backends.cuda.matmul, key_of_attention(engine)
        precision = products.fp32_precision
        try:
            products.fp32_precision = "none"
            unset = key_of_attention(engine)
            products.allow_tf32 = True
            assert key_of_attention(engine) != unset
            products.allow_tf32 = False
            assert key_of_attention(engine) == unset == before
        finally:
            products.fp32_precision = precision

    def test_two_processes_give_the_same(self, engine):
        script = [sys.executable, traced_graphs.__file__]
        environment = {**os.environ, "PYTHONHASHSEED": "4711", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        there = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120)
        assert there.returncode == 0, there.stderr
        assert json.loads(there.stdout.splitlines()[-1]) == json.loads(json.dumps(what_is_named(engine)))


def test_a_class_that_a_graph_calls(wire):
    """A block that asks for the shape of a view has `torch.Size` among its calls."""
    loaded, _inputs, _mode = over(wire, graph_of(("call_function", torch.Size, ([2, 3],), {})), [fake(2)])
    assert [node.target for node in loaded.graph.nodes if node.op == "call_function"] == [torch.Size]


def test_a_size_that_turned_out_to_be_constant_is_none_of_those_that_guards_are_asked_for(engine, wire):
    def split(x, count):
        count = count + 0
        return (x * count).reshape(-1, count)[:, :3] if count == 8 else x

    made = request(engine, split, torch.randn(3, 40, 8), 8, dynamic=True)
    _graph, inputs, mode = wire.loads(json.loads(made.text)["graph"])
    sizes = [value for value in inputs if isinstance(value, torch.SymInt)]
    assert any(size > 20 for size in sizes)  # a guard as lowering adds one, on the tokens
    guards = wire.guards_of(inputs, mode)
    assert made.sizes == (3, 40) and engine("compile_process.obtain").holds(guards, made.sizes)


def test_guards_of_the_operators_themselves_are_kept_with_the_code(engine, wire):
    """As a mask is padded where its length asks for it (aten/native/transformers/attention.cpp): one text, two codes."""
    library = torch.library.Library("test_wire", "FRAGMENT")
    library.define("padded(Tensor x) -> Tensor")

    def padded(x):
        length = x.shape[-1]
        return (torch.constant_pad_nd(x, [0, 8 - length % 8])[..., :length] if length % 8 else x).sin()

    library.impl("padded", padded, "CompositeImplicitAutograd")
    function, holds = lambda x: torch.ops.test_wire.padded.default(x) + 1, engine("compile_process.obtain").holds
    whole, odd = (request(engine, function, torch.randn(3, 5, length), dynamic=True) for length in (256, 250))
    assert whole.key == odd.key
    _graph, inputs, mode = wire.loads(json.loads(whole.text)["graph"])
    guards = wire.guards_of(inputs, mode)
    assert holds(guards, whole.sizes) and not holds(guards, odd.sizes)


WEIGHT = torch.ones(3, requires_grad=True)
NOT_SENT = {
    "backward": (lambda x: x * WEIGHT, {}, False),
    "options": (torch.relu, {"post_grad": object()}, True),
}


@pytest.mark.parametrize("what", NOT_SENT)
def test_what_no_request_can_hold_is_named(engine, wire, what):
    function, options, inference = NOT_SENT[what]

    def use(graph, fakes):
        with pytest.raises(wire.LowerInline, match=what):
            engine("compile_process.obtain").request_for(graph, fakes, options, torch.device("cpu"))
        return True

    assert traced(engine, function, torch.ones(3), use=use, inference=inference) == [True]
