"""A model that another node compiles: this pack leaves it alone, in either order of the nodes, and says so."""

import gc
import logging

import pytest
import torch
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

BLOCKS = [f"diffusion_model.double_blocks.{i}" for i in range(2)] + [f"diffusion_model.single_blocks.{i}" for i in range(4)]


def wrapped(keys):
    """As ComfyUI's own node, TorchCompileModel, and KJNodes do it."""

    def compile_with(patcher, backend):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        set_torch_compile_wrapper(patcher, backend, keys=keys)

    return compile_with


def patched(patcher, backend):
    """As WaveSpeed does it."""
    network = patcher.get_model_object("diffusion_model")
    patcher.add_object_patch("diffusion_model", torch.compile(network, backend=backend))


def in_place(patcher, backend):
    patcher.model.diffusion_model.compile(backend=backend)


def blocks_in_place(patcher, backend):
    for path in BLOCKS:
        patcher.get_model_object(path).compile(backend=backend)


WAYS = {
    "the model wrapped": wrapped(["diffusion_model"]),
    "blocks wrapped": wrapped(BLOCKS),
    "the model patched": patched,
    "the model in place": in_place,
}
ORDERS = "other node first", "other node last"
LEFT = ["leftAsIs", ["compiledElsewhere"]]


class Both(Runs):
    """A tiny Flux that another node compiles beside ours; `compiled` counts what the other one compiled."""

    def __init__(self, tiny, engine):
        super().__init__(tiny, engine, "flux", cfg=1.0)
        self.compiled = 0

    def backend(self, graph, _inputs):
        self.compiled += 1
        return graph

    def with_both(self, way, order, **settings):
        patcher = self.patcher.clone()
        chosen = self.engine("settings").CompileSettings(backend="eager", **settings)
        if order == ORDERS[0]:
            way(patcher, self.backend)
        patcher = self.engine("host.model.attach").attach(patcher, chosen, "7").clone()
        if order == ORDERS[1]:
            way(patcher, self.backend)
        return patcher

    def alone(self, way):
        patcher = self.patcher.clone()
        way(patcher, self.backend)
        return patcher

    def check(self, patcher):
        """Sample until nothing is compiled any more; how often the other node has compiled."""
        self.compiled = 0
        for _ in range(4):
            same(self.run(patcher), self.plain(), "with both nodes")
            assert self.engine("background.thread").compiler.wait(120)
        return self.compiled

    def line(self):
        return self.engine("messages.status").lines_of()["7"]


@pytest.fixture(scope="module")
def graphs_of(tiny, engine):
    """A function: how often the other node compiles where it is alone."""
    known = {}

    def of(way):
        if way not in known:
            alone = Both(tiny, engine)
            known[way] = alone.check(alone.alone(way))
            torch._dynamo.reset()
        assert known[way], "else this proves nothing"
        return known[way]

    return of


@pytest.fixture
def flux(tiny, engine):
    torch._dynamo.reset()
    both = Both(tiny, engine)
    yield both
    torch._dynamo.reset()
    for module in both.patcher.model.modules():
        module._compiled_call_impl = None  # holds the model in a cycle
    gc.collect()


@pytest.mark.parametrize(
    ("way", "order", "when"),
    [
        *((way, order, "in background") for way in WAYS for order in ORDERS),
        *(("the model wrapped", order, "before first image") for order in ORDERS),
    ],
)
def test_a_model_is_left_to_the_node_that_compiles_it(flux, graphs_of, caplog, way, order, when):
    expected = graphs_of(WAYS[way])
    with caplog.at_level(logging.WARNING, "torch-compile-kit"):
        patcher = flux.with_both(WAYS[way], order, compile_when=when)
        assert flux.check(patcher) == expected
    assert flux.line()[:2] in [("unclear", LEFT), ("unclear", [LEFT])] and not flux.graphs
    assert [r.getMessage() for r in caplog.records if r.name == "torch-compile-kit"] == [
        "Flux is left as it is: another node compiles it; remove one of the two"
    ]


def test_a_model_is_compiled_once_the_other_node_is_gone(flux):
    both = flux.with_both(WAYS["the model wrapped"], ORDERS[1])
    flux.run(both)
    assert flux.line().says == LEFT
    compiled = flux.attach(flux.patcher, compile_when="in background")
    assert flux.check(compiled) == 0 and flux.graphs == 2


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_are_compiled_in_place_are_left(engine, flux, graphs_of, order):
    expected = graphs_of(blocks_in_place)
    patcher = flux.with_both(blocks_in_place, order)
    assert flux.check(patcher) == expected and not flux.graphs
    assert [n for n in engine("host.model.attach").notes_about(patcher) if "DoubleStreamBlock" in n] == [
        "2 DoubleStreamBlock are left as they are: another node compiles them; remove one of the two."
    ]
    assert flux.line()[:2] == ("unclear", LEFT)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_around_a_layer_that_another_node_compiles_are_compiled(engine, flux, order):
    def a_layer(patcher, backend):
        for path in (f"{block}.linear1" for block in BLOCKS if "single" in block):
            patcher.add_object_patch(path, torch.compile(patcher.get_model_object(path), backend=backend))

    patcher = flux.with_both(a_layer, order)
    assert flux.check(patcher) == 0, "our graphs contain the layers"
    assert not [note for note in engine("host.model.attach").notes_about(patcher) if "look at" in note]
    assert {group.class_name for group in flux.groups if group.stats.graphs} == {"DoubleStreamBlock", "SingleStreamBlock"}


def test_a_model_that_another_node_compiled_in_the_prompt_before(flux):
    """The host takes that node's patch off when it loads the model again, which is after our node has looked for blocks."""
    flux.run(flux.alone(WAYS["the model patched"]))
    patcher = flux.with_both(lambda *_: None, ORDERS[0], only_blocks="double_blocks.*")
    assert flux.check(patcher) == 0 and flux.graphs == 1 and flux.line().says != LEFT


def test_only_the_node_with_another_behind_it_says_so(flux, engine):
    """Two branches of one model."""
    settings = engine("settings").CompileSettings(backend="eager")
    ours = engine("host.model.attach").attach(flux.patcher, settings, "8")
    both = flux.with_both(WAYS["the model wrapped"], ORDERS[1])
    flux.check(ours)
    flux.run(both)
    lines = engine("messages.status").lines_of()
    assert lines["7"].says == LEFT and str(lines["8"].says[0]).startswith("ready")
