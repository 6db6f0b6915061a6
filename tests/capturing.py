"""CUDA graphs without a GPU: all decisions are the real ones, and a graph is what it is, operations on fixed memory."""

from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Again:
    """Stands in for a captured graph: runs the model again."""

    def __init__(self, run):
        self.run = run

    def replay(self, tensors):
        return self.run(tensors)


def trust(engine, monkeypatch, *names):
    """Until the test ends what lies in test files of these names counts as the host's code."""
    ownership = engine("ownership")
    told = ownership.pack_of_file
    monkeypatch.setattr(ownership, "pack_of_file", lambda file: None if Path(file).name in names else told(file))


def capture_again(engine, monkeypatch):
    """From here on nothing else tells this machine from one with a GPU; what is captured runs again with the inputs given."""

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

    _as_on_a_gpu(engine, monkeypatch, capture)


def _as_on_a_gpu(engine, monkeypatch, capture):
    monkeypatch.setattr(engine("cuda_graphs.capture").ModelGraphs, "_capture", capture)
    # On a CPU the wrapper leaves graphs alone; here everything but the capture is as on a GPU.
    monkeypatch.setattr(engine("host.graphs.policy"), "no_graphs", lambda device: None)
    monkeypatch.setattr(engine("settings").CompileSettings, "wants_graphs", True)
    trust(engine, monkeypatch, "capturing.py", "paging.py")
    monkeypatch.setitem(engine("ownership").TRUSTED, "paging", "stands in for comfy_aimdo")


class Recorder(TorchDispatchMode):
    """Notes each operation with the memory that it reads and writes."""

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operations.append((func, *pytree.tree_map_only(torch.Tensor, _alias, (args, kwargs, out))))
        return out


def _alias(tensor):
    return tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor


class Recorded:
    """The operations of one call."""

    def __init__(self, inputs, operations, output):
        self.inputs, self.operations, self.output = inputs, operations, output

    def replay(self, tensors):
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        for func, args, kwargs, out in self.operations:
            new = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for place, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(new), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self.output)


def record(engine, monkeypatch):
    """As `capture_again`, but a replay does what was recorded: nothing that has changed since is in it."""

    def capture(self, key, forward, leaves, spec, tensors, fixed):
        static = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
        replacements = iter(static)
        copied = [next(replacements) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(copied, spec)
        with Recorder() as recorder:
            output = forward(*args, **kwargs, **fixed)
        self.captures += 1
        self.graphs[key] = Recorded(static, recorder.operations, output)
        return self.graphs[key]

    _as_on_a_gpu(engine, monkeypatch, capture)
