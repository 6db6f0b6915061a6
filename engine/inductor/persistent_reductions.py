"""Have inductor compute norms in one pass.

Inductor keeps a row in registers up to 1024 elements and reads longer rows twice, in a loop (torch/_inductor/choices.py). A
token's channels, 3072 to 5120 in today's transformers, also fit into the registers of NVIDIA's GPUs.
"""

import functools
from contextlib import AbstractContextManager, nullcontext

from ..torch_compat import private
from ..torch_settings import is_nvidia

# The most elements of a row: with 8 warps, 32 per thread.
MOST = 8192
_TILED = "torch_compile_kit_tiled"
_STRICT = "strict_reduction_rblock", "strict_sum_rblock"  # the name since PyTorch 2.15, and that of 2.14


def in_one_pass() -> AbstractContextManager:
    """A context in which this thread's inductor makes one-pass kernels, unless another pack has set a handler of choices."""
    if None in (private.InductorChoices, private.ReductionHint, private.V, private.inductor_config):
        return nullcontext()
    chosen = private.V.choices
    return private.V.set_choices_handler(_choices()) if type(chosen) is private.InductorChoices else nullcontext()


@functools.cache
def _choices() -> object:
    V = private.V  # noqa: N806  PyTorch's name

    class Choices(private.InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features, cooperative_reduction: bool, *rest: object) -> bool:
            if private.InductorChoices.should_use_persistent_reduction(features, cooperative_reduction, *rest):
                return True
            # Tiled reductions have no block sizes for long rows; strict ones have block sizes that their rounding depends on.
            is_strict = any(getattr(features, name, lambda: None)() is not None for name in _STRICT)
            if (
                is_strict
                or getattr(features, _TILED, False)
                or cooperative_reduction
                or not private.inductor_config.triton.persistent_reductions
            ):
                return False
            if V.graph.current_device is None or not is_nvidia(V.graph.current_device):
                return False
            inner = features.get_reduction_hint() == private.ReductionHint.INNER
            return inner and V.graph.sizevars.statically_known_leq(features.reduction_numel, MOST)

        def triton_kernel_kwargs(self, kernel_cls, features, groups, kernel_kwargs: dict) -> dict:
            setattr(features, _TILED, any(isinstance(sizes, dict) and "y" in sizes for sizes in groups))
            return super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)

    return Choices()
