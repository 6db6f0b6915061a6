"""Which attention kernel a model gets: measured once, in a call that leaves no trace; what others have chosen stays."""

import functools
import logging
import threading

import pytest
import torch
import zoo
from patching import Runs
from torch import nn

pytestmark = pytest.mark.host
OVERRIDE = "optimized_attention_override"


def attention_pytorch(q, *_args, **_kwargs):
    return q


@pytest.fixture(autouse=True)
def nothing_measured(engine, monkeypatch):
    monkeypatch.setattr(engine("host.model.attention_choice"), "_measured", {})


class Model:
    """The host's model, as far as a wrapper of APPLY_MODEL knows it."""

    def __init__(self):
        self.diffusion_model = torch.nn.Linear(2, 2)

    def apply(self, _x, options):
        options["optimized_attention_override"](attention_pytorch, *[torch.randn(2, 32, 256) for _ in range(3)], 4)


@pytest.mark.parametrize("memory", ["enough", "too little"])
def test_the_measurement_is_made_once_and_remembered_when_complete(engine, monkeypatch, memory):
    choice, asked, remembered = engine("host.model.attention_choice"), [], []

    def seconds(kernel, _call):
        asked.append(kernel)
        if memory != "enough":
            raise torch.OutOfMemoryError
        return {"cudnn": 0.5}.get(kernel, 1.0)

    class Cache:
        def choices(self, _structure):
            return {}

        def remember(self, _structure, choices):
            remembered.extend(choices.values())

    monkeypatch.setattr(engine("attention_kernels"), "_measure", seconds)
    monkeypatch.setattr(choice, "current", Cache)
    monkeypatch.setattr(choice, "_can_measure", lambda _device: True)
    model, args = Model(), (torch.zeros(1), 0, None, None, None, {})
    given, after = choice.with_attention("auto", model, args)
    model.apply(given[0], given[5])
    assert not asked
    after()
    found = choice.chosen_kernel(model.diffusion_model, "auto")
    again, after = choice.with_attention("auto", model, args)
    assert after is None and (OVERRIDE in again[5]) == (found == "cudnn")
    _, after = choice.with_attention("auto", Model(), args)
    assert (after is None) == (memory == "enough"), "ComfyUI may load the model anew for each prompt"
    if memory == "enough":
        assert (found, remembered, asked) == ("cudnn", ["cudnn"], ["flash", "cudnn", "efficient"])
    else:
        assert (found, remembered, asked) == ("comfyui", [], ["flash"])


def test_kernels_are_made_ready_beside_uncompiled_calls(engine, monkeypatch):
    """Loading cuDNN's took 1.8 s of the first image of Flux, on the sampler's thread."""
    choice, begun, ready = engine("host.model.attention_choice"), threading.Event(), threading.Event()
    kernels = engine("attention_kernels")
    monkeypatch.setattr(choice, "_can_measure", lambda _device: True)
    monkeypatch.setattr(choice, "_must_prepare", lambda _device: True)
    monkeypatch.setattr(choice, "current", lambda: None)
    monkeypatch.setattr(kernels, "_measure", lambda kernel, _call: {"cudnn": 0.5}.get(kernel, 1.0))
    monkeypatch.setattr(kernels.AttentionSurvey, "prepare", lambda _survey: begun.set() or ready.wait(60))
    model, args = Model(), (torch.zeros(1), 0, None, None, None, {})
    given, after = choice.with_attention("auto", model, args, False)
    model.apply(given[0], given[5])
    after()
    assert begun.wait(60)
    meanwhile, after = choice.with_attention("auto", model, args, False)
    after()
    assert meanwhile is args and choice.chosen_kernel(model.diffusion_model, "auto") is None
    ready.set()
    assert engine("background.thread").compiler.wait(60)
    _, after = choice.with_attention("auto", model, args, False)
    after()
    assert choice.chosen_kernel(model.diffusion_model, "auto") == "cudnn"
    assert choice.with_attention("auto", model, args, False)[1] is None


@pytest.mark.parametrize("asks", [True, False], ids=["a step cache skips calls", "an attention of its own"])
def test_a_call_in_which_the_model_asks_for_no_attention_decides_nothing(engine, monkeypatch, asks):
    """Not at first: a model whose attention is not the host's is compiled after three calls."""
    choice = engine("host.model.attention_choice")
    monkeypatch.setattr(choice, "_can_measure", lambda _device: True)
    monkeypatch.setattr(choice, "_must_prepare", lambda _device: False)
    monkeypatch.setattr(choice, "current", lambda: None)
    monkeypatch.setattr(engine("attention_kernels"), "_measure", lambda kernel, _call: {"cudnn": 0.5}.get(kernel, 1.0))
    model, args = Model(), (torch.zeros(1), 0, None, None, None, {})
    for skipped in (True, True, False):
        assert choice.chosen_kernel(model.diffusion_model, "auto") is None
        given, after = choice.with_attention("auto", model, args, False)
        if asks and not skipped:
            model.apply(given[0], given[5])
        after()
    assert choice.chosen_kernel(model.diffusion_model, "auto") == ("cudnn" if asks else "comfyui")


@pytest.mark.parametrize(("flag", "kept"), [("pytorch", True), ("sage", False), ("a partial of another pack", False)])
def test_what_was_measured_beside_another_attention_of_comfyui_is_not_remembered(engine, monkeypatch, flag, kept):
    """A start with `--use-sage-attention`, say: then `host` held for good, also without it."""
    choice, remembered, asked = engine("host.model.attention_choice"), [], []

    class Cache:
        def choices(self, structure):
            asked.append(structure)
            return {}

        def remember(self, _structure, choices):
            remembered.extend(choices.values())

    def optimized_attention(*args, **kwargs): ...

    if flag == "a partial of another pack":  # has no name
        optimized_attention = functools.partial(optimized_attention)
    else:
        optimized_attention.__name__ = f"attention_{flag}"
    monkeypatch.setattr(choice.host_attention, "optimized_attention", optimized_attention)
    monkeypatch.setattr(engine("attention_kernels"), "_measure", lambda kernel, _call: 0.5 + (kernel != "cudnn"))
    monkeypatch.setattr(choice, "current", Cache)
    monkeypatch.setattr(choice, "_can_measure", lambda _device: True)
    model = Model()
    given, after = choice.with_attention("auto", model, (torch.zeros(1), 0, None, None, None, {}))
    model.apply(given[0], given[5])
    after()
    assert choice.chosen_kernel(model.diffusion_model, "auto") == "cudnn"
    assert (bool(asked), remembered) == (kept, ["cudnn"] * kept)


class ComfyAttention(nn.Module):
    """As ComfyUI has from 0.38 on (comfy/ldm/modules/attention.py, #16419): `function` is what a checkpoint asks for, or None.

    Its configuration is part of the state dict, its function is not.
    """

    def __init__(self, function=None):
        super().__init__()
        self.function = function


@pytest.fixture
def flux(tiny, engine, monkeypatch):
    """A model whose kernels are as if measured: `efficient` is the fastest. No other test's choice is recalled."""
    monkeypatch.setattr(engine("host.model.attention_choice"), "current", lambda: None)
    monkeypatch.setattr(engine("host.model.attention_choice"), "_can_measure", lambda _device: True)
    monkeypatch.setattr(engine("attention_kernels"), "_measure", lambda kernel, _call: {"efficient": 0.5}.get(kernel, 1.0))
    runs = Runs(tiny, engine, "flux", cfg=1.0, steps=2)
    runs.attach = functools.partial(runs.attach, only_blocks="single_blocks.*")  # what is compiled is not what these tests see
    return runs


def overrides(runs, patcher):
    """Which overrides the model itself gets in a run, in their order, not twice one after the other."""
    found = []

    def note(_module, _args, kwargs):
        override = kwargs["transformer_options"].get(OVERRIDE)
        if not found or found[-1] is not override:
            found.append(override)

    with torch.inference_mode(), patcher.model.diffusion_model.register_forward_pre_hook(note, with_kwargs=True):
        runs.run(patcher)
    return found


def names(found):
    return [getattr(override, "__name__", type(override).__name__) for override in found]


@pytest.mark.parametrize("when", ["in background", "before first image"])
def test_measuring_calls_the_model_as_often_as_without(flux, engine, when):
    """Packs count calls (step caches), or draw random numbers in them (ToMe)."""
    calls = []
    patcher = flux.attach(flux.patcher, compile_when=when)
    with flux.patcher.model.diffusion_model.register_forward_pre_hook(lambda *_: calls.append(1)):
        flux.run(patcher)
    assert len(calls) == flux.steps and engine("host.model.attention_choice").chosen_kernel(
        flux.patcher.model.diffusion_model, "auto"
    )


def test_a_warmup_compiles_what_the_measuring_call_did_not(flux, engine):
    ran = []
    patcher = flux.attach(flux.patcher)
    size = engine("host.nodes.warmup_plan").Size(64, 64)
    with flux.patcher.model.diffusion_model.register_forward_pre_hook(lambda *_: ran.append(flux.graphs)):
        engine("host.nodes.warmup").warm_up(patcher, flux.positive, flux.negative, 1.0, [size])
    assert ran[2:] and flux.graphs == 1


def test_what_was_measured_is_used(flux):
    patcher = flux.attach(flux.patcher)
    assert names(overrides(flux, patcher)) == ["AttentionSurvey", "attention_efficient"]
    assert names(overrides(flux, patcher)) == ["attention_efficient"]


@pytest.mark.parametrize(("wanted", "given"), [("auto", None), ("cudnn", "attention_cudnn")])
def test_nothing_is_measured_while_other_gpus_are_at_work(engine, monkeypatch, wanted, given):
    """Under MultiGPU CFG Split: the kernels are switched on and off for the whole process."""
    choice, model = engine("host.model.attention_choice"), Model()
    monkeypatch.setattr(choice, "_can_measure", lambda _device: True)
    args = torch.zeros(1), 0, None, None, None, {"multigpu_thread_device": torch.device("cuda:1")}
    taken, after = choice.with_attention(wanted, model, args)
    assert after is None and getattr(taken[5].get(OVERRIDE), "__name__", None) == given


def test_an_attention_that_the_checkpoint_asks_for_is_the_hosts(flux, engine, caplog):
    patcher = flux.attach(flux.patcher)
    blocks = patcher.model.diffusion_model.double_blocks
    for block in blocks:
        block.comfy_attention = ComfyAttention()
    blocks[1].comfy_attention.function = attention_pytorch
    said = "Flux: attention: the one that the checkpoint asks for"
    with caplog.at_level(logging.INFO, "torch-compile-kit"):
        assert overrides(flux, patcher) == [None]
        assert overrides(flux, patcher) == [None]
    assert [r.getMessage() for r in caplog.records if "attention" in r.getMessage()] == [said]
    assert "Attention: the one that the checkpoint asks for." in engine("host.model.attach").notes_about(patcher)
    # A LoRA that asked for it is taken out, and comes back.
    blocks[1].comfy_attention.function = None
    assert names(overrides(flux, patcher)) == ["AttentionSurvey", "attention_efficient"]
    blocks[0].comfy_attention.function = attention_pytorch
    assert overrides(flux, patcher) == [None]


def test_a_kernel_that_the_user_asks_for_comes_before_the_checkpoints(flux, engine, monkeypatch):
    settings = engine("settings").CompileSettings
    monkeypatch.setattr(settings, "check_backend", lambda _self: None)  # which wants an NVIDIA GPU
    monkeypatch.setattr(engine("attention_kernels").AttentionSurvey, "_check", lambda *_: None)
    flux.patcher.model.diffusion_model.double_blocks[0].comfy_attention = ComfyAttention(attention_pytorch)
    found = overrides(flux, flux.attach(flux.patcher, attention="cudnn"))
    assert names(found) == ["AttentionSurvey", "attention_cudnn"]


def test_another_nodes_attention_stays(flux):
    """Through the host's own method where there is one (0.33), with a way for containers."""
    from comfy.ldm.modules import attention

    calls = []

    def others(*args, **kwargs):
        calls.append(args)
        return attention.attention_pytorch(*args, **kwargs)

    others.container_function = others
    clone = flux.patcher.clone()
    if hasattr(clone, "set_model_optimized_attention"):
        clone.set_model_optimized_attention(others)
    else:
        clone.model_options["transformer_options"][OVERRIDE] = lambda _func, *args, **kwargs: others(*args, **kwargs)
    (found,) = overrides(flux, flux.attach(clone))
    assert found is clone.model_options["transformer_options"][OVERRIDE] and calls


def minimax():
    """A model that passes queries, keys and values in containers, each used once, where the host knows them (0.32)."""
    import comfy.ldm.minimax.model as module

    setup = zoo.SETUPS["minimax_h3"]
    return setup, setup.build(), getattr(module, "AttentionTensorContainer", None)


def called(model, setup, override=None):
    inputs = setup.inputs(0, 1, model=model)
    if override is not None:
        inputs["transformer_options"][OVERRIDE] = override
    with torch.inference_mode():
        return model.apply_model(**inputs)


def test_the_survey_sees_what_is_in_containers(engine, monkeypatch):
    setup, model, container = minimax()
    taken = []
    if container is not None:
        take = container.take
        monkeypatch.setattr(container, "take", lambda self: taken.append(self) or take(self))
    survey = engine("attention_kernels").AttentionSurvey("auto")
    result = called(model, setup, survey)
    calls = sum(survey.calls.values())
    assert calls == len(model.diffusion_model.blocks)  # the prompt was refined when the inputs were made
    assert container is None or len(taken) >= 3 * calls
    assert torch.equal(result, called(model, setup))


def test_our_kernels_take_what_is_in_containers(engine, monkeypatch):
    setup, model, _ = minimax()
    expected, asked = called(model, setup), []
    attention = engine("attention_kernels")
    as_sdpa = attention._as_sdpa
    monkeypatch.setattr(attention, "_as_sdpa", lambda *args: asked.append(args[0].shape) or as_sdpa(*args))
    torch.testing.assert_close(called(model, setup, attention.override_for("efficient")), expected)
    assert len(asked) >= 3


def test_containers_compile_with_our_kernel(engine):
    """One graph for the attention that follows the host's own way of unpacking them."""
    from comfy.ldm.modules import attention

    container = getattr(attention, "AttentionTensorContainer", lambda tensor: tensor)
    override = engine("attention_kernels").override_for("efficient")

    def block(x):
        q, k, v = (container(part) for part in x.chunk(3, -1))
        return attention.attention_pytorch(q, k, v, 4, transformer_options={OVERRIDE: override})

    x = torch.randn(2, 8, 3 * 64)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, backend="eager", fullgraph=True)(x), block(x))


@pytest.mark.parametrize("name", ["attention_split", "attention_sub_quad"])
def test_fullgraph_is_refused_where_the_hosts_attention_cannot_be_in_a_graph(tiny, engine, monkeypatch, name):
    import comfy.ldm.modules.attention as attention

    choice, settings = engine("host.model.attention_choice"), engine("settings").CompileSettings
    tensors = [torch.randn(1, 32, 64) for _ in range(3)]
    unwrapped = getattr(attention, name)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(unwrapped, backend="eager", fullgraph=True)(*tensors, 4)
    torch._dynamo.reset()
    choice.check_fullgraph(settings(fullgraph=True))
    monkeypatch.setattr(attention, "optimized_attention", unwrapped)
    choice.check_fullgraph(settings())
    choice.check_fullgraph(settings(fullgraph=True, backend="none"))
    runs = Runs(tiny, engine, "flux", cfg=1.0)
    with pytest.raises(engine("errors").InvalidSetting, match=r"fullgraph.*-cross-attention.*set fullgraph to false"):
        runs.attach(runs.patcher, fullgraph=True, attention="comfyui")
