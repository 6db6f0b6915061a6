"""Norms in one pass.

Inductor keeps a row in registers up to 1024 elements, up to 64 where it does not read rows in their order, and reads longer
ones twice, in a loop (torch/_inductor/choices.py). A token's channels, 3072 to 5120 in today's transformers, fit as well, and
so do a head's that are rotated behind their norm.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

# Elements of a row: at 8 warps 32 a thread.
MOST = 8192
# Elements of a row that is not read in order, as a head's that are rotated behind their norm.
MOST_OF_HEAD = 256


def in_one_pass() -> AbstractContextManager:
    """While it lasts, this thread's inductor makes such kernels; nothing changes where somebody else has made its choices."""
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    return V.set_choices_handler(_choices()) if type(V.choices) is InductorChoices else nullcontext()


@functools.cache
def _choices() -> object:
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    def _at_most(features, elements: int) -> bool:
        return V.graph.sizevars.statically_known_leq(features.reduction_numel, elements)

    def _is_head(features) -> bool:
        hints = ReductionHint.DEFAULT, ReductionHint.OUTER_TINY  # as PyTorch finds them; the second is also given below
        return features.get_reduction_hint() in hints and _at_most(features, MOST_OF_HEAD)

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction: bool) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            if cooperative_reduction or not config.triton.persistent_reductions:
                return False
            if features.get_reduction_hint() == ReductionHint.INNER:
                return _at_most(features, MOST)
            return _is_head(features)

        def triton_kernel_kwargs(self, kernel_cls, features, groups, kernel_kwargs: dict) -> dict:
            kernel_kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            if not features.is_reduction():
                return kernel_kwargs
            tiled = any(isinstance(sizes, dict) and "y" in sizes for sizes in groups)
            if tiled and "override_persistent_reduction" not in kernel_kwargs:  # there are no block sizes for long rows then
                cooperative = self.should_use_cooperative_reduction(features)
                found = InductorChoices.should_use_persistent_reduction(features, cooperative)
                return {**kernel_kwargs, "override_persistent_reduction": found}
            if not tiled and _is_head(features):
                # Some rows at a time, in blocks of one size; else PyTorch compiles three sizes and measures them.
                features.get_reduction_hint = lambda *_: ReductionHint.OUTER_TINY
            return kernel_kwargs

    return Choices()
