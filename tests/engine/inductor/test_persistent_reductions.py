"""Which of inductor's reductions keep a row in registers."""

import types

import pytest
import sympy
import torch

STRICT = "strict_sum_rblock", "strict_reduction_rblock"  # as PyTorch 2.14 and 2.15 name it


def features_of(elements, hint):
    from torch._inductor.runtime.hints import ReductionHint

    return types.SimpleNamespace(
        reduction_numel=sympy.Integer(elements) if isinstance(elements, int) else elements,
        numel=sympy.Integer(4096),
        get_reduction_hint=lambda *_: ReductionHint[hint],
        is_reduction=lambda: True,
    )


@pytest.fixture
def chosen(engine):
    """chosen(elements, hint, cooperative) of whoever decides now, on a CUDA device; `sizes` are those of the kernel's tiles."""
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    def ask(elements, hint="INNER", cooperative=False, sizes=("x",), strict=None, device="cuda"):
        features = features_of(elements, hint)
        for name in STRICT:
            setattr(features, name, lambda name=name: sympy.Integer(64) if name == strict else None)
        features.has_strict_sum_multirow_reduction = features.has_strict_multirow_reduction = lambda: False
        graph = types.SimpleNamespace(sizevars=SizeVarAllocator(), current_device=torch.device(device))
        with V.set_graph_handler(graph):
            V.choices.triton_kernel_kwargs(None, features, [dict.fromkeys(sizes, 64)], {})
            return bool(V.choices.should_use_persistent_reduction(features, cooperative))

    return ask


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        ((1024,), True, True), ((3072,), False, True), ((5120,), False, True), ((8193,), False, False),
        ((3072, "OUTER"), False, False), ((3072, "INNER", True), False, False), ((sympy.Symbol("s0"),), False, False),
        ((128, "DEFAULT"), False, False), ((128, "OUTER"), False, False), ((512, "INNER", False, ("x", "y")), True, True),
        ((5120, "INNER", False, ("x", "y")), False, False),
    ],
)  # fmt: skip
def test_rows_of_a_transformer_are_read_once(engine, chosen, asked, before, after):
    assert chosen(*asked) is before
    with engine("inductor.persistent_reductions").in_one_pass():
        assert chosen(*asked) is after
    assert chosen(*asked) is before


@pytest.mark.parametrize("name", STRICT)
def test_rows_whose_rounding_is_strict_keep_their_blocks(engine, chosen, name):
    with engine("inductor.persistent_reductions").in_one_pass():
        assert chosen(3072) is True
        assert chosen(3072, "INNER", False, ("x",), name) is False


@pytest.mark.parametrize(("device", "hip"), [("cpu", None), ("xpu", None), ("cuda", "7.0"), ("cuda", None)])
def test_only_where_it_has_been_measured(engine, chosen, monkeypatch, device, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    with engine("inductor.persistent_reductions").in_one_pass():
        assert chosen(3072, device=device) is (device == "cuda" and hip is None)


def test_the_choices_of_others_stay(engine):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Others(InductorChoices):
        pass

    others = Others()
    with V.set_choices_handler(others), engine("inductor.persistent_reductions").in_one_pass():
        assert V.choices is others


def test_inductor_runs_with_them(engine, monkeypatch):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    used = []

    def compile_fx(graph, *_args, **_options):
        used.append(type(V.choices) is not InductorChoices)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch.compile(lambda x: x + 1, backend=engine("inductor.backend").inductor)(torch.ones(2))
    assert used == [True] and type(V.choices) is InductorChoices
