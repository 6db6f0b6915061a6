"""Make the request for the code of a graph, and the name under which the code is kept."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..cache.environment import environment
from ..log import logger
from ..tensor_spec import hint, is_symbol
from ..torch_compat import private
from . import lowering_settings, wire
from .client import compile_process


@dataclass(frozen=True)
class Request:
    """All that determines the code of a graph.

    Args:
        text: for the compile process, as JSON.
        key: SHA-256 of the text and of the versions and the device here, without the sizes that the symbols had: code for one
            size fits others.
        sizes: those that the sizes among the inputs had, for the guards that lowering adds.
    """

    text: str
    key: str
    sizes: tuple[int, ...]
    device: torch.device


def request_for(graph: fx.GraphModule, fakes: Sequence[Any], options: dict[str, Any], device: torch.device) -> Request:
    """Called where the graph is traced.

    Raises:
        wire.CannotTravel: what of the graph has no form for another process.
    """
    if any(isinstance(fake, torch.Tensor) and fake.requires_grad for fake in fakes) and torch.is_grad_enabled():
        raise wire.CannotTravel("it has a backward")
    described = wire.dumps(graph, fakes)
    if described["sources"] or any(map(_is_custom, graph.graph.nodes)):  # layouts are found by names that such modules register
        digests = {module: wire.digest_of(module) for module in compile_process.modules()}
        described["sources"] |= {module: digest for module, digest in digests.items() if digest is not None}
    try:
        text = json.dumps({"graph": described, "settings": lowering_settings.now(device), "options": options})
    except TypeError as error:
        raise wire.CannotTravel(f"its options are no text ({error})") from error
    symbols = [[positive, lower, upper] for positive, _hint, lower, upper in described["symbols"]]
    named = {"graph": {**described, "symbols": symbols}, "settings": lowering_settings.now(device), "options": options}
    key = hashlib.sha256(json.dumps([named, environment()], sort_keys=True).encode()).hexdigest()
    return Request(text, key, tuple(hint(fake) for fake in fakes if is_symbol(fake)), device)


def _is_custom(node: fx.Node) -> bool:
    return isinstance(node.target, private.OpOverload) and node.target.namespace != "aten"


def holds(guards: str | None, sizes: Sequence[int]) -> bool:
    """Whether the guards of code hold for sizes among the inputs; not if they cannot be evaluated."""
    try:
        return guards is None or bool(private.ShapeEnv().evaluate_guards_expression(guards, list(sizes)))
    except Exception as error:
        logger.debug("guards of kept code: %s", error)
        return False
