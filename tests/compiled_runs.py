"""Count how often compiled code runs, block by block: from PyTorch's side, not from the engine's statistics."""

from collections import Counter
from contextlib import contextmanager

import torch


class CompiledRuns:
    """PyTorch's backend `eager`, which runs a traced graph as it is, with a count of the graphs and of their runs.

    A run belongs to a block if a weight of that block is among the inputs of the graph.
    """

    def __init__(self):
        self.graphs = 0
        self._inputs = []

    @contextmanager
    def installed(self):
        """While it lasts, code for the backend `eager` is counted."""
        self._eager = torch._dynamo.lookup_backend("eager")
        backends = torch._dynamo.backends.registry._COMPILER_FNS
        backends["eager"] = self._backend
        try:
            yield self
        finally:
            backends["eager"] = self._eager

    def _backend(self, graph, example_inputs, **options):
        compiled = self._eager(graph, example_inputs, **options)
        self.graphs += 1

        def run(*args):
            self._inputs.append({id(a) for a in args if isinstance(a, torch.Tensor)})
            return compiled(*args)

        return run

    _backend._tags = ()  # PyTorch asks every registered backend for its tags

    def clear(self):
        """Forget all runs, not the graphs."""
        self._inputs.clear()

    def by_block(self, model, class_names):
        """Runs since `clear`, by the path of each block of these classes; also of blocks without any."""
        blocks = {path: block for path, block in model.named_modules() if type(block).__name__ in class_names}
        owner = {id(p): path for path, block in blocks.items() for p in block.parameters()}
        found = Counter(dict.fromkeys(blocks, 0))
        for inputs in self._inputs:
            found.update({owner[i] for i in inputs if i in owner})
        return dict(found)
