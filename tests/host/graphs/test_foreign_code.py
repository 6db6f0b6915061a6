"""Code of another pack in a run, of every kind: no CUDA graph is used, and the pack is named; the host's code keeps graphs."""

import types
from pathlib import Path

import comfy.ldm.flux.layers
import comfy.ldm.flux.model
import comfy.samplers
import pytest
import torch
from capturing import record
from comfy.patcher_extension import CallbacksMP, WrappersMP
from patch_kinds.conditions import cached
from patch_kinds.options import overridden
from patch_kinds.weights import bypass_lora, lora, scheduled_lora, two_loras
from patching import Runs, graphs_of, notes, same
from patching import shares_code as fresh_dynamo  # noqa: F401
from torch import nn

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]
HERE = Path(__file__).name
OFF = f"CUDA graphs are off: {HERE} is in this run."


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    record(engine, monkeypatch)
    return Runs(tiny, engine, "flux", cfg=1.0, steps=3, only="single_blocks.*")


class Strength:
    """What a user sets on a node, and code of the node reads wherever it runs."""

    value = 1.5


def louder(x):
    return tuple(map(louder, x)) if isinstance(x, tuple) else x * Strength.value if isinstance(x, torch.Tensor) else x


def louder_call(function, *args, **kwargs):
    return louder(function(*args, **kwargs))


class LouderLinear(nn.Linear):
    _strength = property(lambda self: Strength.value)

    def forward(self, x):
        return super().forward(x) * self._strength


class LouderModule(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return louder(self.inner(*args, **kwargs))


def like(layer):
    with torch.inference_mode(False):
        made = LouderLinear(layer.in_features, layer.out_features, bias=layer.bias is not None).requires_grad_(False)
    made.load_state_dict(layer.state_dict())
    return made


def network_of(runs):
    return runs.patcher.model.diffusion_model


# Put into the network itself, for all its patchers: functions of (runs, monkeypatch).


def on_layer(runs, monkeypatch):
    layer = network_of(runs).img_in
    own = layer.forward
    monkeypatch.setitem(vars(layer), "forward", lambda x: louder(own(x)))


def hooked(runs, monkeypatch):
    handle = network_of(runs).img_in.register_forward_hook(lambda _module, _args, result: louder(result))
    monkeypatch.callback(handle.remove)


def hooked_for_all(runs, monkeypatch):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, _args, result: louder(result) if module is network_of(runs).img_in else None
    )
    monkeypatch.callback(handle.remove)


def on_class(_runs, monkeypatch):
    kind = comfy.ldm.flux.layers.MLPEmbedder
    monkeypatch.setattr(kind, "forward", (lambda own: lambda self, x: louder(own(self, x)))(kind.forward))


def in_module(module, name):
    def put(_runs, monkeypatch):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: louder_call(own, *args, **kwargs))

    return put


# Every kind of code in a network: engine/test_ownership.py.
IN_NETWORK = {
    "a closure over a forward": on_layer,
    "a hook": hooked,
    "a hook for all modules": hooked_for_all,
    "a method of a class": on_class,
    "a function of a model's module": in_module(comfy.ldm.flux.model, "timestep_embedding"),
    "a function around each call": in_module(comfy.samplers, "sampling_function"),
}

# Put into a clone of a patcher.


def object_patched(name, make):
    def patch(m):
        key = f"diffusion_model.{name}"
        m.add_object_patch(key, make(m.get_model_object(key)))

    return patch


def wrapped(kind):
    def patch(m):
        m.add_wrapper_with_key(kind, "test", lambda executor, *args, **kwargs: louder(executor(*args, **kwargs)))

    return patch


def changing_layers(kind, change):
    """A wrapper that changes the network for the length of a call."""

    def patch(m):
        def wrapper(executor, *args, **kwargs):
            with pytest.MonkeyPatch.context() as for_this_call:
                for_this_call.callback = lambda function: handles.append(function)
                handles = []
                change(m, for_this_call)
                try:
                    return executor(*args, **kwargs)
                finally:
                    for handle in handles:
                        handle()

        if kind is None:
            m.set_model_unet_function_wrapper(lambda apply, given: wrapper(_Apply(apply, given)))
        else:
            m.add_wrapper_with_key(kind, "test", wrapper)

    return patch


class _Apply:
    def __init__(self, apply, given):
        self.apply, self.given = apply, given

    def __call__(self):
        return self.apply(self.given["input"], self.given["timestep"], **self.given["c"])


def other_weight(m, monkeypatch):
    layer = m.model.diffusion_model.img_in
    monkeypatch.setitem(layer._parameters, "weight", nn.Parameter(layer.weight * Strength.value, requires_grad=False))


def another_module(m, monkeypatch):
    network = m.model.diffusion_model
    monkeypatch.setitem(network._modules, "img_in", LouderModule(network.img_in))


def of_patcher(put):
    """What `IN_NETWORK` puts there."""

    class Of:
        def __init__(self, patcher):
            self.patcher = patcher

    return lambda m, monkeypatch: put(Of(m), monkeypatch)


def later(m):
    """From the second step on a layer runs something else; nothing of that is in the first."""
    calls = []

    def after_step(args):
        calls.append(1)
        if len(calls) == 2:
            layer = m.model.diffusion_model.img_in
            layer.forward = lambda x: louder(type(layer).forward(layer, x))
        if len(calls) == 3:
            vars(m.model.diffusion_model.img_in).pop("forward")
            calls.clear()
        return args["denoised"]

    m.set_model_sampler_post_cfg_function(after_step)


def called_back(m):
    """Before each step, but back to what it was after the run."""

    def change(patcher, *_args):
        layer = patcher.model.diffusion_model.img_in
        layer.forward = lambda x: louder(type(layer).forward(layer, x))

    m.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "test", change)
    m.add_callback_with_key(
        CallbacksMP.ON_CLEANUP, "test", lambda patcher: vars(patcher.model.diffusion_model.img_in).pop("forward")
    )


class Attention:
    def __call__(self, function, *args, transformer_options, **kwargs):
        return louder(function(*args, transformer_options=transformer_options, **kwargs))


IN_PROMPT = {
    "a layer in place of one": object_patched("img_in", like),
    "a module around one": object_patched("pe_embedder", LouderModule),
    "a forward": object_patched("img_in.forward", lambda own: lambda x: louder(own(x))),
    "a method of the network": object_patched("forward_orig", lambda own: lambda *args, **kwargs: louder(own(*args, **kwargs))),
    "an attention": overridden(Attention()),
    "a patch": lambda m: m.set_model_patch(lambda args: {**args, "img": louder(args["img"])}, "post_input"),
    "a replacement": lambda m: m.set_model_patch_replace(
        lambda args, extra: {k: louder(v) for k, v in extra["original_block"](args).items()}, "dit", "double_block", 0
    ),
    **{f"a wrapper: {kind}": wrapped(kind) for kind in (WrappersMP.DIFFUSION_MODEL, WrappersMP.APPLY_MODEL)},
    "a wrapper of weights": lambda m: m.add_weight_wrapper("diffusion_model.img_in.weight", louder),
    "a cfg function": lambda m: m.set_model_sampler_post_cfg_function(lambda args: louder(args["denoised"])),
    "what a cfg function changes later": later,
    "what a callback changes": called_back,
    **{
        f"{name}, for the length of a call ({kind or 'function wrapper'})": changing_layers(kind, change)
        for kind, changes in {
            WrappersMP.DIFFUSION_MODEL: {
                "other weights": other_weight,
                "another module": another_module,
                "a closure": of_patcher(IN_NETWORK["a closure over a forward"]),
                "a hook": of_patcher(IN_NETWORK["a hook"]),
                "a class's method": of_patcher(on_class),
                "a module's function": of_patcher(IN_NETWORK["a function of a model's module"]),
            },
            # Whatever the wrapper changes, it looks the same from inside.
            **{other: {"other weights": other_weight} for other in (WrappersMP.APPLY_MODEL, WrappersMP.PREDICT_NOISE, None)},
        }.items()
        for name, change in changes.items()
    },
}


def check(flux, patch):
    """The image is that of eager whatever the strength, no call was captured, and it is said why."""
    compiled, graphs = flux.attach(flux.patcher), graphs_of(flux)
    plain = flux.run(compiled)
    before = graphs.captures, graphs.replays
    assert before == (1, 1)

    def of(patcher):
        clone = patcher.clone()
        return patch(clone) or clone

    images = []
    for strength in (1.5, 2.5):
        Strength.value = strength
        images.append(flux.run(of(flux.patcher)))
        for _ in range(2):
            same(flux.run(of(compiled)), images[-1], f"strength {strength}")
    assert (graphs.captures, graphs.replays) == before and OFF in notes(flux, compiled)
    assert not torch.allclose(images[0], plain, rtol=1e-2) and not torch.allclose(*images, rtol=1e-2), "it does nothing"
    return compiled, plain


def test_a_forward_that_a_wrapper_gives_a_block_in_the_first_call_of_a_run(flux):
    """What runs compiled in this call was chosen before the wrapper ran."""
    Strength.value, block = 1.5, network_of(flux).single_blocks[0]

    def wrapper(executor, *args, **kwargs):
        if "forward" not in vars(block):
            own = block.forward
            block.forward = types.MethodType(lambda _self, *given, own=own, **named: louder(own(*given, **named)), block)
        return executor(*args, **kwargs)

    def of(patcher):
        clone = patcher.clone()
        clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", wrapper)
        return clone

    expected = flux.run(of(flux.patcher))
    del block.forward
    compiled = flux.attach(flux.patcher)
    plain = flux.run(compiled)
    same(flux.run(of(compiled)), expected)
    vars(block).pop("forward", None)
    same(flux.run(compiled), plain)
    assert not torch.allclose(expected, plain, rtol=1e-2), "it does nothing"


@pytest.mark.parametrize("patch", IN_PROMPT.values(), ids=IN_PROMPT)
def test_code_of_another_pack_in_a_prompt(flux, patch):
    compiled, plain = check(flux, patch)
    replays = graphs_of(flux).replays
    for _ in range(2):
        same(flux.run(compiled), plain, "without it")
    assert graphs_of(flux).replays > replays, "graphs are back"


@pytest.mark.parametrize("put", IN_NETWORK.values(), ids=IN_NETWORK)
def test_code_of_another_pack_in_a_network(flux, put):
    compiled, graphs = flux.attach(flux.patcher), graphs_of(flux)
    plain = flux.run(compiled)
    before = graphs.captures, graphs.replays
    undo, images = [], []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.callback = undo.append
        put(flux, monkeypatch)
        try:
            for strength in (1.5, 2.5):
                Strength.value = strength
                images.append(flux.run(flux.patcher))
                for _ in range(2):
                    same(flux.run(compiled), images[-1], f"strength {strength}")
        finally:
            for function in undo:
                function()
    assert (graphs.captures, graphs.replays) == before and OFF in notes(flux, compiled)
    assert not torch.allclose(images[0], plain, rtol=1e-2) and not torch.allclose(*images, rtol=1e-2), "it does nothing"
    for _ in range(2):
        same(flux.run(compiled), plain, "without it")
    assert graphs.replays > before[1], "graphs are back"


def reference_method(m):
    m.add_object_patch("diffusion_model.params.default_ref_method", "uxo")


HOSTS = {
    "nothing": lambda m: m,
    "a LoRA": lora,
    "two LoRA": two_loras,
    "a LoRA in bypass mode": bypass_lora,
    "a plain value": reference_method,
    "a cache of steps": cached("EasyCacheNode"),
}


@pytest.mark.parametrize("patch", HOSTS.values(), ids=HOSTS)
def test_code_of_the_host_keeps_its_graphs(flux, patch):
    def of(patcher):
        clone = patcher.clone()
        return patch(clone) or clone

    flux.steps = 6
    compiled, graphs = of(flux.attach(flux.patcher)), graphs_of(flux)
    expected = flux.run(of(flux.patcher))
    for _ in range(3):
        same(flux.run(compiled), expected)
    replays = graphs.replays
    same(flux.run(compiled), expected)
    assert graphs.replays > replays and not any("are off" in note for note in notes(flux, compiled)), notes(flux, compiled)


def test_a_lora_with_a_schedule_keeps_its_graphs(flux):
    positive = scheduled_lora(flux)
    compiled, expected = flux.attach(flux.patcher), flux.run(flux.patcher, positive)
    for _ in range(3):
        same(flux.run(compiled, positive), expected)
    assert graphs_of(flux).replays > 3 and not any("are off" in note for note in notes(flux, compiled))


def test_a_strength_in_bypass_mode_that_changes(flux):
    import comfy.sd
    from patch_kinds.weights import lora_file

    compiled = flux.attach(flux.patcher)
    for strength in (1.0, 0.3, 1.0):
        one, other = (
            comfy.sd.load_bypass_lora_for_models(m, None, lora_file(flux.patcher), strength, 0)[0]
            for m in (flux.patcher, compiled)
        )
        expected = flux.run(one)
        for _ in range(2):
            same(flux.run(other), expected, f"strength {strength}")


@pytest.mark.parametrize("is_short", [False, True])
def test_graphs_that_wait_for_a_run_without_it_give_their_memory_back_where_it_is_short(flux, monkeypatch, is_short):
    """Before the call: a second one, after it ran out of memory, would find the lists of a ControlNet empty."""
    compiled, graphs, calls = flux.attach(flux.patcher), graphs_of(flux), []
    plain = flux.run(compiled)
    assert graphs.graphs
    monkeypatch.setattr(flux.engine("host.graphs.replay"), "is_short_of_memory", lambda _device: is_short)
    patched = compiled.clone()
    patched.set_model_attn1_output_patch(lambda out, _options: calls.append(bool(graphs.graphs)) or out)
    same(flux.run(patched), plain)
    assert set(calls) == {not is_short} and bool(graphs.graphs) is not is_short


def test_graphs_of_a_run_that_also_has_patched_calls_stay_where_memory_is_short(flux, monkeypatch):
    """As with PerturbedAttentionGuidance, which calls the model again in each step, with another attention."""
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance

    unet = Runs(flux.tiny, flux.engine, "sdxl", steps=6)
    monkeypatch.setattr(flux.engine("host.graphs.replay"), "is_short_of_memory", lambda _device: True)
    (guided,) = PerturbedAttentionGuidance.execute(unet.attach(unet.patcher), 3.0).args
    graphs = graphs_of(unet)
    for _ in range(2):
        unet.run(guided)
    assert (graphs.captures, len(graphs.graphs)) == (1, 1) and graphs.replays > 6


def test_the_node_says_whose_code_it_is(flux):
    settings = flux.engine("settings").CompileSettings(
        backend="eager", only_blocks="single_blocks.*", compile_when="before first image"
    )
    compiled = flux.engine("host.model.attach").attach(flux.patcher, settings, "7")
    (line,) = (line for line in flux.engine("messages.status").lines.values() if line.node == "7")
    patched = compiled.clone()
    overridden(Attention())(patched)
    for _ in range(2):
        flux.run(patched)
    assert ["graphsOff", HERE] in line.now().says
    flux.run(compiled)
    assert "graphsOff" not in str(line.now().says)
    assert flux.engine("messages.words").in_words(["graphsOff", "a_pack"], "de").startswith("CUDA-Graphen sind aus: a_pack")


def test_a_sampler_of_another_pack_is_around_each_call(flux):
    def sampler(model, noise, sigmas, extra_args, callback, disable):
        x = noise * sigmas[0]
        for i in range(len(sigmas) - 1):
            denoised = model(x, sigmas[i] * x.new_ones([x.shape[0]]), **extra_args)
            x = x + (x - denoised) / sigmas[i] * (sigmas[i + 1] - sigmas[i])
        return x

    compiled = flux.attach(flux.patcher)
    own = comfy.samplers.ksampler
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(comfy.samplers, "ksampler", lambda *_args, **_kwargs: comfy.samplers.KSAMPLER(sampler))
        flux.run(compiled)
    assert comfy.samplers.ksampler is own and graphs_of(flux).captures == 0 and OFF in notes(flux, compiled)


class Kept:
    x = factor = None


def keeping(own):
    def forward(self, x):
        Kept.x = x
        return own(self, x)

    return forward


def noting(own, kept):
    def forward(self, x):
        kept.x = x
        return own(self, x)

    return forward


def noting_there(own, _kept):
    def forward(self, x):
        self.noted = x
        return own(self, x)

    return forward


def reading(own, kept):
    def forward(self, x):
        kept.x = x
        return own(self, x if kept.factor is None else x * kept.factor)

    return forward


@pytest.mark.parametrize(
    ("around", "captures"), [(noting, 1), (noting_there, 0), (reading, 0), (lambda own, _: keeping(own), 0)]
)
def test_a_function_around_a_method_that_only_notes_its_arguments_keeps_no_graph_off(flux, monkeypatch, around, captures):
    """Two widely used packs put one around the forward of UNets' blocks when they are imported."""
    kind = comfy.ldm.flux.layers.MLPEmbedder
    monkeypatch.setattr(kind, "forward", around(around(kind.forward, Kept), Kept))
    plain, compiled = flux.run(flux.patcher), flux.attach(flux.patcher)
    for _ in range(2):
        same(flux.run(compiled), plain)
    assert graphs_of(flux).captures == captures and (OFF in notes(flux, compiled)) == (not captures)
    for module in network_of(flux).modules():
        vars(module).pop("noted", None)


def test_what_another_pack_has_put_around_all_sampling_is_around_no_call(flux, monkeypatch):
    """Some wrap it when they are imported."""
    own = comfy.samplers.KSAMPLER.sample
    monkeypatch.setattr(comfy.samplers.KSAMPLER, "sample", lambda self, *args, **kwargs: louder(own(self, *args, **kwargs)))
    plain, compiled = flux.run(flux.patcher), flux.attach(flux.patcher)
    for _ in range(2):
        same(flux.run(compiled), plain)
    assert graphs_of(flux).captures == 1 and OFF not in notes(flux, compiled)


def test_a_replay_that_gives_something_else_is_noticed(flux, monkeypatch):
    """Whatever was overlooked."""
    plain = flux.run(flux.patcher)
    compiled, graphs, other = flux.attach(flux.patcher), graphs_of(flux), {}
    flux.run(compiled)
    assert (graphs.checks, graphs.differences, graphs.replays) == (1, 0, 1), "after the capture"
    monkeypatch.setattr(flux.engine("host.graphs.replay"), "RUNS_A_CHECK", 1)
    same(flux.run(compiled), plain)
    assert (graphs.checks, graphs.differences) == (2, 0), "once in such a run"
    for key, graph in graphs.graphs.items():
        other[key] = type("Wrong", (), {"replay": lambda _self, tensors, graph=graph: graph.replay(tensors) * 1.1})()
    graphs.graphs.update(other)
    for _ in range(2):
        same(flux.run(compiled), plain, "the result is that of the model")
    assert (graphs.checks, graphs.differences) == (3, 1) and not graphs.graphs
    assert sum("another result" in note for note in notes(flux, compiled)) == 1
