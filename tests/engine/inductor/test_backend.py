"""What we give inductor in the place of kernels that it cannot see into: the same numbers, without the kernel."""

import types

import pytest
import torch
from support import brief_codegen, compiled_code, without_codegen
from torch.nn import functional

HEADS, TOKENS, DIM = 3, 20, 16


@pytest.fixture(autouse=True, scope="module")
def host_kernels():
    import comfy_kitchen  # noqa: F401  registers its operators


def frequencies(tokens, heads_first=True):
    """A rotation for each token and pair of channels, as the host's `rope` (comfy/ldm/flux/math.py) makes them."""
    positions = torch.rand(1, tokens, 1, generator=torch.Generator().manual_seed(1)) * 64
    angles = positions / 10000 ** (torch.arange(0, DIM, 2) / DIM)
    made = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    return made.unsqueeze(1 if heads_first else 2)


def inputs(name, dtype, longer=0):
    """Arguments of the host's operator `name`."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    if "adaln" in name:
        return random(2, TOKENS, DIM), random(2, 1, DIM), random(2, 1, DIM), 1e-6
    tensors = [random(2, HEADS, TOKENS, DIM) for _ in range(1 if name.endswith("1") else 2)]
    scales = [random(DIM) for _ in tensors] if name.startswith("rms") else []
    return *tensors, frequencies(TOKENS + longer), *scales


ROPE = [f"{norm}rope{half}" for norm in ("apply_", "rms_") for half in ("", "1", "_split_half", "_split_half1")]
ALL = [*ROPE, "adaln", "rms_adaln"]


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["decomposed", "generated"])
def test_the_hosts_kernels_as_code(everywhere, engine, generated, monkeypatch):
    """All of them in one graph, in both precisions, and one with frequencies of more tokens, which are cut off.

    The generated C++ of them takes ten seconds of a core to compile.
    """
    assert set(ALL) == set(engine("inductor.rotary_norms").DECOMPOSITIONS)
    names = [*ALL, *ALL, "apply_rope"]
    given = [inputs(name, dtype) for dtype in (torch.float32, torch.bfloat16) for name in ALL]
    given.append(inputs("apply_rope", torch.float32, longer=5))

    def all_of_them(given):
        calls = zip(names, given, strict=True)
        return [output for name, args in calls for output in outputs(getattr(torch.ops.comfy_kitchen, name)(*args))]

    with torch.inference_mode():
        expected = all_of_them(given)
        if generated:
            actual, code = compiled_code(all_of_them, everywhere.inductor, (given,))
        else:
            decomposed = without_codegen(monkeypatch)
            actual = torch.compile(all_of_them, backend=everywhere.inductor, dynamic=False)(given)
            (code,) = decomposed
    assert "comfy_kitchen" not in code
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        # bf16 steps: what is fused is not rounded on the way
        torch.testing.assert_close(one, other, **({"rtol": 2e-2, "atol": 2e-2} if one.dtype is torch.bfloat16 else {}))


def test_one_graph_serves_all_sizes(everywhere, monkeypatch):
    decomposed = without_codegen(monkeypatch)
    compiled = torch.compile(
        lambda *a: torch.ops.comfy_kitchen.apply_rope(*a), backend=everywhere.inductor, dynamic=True, fullgraph=True
    )
    with torch.inference_mode():
        for tokens in (6, 9, 30):
            q, k = (torch.randn(2, HEADS, tokens, DIM) for _ in range(2))
            given = q, k, frequencies(tokens)
            torch.testing.assert_close(compiled(*given), tuple(torch.ops.comfy_kitchen.apply_rope(*given)))
    assert len(decomposed) == 1 and "comfy_kitchen" not in decomposed[0]


def test_on_a_cpu_the_hosts_kernels_stay(engine, monkeypatch):
    engine("inductor.rotary_norms").register()
    decomposed = without_codegen(monkeypatch)
    with torch.inference_mode():
        torch.compile(lambda *a: torch.ops.comfy_kitchen.apply_rope(*a), backend=engine("inductor.backend").inductor)(
            *inputs("apply_rope", torch.float32)
        )
    assert len(decomposed) == 1 and "comfy_kitchen" in decomposed[0]


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 2**-8), (torch.float16, 2**-10)])
def test_gelu_by_sigmoid_is_gelu_by_tanh(dtype, most, engine):
    import functools

    module = engine("inductor.backend")
    x = torch.linspace(-30, 30, 20001).to(dtype)
    exact = functools.partial(functional.gelu, approximate="tanh")(x.double())
    actual = module._gelu(None, x, approximate="tanh")
    assert actual.dtype == dtype
    error = (actual.double() - exact).abs()
    assert (error <= most * exact.abs() + 1e-7).all()


def mixed(text, image, freqs, weight):
    """A kernel of the host's behind a join, and GELU behind a product."""
    q = torch.ops.comfy_kitchen.apply_rope1(torch.cat((text, image), 2), freqs)
    return functional.gelu(functional.linear(q, weight), approximate="tanh")


def test_what_we_change_serves_all_sizes_and_is_kept_on_disk(everywhere):
    from torch._dynamo.utils import counters
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache, run_and_get_code

    weight = torch.randn(DIM, DIM).bfloat16()
    inputs = [
        (*(torch.randn(2, HEADS, n, DIM).bfloat16() for n in tokens), frequencies(sum(tokens)), weight)
        for tokens in ((6, 9), (5, 7), (30, 12))
    ]
    with torch.inference_mode(), fresh_cache(), config.patch(brief_codegen()):
        expected = [mixed(*given) for given in inputs]
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(mixed, backend=everywhere.inductor, dynamic=True, fullgraph=True)
            actual, _ = run_and_get_code(lambda compiled=compiled: [compiled(*given) for given in inputs])
            torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)
            assert counters["stats"]["unique_graphs"] == 1 and not counters["aot_autograd"]["autograd_cache_bypass"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_gelu_has_its_derivative(everywhere, monkeypatch):
    without_codegen(monkeypatch)

    def perceptron(x):
        return functional.gelu(functional.linear(x, torch.ones(DIM, DIM).bfloat16()), approximate="tanh")

    x = (torch.randn(2, DIM, generator=torch.Generator().manual_seed(5)) / DIM).bfloat16().requires_grad_()
    (expected,) = torch.autograd.grad(perceptron(x).sum(), x)
    (actual,) = torch.autograd.grad(torch.compile(perceptron, backend=everywhere.inductor)(x).sum(), x)
    assert expected.any()
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_other_gelu_is_left_alone(engine):
    calls = []
    module = engine("inductor.backend")
    module._gelu(lambda *a, **k: calls.append(k), torch.ones(2, dtype=torch.bfloat16), approximate="none")
    module._gelu(lambda *a, **k: calls.append(k), torch.ones(2), approximate="tanh")
    assert calls == [{"approximate": "none"}, {"approximate": "tanh"}]


def test_who_sets_the_rounding_is_obeyed(everywhere, monkeypatch):
    found = []

    def compile_fx(graph, *_args, config_patches, **_options):
        found.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    for options in (None, {"emulate_precision_casts": False, "max_autotune": True}):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=lambda *a, o=options: everywhere.inductor(*a, options=o))(torch.ones(2))
    wanted = [{"emulate_precision_casts": True}, {"emulate_precision_casts": False, "max_autotune": True}]
    assert [{name: options[name] for name in like} for options, like in zip(found, wanted, strict=True)] == wanted


def test_all_kernels_of_this_host_are_as_they_are_known(engine):
    found = engine("inductor.rotary_norms")
    assert sorted(found._matching()) == sorted(ALL)


@pytest.mark.parametrize(
    "name, other",
    [
        ("apply_rope1", lambda x, freqs: -x),
        ("rms_rope1", lambda x, freqs, scale, epsilon=1e-6, rot_dim=0: _host("rms_rope1")(x, freqs, scale, 1e-6, rot_dim)),
        ("rms_adaln", lambda x, scale, shift, eps=1e-6: _host("rms_adaln")(x, scale, shift, 1e-6)),
        ("apply_rope", lambda q, k, freqs: (q, k, freqs)),
        ("adaln", lambda x: x),
    ],
    ids=["another result", "epsilon left out", "another default", "one more result", "other arguments"],
)
def test_a_kernel_whose_meaning_has_changed_stays_the_hosts(name, other, engine, monkeypatch):
    """Of another comfy-kitchen: opened by its name alone it would give wrong images."""
    opened = engine("inductor.rotary_norms")
    kept = {known: getattr(torch.ops.comfy_kitchen, known) for known in ALL}
    monkeypatch.setattr(torch.ops, "comfy_kitchen", types.SimpleNamespace(**{**kept, name: other}))
    HOST.update(kept)
    assert sorted(opened._matching.__wrapped__()) == sorted(set(ALL) - {name})


HOST = {}


def _host(name):
    return HOST[name]
