"""A graph that only the call that traces it can lower, as the compile process finds out: it is traced alone, once more."""

import gc
import weakref

import pytest
import torch
from support import Block, CompiledNet, Net

X = torch.randn(2, 4, 8)
pytestmark = pytest.mark.usefixtures("inference_mode")


class Refused:
    """Blocks of which each graph is refused; `inputs`: shapes and numbers of what was lowered in a call instead.

    Args:
        guard: adds guards to those of the trace, from the inputs' shapes and numbers.
    """

    def __init__(self, engine, monkeypatch, net, guard=None, **settings):
        self.engine, self.inputs, self.graphs = engine, inputs, graphs = engine, [], []

        # PyTorch and pytest keep these.
        def refuse(_request, _block, _patient):
            raise engine("compile_process.artefact").LowerInline("not here")

        def lower(graph, _inputs):
            fakes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
            inputs.append([tuple(fake.shape) if isinstance(fake, torch.Tensor) else fake for fake in fakes])
            if guard is not None:
                guard(inputs[-1])
            graphs.append(weakref.ref(graph))
            return graph.forward

        self.net = CompiledNet(engine, net, backend=lower, **settings)
        lowerers = engine("compile.traced_graph").LOWERERS
        monkeypatch.setitem(lowerers, self.net.settings.backend, refuse)
        self.net(X)
        self.net.wait()

    def __call__(self, x, puts_off):
        """A call of the model, which may be one that may not trace."""
        call = self.engine("background.model_call").ModelCall(synchronous=False, puts_off=puts_off)
        blocks = self.engine("compile.binding").Binding(self.net.net, self.net.settings, call).bound()
        with self.engine("compile.session").watching, blocks:
            assert torch.allclose(self.net.net(x), self.expected(x))
        return call

    def expected(self, x):
        for module in (self.net.net.entry, *self.net.net.blocks):
            x = type(module).forward(module, x)
        return x

    @property
    def code(self):
        (group,) = self.net._groups
        return group.code


@pytest.fixture
def refused(engine, monkeypatch):
    return lambda net, guard=None, **settings: Refused(engine, monkeypatch, net, guard, **settings)


class Numbered(Block):
    """It has a number of its own, and a weight that is no parameter, as quantised ones are none."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("weight", torch.eye(width))

    def forward(self, x, scale=None):
        return super().forward(x @ self.weight) * self.number


def numbered():
    net = Net(block=Numbered, count=5)
    for number, block in enumerate(net.blocks):
        block.number = 3 + number
    return net


@pytest.mark.parametrize("dynamic", ["auto", "false"])
def test_what_varied_in_the_blocks_trace_varies_in_its_own_and_weights_do_not(refused, dynamic):
    blocks = refused(numbered(), dynamic=dynamic)
    for x in (X, torch.randn(2, 6, 8))[: 2 if dynamic == "auto" else 1]:
        result, uncompiled = blocks.net(x)
        assert torch.allclose(result, blocks.net.net(x)) and not uncompiled
    (inputs,) = blocks.inputs
    assert inputs.count((8, 8)) == 3, "sizes of weights are constants"
    assert [type(value) for value in inputs if not isinstance(value, tuple)].count(torch.SymInt) >= 1


def test_strides_vary_where_sizes_do_not(refused):
    blocks = refused(Net())
    for step in (5, 6, 7, 9, 10):
        scale = torch.randn(1, 8, step)[:, :, :1].transpose(1, 2)  # 1x1x8, in steps of 5, 6 and so on
        blocks.net(X, scale=scale)
        blocks.net.wait()
        result, uncompiled = blocks.net(X, scale=scale)
        assert torch.allclose(result, blocks.net.net(X, scale=scale)) and not uncompiled
    assert len(blocks.inputs) == 1


def test_it_is_no_trace_of_the_block(refused):
    blocks = refused(Net())
    blocks.code._traces_in_run["these shapes"] = 4  # once more, and it would be given up
    assert not blocks.net(X)[1] and len(blocks.inputs) == 1
    assert [*blocks.code._traced.values()] == [1] and not blocks.code._traces_in_run


def test_a_call_that_may_not_trace_runs_it_uncompiled_until_another_has_traced_it(refused):
    blocks = refused(Net())
    before = blocks(X, puts_off=True)
    assert before.put_off and before.uncompiled and not blocks.inputs
    traces, after = blocks(X, puts_off=False), blocks(X, puts_off=True)
    assert not (traces.uncompiled or after.put_off or after.uncompiled) and len(blocks.inputs) == 1


def test_a_size_that_only_its_own_guards_exclude_waits_where_traces_are_put_off(refused):
    """Lowering adds guards, which the block's code does not have."""

    def guard(inputs):
        (_, tokens, _), *_ = (shape for shape in inputs if isinstance(shape, tuple) and len(shape) == 3)
        bool(tokens % 4 == 0)

    blocks, other = refused(Net(), guard), torch.randn(2, 6, 8)
    blocks(X, puts_off=False)
    blocks(torch.randn(2, 8, 8), puts_off=False)
    assert len(blocks.inputs) == 1, "the block's code is for all sizes"
    call = blocks(other, puts_off=True)
    assert call.put_off and call.uncompiled and len(blocks.inputs) == 1
    assert not blocks(other, puts_off=False).uncompiled and len(blocks.inputs) == 2


def test_all_of_it_is_freed_with_the_model(engine, refused):
    kind = engine("compile.traced_graph").TracedGraph
    others = weakref.WeakSet(item for item in gc.get_objects() if type(item) is kind)  # of other tests
    blocks = refused(Net(width=8))
    blocks.net(X)
    graphs, weight = blocks.graphs, weakref.ref(blocks.net.net.blocks[0].inner.weight)
    traced = [weakref.ref(item) for item in gc.get_objects() if type(item) is kind and item not in others]
    assert traced
    del blocks
    engine("compile.registry")._recent.clear()
    gc.collect()
    for _ in range(2):  # the graphs of a freed model's code are found when that is freed
        engine("compile.compiled_code").free_unused()
        gc.collect()
    assert weight() is None and not any(graph() for graph in (*graphs, *traced))
