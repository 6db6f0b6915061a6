"""In the default mode nothing is lowered in ComfyUI's process: models of the host, inductor, the compile process as it is.

What PyTorch calls to lower a graph is counted here; PyTorch's functions and settings are compared while jobs run. The images
are eager's, and bit for bit those of code that was lowered here.
"""

import functools
import importlib
import sys
import time

import pytest
import torch
from patch_kinds import gguf_pack, weights
from patching import Runs
from support import relative_error, torch_settings, without_compile_process

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("inference_mode")]

# Not the C++ compiler: on a CPU code that is loaded has it preprocess PyTorch's headers, once.
LOWERING = {
    "AOTAutograd": ("torch._functorch.aot_autograd", "create_aot_state"),
    "inductor": ("torch._inductor.graph", "GraphLowering.run"),
}


@pytest.fixture
def lowered_here(monkeypatch):
    """The names of LOWERING, once for each call."""
    calls = []
    for name, (module, path) in LOWERING.items():
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        original = getattr(owner, attribute)

        def counted(*args, _function=original, _name=name, **kwargs):
            calls.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)
    return calls


# Modules of loaded kernels, which PyTorch puts among its own: a kernel that is loaded once more is another function.
KERNELS = "torch._inductor.runtime.compile_tasks."


def functions_of_torch():
    """Every function and class that a module of PyTorch has, and those of the classes."""
    of_torch = [name for name in list(sys.modules) if name.partition(".")[0] == "torch" and not name.startswith(KERNELS)]
    modules = [m for name in of_torch if (m := sys.modules.get(name)) is not None]
    held = {(m.__name__, name): value for m in modules for name, value in list(vars(m).items()) if callable(value)}
    classes = {value for value in held.values() if isinstance(value, type) and value.__module__.startswith("torch")}
    of_classes = {(c, name): value for c in classes for name, value in list(vars(c).items()) if callable(value)}
    return held | of_classes


def settings():
    """But for inductor's folders, which `load` sets in the environment."""
    return {name: value for name, value in torch_settings().items() if name != "folders"}


def seen_while_busy(engine):
    """Settings of PyTorch while jobs run, and the functions that are others than before them."""
    compiler, before, found = engine("background.thread").compiler, functions_of_torch(), []
    now, exchanged, end = before, {}, time.monotonic() + 600
    while compiler.busy and time.monotonic() < end:
        if settings() not in found:
            found.append(settings())
        now = functions_of_torch()
        exchanged |= {name: now[name] for name in before if name in now and now[name] is not before[name]}
        time.sleep(0.2)
    assert not compiler.busy
    return found, exchanged


def loaded_as(format_name):
    import comfy.sd

    def load(tiny):
        state_dict = tiny.build_patcher("flux").model.diffusion_model.state_dict()
        return comfy.sd.load_diffusion_model_state_dict(weights.quantised(state_dict, format_name))

    return load


def packed(tiny):
    patcher = tiny.build_patcher("flux")
    gguf_pack.pack(patcher)
    return patcher


def with_flash_attention(tiny):
    """As with `--use-flash-attention`: the host's operator, and PyTorch's kernel in place of the package's."""
    import comfy.ldm.flux.math
    from comfy.ldm.modules import attention

    def flash_attn_func(q, k, v, **_kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).contiguous()

    attention.flash_attn_func = flash_attn_func
    comfy.ldm.flux.math.optimized_attention = attention.attention_flash
    return tiny.build_patcher("flux")


@pytest.fixture
def hosts_attention(monkeypatch):
    """What `with_flash_attention` changes is put back."""
    import comfy.ldm.flux.math
    from comfy.ldm.modules import attention

    monkeypatch.setattr(attention, "flash_attn_func", None, raising=False)
    monkeypatch.setattr(comfy.ldm.flux.math, "optimized_attention", comfy.ldm.flux.math.optimized_attention)


# Model, its blocks, what loads it, the error against eager; INT8 rounds each activation to one of 255 steps,
# and on a CPU inductor unpacks without rounding to fp16 in between.
CASES = {
    "flux, one kind": ("flux", "single_blocks.*", None, 1e-5),
    "flux": ("flux", "", None, 1e-5),
    "sdxl": ("sdxl", "middle_block.*", None, 1e-5),
    "fp8": ("flux", "single_blocks.*", loaded_as("float8_e4m3fn"), 1e-5),
    "int8": ("flux", "single_blocks.*", loaded_as("int8_tensorwise"), 0.02),
    "packed": ("flux", "single_blocks.*", packed, 1e-3),
    "flash attention": ("flux", "single_blocks.*", with_flash_attention, 1e-5),
}


@pytest.mark.parametrize("case", ["flux, one kind", *(pytest.param(n, marks=pytest.mark.rest) for n in list(CASES)[1:])])
def test_nothing_is_lowered_in_this_process(case, tiny, engine, lowered_here, monkeypatch, hosts_attention):
    name, blocks, load, error = CASES[case]
    current = engine("cache.code_store")._Current  # nothing is kept: the process works for each graph
    monkeypatch.setattr(current, "opened", True)
    monkeypatch.setattr(current, "store", None)

    def model():
        made = Runs(tiny, engine, name, cfg=1.0)
        if load is not None:
            made.patcher = load(tiny)
        return made

    runs = model()
    expected, before = runs.run(runs.patcher), settings()
    chosen = {"backend": "inductor", "only_blocks": blocks}
    compiled = runs.attach(runs.patcher, compile_when="in background", **chosen)
    assert relative_error(runs.run(compiled), expected) < 1e-5
    found, exchanged = seen_while_busy(engine)
    assert found == [before] and not exchanged, "while jobs run"
    graphs, result = runs.graphs, runs.run(compiled)
    assert relative_error(result, expected) < error and runs.graphs == graphs > 0 and not runs.failures
    code = engine("compile.registry").code_of(runs.patcher.model.diffusion_model)
    assert not any(group.code.why_inline for group in runs.groups)
    code.eager_calls = 0
    runs.run(compiled)
    assert code.eager_calls == 0 and settings() == before
    assert lowered_here == []
    if case == "flux, one kind":
        return
    torch._dynamo.reset()
    engine("compile.registry")._groups.clear()
    without_compile_process(engine, monkeypatch)
    here = model()
    image = here.run(here.attach(here.patcher, compile_when="in background", **chosen))
    assert set(lowered_here) == set(LOWERING) and torch.equal(image, result), "code that was lowered here"


def test_what_is_counted_is_what_lowers(lowered_here):
    """Else the other tests prove nothing."""
    function = torch.compile(lambda x: torch.nn.functional.linear(x, x) * 2, backend="inductor")
    function(torch.ones(2, 2))
    assert set(lowered_here) == set(LOWERING)


def test_a_function_that_is_exchanged_is_seen(monkeypatch):
    before = functions_of_torch()
    monkeypatch.setattr(torch.fx.Tracer, "trace", lambda *_: None)
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda *_: None)
    now = functions_of_torch()
    assert {name for _owner, name in before if before[_owner, name] is not now.get((_owner, name))} == {"trace", "gelu"}
