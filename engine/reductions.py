"""Norms over a token's channels in one pass.

Inductor keeps a row in registers up to 1024 elements and reads longer ones twice, in a loop (torch/_inductor/choices.py).
Widths of today's transformers, 3072 to 5120, fit as well.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

# Elements of a row: at 8 warps 32 a thread.
MOST = 8192


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

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction: bool) -> bool:
            if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
                return True
            rows = config.triton.persistent_reductions and features.get_reduction_hint() == ReductionHint.INNER
            return rows and not cooperative_reduction and V.graph.sizevars.statically_known_leq(features.reduction_numel, MOST)

        def triton_kernel_kwargs(self, kernel_cls, features, groups, kernel_kwargs: dict) -> dict:
            kernel_kwargs = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
            tiled = any(isinstance(sizes, dict) and "y" in sizes for sizes in groups)
            if tiled and "override_persistent_reduction" not in kernel_kwargs:  # there are no block sizes for long rows then
                cooperative = self.should_use_cooperative_reduction(features)
                found = InductorChoices.should_use_persistent_reduction(features, cooperative)
                return {**kernel_kwargs, "override_persistent_reduction": found}
            return kernel_kwargs

    return Choices()
