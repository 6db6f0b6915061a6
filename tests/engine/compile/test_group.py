"""Blocks of plain PyTorch, compiled: sharing, shapes, failures, scopes."""

import gc
import importlib
import json
import sys
import weakref

import pytest
import torch
from support import Block, CompiledNet, Net, relative_error, torch_settings, without_compile_process
from torch import nn
from torch._dynamo import funcname_cache
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def compiled(engine):
    """compiled(net, **settings) runs as `with`, for what holds within a call."""
    with engine("compile.session").watching:
        yield (
            lambda net, **settings: (
                engine("compile.binding").Binding(net, CompiledNet(engine, net, **settings).settings).bound()
            )
        )


@pytest.fixture
def added(engine):
    """added(net, *shapes or tensors, **settings): compiled calls give what eager does; how many graphs they added."""
    last = {}

    def count(net, *inputs, **settings):
        step = CompiledNet(engine, net, **settings)
        for x in inputs or [(2, 4, 8)]:
            x = torch.randn(x) if isinstance(x, tuple) else x
            assert torch.equal(step.at_once(x), net(x))
        before, last[net] = last.get(net, 0), step.graphs
        return step.graphs - before

    return count


def test_identical_blocks_share_a_graph(added):
    assert added(Net(count=5)) == 1


def test_tracing_reads_no_source_files_for_pytorchs_debug_log(added):
    funcname_cache.clearcache()
    assert added(Net()) == 1 and not funcname_cache.cache


def test_guards_are_not_timed_for_pytorchs_debug_log(added, monkeypatch):
    timed, guards = [], torch._dynamo.guards
    time = guards.profile_guard_manager
    monkeypatch.setattr(guards, "profile_guard_manager", lambda *args: (timed.append(args), time(*args))[1])
    assert added(Net()) == 1 and not timed


def test_no_garbage_is_collected_while_a_call_traces(engine, monkeypatch):
    seen = []
    run_while_tracing = torch._dynamo.assume_constant_result(lambda: seen.append(gc.isenabled()))
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: (run_while_tracing(), forward(self, x))[1])
    CompiledNet(engine, Net()).at_once(torch.randn(2, 4, 8))
    assert seen == [False] and gc.isenabled()


@pytest.fixture
def order():
    """order(list) sets the order in which PyTorch tries attention kernels, for the process."""
    before = torch._C._get_sdp_priority_order()
    yield torch._C._set_sdp_priority_order
    torch._C._set_sdp_priority_order(before)


class Attention(nn.Module):
    def __init__(self, _width):
        super().__init__()

    def forward(self, x):
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            return functional.scaled_dot_product_attention(x, x, x)


def test_the_order_of_attention_kernels_in_a_graph_is_pytorchs_default(engine, order):
    """It would be another graph on disk after each other thing that ran before."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(str(graph.graph))
        return graph

    for now in ([1, 2, 0, 3, 4], [3, 0, 1, 2, 4]):
        order(now)
        torch._dynamo.reset()
        CompiledNet(engine, Net(Attention), backend=backend).at_once(torch.randn(2, 4, 8))
    assert len(graphs) == 2 and graphs[0] == graphs[1]


def test_an_order_of_attention_kernels_that_ends_while_a_call_traces_does_not_come_back(engine, monkeypatch, order):
    """The host sets one around each of its calls, also on another thread."""
    end = torch._dynamo.assume_constant_result(lambda: order([1, 2, 0, 3, 4]))
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: (end(), forward(self, x))[1])
    order([3, 0, 1, 2, 4])
    CompiledNet(engine, Net()).at_once(torch.randn(2, 4, 8))
    assert torch._C._get_sdp_priority_order() == [1, 2, 0, 3, 4]


def test_shapes_in_auto_share_a_graph_and_a_batch_of_one_has_its_own(added):
    net, later = Net(), [(2, 6), (2, 7), (3, 4), (4, 9), (5, 5), (8, 8), (2, 4)]
    assert added(net, (2, 4, 8), dynamic="auto") == 1
    assert added(net, *((*shape, 8) for shape in later), dynamic="auto") == 0
    assert added(net, (1, 6, 8), dynamic="auto") == 1
    assert added(net, (1, 12, 8), dynamic="auto") == 0


def test_shapes_in_true_and_false(added):
    for dynamic, width, graphs in (("true", 8, 1), ("false", 16, 4)):
        shapes = [(2, 4, width), (2, 6, width), (3, 9, width), (4, 4, width)]
        assert added(Net(width=width), *shapes, dynamic=dynamic) == graphs


def test_per_call_entries_do_not_recompile(engine):
    step, x = CompiledNet(engine, Net()), torch.randn(2, 4, 8)
    for number in range(4):
        options = {"sigmas": torch.tensor([1.0 / (number + 1)]), "uuids": [object()], "patches": {}}
        step.at_once(x, transformer_options=options)
    assert step.graphs == 1


def test_a_transposed_view_uses_the_graph_of_the_others(added):
    net = Net()
    net.entry = torch.nn.Identity()
    assert added(net, torch.randn(2, 8, 4).transpose(1, 2)) == 1


def test_a_forward_of_somebody_else_is_left_alone(compiled):
    net, x = Net(), torch.randn(2, 4, 8)
    net.blocks[1].forward = lambda x, **_kwargs: x + 100
    expected = net(x)
    theirs = net.blocks[1].__dict__["forward"]
    with compiled(net):
        assert torch.equal(net(x), expected)
        assert net.blocks[1].__dict__["forward"] is theirs
    assert net.blocks[1].__dict__["forward"] is theirs


def test_the_blocks_own_forward_in_its_dict_is_compiled_and_put_back(compiled):
    net = Net()
    net.blocks[1].forward = net.blocks[1].forward
    own = net.blocks[1].__dict__["forward"]
    with compiled(net):
        net(torch.randn(2, 4, 8))
        assert net.blocks[1].__dict__["forward"] is not own
    assert net.blocks[1].__dict__["forward"] is own


def test_other_peoples_compile_is_left_alone(compiled):
    """A plain torch.compile of the same class has its own cache and limit, before, during and after ours."""
    net, x = Net(), torch.randn(2, 4, 8)
    own = torch.compile(net.blocks[0], backend="eager", dynamic=False)

    def count():
        entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(Block.forward)
        return len(entries)

    own(x)
    assert count() == 1
    with compiled(net, dynamic="false"):
        for tokens in range(4, 12):
            net(torch.randn(2, tokens, 8))
        own(x)
        assert count() == 1
    own(torch.randn(2, 5, 8))
    assert count() == 2


def test_what_pytorch_compiled_for_a_freed_model_is_freed(engine):
    """Its table of code objects kept them, and a function of each graph in the module of the block's class."""

    def left_in_the_module():
        return {name for name in vars(sys.modules[Block.__module__]) if name.startswith("__compiled_fn")}

    graphs = []

    def backend(graph, _inputs):
        graphs.append(weakref.ref(graph))
        return graph

    first = CompiledNet(engine, Net())  # of a process: it is kept somewhere
    first.at_once(torch.randn(2, 4, 8))
    for _ in range(2):
        gc.collect()  # what other tests have left goes with their graphs
        first.new_run()
    net, before = Net(width=16), left_in_the_module()
    CompiledNet(engine, net, backend=backend).at_once(torch.randn(2, 4, 16))
    assert len(graphs) == 1 and left_in_the_module() > before
    del net
    gc.collect()
    assert graphs[0]() is not None, "the next model of its structure uses it"
    engine("compile.registry")._recent.clear()  # others were used since
    gc.collect()
    # Not where it is given up: in a reset of PyTorch's, which frees the same, that ended the process.
    assert graphs[0]() is not None and left_in_the_module() > before
    CompiledNet(engine, Net()).new_run()
    gc.collect()
    assert graphs[0]() is None and left_in_the_module() == before


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.rest)])
def test_every_backend_that_a_cpu_can_run(engine, backend):
    """Inductor also in the background, and as its code is found there by the calls that wait."""
    if backend == "inductor" and not hasattr(
        importlib.import_module("torch._inductor.standalone_compile"), "AOTCompiledArtifact"
    ):
        pytest.skip("PyTorch before 2.10 lowers graphs in the call that traces them")
    net, x = Net(), torch.randn(2, 4, 8)
    step, before = CompiledNet(engine, net, backend=backend), torch_settings()
    expected, eager = step(x)
    assert eager and torch.equal(expected, net(x))
    assert step.wait() == 1 and torch_settings() == before
    result, eager = step(x)
    assert not eager and relative_error(result, expected) < 1e-5 and relative_error(step.at_once(x), expected) < 1e-5
    assert step.graphs == 1 and not step.failures and torch_settings() == before


def test_random_numbers_are_those_of_eager(engine):
    """As a patch inside a block draws them (ToMe); inductor has a generator of its own."""

    class Drawing(Block):
        def forward(self, x):
            return super().forward(x) + torch.rand_like(x) * torch.randint(3, x.shape[-1:])

    net, x = Net(Drawing), torch.randn(2, 4, 8)
    step = CompiledNet(engine, net, backend="inductor")
    torch.manual_seed(0)
    expected = net(x)
    step(x)
    assert step.wait() == 1
    torch.manual_seed(0)
    result, eager = step(x)
    assert not eager and relative_error(result, expected) < 1e-5 and not step.failures


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_inductor_gets_the_options_of_each_mode_but_cuda_graphs(engine, monkeypatch, mode):
    from torch._inductor import compile_fx, config

    asked, traced_graph = [], engine("compile.traced_graph")

    def compiler(graph, _inputs, config_patches):
        with config.patch(config_patches):
            asked.append(config_patches)
        return graph

    monkeypatch.setattr(compile_fx, "compile_fx", compiler)
    net, x = Net(), torch.randn(2, 4, 8)
    with monkeypatch.context() as patch:
        without_compile_process(engine, patch)
        step = CompiledNet(engine, net, backend="inductor", mode=mode)
        assert torch.equal(step.at_once(x), net(x)) and not step.failures

    def lower(request, _block, _patient):
        asked.append(json.loads(request.text)["options"])
        raise NotImplementedError("no code")

    monkeypatch.setitem(traced_graph.LOWERERS, "inductor", lower)
    CompiledNet(engine, Net(width=16), backend="inductor", mode=mode).at_once(torch.randn(2, 4, 16))
    theirs = {name: value for name, value in torch._inductor.list_mode_options(mode).items() if name != "triton.cudagraphs"}
    off = {"triton.cudagraphs": False, "fallback_random": True}
    assert asked == [theirs | off] * 2 and ("max_autotune" in theirs) == mode.startswith("max-autotune")


def test_numbers_in_which_blocks_differ_are_no_constants_of_the_graph(added):
    class Numbered(Block):
        def forward(self, x, transformer_options={}):  # noqa: B006
            return x if self.number == 100 else x + self.inner(x) * self.number

    net = Net(Numbered, count=5)
    for number, block in enumerate(net.blocks):
        block.number = number
    before = torch_settings()
    assert added(net) == 1 and torch_settings() == before
    net.blocks[2].number = 100
    added(net)


def test_a_batch_of_one_in_another_layout_is_the_same_graph(engine, compiled):
    net = Net(width=8)
    odd = torch.randn(4, 1, 8).transpose(0, 1)  # Cosmos keeps the batch last but one
    plain = odd.clone(memory_format=torch.contiguous_format)
    assert odd.is_contiguous() and odd.stride() != plain.stride()
    block = net.blocks[0]
    with compiled(net, dynamic="true"):
        expected = block(plain)
        assert torch.equal(block(odd), expected)
    assert CompiledNet(engine, net).graphs == 1
