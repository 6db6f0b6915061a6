"""CUDA graphs without a GPU: all decisions are the real ones, a captured call runs the model again with the inputs given."""

import torch
from torch.utils import _pytree as pytree


class Again:
    """Stands in for a captured graph."""

    def __init__(self, run):
        self.run = run

    def replay(self, tensors):
        return self.run(tensors)


def capture_again(engine, monkeypatch):
    """From here on nothing else tells this machine from one with a GPU."""

    def capture(self, key, forward, leaves, spec, tensors, fixed):
        def run(given):
            given = iter(given)
            args, kwargs = pytree.tree_unflatten(
                [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
            )
            return forward(*args, **kwargs, **fixed)

        self.captures += 1
        self.graphs[key] = Again(run)
        return self.graphs[key]

    monkeypatch.setattr(engine("cuda_graphs.capture").ModelGraphs, "_capture", capture)
    # On a CPU the wrapper leaves graphs alone; here everything but the capture is as on a GPU.
    monkeypatch.setattr(engine("host.graphs.policy"), "no_graphs", lambda device: None)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", True)
