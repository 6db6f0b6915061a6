"""Run some layers of a compiled block eager: the classic way to compile around weights that move.

As musubi-tuner and sd-scripts do it for block swap: the Linear layers break the graph, the rest of the block is compiled.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from ...forwards import exchanged


class EagerLayers:
    """Some layers of one block, kept out of its graphs while it runs.

    Args:
        layers: whose forward stays eager.
    """

    def __init__(self, layers: list[nn.Module]):
        self._eager = [(layer, torch.compiler.disable(layer.forward)) for layer in layers]
        self._scopes = ExitStack()

    def place(self) -> None:
        self._scopes.enter_context(exchanged(dict(self._eager)))

    def release(self) -> None:
        self._scopes.close()

    def drop(self) -> None:
        """Nothing is fetched ahead."""


def linears(block: nn.Module) -> list[nn.Module]:
    """The layers that hold most weights; by name, since quantised ones are no nn.Linear (comfy/ops.py)."""
    return [m for m in block.modules() if type(m).__name__.endswith("Linear")]
