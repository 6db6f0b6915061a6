"""Traces that are kept for the next process: used only where it would trace the same."""

import enum
import functools
import gc
import sys
import types
import weakref

import pytest
import torch
from support import copy_of, nothing_compiles, recorded
from torch import nn

pytestmark = pytest.mark.usefixtures("inference_mode")
FACTOR = 2.0


class Ops:
    class Linear(nn.Linear):
        """Defined inside a class, as ComfyUI's layers are."""

        def forward(self, x):
            return super().forward(x)


def layers_of(bias):
    class Local(nn.Linear):
        """Defined inside a function, as ComfyUI's layers for quantized weights are."""

        def forward(self, x):
            return super().forward(x) if bias else x

    return Local


def scaled(x):
    return torch.relu(x) * FACTOR


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.power = 2

    def forward(self, x):
        return scaled(x) ** self.power


class Block(nn.Module):
    def __init__(self, linear=Ops.Linear):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = linear(8, 8)
        self.part = Part()
        self.requires_grad_(False)

    def forward(self, x, options={}):  # noqa: B006  as the host writes it
        y = self.part(self.inner(self.norm(x)))
        for patch in options.get("patches", ()):
            y = patch(y)
        return x + y


class Lazy(nn.Module):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = 2.0
        return x * self.kept


class InPlace(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


@pytest.fixture(scope="module")
def record(engine):
    """record(block, *args) compiles a copy of its forward and returns the stored trace, or None."""
    return functools.partial(recorded, engine)


@pytest.fixture
def load(engine):
    """load(stored, block, *args) is the result of the code of the trace, or None if it is refused."""
    stored_traces = engine("stored_traces")

    def run(stored, block, *args):
        own = copy_of(type(block).forward)
        if not stored_traces.load(stored, own, (block, *args), {}):
            return None
        return torch.compile(own, backend=nothing_compiles)(block, *args)

    return run


@pytest.fixture(scope="module")
def stored(record):
    with torch.inference_mode():
        return record(Block(), torch.randn(2, 4, 8))


def test_traces_of_this_pytorch_can_be_kept(engine, stored):
    assert engine("trace_record").can_store() == (torch.__version__.startswith("2.11.") and sys.version_info >= (3, 11))
    assert stored


def test_another_process_runs_it_without_compiling(stored, load):
    for _ in range(2):  # twice in one process: two models of a kind
        block, x = Block(), torch.randn(2, 4, 8)
        assert torch.allclose(load(stored, block, x), block(x), atol=1e-6)


def test_sizes_vary_where_they_did(record, load):
    kept = record(Block(), torch.randn(2, 4, 8), dynamic=True)
    block, x = Block(), torch.randn(3, 7, 8)
    assert torch.allclose(load(kept, block, x), block(x), atol=1e-6)
    assert load(kept, block, torch.randn(1, 7, 8)) is None, "a batch of one is code of its own"


def other_scaled(x):
    return torch.relu(x) * FACTOR + 1


def other_forward(self, x):
    return scaled(x) ** self.power + 1


@pytest.mark.parametrize(
    "name, owner, value",
    [
        ("FACTOR", sys.modules[__name__], 3.0),
        ("scaled", sys.modules[__name__], other_scaled),
        ("forward", Part, other_forward),
        ("forward", nn.LayerNorm, lambda self, x: nn.functional.layer_norm(x, (8,)) + 1),
        ("relu", torch, torch.sigmoid),
    ],
    ids=["a number", "a function", "a method", "a method of PyTorch's", "an operator"],
)
def test_other_code_is_traced_anew(stored, load, monkeypatch, name, owner, value):
    block, x = Block(), torch.randn(2, 4, 8)
    assert load(stored, block, x) is not None
    monkeypatch.setattr(owner, name, value)
    assert load(stored, block, x) is None
    monkeypatch.undo()
    assert load(stored, block, x) is not None


@pytest.mark.parametrize("what", ["attribute", "class", "dtype", "shape", "option", "gradients", "threads"])
def test_another_call_is_traced_anew(stored, load, what):
    block, x, options = Block(), torch.randn(2, 4, 8), {}
    if what == "attribute":
        block.part.power = 3
    elif what == "class":
        block = Block(nn.Linear)
    elif what == "dtype":
        block, x = block.double(), x.double()
    elif what == "shape":
        x = torch.randn(2, 5, 8)
    elif what == "option":
        options = {"patches": [torch.sin]}
    if what == "gradients":
        with torch.inference_mode(False), torch.no_grad():
            assert load(stored, Block(), torch.randn(2, 4, 8)) is None
    elif what == "threads":
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert load(stored, block, x) is None
        finally:
            torch.set_num_threads(threads)
    else:
        assert load(stored, block, x, *([options] if options else [])) is None


def test_classes_made_in_functions_are_told_by_their_methods(record, load):
    kept = record(Block(layers_of(True)), torch.randn(2, 4, 8))
    block, x = Block(layers_of(True)), torch.randn(2, 4, 8)
    assert torch.allclose(load(kept, block, x), block(x), atol=1e-6)
    assert load(kept, Block(layers_of(False)), x) is None, "the same code, made with another value"


def test_functions_made_in_functions_are_told_by_their_code(record, load):
    def patch(offset):
        return {"patches": [lambda y: y + offset]}

    block, x = Block(), torch.randn(2, 4, 8)
    kept, other = record(block, x, patch(torch.randn(8))), patch(torch.randn(8))
    assert torch.allclose(load(kept, block, x, other), block(x, other), atol=1e-6), "another tensor"
    assert load(kept, block, x, patch(2.0)) is None
    assert load(kept, block, x, {"patches": [lambda y: y * 2]}) is None


class Colour(enum.Enum):
    RED = 1


NAMED = [None, torch, torch.ops.aten, torch.cat, torch.ops.aten.relu, torch.ops.aten.relu.default, len, list.append, scaled]
NAMED += [Part, Colour.RED, Ops.Linear, layers_of(True), nn.functional.layer_norm, types.FunctionType, scaled.__code__]
UNNAMED = [object(), Part(), lambda x: x, [].append, types.ModuleType("torch"), other_forward.__get__(1)]


@pytest.mark.parametrize("value", NAMED)
def test_what_has_a_name(engine, value):
    assert engine("identities").name_of(value) == engine("identities").name_of(value)


@pytest.mark.parametrize(
    "value", [object(), Part(), lambda x: x, [].append, types.ModuleType("torch"), other_forward.__get__(1)]
)
def test_what_has_none(engine, value):
    with pytest.raises(engine("identities").Unnamed):
        engine("identities").name_of(value)


def test_names_differ_where_the_code_does(engine, monkeypatch):
    name_of = engine("identities").name_of
    before = name_of(Part), name_of(layers_of(True)), name_of(scaled)
    monkeypatch.setattr(Part, "forward", other_forward)
    assert name_of(Part) != before[0]
    monkeypatch.setattr(scaled, "__code__", other_scaled.__code__)
    assert name_of(scaled) != before[2]


def test_a_trace_that_compares_what_has_no_name_is_not_kept(engine, record, monkeypatch, caplog):
    def unnamed(value):
        raise engine("identities").Unnamed("a name")

    monkeypatch.setattr(engine("guard_text"), "name_of", unnamed)
    with caplog.at_level("DEBUG", "torch-compile-kit"):
        assert record(Block(), torch.randn(2, 4, 8)) is None
    assert "traced in each process" in caplog.text and "a name" in caplog.text


def test_code_with_other_results_than_eager_is_refused(engine, stored, load, monkeypatch, caplog):
    module, block, x = engine("stored_traces"), Block(), torch.randn(2, 4, 8)
    compiled = module._compiled
    monkeypatch.setattr(module, "_compiled", lambda entry: lambda *given: [y * 1.05 for y in compiled(entry)(*given)])
    names = set(globals())
    with caplog.at_level("INFO", "torch-compile-kit"):
        assert load(stored, block, x) is None
    assert "Block.forward: stored code differs from eager by 0.05 and is compiled anew." in caplog.text
    gc.collect()
    assert set(globals()) == names
    monkeypatch.undo()
    assert torch.allclose(load(stored, block, x), block(x), atol=1e-6)


def test_a_call_that_changes_its_input_changes_it_once(record, load):
    kept, x = record(InPlace(), torch.randn(2, 4, 8)), torch.ones(2, 4, 8)
    assert torch.equal(load(kept, InPlace(), x), torch.full_like(x, 4))
    assert torch.equal(x, torch.full_like(x, 2))


def test_a_first_call_that_changes_what_guards_look_at_is_not_loaded(record, load):
    stored, x = record(Lazy(), torch.randn(2, 4, 8)), torch.randn(2, 4, 8)
    assert stored is not None and load(stored, Lazy(), x) is None


@pytest.mark.parametrize("refused", [False, True])
def test_classes_live_no_longer_than_their_blocks(record, load, refused):
    x = torch.randn(2, 4, 8)
    kept = record(Block(layers_of(True)), x)
    layer = layers_of(not refused)
    freed, block = weakref.ref(layer), Block(layer)
    assert (load(kept, block, x) is None) == refused
    del layer, block
    gc.collect()
    assert freed() is None


def test_nothing_is_left_behind(engine, stored):
    stored_traces, names = engine("stored_traces"), set(globals())
    block, own = Block(), copy_of(Block.forward)
    x, freed = torch.randn(2, 4, 8), weakref.ref(block)
    assert stored_traces.load(stored, own, (block, x), {})
    assert len(stored_traces.guards_of(own.__code__)) == 1
    assert any(name.startswith("__stored_trace_") for name in globals())
    del block
    gc.collect()
    assert freed() is None
    del own
    gc.collect()
    assert not any(name.startswith("__stored_trace_") for name in set(globals()) - names)
    from torch._dynamo.convert_frame import DynamoOutput

    assert DynamoOutput.build_guards.__module__ == "torch._dynamo.convert_frame"
