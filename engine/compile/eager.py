"""Decide which calls of blocks run eager, and why; `ModelCode.eager_in_words` words the reasons for reports.

Before a call of the model, `Binding` leaves out blocks that another node has given a forward (`Taken`), `choose`
(blocks/convolutions.py) leaves out others, and a block that cannot be looked at gets no group (`ModelCode.look`). In the call
`why_eager` decides. Not decided here: while a graph has no code yet, it runs operator by operator (traced_graph.py).
"""

import enum
from typing import Any, NamedTuple

import torch
from torch import nn

from ..background.model_call import ModelCall
from ..devices import is_capturing
from ..ownership import TORCH_COMPILE
from ..transformer_options.arguments import is_given_an_object

# After so many seconds of tracing in one call of the model, or in one sampling run, no other trace begins. So whatever other
# nodes do, a step gets longer by at most that time and one trace (LTX-AV's block: 13 s on two slow cores; all of Flux: 2.3 s).
CALL_SECONDS, RUN_SECONDS = 4.0, 20.0


class Eager(enum.Enum):
    """Why a block runs eager."""

    CONVOLUTIONS = enum.auto()  # `choose` has left out the block
    SMALL = enum.auto()  # compiling the block would save little
    FILLS_CACHE = enum.auto()  # an argument fills a cache, and each block would need a graph of its own
    FAILED = enum.auto()  # the block could not be compiled
    LIMIT = enum.auto()  # one more shape would need one more variant than `cache_limit` allows
    CAPTURING = enum.auto()  # a CUDA graph is being captured, and nothing may be traced
    TRACE_TIME = enum.auto()  # no trace may begin: tracing took too long in this model call or run, or would not pay yet


class Taken(NamedTuple):
    """Blocks of one class that run another node's forward, or that another node compiles."""

    class_name: str
    forward: str  # a result of `named_origin`
    blocks: int

    @property
    def block(self) -> str:
        return f"{self.blocks} {self.class_name}"

    @property
    def is_compiled(self) -> bool:
        return self.forward == TORCH_COMPILE

    def message(self) -> str:
        if self.is_compiled:
            return f"{self.block} are left as they are: another node compiles them; remove one of the two."
        return f"{self.block} run uncompiled: another node has replaced their forward by {self.forward}."


def why_eager(group: Any, block: nn.Module, call: ModelCall, args: tuple, kwargs: dict, shapes: tuple) -> Eager | None:
    """Why a call of `block` runs eager; None: the call runs the code of `group`, or traces.

    Args:
        group: the `BlockGroup` (group.py imports this module).
    """
    if call.effort is not None and call.effort.is_too_small(block, args):
        return Eager.SMALL
    if is_given_an_object(args, kwargs):
        return Eager.FILLS_CACHE
    if group.failure_now is not None:
        return Eager.FAILED
    if group.has_run(shapes):
        return None
    if group.code.limit_reached and group.settings.dynamic == "false":
        return Eager.LIMIT
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and is_capturing(first.device):
        return Eager.CAPTURING
    return None if group.code.has_code or call.may_trace else Eager.TRACE_TIME
