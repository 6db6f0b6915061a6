"""Which of inductor's reductions keep a row in registers."""

import types

import pytest
import sympy


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
    """chosen(elements, hint, cooperative) of whoever decides now."""
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    def ask(elements, hint="INNER", cooperative=False):
        features = features_of(elements, hint)
        with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
            return bool(V.choices.should_use_persistent_reduction(features, cooperative))

    return ask


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        ((1024,), True, True), ((3072,), False, True), ((5120,), False, True), ((8193,), False, False),
        ((3072, "OUTER"), False, False), ((3072, "INNER", True), False, False), ((sympy.Symbol("s0"),), False, False),
        ((128, "DEFAULT"), False, True), ((512, "DEFAULT"), False, False), ((128, "OUTER"), False, False),
        ((128, "DEFAULT", True), False, False),
    ],
)  # fmt: skip
def test_rows_of_a_transformer_are_read_once(engine, chosen, asked, before, after):
    assert chosen(*asked) is before
    with engine("reductions").in_one_pass():
        assert chosen(*asked) is after
    assert chosen(*asked) is before


@pytest.fixture
def kwargs_of(engine, monkeypatch):
    """kwargs_of(sizes, elements, hint, **given): what a kernel is made with, and the hint that it then has."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_cooperative_reduction", staticmethod(lambda _features: False))

    def ask(sizes, elements, hint, **given):
        features = features_of(elements, hint)
        with engine("reductions").in_one_pass(), V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
            found = V.choices.triton_kernel_kwargs(None, features, [sizes], {"features": 1, **given})
        return {name: value for name, value in found.items() if name != "features"}, features.get_reduction_hint().name

    return ask


def test_tiled_kernels_keep_their_loop(kwargs_of):
    override = "override_persistent_reduction"
    assert kwargs_of({"x": 64, "r0_": 5120}, 5120, "INNER") == ({}, "INNER")
    assert kwargs_of({"x": 64, "y": 64, "r0_": 5120}, 5120, "INNER") == ({override: False}, "INNER")
    assert kwargs_of({"x": 64, "y": 64, "r0_": 5120}, 5120, "INNER", **{override: True}) == ({override: True}, "INNER")


def test_norms_of_heads_have_blocks_of_one_size(kwargs_of, engine):
    assert kwargs_of({"x": 64, "r0_": 128}, 128, "DEFAULT") == ({}, "OUTER_TINY")
    assert kwargs_of({"x": 64, "y": 64, "r0_": 128}, 128, "DEFAULT")[1] == "DEFAULT"
    assert kwargs_of({"x": 64, "r0_": 512}, 512, "DEFAULT") == ({}, "DEFAULT")


def test_the_choices_of_others_stay(engine):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Others(InductorChoices):
        pass

    others = Others()
    with V.set_choices_handler(others), engine("reductions").in_one_pass():
        assert V.choices is others


def test_inductor_runs_with_them(engine, monkeypatch):
    import torch
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    used = []

    def compile_fx(graph, *_args, **_options):
        used.append(type(V.choices) is not InductorChoices)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    torch.compile(lambda x: x + 1, backend=engine("inductor").inductor)(torch.ones(2))
    assert used == [True] and type(V.choices) is InductorChoices
