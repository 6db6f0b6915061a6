"""Lower a graph with PyTorch's inductor, with decompositions of the host's kernels.

Inductor cannot fuse a hand-written kernel with its neighbours, so that input and output of the kernel go through memory. If the
kernel saves no more than fusion does, a decomposition is faster: inductor makes one kernel of the norm and the rotary embedding
of queries and keys (docs/measurements.md, where the time goes).
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from ..torch_compat import private
from ..torch_settings import SharedScope, is_nvidia
from .persistent_reductions import in_one_pass

aten = torch.ops.aten
# Operator -> decomposition, out of place.
REPLACEMENTS: dict[Any, Callable] = {}


def inductor(graph: fx.GraphModule, example_inputs: Sequence, *, options: dict | None = None) -> Callable:
    """A backend of torch.compile: inductor with `options`; on NVIDIA's GPUs with REPLACEMENTS, and with eager's rounding."""
    if private.compile_fx is None:
        private.NAMES["compile_fx"].find()  # raises the error of the import, which may have a cure
    options = {**(_as_eager_rounds() if _has_replacements(example_inputs) else {}), **(options or {})}
    with in_one_pass(), replacements(example_inputs):
        return private.compile_fx.compile_fx(graph, example_inputs, config_patches=options)


def _has_replacements(inputs: Sequence) -> bool:
    on_nvidia = any(isinstance(t, torch.Tensor) and is_nvidia(t.device) for t in inputs)
    return on_nvidia and private.select_decomp_table is not None


def replacements(inputs: Sequence) -> AbstractContextManager:
    """A context in which inductor replaces the operators in `REPLACEMENTS`. Serialise artefacts within the context too:
    from PyTorch 2.15 on, an artefact names the function that gives the table."""
    return _table_scope.applied(table=_table_with_replacements) if _has_replacements(inputs) else nullcontext()


def _table_with_replacements() -> dict:
    """PyTorch's decompositions under the options in force (`fallback_random` removes some), and ours."""
    table = dict(private.select_decomp_table())
    exact = table.get(aten.gelu.default, aten.gelu)
    return table | {**REPLACEMENTS, aten.gelu.default: functools.partial(_gelu, exact)}


# PyTorch's cache key of a graph contains the name of the function that gives the table, so ours takes the name of PyTorch's.
_module, _, _name = private.NAMES["decomp_table_in_use"].path.partition(":")
_table_with_replacements.__module__, _table_with_replacements.__qualname__ = _module, _name
# If the table were passed as an argument, it would be part of that key from 2.15 on, and no graph would be kept on disk.
_table_scope = SharedScope({"table": private.switch("decomp_table_in_use", late=True)})


def _as_eager_rounds() -> dict:
    """The option of inductor to round to bf16 and fp16 where eager does.

    Fused operations otherwise keep fp32 in between, which moves results as far from eager's as another attention kernel would,
    and saves no time (docs/measurements.md).
    """
    name = "emulate_precision_casts"
    return {name: True} if hasattr(private.inductor_config, name) else {}


def needs_gradients(inputs: Sequence) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in inputs)


def _gelu(exact: Callable, x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """GELU by tanh, written with a sigmoid: (1 + tanh(z)) / 2 = sigmoid(2 z), for which GPUs have an instruction.

    libdevice's tanh takes longer than reading and writing the tensor.
    """
    if approximate != "tanh" or x.dtype not in (torch.bfloat16, torch.float16):
        return exact(x, approximate=approximate)
    y = x.float()
    return (y * torch.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))).to(x.dtype)
