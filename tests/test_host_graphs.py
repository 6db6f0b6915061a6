"""CUDA graphs over paged weights: when a call may be replayed. Capturing itself needs a GPU (benchmarks/graphs.py)."""

import pytest
import torch
from paging import paged
from patching import Runs
from support import relative_error
from torch import nn
from torch.utils import _pytree as pytree

pytestmark = [pytest.mark.host, pytest.mark.pages, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    """A tiny Flux whose calls go through the decisions of `graphed`; what is captured runs the model again."""
    runs = Runs(tiny, engine, "flux", cfg=1.0, steps=3)
    graphs = engine("graphs")

    class Again:
        def __init__(self, run):
            self.run = run

        def replay(self, tensors):
            return self.run(tensors)

    def capture(self, key, forward, leaves, spec, tensors, fixed):
        def run(given):
            given = iter(given)
            args, kwargs = pytree.tree_unflatten(
                [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
            )
            return forward(*args, **kwargs, **fixed)

        self.captures += 1
        self.graphs[key] = Again(run)
        return self.graphs[key].replay(tensors)

    monkeypatch.setattr(graphs.ModelGraphs, "_capture", capture)
    # On a CPU the wrapper leaves graphs alone; here everything but the capture is as on a GPU.
    monkeypatch.setattr(engine("host.attachment"), "has_graphs", lambda device: True)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", True)
    return runs


def graphs_of(runs):
    return runs.engine("graphs").graphs_of(runs.patcher.model.diffusion_model)


@pytest.fixture
def compiled(flux):
    """Compiled blocks take their weights from pages; the host's own layers do not on a CPU."""
    return flux.attach(flux.patcher)


def check(flux, compiled, expected):
    """Run; how many calls were captured and how many replayed."""
    found = graphs_of(flux)
    before = found.captures, found.replays
    assert relative_error(flux.run(compiled), expected) < 1e-6
    return found.captures - before[0], found.replays - before[1]


def test_weights_that_stay_in_their_pages(flux, compiled, monkeypatch):
    expected = flux.run(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        assert check(flux, compiled, expected) == (1, 1)  # plain (which fetched the weights), captured, replayed
        assert check(flux, compiled, expected) == (0, 3)
        assert pages.pinned == 0 and not graphs_of(flux).crowded


def test_a_page_that_was_taken_away_is_fetched_by_a_plain_call(flux, compiled, monkeypatch):
    expected = flux.run(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        check(flux, compiled, expected)
        del pages.memory[next(iter(pages.memory))]  # another model needed the room
        assert check(flux, compiled, expected) == (0, 2)
        assert pages.pinned == 0 and graphs_of(flux).graphs


def test_a_lora_that_belongs_in_the_pages_is_put_there_first(flux, compiled, monkeypatch):
    expected = flux.run(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        check(flux, compiled, expected)
        layer = pages.layers[next(iter(pages.memory))]
        with torch.inference_mode():
            layer.weight.mul_(1.5)
        layer._v_signature = None  # as the host's loading marks what has changed
        changed = flux.run(flux.patcher)
        layer._v_signature = None
        assert check(flux, compiled, changed) == (0, 2)
        assert relative_error(changed, expected) > 1e-3


def test_weights_that_do_not_all_fit_are_not_captured_and_it_is_said(flux, compiled, engine, monkeypatch):
    expected = flux.run(flux.patcher)
    with paged(monkeypatch, flux.patcher.model) as pages:
        pages.resident = set(pages.layers)
        check(flux, compiled, expected)
        pages.resident = set(list(pages.layers)[::2])
        assert check(flux, compiled, expected) == (0, 0)
        assert graphs_of(flux).crowded and not graphs_of(flux).graphs and pages.pinned == 0
        assert any("do not all fit" in note for note in engine("host.attachment").notes_about(compiled))
        pages.resident = set(pages.layers)
        assert check(flux, compiled, expected) == (1, 1)


def test_weights_changed_on_the_way_are_not_captured(flux, compiled, engine):
    def half_as_much_more(patcher):
        clone = patcher.clone()
        clone.add_weight_wrapper("diffusion_model.img_in.weight", lambda weight: weight * 1.5)
        return clone

    expected = flux.run(half_as_much_more(flux.patcher))
    assert check(flux, half_as_much_more(compiled), expected) == (0, 0)
    assert any("on their way" in note for note in engine("host.attachment").notes_about(compiled))
    assert check(flux, compiled, flux.run(flux.patcher)) == (1, 1)


def test_a_small_tensor_that_the_host_made_anew_moves_back_to_where_the_graph_knows_it(engine):
    settle = engine("graphs").ModelGraphs._settle
    home, table = torch.zeros(3), {}
    made = nn.Parameter(torch.ones(3), requires_grad=False)
    assert settle(table, "bias", made, home) is table["bias"]
    assert isinstance(table["bias"], nn.Parameter) and table["bias"].data_ptr() == home.data_ptr()
    assert torch.equal(home, torch.ones(3))
    other = nn.Parameter(torch.ones(4), requires_grad=False)
    assert settle({}, "bias", other, home) is other
