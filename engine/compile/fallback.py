"""What happens when a block group cannot be compiled: it runs eager, or stops the run where the user wants that."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from ..errors import BlockCompileError
from ..failures.describe import Failure, describe_failure, is_limit_hit
from ..settings import CompileSettings
from .stats import CompileStats

logger = logging.getLogger("torch-compile-kit")
RETRIES = 3
# More variants than this for the same shapes, under one set of patches: a patch that differs for each block or step.
PATCH_VARIANTS = 4


@dataclass
class Fallback:
    """Why a block group runs eager, if it does.

    Args:
        name: for reports, the patches of the group included.
        forward: the class's own forward function.
        stats: what compiling has cost so far.
        failure: all calls run eager.
        limit_reached: calls with new shapes do.
        retries: since a graph was lowered, of what may pass.
    """

    name: str
    forward: Callable
    settings: CompileSettings
    stats: CompileStats
    failure: Failure | None = None
    limit_reached: bool = False
    retries: int = 0
    _variants: Counter[tuple] = field(default_factory=Counter)
    _made_in: Callable[[], object] = lambda: None

    def give_up(self, failure: Failure) -> None:
        self.failure = failure
        logger.warning("%s", failure.message())

    def forgive(self) -> None:
        """A new run: what failed for a reason that may have passed (a full disk) is tried again, some times."""
        if self.failure is not None and self.failure.may_pass and self.retries < RETRIES:
            self.retries += 1
            self.failure = None

    def run(self, block: nn.Module, args: tuple, kwargs: dict) -> object:
        """Eager, or with the error where the user wants that."""
        if self.failure is not None and self.settings.on_failure == "stop":
            raise BlockCompileError(self.failure.message())
        return self.forward(block, *args, **kwargs)

    def after(self, error: Exception, block: nn.Module, args: tuple, kwargs: dict) -> object:
        """Run the call of which compiling has failed with `error`, and keep what it says."""
        failure = self.of(error)
        if failure is not None and self.settings.on_failure == "stop":
            self.failure = failure
            raise BlockCompileError(failure.message()) from error
        # An error of the model itself comes again here and is the user's to see, as without us.
        result = self.forward(block, *args, **kwargs)
        if failure is not None:
            self.give_up(failure)
        return result

    def of(self, error: Exception) -> Failure | None:
        """What to say of an error while compiling; None where only new shapes run eager."""
        if not is_limit_hit(error):
            return describe_failure(self.name, error)
        if not self.limit_reached:
            self.limit_reached = True
            changed = self._last_guard.partition(": ")[2] or "unknown"
            logger.warning(
                "%s: %d compiled variants, the limit; what changed last: %s. New shapes run eager; set cache_limit higher "
                "or dynamic to true.",
                self.name,
                self.settings.variant_limit,
                changed.partition("  #")[0].strip().rstrip("."),
            )
        return None

    def count_variant(self, shapes: tuple, call: object, made: bool) -> None:
        """A block has had code made, or found it: give up on a patch that needs another one in each call of the model."""
        if made:
            self._variants[shapes] += 1
            self._made_in = weakref.ref(call)
            if self._variants[shapes] > PATCH_VARIANTS:
                self.too_many_variants()
        elif self._made_in() is not call:  # that of other blocks in the same call is no use yet
            self._variants.pop(shapes, None)

    def too_many_variants(self) -> None:
        if self.failure is None:
            cure = "Other blocks and runs without this patch stay compiled."
            reason = f"compiled {PATCH_VARIANTS + 1} times for the same shapes."
            self.give_up(Failure(self.name, reason, cure, self._last_guard or "unknown"))

    @property
    def _last_guard(self) -> str:
        return self.stats.recompiles[-1].guard if self.stats.recompiles else ""
