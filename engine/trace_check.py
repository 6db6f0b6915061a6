"""Code that another process has made is compared with eager before it is used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import _pytree as pytree

# Relative. Two ways to round differ by less than half of this over a whole image (benchmarks/results), code of another block or
# with another constant by far more.
TOLERANCE = 0.02


def error_of(made: Callable, eager: Callable, args: tuple, kwargs: dict) -> float:
    """How far two functions are apart for one call: relative, the largest of all tensors that they return or change.

    Both get copies of all tensors, lists and dicts, so the caller's stay as they are, and random generators as well.

    Returns:
        Infinity where shapes, types or other values differ.

    Raises:
        Exception: of any kind, as the functions do; out of memory, which copies of one call's arguments need.
    """
    wanted, wanted_form = pytree.tree_flatten(_run(eager, args, kwargs))
    found, found_form = pytree.tree_flatten(_run(made, args, kwargs))
    if wanted_form != found_form:
        return float("inf")
    return max(map(_error, found, wanted), default=0.0)


def _run(function: Callable, args: tuple, kwargs: dict) -> tuple[object, object]:
    """The result of a call on copies, and the copies after it, without the tensors that it has not changed."""
    copies: dict[int, torch.Tensor] = {}
    given: dict[int, torch.Tensor] = {}

    def copied(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:  # code may rely on two arguments being one
            copy = copies[id(leaf)] = copy_in_layout(leaf)
            given[id(copy)] = leaf
        return copies[id(leaf)]

    def changed(leaf: object) -> object:
        return None if id(leaf) in given and torch.equal(leaf, given[id(leaf)]) else leaf

    args, kwargs = pytree.tree_map(copied, (args, kwargs))
    devices = {t.device for t in copies.values() if t.device.type not in ("cpu", "mps")}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([d.index for d in devices], device_type=kind):
        result = function(*args, **kwargs)
    return result, pytree.tree_map(changed, (args, kwargs))


def copy_in_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, be it expanded or cut out of a larger tensor: compiled code asserts them."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or not tensor.numel():
        return tensor.detach().clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((reach,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _error(found: object, wanted: object) -> float:
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        plain = type(found) is type(wanted) and isinstance(wanted, bool | int | float | str | None)
        return 0.0 if found is wanted or (plain and found == wanted) else float("inf")
    if (found.shape, found.dtype, found.device) != (wanted.shape, wanted.dtype, wanted.device):
        return float("inf")
    if torch.equal(found, wanted):
        return 0.0
    if not wanted.is_floating_point():
        return float("inf")
    if wanted.itemsize == 1:  # float8 has no arithmetic
        found, wanted = found.float(), wanted.float()
    error = torch.linalg.vector_norm(found - wanted, dtype=torch.float32) / torch.linalg.vector_norm(
        wanted, dtype=torch.float32
    )
    return float("inf") if error.isnan() else float(error)
