"""A custom node file: in a server on a CPU everything but the capture of CUDA graphs is as on a GPU; a replay calls again."""

import importlib
import sys

import torch
from torch.utils import _pytree as pytree


class Again:
    def __init__(self, run):
        self.replay = run


def capture(self, key, forward, leaves, spec, tensors, fixed):
    def run(given):
        given = iter(given)
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        return forward(*args, **kwargs, **fixed)

    self.captures += 1
    self.graphs[key] = Again(run)
    return self.graphs[key]


def stand_in():
    engine = next(name for name in sys.modules if name.endswith(".engine.cuda_graphs.capture")).removesuffix(
        "cuda_graphs.capture"
    )
    importlib.import_module(engine + "cuda_graphs.capture").ModelGraphs._capture = capture
    importlib.import_module(engine + "host.graphs.policy").no_graphs = lambda _device: None
    importlib.import_module(engine + "host.model.network_calls").imports_beside_calls = lambda _device: True
    importlib.import_module(engine + "settings").CompileSettings.wants_graphs = True
    ownership = importlib.import_module(engine + "ownership")
    told = ownership.pack_of_file
    ownership.pack_of_file = lambda file: None if file == __file__ else told(file)


class StandIn:
    """The model as it is; with the first prompt the stand-in begins, as the packs are loaded in any order."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "begin"
    CATEGORY = "tests"

    def begin(self, model):
        stand_in()
        return (model,)


NODE_CLASS_MAPPINGS = {"StandIn": StandIn}
