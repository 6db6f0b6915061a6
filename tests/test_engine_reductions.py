"""Which of inductor's reductions keep a row in registers."""

import types

import pytest
import sympy


@pytest.fixture
def chosen(engine):
    """chosen(elements, hint, cooperative) of whoever decides now."""
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    def ask(elements, hint="INNER", cooperative=False):
        features = types.SimpleNamespace(
            reduction_numel=sympy.Integer(elements) if isinstance(elements, int) else elements,
            numel=sympy.Integer(4096),
            get_reduction_hint=lambda: ReductionHint[hint],
        )
        with V.set_graph_handler(types.SimpleNamespace(sizevars=SizeVarAllocator())):
            return bool(V.choices.should_use_persistent_reduction(features, cooperative))

    return ask


@pytest.mark.parametrize(
    ("asked", "before", "after"),
    [
        ((1024,), True, True), ((3072,), False, True), ((5120,), False, True), ((8193,), False, False),
        ((3072, "OUTER"), False, False), ((3072, "INNER", True), False, False), ((sympy.Symbol("s0"),), False, False),
    ],
)  # fmt: skip
def test_rows_of_a_transformer_are_read_once(engine, chosen, asked, before, after):
    assert chosen(*asked) is before
    with engine("reductions").in_one_pass():
        assert chosen(*asked) is after
    assert chosen(*asked) is before


@pytest.mark.parametrize(("sizes", "overridden"), [({"x": 64, "r0_": 5120}, False), ({"x": 64, "y": 64, "r0_": 5120}, True)])
def test_tiled_kernels_keep_their_loop(engine, chosen, sizes, overridden, monkeypatch):
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    monkeypatch.setattr(InductorChoices, "should_use_cooperative_reduction", staticmethod(lambda _features: False))
    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda *_: False))
    with engine("reductions").in_one_pass():
        found = V.choices.triton_kernel_kwargs(None, None, [sizes], {"features": 1})
        given = V.choices.triton_kernel_kwargs(None, None, [sizes], {"override_persistent_reduction": True})
    assert found == {"features": 1} | ({"override_persistent_reduction": False} if overridden else {})
    assert given == {"override_persistent_reduction": True}


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
