"""A ControlNet whose blocks run compiled: the host's own, with a tiny model beside it."""

import copy
import time
import types

import pytest
import torch
from capturing import capture_again
from patch_kinds.conditions import controlnet, with_options
from patching import Runs, same

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


class Controlled(Runs):
    """Samples with a ControlNet, which `compiled` compiles as the model is, by tracing only."""

    def __init__(self, tiny, engine, name, **options):
        super().__init__(tiny, engine, name, cfg=3.0, **options)
        self.control = controlnet(tiny, name, 1)

    def compiled(self, control, node=None, **settings):
        blocks = "double_blocks.*" if self.name == "flux" else ""  # one kind is enough; SDXL's has several
        chosen = {"backend": "eager", "compile_when": "before first image", "only_blocks": blocks, **settings}
        chosen = self.engine("settings").CompileSettings(**chosen)
        return self.engine("host.model.controlnet").attach_control(control, chosen, node)

    def with_control(self, control, patcher=None, brightness=0.5):
        """As Apply ControlNet hands it on."""
        hint = torch.full((1, 3, 64, 64), brightness)
        applied = control.copy().set_cond_hint(hint, 0.8, (0.0, 1.0))
        return self.run(patcher or self.patcher, with_options(self.positive, control=applied, control_apply_to_uncond=True))

    def of_control(self):
        return list(self.engine("compile.registry").code_of(self.control.control_model).groups.values())


@pytest.mark.parametrize("name", ["sdxl", pytest.param("flux", marks=pytest.mark.rest)])
def test_compiled_equals_eager_alone_and_behind_a_compiled_model(tiny, engine, name):
    runs = Controlled(tiny, engine, name)
    plain, expected = runs.run(runs.patcher), runs.with_control(runs.control)
    assert not torch.allclose(plain, expected, rtol=1e-3, atol=1e-4), "the ControlNet does nothing; this proves nothing"
    control = runs.compiled(runs.control)
    same(runs.with_control(control), expected)
    graphs = {kind.class_name: kind.stats.graphs for kind in runs.of_control()}
    assert graphs and all(graphs.values()) and not any(kind.failure for kind in runs.of_control())
    assert sum(kind.stats.graph_breaks for kind in runs.of_control()) == 0
    same(runs.with_control(control, runs.attach(runs.patcher)), expected, "with the model compiled")
    same(runs.with_control(control, brightness=0.1), runs.with_control(runs.control, brightness=0.1), "another hint")
    same(runs.with_control(runs.control), expected, "without the node")
    assert {kind.class_name: kind.stats.graphs for kind in runs.of_control()} == graphs
    assert "forward" not in {name for m in runs.control.control_model.modules() for name in vars(m)}


def test_two_in_a_row_and_one_of_them_compiled(tiny, engine):
    runs = Controlled(tiny, engine, "flux")
    hint = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))

    def both(first, second):
        first = first.copy().set_cond_hint(hint, 0.5, (0.0, 1.0))
        second = second.copy().set_cond_hint(1 - hint, 0.9, (0.0, 0.6)).set_previous_controlnet(first)
        return runs.run(runs.patcher, with_options(runs.positive, control=second, control_apply_to_uncond=True))

    other = controlnet(tiny, "flux", 2)
    expected = both(runs.control, other)
    same(both(runs.compiled(runs.control), other), expected, "the first one")
    same(both(runs.control, runs.compiled(other)), expected, "the second one")
    same(both(runs.compiled(runs.control), runs.compiled(other)), expected, "both")


@pytest.mark.parametrize("when", ["in background", pytest.param("before first image", marks=pytest.mark.rest)])
def test_its_line_ends_with_the_compiling_and_goes_to_whose_prompt_runs(tiny, engine, monkeypatch, when):
    runs, status, told = Controlled(tiny, engine, "flux"), engine("messages.status"), []
    monkeypatch.setattr(status, "listeners", [lambda *news: told.append(news)])
    control = runs.compiled(runs.control, "41", compile_when=when)
    monkeypatch.setattr(status, "owner_now", lambda: ("who has it from the host's cache", "workflow"))
    runs.with_control(control)
    assert engine("background.thread").compiler.wait(120)
    for _ in range(100):  # the worker tells the line when the job that `wait` waits for is over
        if told[-1][2].state == "ready":
            break
        time.sleep(0.1)
    states = [(owner[1], line.state) for owner, node, line in told if node == "41" and line.state and owner[1]]
    assert states[0] == ("workflow", "compiling") and states[-1] == ("workflow", "ready"), states


def test_a_note_of_an_earlier_run_is_gone(tiny, engine):
    """It may be about a pack whose node is gone."""
    runs = Controlled(tiny, engine, "flux")
    control = runs.compiled(runs.control)
    (ours,) = engine("host.model.controlnet").controls_in(with_options(runs.positive, control=control))
    ours._calls.notes.add("CUDA graphs are off: some_pack runs in the model.")
    assert any("some_pack" in note for note in ours.notes())
    runs.with_control(control)
    assert not any("some_pack" in note for note in ours.notes())


def test_what_has_no_network_of_its_own_is_left_and_what_is_no_controlnet_refused(tiny, engine):
    import comfy.controlnet
    from comfy.t2i_adapter.adapter import Adapter_light

    attach, settings = engine("host.model.controlnet").attach_control, engine("settings").CompileSettings()
    adapter = comfy.controlnet.T2IAdapter(Adapter_light(channels=[8, 8], nums_rb=1, cin=3), 3, 8, "nearest-exact")
    left = attach(adapter, settings, "7")
    assert type(left) is comfy.controlnet.T2IAdapter and left is not adapter
    assert engine("messages.status").lines_of()["7"].says == [["controlLeft", "T2IAdapter"]]
    with pytest.raises(engine("errors").InvalidSetting, match="control_net"):
        attach(tiny.build_patcher("flux"), settings)


@pytest.mark.parametrize("order", ["other node first", "other node last"])
def test_what_another_node_compiles_is_left_to_it(tiny, engine, order):
    """KJNodes' TorchCompileControlNet: beside ours it failed, or compiled anew in each step."""
    runs, graphs = Controlled(tiny, engine, "flux", steps=4), []
    expected, network = runs.with_control(runs.control), runs.control.control_model
    backend = lambda graph, _inputs: graphs.append(graph) or graph  # noqa: E731
    control = runs.control
    for who in ("other", "ours") if order == "other node first" else ("ours", "other"):
        if who == "other":
            control.control_model = torch.compile(control.control_model, backend=backend)
        else:
            control = runs.compiled(control, "8", compile_when="in background")
    for _ in range(3):
        same(runs.with_control(control), expected, order)
        assert engine("background.thread").compiler.wait(120)
    assert len(graphs) == 1 and not engine("compile.registry").code_of(network).groups
    if order == "other node first":
        assert engine("messages.status").lines_of()["8"].says == [["leftAsIs", ["compiledElsewhere"]]]


def test_a_second_node_replaces_the_first(tiny, engine):
    runs = Controlled(tiny, engine, "flux")
    twice = runs.compiled(runs.compiled(runs.control), dynamic="false")
    assert twice.control_model.torch_compile_kit.network is runs.control.control_model
    same(runs.with_control(twice), runs.with_control(runs.control))


def scaled(control):
    """As a pack that replaces the forward of a ControlNet's network (Easy-Use's Kolors)."""
    network, calls = control.control_model, []
    kind = next(cls for cls in type(network).__mro__ if "forward" in vars(cls))

    def forward(self, x, hint, timesteps, context, **more):
        calls.append(self)
        return kind.forward(self, x, hint, timesteps, context * self.gain, **more)

    network.gain = 0.1
    network.forward = types.MethodType(forward, network)
    return calls


def test_what_another_pack_sets_on_it_reaches_the_network(tiny, engine):
    runs, plain = Controlled(tiny, engine, "sdxl"), Controlled(tiny, engine, "sdxl")
    without = plain.with_control(plain.control)
    scaled(plain.control)
    expected = plain.with_control(plain.control)
    assert not torch.allclose(without, expected, rtol=1e-3, atol=1e-4), "the forward does nothing; this proves nothing"
    control = runs.compiled(runs.control)
    same(runs.with_control(control), without)
    calls = scaled(control)
    same(runs.with_control(control), expected, "set on it")
    assert calls and any(kind.stats.graphs for kind in runs.of_control())
    same(runs.with_control(runs.control), expected, "without the node")
    del control.control_model.forward
    control.control_model.gain = torch.nn.Linear(1, 1)
    assert runs.control.control_model.gain in set(runs.control.control_model.modules())
    del control.control_model.gain
    same(runs.with_control(control), without, "deleted")
    assert not hasattr(runs.control.control_model, "gain")


def test_other_packs_take_it_for_the_network(tiny, engine):
    """Advanced-ControlNet asks for the name of the class, and made a wrong image of another one."""
    import comfy.model_patcher

    runs = Controlled(tiny, engine, "flux")
    network, cpu = runs.control.control_model, torch.device("cpu")
    control = runs.compiled(runs.control).control_model
    assert isinstance(control, type(network)) and type(control).__name__ == type(network).__name__
    assert control.to(torch.float32) is control and repr(control) == repr(network)
    assert [*map(id, control.parameters())] == [*map(id, network.parameters())]
    assert [*control.state_dict()] == [*network.state_dict()]
    assert [name for name, _ in control.named_modules()] == [name for name, _ in network.named_modules()]
    for patcher in (comfy.model_patcher.ModelPatcher, comfy.model_patcher.CoreModelPatcher):
        assert patcher(control, load_device=cpu, offload_device=cpu).model_size() == control_size(network)
    assert all(type(copied) is type(network) for copied in (copy.copy(control), copy.deepcopy(control)))
    kind = type(network)
    control.__class__ = other = type("Other", (kind,), {})
    assert type(network) is other and isinstance(control, other) and type(control).__name__ == "Other"


def control_size(network):
    import comfy.model_management

    return comfy.model_management.module_size(network)


def test_weights_that_are_elsewhere_are_streamed(tiny, engine):
    """Partial loading, as with --lowvram: here, weights cast on the way."""

    runs = Controlled(tiny, engine, "flux")
    expected = runs.with_control(runs.control)
    control = runs.compiled(runs.control)
    for module in runs.control.control_model.modules():
        if hasattr(module, "comfy_cast_weights"):
            module.comfy_cast_weights = True
    same(runs.with_control(control), expected)
    assert sum(kind.stats.graph_breaks for kind in runs.of_control()) == 0


def test_a_copy_for_another_gpu_is_plain(tiny, engine):
    control = engine("host.model.controlnet").attach_control(controlnet(tiny, "flux", 1), engine("settings").CompileSettings())
    other = control.deepclone_multigpu(torch.device("cpu"))
    assert isinstance(other.control_model, torch.nn.Module)
    assert {p.data_ptr() for p in other.control_model.parameters()}.isdisjoint(
        p.data_ptr() for p in control.control_model.parameters()
    )


def test_a_trainer_finds_it_uncompiled_and_the_model_freed_takes_its_code(tiny, engine):
    import gc
    import weakref

    runs = Controlled(tiny, engine, "flux")
    control = runs.compiled(runs.control)
    runs.with_control(control)
    alive = weakref.ref(runs.control.control_model)
    del control, runs
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("loaded", ["whole", "in part"])
@pytest.mark.parametrize("when", ["in background", pytest.param("before first image", marks=pytest.mark.rest)])
def test_after_a_cancelled_run_the_next_one_looks_at_the_weights_again(tiny, engine, monkeypatch, when, loaded):
    """The host cleans up after no run that ended early; graphs would read where the weights were."""
    import comfy.model_management

    capture_again(engine, monkeypatch)
    runs = Controlled(tiny, engine, "flux", steps=3)
    network = runs.control.control_model
    control, graphs = runs.compiled(runs.control, compile_when=when), engine("cuda_graphs.capture").graphs_of(network)
    for _ in range(2):
        runs.with_control(control)
        assert engine("background.thread").compiler.wait(120)
    assert graphs.captures
    cancelled = comfy.model_management.InterruptProcessingException

    def cancel(_apply_model, _given):
        raise cancelled

    stopped = runs.patcher.clone()
    stopped.set_model_unet_function_wrapper(cancel)
    with pytest.raises(cancelled):
        runs.with_control(control, stopped)
    before = graphs.captures
    if loaded == "in part":  # something else needs room; the next run loads again
        control.control_model_wrapped.partially_unload(torch.device("cpu"), 1)
    for layer in network.modules():
        for name, weight in list(layer._parameters.items()):
            if weight is not None:
                layer._parameters[name] = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    runs.with_control(control)
    assert graphs.captures == before + 1
