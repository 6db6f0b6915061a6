"""What a captured call depends on beside its tensors: a replay never stands in for a call that would do something else."""

import functools

import pytest
import torch
import zoo
from capturing import capture_again, trust
from patch_kinds.conditions import cached
from patching import Runs, same
from patching import shares_code as fresh_dynamo  # noqa: F401
from sampling import sample
from support import compile_settings

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]


@pytest.fixture
def counts(flux):
    """A function: calls captured and replayed since it was asked last."""
    seen = [0, 0]

    def counts():
        graphs = flux.engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model)
        found = [graphs.captures, graphs.replays]
        added = found[0] - seen[0], found[1] - seen[1]
        seen[:] = found
        return added

    return counts


@pytest.fixture
def compiled(flux, counts):
    """A patcher of which a call was captured and replayed."""
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    assert counts() == (1, 1)  # plain, captured, replayed
    return compiled


def with_object_patch(patcher, name, value):
    clone = patcher.clone()
    clone.add_object_patch(f"diffusion_model.{name}", value)
    return clone


@pytest.mark.parametrize(
    "other",
    [
        {"only_blocks": "double_blocks.*"},
        {"dynamic": "false"},
        *(pytest.param(other, marks=pytest.mark.rest) for other in ({"allow_tf32": True}, {"on_failure": "stop"})),
    ],
    ids=str,
)
def test_other_settings(flux, counts, other):
    """Of two nodes, or of one that was changed."""
    compiled, changed = flux.attach(flux.patcher), flux.attach(flux.patcher, **other)
    for patcher in (compiled, changed):
        flux.run(patcher)
        assert counts() == (1, 1)
    flux.run(compiled)  # captured anew, where code was made for the other settings
    counts()
    for patcher in (compiled, changed):
        flux.run(patcher)
        assert counts() == (0, 3)


def test_settings_of_pytorch_that_another_node_changes(flux, counts, compiled):
    """As KJNodes' "Model Patch Torch Settings" does for the length of a run; no guard of compiled code asks for this one."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic
    try:
        cudnn.deterministic = not before
        flux.run(compiled)
        assert counts() == (1, 1)
    finally:
        cudnn.deterministic = before
    flux.run(compiled)
    assert counts() == (0, 3)


def test_what_waiting_calls_have_captured_is_replayed_by_the_others(flux, counts, engine):
    """After a warmup; models without convolutions wait for no kernels of ours."""
    compiled = flux.attach(flux.patcher, compile_when="in background")
    with engine("messages.recompile_log").warming():
        flux.run(compiled)
    assert counts() == (1, 1)
    flux.run(compiled)
    assert counts() == (0, 3)


def with_option(patcher, name, value):
    clone = patcher.clone()
    clone.model_options["transformer_options"][name] = value
    return clone


def test_equal_options_are_replayed_and_others_are_not(flux, counts):
    compiled = flux.attach(flux.patcher)
    for expected in ((1, 1), (0, 3)):
        flux.run(with_option(compiled, "scale", {"x": [1.0, 2]}))
        assert counts() == expected
    flux.run(with_option(compiled, "scale", {"x": [1.0, 3]}))
    assert counts() == (1, 1)


def test_an_input_that_is_elsewhere_is_no_constant_of_a_graph(engine):
    graphs = engine("cuda_graphs.capture").ModelGraphs()
    graphs.model.device = torch.device("cuda", 0)
    for _ in range(3):
        assert graphs.call("key", lambda x: x + 1, (torch.ones(()),), {}, {}).item() == 2
    assert not graphs.seen and "another device" in " ".join(graphs.failures.values())


@pytest.mark.parametrize("name", ["flux", *(pytest.param(n, marks=pytest.mark.rest) for n in ("sdxl", "wan"))])
def test_a_cache_of_steps_skips_as_many_and_the_others_are_replayed(name, tiny, engine, monkeypatch):
    """EasyCache wraps the model; what it calls is captured, what it decides is not."""
    capture_again(engine, monkeypatch)
    runs = Runs(tiny, engine, name, cfg=1.0, steps=8)
    network = runs.patcher.model.diffusion_model
    calls, own = [], type(network)._forward

    def counted(self, *args, **kwargs):
        calls.append(1)
        return own(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(network), "_forward", counted)
        expected = runs.run(cached("EasyCacheNode")(runs.patcher))
    ran = len(calls)
    assert 1 < ran < 8, "it skips nothing, or all; this proves nothing"
    graphs = engine("cuda_graphs.capture").graphs_of(network)
    same(runs.run(cached("EasyCacheNode")(runs.attach(runs.patcher))), expected)
    same(runs.run(runs.attach(cached("EasyCacheNode")(runs.patcher))), expected, "with the cache upstream")
    before = graphs.replays
    same(runs.run(runs.attach(cached("EasyCacheNode")(runs.patcher))), expected, "when all is captured")
    assert graphs.replays - before == ran
    same(runs.run(runs.attach(runs.patcher)), runs.run(runs.patcher), "without the cache")


def test_an_object_patch_of_a_plain_value(flux, counts):
    """As core's Flux KV Cache makes one: values of layers are compared once a run."""
    compiled = flux.attach(flux.patcher)
    for patcher in (compiled, with_object_patch(compiled, "params.default_ref_method", "uxo")):
        for expected in ((1, 1), (0, 3)):
            flux.run(patcher)
            assert counts() == expected


def test_weights_that_were_loaded_anew_in_the_middle_of_a_run(flux, counts, engine, monkeypatch):
    """A VAE of a ControlNet may need their room; the host then loads them again."""
    trust(engine, monkeypatch, "test_stale_graphs.py")
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    assert counts() == (1, 1)
    layer, steps = flux.patcher.model.diffusion_model.img_in, []

    def wrapper(apply_model, given):
        steps.append(1)
        if len(steps) == 2:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            compiled.load(torch.device("cpu"), full_load=True)
        return apply_model(given["input"], given["timestep"], **given["c"])

    wrapped = compiled.clone()
    wrapped.set_model_unet_function_wrapper(wrapper)
    flux.run(wrapped)
    assert counts() == (1, 1), "replayed; all dropped and run; captured"


def test_kernels_for_convolutions_get_ready_while_a_model_has_none(flux, counts, engine, monkeypatch):
    """As when the VAE's norm kernels are compiled beside it."""
    kernels = engine("channels_last.preparing").norm_kernels
    monkeypatch.setattr(kernels, "ready", False)
    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    assert counts() == (1, 1)
    kernels.ready = True
    flux.run(compiled)
    assert counts() == (0, 3)


def test_a_prompt_of_its_own_is_not_captured_anew(engine, monkeypatch):
    """ComfyUI keeps a function of each prompt where weights are moved, which models with parameters of their own name."""
    import comfy.memory_management

    capture_again(engine, monkeypatch)
    setup = zoo.SETUPS["z_image"]
    patcher, latent, prompts = setup.patcher(), setup.latent(), setup.conds()
    compiled = engine("host.model.attach").attach(patcher, compile_settings(engine, compile_when="before first image"))
    graphs = engine("cuda_graphs.capture").graphs_of(patcher.model.diffusion_model)
    for _ in range(3):
        monkeypatch.setattr(comfy.memory_management, "extra_ram_release_callback", functools.partial(int))
        sample(compiled, prompts, latent, 1.0, seed=1, steps=2)
    assert (graphs.captures, graphs.replays) == (1, 4)


def test_a_call_outside_of_inference_mode_has_a_graph_of_its_own(flux, counts, compiled):
    """A graph that was captured in it has inputs which nothing else may write to."""
    plain = flux.run(flux.patcher)
    for mode in (torch.no_grad, torch.enable_grad):
        with torch.inference_mode(False), mode():
            same(flux.run(compiled), plain)
        assert counts() == ((1, 1) if mode is torch.no_grad else (0, 3)), "the host's sampling switches gradients off"
    same(flux.run(compiled), plain)
    assert counts() == (1, 1), "anew, since there is more code now"
