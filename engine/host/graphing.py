"""Run the host's diffusion model through CUDA graphs where that is safe, and say why where it is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..block_options import BOOKKEEPING, keys_read
from ..graphs import ModelGraphs, graphs_of
from ..per_model import PerModel
from .paging import AllPages, address_of

logger = logging.getLogger("torch-compile-kit")
# Entries that no code below `apply_model` can depend on but through the patcher's own machinery.
_MACHINERY = frozenset({"wrappers", "callbacks", "patches", "patches_replace"})


def has_graphs(device: torch.device) -> bool:
    """Whether work on `device` can be captured."""
    return device.type == "cuda"


@contextmanager
def graphed(network: nn.Module, blocks_are_plain: bool, notes: list[str]) -> Iterator[None]:
    """While it lasts, calls of `network` are captured and replayed.

    Args:
        blocks_are_plain: all blocks run their own forward, with weights that stay where they are, or in pages.
        notes: gets the reason when a call cannot be captured.
    """
    if not blocks_are_plain or "forward" in network.__dict__:
        _note(notes, "CUDA graphs are off: weights move, or another node replaces parts of the model.")
        yield
        return
    graphs = graphs_of(network)
    graphs.check_model(network, address_of)
    pages = pages_of(network)
    forward = network.forward

    def run(*args, transformer_options=None, **kwargs):
        options = transformer_options or {}
        reason = _obstacle(network, options)
        if reason:
            _note(notes, f"CUDA graphs are off: {reason}.")
            return forward(*args, transformer_options=options, **kwargs)
        with _kept(pages, graphs) as present:
            if graphs.crowded:
                _note(notes, "CUDA graphs are off: the weights do not all fit into the memory that is free.")
            return graphs.call(_key(network, options), forward, args, kwargs, {"transformer_options": options}, present)

    network.__dict__["forward"] = run
    try:
        yield
    finally:
        network.__dict__.pop("forward", None)


@contextmanager
def _kept(pages: AllPages, graphs: ModelGraphs) -> Iterator[bool]:
    """Keep the weights in memory during a call; yields whether they are there."""
    present = not pages or pages.pin()
    graphs.absences = 0 if present else graphs.absences + 1
    graphs.crowded = graphs.absences > 1 or (graphs.crowded and not present)
    if graphs.crowded and graphs.graphs:
        graphs.drop()  # their memory is better used for weights
    replays = graphs.replays
    try:
        yield present
    finally:
        if pages and graphs.replays == replays:
            pages.learn()
        if pages and present:
            pages.unpin()


pages_of = PerModel(AllPages)


def forget_graphs(network: nn.Module, unpatch_all: bool = True) -> None:
    """The host detaches a patcher; when it unloads the model with it, the graphs' memory is wanted elsewhere."""
    if unpatch_all:
        graphs_of(network).drop()


def new_run(network: nn.Module, *_: object) -> None:
    """A sampling run begins: the host has loaded the model, weights may have moved since the last."""
    graphs = graphs_of(network)
    graphs.new_run()
    if any(getattr(m, "weight_function", None) or getattr(m, "bias_function", None) for m in network.modules()):
        graphs.obstacle = "another node changes weights on their way to a layer"
    pages_of(network).new_run(network)
    _read(network)  # now, while the blocks have their own forwards


def graphs_summary(graphs: ModelGraphs) -> list[str]:
    """For the report."""
    lines = [f"CUDA graphs: {len(graphs.graphs)} captured"] if graphs.captures else []
    return lines + [f"CUDA graph not captured: {reason}" for reason in set(graphs.failures.values())]


def _obstacle(network: nn.Module, options: dict) -> str | None:
    """Why a replay might not do what a call does."""
    if options.get("wrappers", {}).get("diffusion_model"):
        return "another node wraps the model"
    if any(options.get("patches", {}).values()) or any(options.get("patches_replace", {}).values()):
        return "the model is patched"
    read = _read(network) & {"sigmas", "sample_sigmas", "uuids"}
    if read:
        return f"the model reads {', '.join(sorted(read))}"
    if any(isinstance(v, torch.Tensor) for k, v in options.items() if k not in BOOKKEEPING):
        return "an option holds a tensor"
    return graphs_of(network).obstacle


def _key(network: nn.Module, options: dict) -> tuple:
    """What of the options a call depends on."""
    return tuple(
        (name, id(value) if callable(value) else repr(value))
        for name, value in options.items()
        if name not in _MACHINERY and (name not in BOOKKEEPING or name in _read(network))
    )


_keys: dict[type, frozenset[str]] = {}


def _read(network: nn.Module) -> frozenset[str]:
    cls = type(network)
    if cls not in _keys:
        _keys[cls] = keys_read(network)
    return _keys[cls]


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)
        logger.info("%s", text)
