"""Blocks whose forward another node has replaced run that forward, uncompiled; the log, the node's line and reports say so."""

import logging
import types

import pytest
import torch
from patching import Runs
from support import relative_error

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


def nag(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs)


def taken(m, *lists):
    """The patcher `m` after another node, which gives all blocks of these lists a forward (ComfyUI-NAG)."""
    m = m.clone()
    for name in lists:
        for i, block in enumerate(getattr(m.model.diffusion_model, name)):
            m.add_object_patch(f"diffusion_model.{name}.{i}.forward", types.MethodType(nag, block))
    return m


def compiled_by_another(m):
    """The patcher `m` after another node that compiles (KJNodes)."""
    m = m.clone()
    for i, block in enumerate(m.model.diffusion_model.double_blocks):
        m.add_object_patch(f"diffusion_model.double_blocks.{i}", torch.compile(block, backend="eager"))
    return m


FORWARD = "another node has replaced their forward by nag (test_taken_blocks.py)."
DOUBLE, SINGLE = f"2 DoubleStreamBlock run uncompiled: {FORWARD}", f"4 SingleStreamBlock run uncompiled: {FORWARD}"
BOTH = "double_blocks", "single_blocks"


class Told(Runs):
    """A tiny Flux, and what is said of its blocks where."""

    def __init__(self, tiny, engine):
        super().__init__(tiny, engine, "flux", cfg=1.0)

    def attach(self, patcher, **settings):
        chosen = self.engine("settings").CompileSettings(backend="eager", **settings)
        return self.engine("host.model.attach").attach(patcher, chosen, "7")

    def line(self):
        return self.engine("messages.status").lines_of()["7"]

    def notes(self, compiled):
        return [n for n in self.engine("host.model.attach").notes_about(compiled) if "forward" in n]

    def panel(self):
        named = self.engine("messages.report").report_json()["models"]
        live = [network for network, _ in self.engine("compile.registry").live_models()]  # of other tests too
        failures = named[live.index(self.patcher.model.diffusion_model)]["failures"]
        return [failure["message"] for failure in failures]

    def warm_up(self, compiled):
        """The lines of a warmup's report above the details, and those below."""
        size = self.engine("host.nodes.warmup_plan").Size(64, 64)
        text = self.engine("host.nodes.warmup").warm_up(compiled, self.positive, self.negative, self.cfg, [size])
        return tuple(part.strip().splitlines() for part in text.split(self.engine("messages.report").RULE))


@pytest.fixture
def flux(tiny, engine):
    return Told(tiny, engine)


def logged(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "torch-compile-kit" and "forward" in r.getMessage()]


@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_blocks_with_another_nodes_forward_are_told_until_they_are_free_again(flux, engine, caplog, when):
    plain, patcher = flux.plain(), taken(flux.patcher, *BOTH)
    with caplog.at_level(logging.WARNING, "torch-compile-kit"):
        compiled = flux.attach(patcher, compile_when=when)
        for _ in range(2):
            assert relative_error(flux.run(compiled), plain) == 0.0
    assert flux.graphs == 0
    assert logged(caplog) == [DOUBLE, SINGLE], "once"
    assert flux.notes(compiled) == flux.panel() == [DOUBLE, SINGLE]
    assert flux.line()[:2] == ("failed", ["runsUncompiled", "2 DoubleStreamBlock, 4 SingleStreamBlock"])
    free = flux.attach(flux.patcher, compile_when=when)
    flux.run(free)
    assert engine("background.thread").compiler.wait(120)
    assert flux.graphs == 2 and flux.notes(free) == [] and flux.line().state != "failed"


def test_a_warmup_that_compiles_nothing_because_of_another_node_is_not_ready(flux):
    above, below = flux.warm_up(flux.attach(taken(flux.patcher, *BOTH)))
    assert above == [
        "Nothing could be compiled: 64x64 runs as without this pack.",
        "6 blocks run code of another node: nag (test_taken_blocks.py). Bypass it to have them compiled.",
    ]
    assert {DOUBLE, SINGLE} <= set(below) and not any("warm" in line for line in below)
    for _ in range(2):  # nor where code of the same blocks is there
        above_free, below_free = flux.warm_up(flux.attach(flux.patcher))
        assert above_free[0].startswith("Ready for 64x64") and not {DOUBLE, SINGLE} & set(below_free)
        assert flux.warm_up(flux.attach(taken(flux.patcher, *BOTH)))[0] == above


def test_a_warmup_is_ready_if_some_blocks_are_compiled(flux):
    above, below = flux.warm_up(flux.attach(taken(flux.patcher, "double_blocks")))
    assert above[0].startswith("Ready for 64x64") and above[1].startswith("2 blocks run code of another node: nag")
    assert DOUBLE in below and SINGLE not in below


def test_blocks_that_another_node_compiles_are_told_by_their_own_class(flux, engine):
    compiled = flux.attach(compiled_by_another(flux.patcher))
    flux.run(compiled)
    assert [note for note in engine("host.model.attach").notes_about(compiled) if "DoubleStreamBlock" in note] == [
        "2 DoubleStreamBlock are left as they are: another node compiles them; remove one of the two."
    ]


class AllInOne(torch.nn.Module):
    """As a cache of steps over the blocks: one module, in the place of their list, that calls them."""

    def __init__(self, blocks):
        super().__init__()
        self.hidden = [*blocks]

    def forward(self, x, *args, **kwargs):
        for block in self.hidden:
            x = block(x, *args, **kwargs)
        return x


@pytest.mark.parametrize("attached", ["while the patch is in place", "before"])
def test_blocks_that_the_object_patch_of_another_prompt_hides(flux, attached):
    name = "diffusion_model.single_blocks"
    patched, plain = flux.patcher.clone(), flux.plain()
    patched.add_object_patch(name, torch.nn.ModuleList([AllInOne(flux.patcher.get_model_object(name))]))
    only = {"only_blocks": "single_blocks.*", "compile_when": "before first image"}
    compiled = flux.attach(flux.patcher, **only) if attached == "before" else None
    assert relative_error(flux.run(patched), plain) == 0.0
    compiled = compiled or flux.attach(flux.patcher, **only)  # the model holds the patch until it is loaded again
    assert relative_error(flux.run(patched), plain) == 0.0
    assert relative_error(flux.run(compiled), plain) == 0.0
    assert [group.class_name for group in flux.groups] == ["SingleStreamBlock"] and flux.graphs == 1
    assert relative_error(flux.run(flux.attach(patched, only_blocks="double_blocks.*")), plain) == 0.0
