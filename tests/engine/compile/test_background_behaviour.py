"""Code made in the background, seen from outside: calls run eager until their code is there, then compiled."""

import gc
import random
import types
import weakref

import pytest
import torch
from support import Block, CompiledNet, Counting, CountingInAList, Held, Net, torch_settings

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.fixture
def compiled(engine):
    """compiled(net, **settings): `CompiledNet`. No code is left in the making."""
    nets = []

    def make(net, **settings):
        nets.append(weakref.ref(step := CompiledNet(engine, net, **settings)))
        return step

    yield make
    for step in filter(None, (ref() for ref in nets)):
        step.wait()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_calls_run_eager_until_their_code_is_there(compiled, backend):
    net, x = Net(), torch.randn(2, 4, 8)
    expected, step = net(x), compiled(net, backend=backend)
    result, eager = step(x)
    assert eager and torch.equal(result, expected)
    assert step.wait() == 1
    result, eager = step(x)
    assert not eager and torch.allclose(result, expected, atol=1e-5)
    assert not step(torch.randn(3, 6, 8))[1], "one code for all sizes"
    assert step(torch.randn(1, 6, 8))[1] and step.wait() == 2, "but for a batch of one"
    assert not step(torch.randn(1, 9, 8))[1] and step.wait() == 2


def test_calls_that_wait_use_code_of_the_background_and_the_other_way_round(compiled):
    step, x = compiled(Net()), torch.randn(2, 4, 8)
    step(x)
    assert step.wait() == 1
    step.at_once(x)
    assert step.graphs == 1
    other, y = compiled(Net(width=16)), torch.randn(2, 4, 16)
    other.at_once(y)
    assert other.graphs == 1
    assert not other(y)[1] and other.wait() == 1


class Times:
    """A patch whose factor is an attribute of it."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, y, _options):
        return y * self.factor


def patch_with_code_of_its_own(factor):
    code = (lambda y, _options: y * 0.5).__code__
    return types.FunctionType(code.replace(co_consts=tuple(factor if c == 0.5 else c for c in code.co_consts)), globals())


@pytest.mark.parametrize("patch", [Times, patch_with_code_of_its_own])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_patch_that_differs_in_each_step_needs_no_code_of_its_own(compiled, at_once, patch):
    net, x = Net(), torch.randn(2, 4, 8)
    step = compiled(net)
    for number in range(12):
        options = {"patches": {"attn1_output_patch": [patch(number + 2.0)]}}
        result, eager = (step.at_once(x, transformer_options=options), 0) if at_once else step(x, transformer_options=options)
        step.wait()
        assert torch.allclose(result, net(x, transformer_options=options))
        assert not eager or number == 0
    assert step.graphs == 2 and not step.failures, "what is before the patch, and what is behind"


def test_random_states_and_settings_are_left_alone(compiled):
    """PyTorch puts random states back when it has compiled; what others have drawn meanwhile must stay drawn."""
    backend, before, x = Held(), torch_settings(), torch.randn(2, 4, 8)
    step = compiled(Net(), backend=backend)
    torch.manual_seed(7)
    random.seed(7)
    step(x)
    assert backend.begun.wait(60)
    drawn, python = torch.randn(4), random.random()
    backend.go_on.set()
    assert step.wait() == 1
    assert not torch.equal(torch.randn(4), drawn) and random.random() != python
    assert torch_settings() == before


def test_what_a_loader_switches_meanwhile_stays(engine, compiled, monkeypatch):
    """PyTorch puts back what was there when it began to trace: transformers loads models in another default type."""
    monkeypatch.setattr(engine("background.thread"), "RETRY_SECONDS", 0.01)
    backend = Held()
    step, x = compiled(Net(), backend=backend), torch.randn(2, 4, 8)
    try:
        torch.set_default_dtype(torch.float16)
        step(x)
        assert backend.begun.wait(60)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(True)
        backend.go_on.set()
        step.wait()
        assert torch.get_default_dtype() is torch.float32 and torch.are_deterministic_algorithms_enabled()
    finally:
        backend.go_on.set()
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_a_model_that_goes_is_not_kept(compiled):
    net = Net()
    gone = weakref.ref(net), weakref.ref(net.blocks[0].inner.weight)
    step = compiled(net)
    step(torch.randn(2, 4, 8))
    del net, step
    gc.collect()
    compiled(Net()).wait()
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_weights_are_freed_while_code_is_being_made(compiled):
    backend, net = Held(), Net()
    step, gone = compiled(net, backend=backend), weakref.ref(net.blocks[0].inner.weight)
    step(torch.randn(2, 4, 8))
    assert backend.begun.wait(60)
    del net, step
    gc.collect()
    try:
        assert gone() is None
    finally:
        backend.go_on.set()
        compiled(Net()).wait()


def test_code_with_graph_breaks_is_made_when_it_is_called(compiled):
    class Breaking(Block):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    net, x = Net(block=Breaking), torch.randn(2, 4, 8)
    expected, step = net(x), compiled(net)
    assert torch.equal(step(x)[0], expected)
    step.wait()
    result, eager = step(x)
    assert not eager and torch.equal(result, expected)
    assert step.wait() >= 1 and step.graph_breaks >= 1 and not step.failures


def test_a_switch_that_flips_while_a_graph_is_lowered_is_no_matter(compiled):
    """Another model's call, or another node's, has TF32 on for a while. Dynamo of PyTorch 2.15 tells a switch that is off from
    one that was never set, and traces once more after the first such call of a process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    backends, x = (Held(), Held()), torch.randn(2, 4, 8)
    steps = [compiled(Net(), backend=backend) for backend in backends]
    for step in steps:
        step(x)
    try:
        assert backends[0].begun.wait(60)
        torch.backends.cuda.matmul.allow_tf32 = True
        backends[0].go_on.set()
        assert backends[1].begun.wait(60)
        torch.backends.cuda.matmul.allow_tf32 = False
        backends[1].go_on.set()
        steps[0].wait()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        backends[1].go_on.set()
    assert [backend.calls for backend in backends] == [1, 1]
    assert not any(step(x)[1] or step.failures for step in steps)


def test_a_block_that_works_in_place_on_halves_of_its_precision(compiled):
    """PyTorch compiles differently for memory that two arguments share, if one is written to."""

    class InPlace(Block):
        def forward(self, x, context):
            x += self.inner(self.norm(x))
            context.mul_(2.0)
            return x + context.to(x.dtype).mean()

    class Two(Net):
        def forward(self, x, context):
            for block in self.blocks:
                x = block(x, context=context)
            return x

    net = Two(block=InPlace)
    given = torch.randn(2, 4, 8), torch.randn(2, 3, 8).bfloat16()
    expected, step = net(given[0].clone(), given[1].clone()), compiled(net, backend="aot_eager")
    for eager in (True, False):
        result, found = step(given[0].clone(), context=given[1].clone())
        assert torch.allclose(result, expected, atol=1e-5) and found is eager
        assert step.wait() == 1


class Given(Block):
    def forward(self, x, function):
        return super().forward(function(x))


class Closing(Net):
    """Hands its blocks a function that closes over what the model's forward goes on to change."""

    def __init__(self):
        super().__init__(Given)
        self.seen = []

    def forward(self, x):
        shift = torch.ones(x.shape[-1])
        self.seen[:] = [weakref.ref(shift)]
        for block in self.blocks:
            x = block(x, lambda y: y + shift)
        shift = None
        return x


def test_functions_among_the_arguments_are_kept_as_they_were_and_without_data(compiled):
    net, x, backend = Closing(), torch.randn(2, 4, 8), Held()
    expected, step = net(x), compiled(net, backend=backend)
    result, eager = step(x)
    assert eager and torch.equal(result, expected)
    assert backend.begun.wait(60)
    gc.collect()
    kept = net.seen[0]()
    backend.go_on.set()
    assert kept is None, "the tensor has been freed with the call"
    assert step.wait() == 1 and not step.failures
    result, eager = step(x)
    assert not eager and torch.equal(result, expected) and step.wait() == 1


@pytest.mark.parametrize("block", [Counting, CountingInAList])
def test_what_a_block_keeps_counts_no_call_more(compiled, block):
    """What compiles in the background runs nothing on the model's own tensors."""
    net, x = Net(block=block), torch.randn(2, 4, 8)
    step = compiled(net)
    for _ in range(3):
        _, eager = step(x)
        step.wait()
    assert not eager
    assert [float(b.seen if block is Counting else b.seen[0]) for b in net.blocks] == [3.0] * 3


def test_code_for_calls_under_autocast(compiled):
    step, x = compiled(Net()), torch.randn(2, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = step(x)
        assert step.wait() == 1
        result, eager = step(x)
    assert not eager and torch.allclose(result, expected, atol=1e-2)


def test_heads_of_rotary_embeddings_are_no_sizes_that_vary(compiled):
    """With symbols for them sympy needs four fifths of the trace of LTX-AV; tokens stay a size that varies."""

    class Turned(Block):
        def forward(self, x, turn):
            pairs = x.view(x.shape[0], x.shape[1], turn.shape[2], -1, 1, 2)
            return super().forward(x) + (turn * pairs).sum(-1).reshape(x.shape)

    shapes = []

    def backend(graph, inputs):
        shapes.extend(tuple(map(str, t.shape)) for t in inputs if isinstance(t, torch.Tensor) and t.dim() == 6)
        return graph

    net = Net(Turned)
    step = compiled(net, backend=backend)
    for tokens in (4, 6):
        x, turn = torch.randn(2, tokens, 8), torch.randn(2, tokens, 2, 2, 2, 2)
        assert torch.allclose(step(x, turn=turn)[0], net(x, turn=turn), atol=1e-6)
        assert not hasattr(turn, "_dynamo_static_indices")
        assert step.wait() == 1
    ((_batch, tokens, *heads),) = shapes
    assert not tokens.isdecimal() and heads == ["2", "2", "2", "2"]


class Writing(Block):
    """As Flux's blocks do: `img += ...`."""

    def forward(self, x, transformer_options={}):  # noqa: B006
        y = super().forward(x, transformer_options=transformer_options)
        y += 1
        return y


def test_after_a_patch_inputs_of_calls_without_one_are_not_copied(engine, monkeypatch):
    """Copies in case that a piece behind a patch cannot be traced, when the piece before it has written."""
    kept, changed, x = [], engine("compile.call_shapes").Changed, torch.randn(2, 4, 8)
    keep = changed.keep
    monkeypatch.setattr(changed, "keep", lambda self: kept.append(self) or keep(self))
    step, patched = CompiledNet(engine, Net(block=Writing)), {"patches": {"attn1_output_patch": [lambda y, _options: y * 2]}}
    counts = []
    for options in (patched, patched, patched, {}, {}, {}):
        kept.clear()
        assert torch.equal(step.at_once(x, transformer_options=options), step.net(x, transformer_options=options))
        counts.append(len(kept) > 0)
    assert counts[2] and not counts[-1] and step.graph_breaks
