"""What a captured call depends on beside its tensors: a replay never stands in for a call that would do something else."""

import functools

import pytest
import torch
import zoo
from capturing import capture_again
from comfy.ldm.flux import layers
from comfy.patcher_extension import WrappersMP
from patch_kinds.conditions import cached
from patch_kinds.options import overridden, passed_on
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


def with_function_wrapper(patcher, wrapper):
    clone = patcher.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def with_wrapper(patcher, wrapper):
    clone = patcher.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "test", wrapper)
    return clone


def notes(flux, compiled):
    return " ".join(flux.engine("host.model.attach").notes_about(compiled))


def louder(forward, factor, *args, **kwargs):
    return forward(*args, **kwargs) * factor


def test_a_partial_of_another_pack_is_not_ours(flux, counts, compiled):
    layer = flux.patcher.model.diffusion_model.img_in
    for factor in (1.5, 2.5):
        layer.forward = functools.partial(louder, type(layer).forward.__get__(layer), factor)
        flux.run(compiled)
        assert counts() == (0, 0), "a callable of this kind may read anything"
        same(flux.run(compiled), flux.run(flux.patcher))
    del layer.forward
    flux.run(compiled)
    assert counts() == (1, 1)


def test_our_own_partials_are(engine):
    binding = engine("compile.binding")
    assert binding.is_ours(functools.partial(binding._run_block, None, None))
    assert not binding.is_ours(functools.partial(louder, print, 1.0)) and not binding.is_ours(print)


def test_a_forward_that_is_patched_later_and_reads_the_step(flux, counts, compiled, monkeypatch):
    block = flux.patcher.model.diffusion_model.single_blocks[0]
    own = type(block.linear1).forward

    def by_step(self, x, transformer_options={}):  # noqa: B006
        steps = transformer_options.get("sigmas")
        return own(self, x) * (1.0 if steps is None else 1.0 + steps[0].item())

    monkeypatch.setattr(type(block.linear1), "forward", by_step)
    flux.run(compiled)
    assert counts() == (0, 0) and "code of another pack, which may read the step" in notes(flux, compiled)
    monkeypatch.undo()


def test_a_method_that_is_replaced_for_the_length_of_a_call(flux, counts, compiled):
    """As TeaCache does with `forward_orig`, from a wrapper around each call."""
    network, plain = flux.patcher.model.diffusion_model, flux.run(flux.patcher)

    def wrapper(apply_model, given):
        network.forward_orig = lambda *args, **kwargs: type(network).forward_orig(network, *args, **kwargs) * 2
        try:
            return apply_model(given["input"], given["timestep"], **given["c"])
        finally:
            del network.forward_orig

    expected = flux.run(with_function_wrapper(flux.patcher, wrapper))
    assert not torch.allclose(expected, plain, rtol=1e-2)
    same(flux.run(with_function_wrapper(compiled, wrapper)), expected)
    assert counts() == (0, 0)


class Recorded:
    """Stands in for a captured graph, which knows nothing of what has changed since."""

    def replay(self, tensors):
        return torch.zeros_like(tensors[0])


@pytest.fixture(params=["in background", "before first image"])
def see(flux, counts, request):
    """see(changes, patch): no graph that was captured before a change is replayed after the change; yields after each."""

    def see(changes, patch=lambda patcher: patcher):
        compiled = patch(flux.attach(flux.patcher, compile_when=request.param))
        graphs = flux.engine("cuda_graphs.capture").graphs_of(flux.patcher.model.diffusion_model).graphs

        def run():
            result = flux.run(compiled)
            assert flux.engine("background.thread").compiler.wait(120)
            return result

        run(), run(), counts()
        before = run()
        assert counts() == (0, 3)
        for change in changes:
            graphs.update(dict.fromkeys(graphs, Recorded()))
            change()
            expected = flux.run(patch(flux.patcher))
            assert not torch.allclose(expected, before, rtol=1e-2), "it does nothing; this proves nothing"
            for _ in range(3):
                same(run(), expected)
            before = expected
            yield

    return see


def test_a_function_that_is_exchanged_in_a_python_module(counts, see, monkeypatch):
    hosts = layers.apply_mod

    def stronger(tensor, scale, shift=None, dims=None):
        return hosts(tensor * 1.5, scale, shift, dims)

    for _ in see(functools.partial(monkeypatch.setattr, layers, "apply_mod", function) for function in (stronger, hosts)):
        assert counts()[1], "it is captured and replayed again"


class Louder:
    """Can be called and is no function; its node sets the factor."""

    def __init__(self, factor, layer=None):
        self.factor, self.layer = factor, layer

    def __call__(self, x):
        return (x if self.layer is None else type(self.layer).forward(self.layer, x)) * self.factor


@pytest.mark.parametrize("path", ["img_in", "single_blocks.0.linear1"])
def test_an_object_over_the_forward_of_a_layer(flux, counts, see, path):
    layer = flux.patcher.model.diffusion_model.get_submodule(path)
    for _ in see(functools.partial(setattr, layer, "forward", Louder(factor, layer)) for factor in (1.5, 2.5)):
        assert counts() == (0, 0), "a callable of this kind may read anything"
    del layer.forward


class Calling(torch.nn.Linear):
    """A layer of another pack with weights, and an object that its node has put there."""

    def forward(self, x):
        return self.louder(super().forward(x))


def test_an_object_that_a_layer_of_another_pack_calls(flux, counts, see):
    layer = like(flux.patcher.model.diffusion_model.img_in, Calling)
    layer.louder = Louder(1.0)
    changes = [lambda: setattr(layer.louder, "factor", 0.2), lambda: setattr(layer, "louder", Louder(0.5))]
    for _ in see(changes, lambda patcher: with_object_patch(patcher, "img_in", layer)):
        assert counts()[1], "it is captured and replayed again"


def test_a_function_that_is_exchanged_and_may_read_the_step(flux, counts, compiled, monkeypatch):
    def stronger(q, *args, transformer_options, **kwargs):
        return hosts(q * 1.5, *args, transformer_options=transformer_options, **kwargs)

    hosts = layers.attention
    monkeypatch.setattr(layers, "attention", stronger)
    same(flux.run(compiled), flux.run(flux.patcher))
    assert counts() == (0, 0) and "which may read the step" in notes(flux, compiled)


def test_a_method_that_is_replaced_on_the_class(flux, counts, compiled, monkeypatch):
    kind = type(flux.patcher.model.diffusion_model)
    own = kind.forward_orig
    for factor in (2.0, 3.0):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward_orig", lambda *args, factor=factor, **kwargs: own(*args, **kwargs) * factor)
            same(flux.run(compiled), flux.run(flux.patcher))
            assert counts() == (0, 0), "code of this kind may read anything"
    same(flux.run(compiled), flux.run(flux.patcher))
    assert counts() == (1, 1)


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
    with engine("notices.recompile_log").warming():
        flux.run(compiled)
    assert counts() == (1, 1)
    flux.run(compiled)
    assert counts() == (0, 3)


class Holder:
    """An option whose text is the same whatever it holds."""

    def __init__(self, factor):
        self.factor = factor

    def __repr__(self):
        return "Holder()"


def with_option(patcher, name, value):
    clone = patcher.clone()
    clone.model_options["transformer_options"][name] = value
    return clone


@pytest.fixture
def scaled_by_option(flux, monkeypatch):
    """A model that multiplies by what an option holds."""
    network = type(flux.patcher.model.diffusion_model)
    own = network.forward

    def forward(self, *args, transformer_options={}, **kwargs):  # noqa: B006
        return own(self, *args, transformer_options=transformer_options, **kwargs) * transformer_options["louder"].factor

    monkeypatch.setattr(network, "forward", forward)


def test_an_object_that_may_change_in_place_is_never_replayed(flux, counts):
    compiled = with_option(flux.attach(flux.patcher), "louder", Holder(1.0))
    same(flux.run(compiled), flux.run(flux.patcher))
    assert counts() == (0, 0) and "Holder, which may change unseen" in notes(flux, compiled)


def test_a_model_with_code_of_another_pack_is_never_replayed(flux, counts, scaled_by_option):
    holder = Holder(1.0)
    compiled = with_option(flux.attach(flux.patcher), "louder", holder)
    eager = with_option(flux.patcher, "louder", holder)
    for factor in (1.0, 2.0):
        holder.factor = factor
        same(flux.run(compiled), flux.run(eager))
    assert counts() == (0, 0) and "code of another pack, which may read the step" in notes(flux, compiled)


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


@pytest.mark.parametrize("where", ["a block", "the model"])
def test_a_wrapper_that_replaces_parts_for_the_length_of_a_call(flux, counts, compiled, where):
    network = flux.patcher.model.diffusion_model
    target, method = (network.single_blocks[1], "forward") if where == "a block" else (network, "forward_orig")

    def wrapper(executor, *args, **kwargs):
        own = getattr(type(target), method)
        setattr(target, method, lambda *given, **more: own(target, *given, **more) * 1.5)
        try:
            return executor(*args, **kwargs)
        finally:
            delattr(target, method)

    plain, expected = flux.run(flux.patcher), flux.run(with_wrapper(flux.patcher, wrapper))
    assert not torch.allclose(expected, plain, rtol=1e-2)
    same(flux.run(with_wrapper(compiled, wrapper)), expected)
    assert counts() == (0, 0)
    same(flux.run(compiled), plain, "without the wrapper")
    assert counts()[1] > 0


def test_a_wrapper_that_hooks_layers_is_not_replayed_around(flux, counts):
    """As packs do that apply a LoRA for the length of a call."""
    compiled, factors = flux.attach(flux.patcher), [1.5, 3.0]

    def wrapper(executor, *args, **kwargs):
        handle = executor.class_obj.img_in.register_forward_hook(lambda _layer, _given, result: result * factors[0])
        try:
            return executor(*args, **kwargs)
        finally:
            handle.remove()

    results = []
    while factors:
        results.append(flux.run(with_wrapper(flux.patcher, wrapper)))
        same(flux.run(with_wrapper(compiled, wrapper)), results[-1])
        factors.pop(0)
    assert counts() == (0, 0) and "another node wraps the model" in notes(flux, compiled)
    assert not torch.allclose(*results, rtol=1e-2)


class Positions(torch.nn.Module):
    """A layer of another pack over one of the model's (DyPE): a wrapper tells it the step before each call."""

    def __init__(self, own):
        super().__init__()
        self.own, self.scale = own, 1.0

    def forward(self, ids):
        return self.own(ids) * self.scale


def test_a_layer_of_another_node_that_is_told_the_step(flux, counts):
    compiled, changes = flux.attach(flux.patcher), True

    def wrapper(apply_model, given):
        layer.scale = float(given["timestep"][0]) if changes else 2.0
        return apply_model(given["input"], given["timestep"], **given["c"])

    layer = Positions(flux.patcher.model.diffusion_model.pe_embedder)

    def patched(patcher):
        return with_function_wrapper(with_object_patch(patcher, "pe_embedder", layer), wrapper)

    for _ in range(3):
        same(flux.run(patched(compiled)), flux.run(patched(flux.patcher)))
    # The first call may be replayed, with what the layer held for it; the rest of a run is plain.
    assert counts()[1] <= 2 and "a layer of another node changes from call to call" in notes(flux, compiled)
    changes = False
    flux.run(patched(compiled))
    flux.run(patched(compiled))
    assert counts()[1] >= 3, "what stays as it is does not forbid it"


def test_an_object_patch_of_a_plain_value(flux, counts):
    """As core's Flux KV Cache makes one."""
    compiled = flux.attach(flux.patcher)
    for expected in ((1, 1), (0, 3)):
        for patcher in (compiled, with_object_patch(compiled, "params.default_ref_method", "uxo")):
            flux.run(patcher)
            assert counts() == expected


def like(layer, kind):
    """A layer of another class with the same weights."""
    with torch.inference_mode(False):
        made = kind(layer.in_features, layer.out_features, bias=layer.bias is not None).requires_grad_(False)
    made.load_state_dict(layer.state_dict())
    return made


class Scaled(torch.nn.Linear):
    """A layer of another pack with weights, and a strength that its node sets."""

    strength = 1.0

    def forward(self, x):
        return super().forward(x) * self.strength


def test_a_strength_of_another_packs_layer(flux, counts):
    layer = like(flux.patcher.model.diffusion_model.img_in, Scaled)
    compiled, results = flux.attach(flux.patcher), []
    for strength in (1.0, 0.2):
        layer.strength = strength
        results.append(flux.run(with_object_patch(flux.patcher, "img_in", layer)))
        same(flux.run(with_object_patch(compiled, "img_in", layer)), results[-1])
        assert counts() == (1, 1)
    assert not torch.allclose(*results, rtol=1e-2)


class Offset(torch.nn.Linear):
    """A layer of another pack with weights, and a tensor that its node sets."""

    def forward(self, x):
        return super().forward(x) + self.offset


def test_a_tensor_of_another_packs_layer(flux, counts):
    layer = like(flux.patcher.model.diffusion_model.img_in, Offset)
    compiled, results = flux.attach(flux.patcher), []
    for offset in torch.randn(2, layer.out_features):
        layer.offset = offset
        results.append(flux.run(with_object_patch(flux.patcher, "img_in", layer)))
        same(flux.run(with_object_patch(compiled, "img_in", layer)), results[-1])
        assert counts() == (1, 1)
    assert not torch.allclose(*results, rtol=1e-2)


def test_one_that_holds_what_cannot_be_compared(flux, counts):
    layer = Positions(flux.patcher.model.diffusion_model.pe_embedder)
    layer.holder = Holder(1.0)
    compiled = with_object_patch(flux.attach(flux.patcher), "pe_embedder", layer)
    flux.run(compiled)
    assert counts() == (0, 0) and "Holder, which may change unseen" in notes(flux, compiled)


def test_weights_that_were_loaded_anew_in_the_middle_of_a_run(flux, counts, compiled):
    """A VAE of a ControlNet may need their room; the host then loads them again."""
    layer, steps = flux.patcher.model.diffusion_model.img_in, []

    def wrapper(apply_model, given):
        steps.append(1)
        if len(steps) == 2:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
            compiled.load(torch.device("cpu"), full_load=True)
        return apply_model(given["input"], given["timestep"], **given["c"])

    flux.run(with_function_wrapper(compiled, wrapper))
    assert counts() == (1, 1), "replayed; all dropped and run; captured"


STEP = {"number": 0}


def by_sigma(func, *args, **kwargs):
    return func(*args, **kwargs) * (1 + 0.1 * kwargs["transformer_options"]["sigmas"][0])


def by_count(func, *args, **kwargs):
    STEP["number"] += 1
    return func(*args, **kwargs) * (1 + 0.01 * STEP["number"])


@pytest.mark.parametrize("override", [by_sigma, by_count])
def test_an_attention_of_another_node_that_differs_in_each_step(flux, counts, override):
    def patched(patcher):
        clone = patcher.clone()
        overridden(override)(clone)
        STEP["number"] = 0
        return clone

    compiled = flux.attach(flux.patcher)
    flux.run(compiled)
    assert counts() == (1, 1)
    expected = flux.run(patched(flux.patcher))
    same(flux.run(patched(compiled)), expected)
    assert counts() == (0, 0) and "another node's attention" in notes(flux, compiled)
    flux.run(compiled)
    assert counts()[1] > 0, "without it the model is replayed again"


def test_with_an_attention_of_another_node_there_are_no_graphs(flux, counts):
    compiled = flux.attach(flux.patcher)
    overridden(passed_on)(compiled)
    flux.run(compiled)
    assert counts() == (0, 0) and "another node's attention" in notes(flux, compiled)


def test_kernels_for_convolutions_get_ready_while_a_model_has_none(flux, counts, engine, monkeypatch):
    """As when the VAE's norm kernels are compiled beside it."""
    kernels = engine("host.graphs.norm_kernels").norm_kernels
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
