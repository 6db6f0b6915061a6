"""A VAE whose images lie channels_last in memory while it decodes and encodes, where that is faster.

cuDNN's convolutions for 16-bit numbers want that layout and else convert at each call. Nothing is compiled: compiling the whole
decoder gave less and took a minute (benchmarks/results/h200-2026-11-23-vae.json at b2f2b61).
"""

from __future__ import annotations

import copy
import logging
import time
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP
from torch import nn

from ...blocks.channels_last import DTYPES, run_channels_last
from ...errors import InvalidSetting
from ...failures.describe import never_swallowed
from ...forwards import is_of_class
from ...notices.status import Line
from ...notices.words import told
from ...torch_compat import private
from ..adapter import forbids_threads
from ..graphs.norm_kernels import kernels, norm_kernels

KEY = "torch-compile-kit"
logger = logging.getLogger(KEY)
# What of a VAE's network the host calls (comfy/sd.py), by the word for it.
FUNCTIONS = {"decode": "decoding", "encode": "encoding", "decode_tiled": "decoding", "encode_tiled": "encoding"}

# The ways of the first calls of a shape: the plain one first, for which nobody waits, and each once before it is timed.
TURNS = (False, True, True, False)
# Taken only where it needs at most this share of the plain way's time.
WORTH = 0.95
_TEXTS: dict[str, tuple[Callable[..., list], Callable[..., list]]] = {
    "decoding": (lambda *values: told("decodingFaster", *values), lambda *values: told("decodingSame", *values)),
    "encoding": (lambda *values: told("encodingFaster", *values), lambda *values: told("encodingSame", *values)),
}


class Timer:
    """Seconds on the device between two moments of its stream, once it has passed both; the CPU is not made to wait."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list = [self._mark()]

    def _mark(self) -> object:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._marks.append(self._mark())

    def seconds(self) -> float | None:
        """None: it is not there yet, or the call ended with an error."""
        if len(self._marks) < 2:
            return None
        begin, end = self._marks
        if not self._on_gpu:
            return end - begin
        return begin.elapsed_time(end) / 1000 if end.query() else None


@dataclass
class _Shape:
    turn: int = 0
    timers: dict[bool, Timer] = field(default_factory=dict)


@dataclass
class Trial:
    """Plain, other, other, plain: then the faster way, for all shapes.

    Args:
        other: whether the other way is taken; None: not known yet.
        plain_seconds, other_seconds: what decided.
        timer: starts a `Timer`.
    """

    timer: Callable[[], Timer]
    other: bool | None = None
    plain_seconds: float = 0.0
    other_seconds: float = 0.0
    _shapes: dict[Hashable, _Shape] = field(default_factory=dict)

    def next(self, shape: Hashable, possible: bool) -> bool:
        """Whether this call goes the other way.

        Args:
            possible: it can; else its turn comes later.
        """
        if self.other is None:
            self._decide()
        if self.other is not None:
            return self.other and possible
        seen = self._shapes.setdefault(shape, _Shape())
        return possible and seen.turn < len(TURNS) and TURNS[seen.turn]

    @contextmanager
    def timed(self, shape: Hashable, way: bool) -> Iterator[None]:
        """Around that call; one that ends with an error is not counted."""
        seen = self._shapes.get(shape)
        if self.other is not None or seen is None or seen.turn >= len(TURNS) or TURNS[seen.turn] != way:
            yield
            return
        timer = self.timer()
        yield
        timer.stop()
        seen.timers[way] = timer  # the second of each way replaces the first
        seen.turn += 1

    def give_up(self) -> None:
        """The other way does not work here."""
        self.other = False
        self._shapes.clear()

    def _decide(self) -> None:
        for seen in self._shapes.values():
            if seen.turn < len(TURNS):
                continue
            plain, other = (seen.timers[way].seconds() for way in (False, True))
            if plain is not None and other is not None:
                self.plain_seconds, self.other_seconds = plain, other
                self.other = other <= WORTH * plain
                self._shapes.clear()
                return


class LaidOut:
    """One function of a VAE's network, in whichever layout is faster.

    Args:
        name: of `FUNCTIONS`.
        function: of the network, as it was. A method is held without the network, on which this object is set: a circle would
            keep that in memory until garbage is collected.
        device: where the VAE runs.
        line: of the node in the page.
    """

    def __init__(self, name: str, function: Callable, device: torch.device, line: Line):
        self._function = weakref.WeakMethod(function) if isinstance(function, types.MethodType) else lambda: function
        self._word, self.line = FUNCTIONS[name], line
        self.trial = Trial(lambda: Timer(device))
        self._told = False
        self._too_large: set[tuple] = set()

    @property
    def function(self) -> Callable:
        function: Any = self._function()  # alive: this is called as its network's method
        return function

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> object:
        shape = (tuple(x.shape), x.dtype)
        # Our kernels have no backward.
        possible = x.dtype in DTYPES and norm_kernels.ready and not torch.is_grad_enabled() and shape not in self._too_large
        way = self.trial.next(shape, possible)
        self._tell()
        why = None
        if way:
            try:
                with self.trial.timed(shape, True):
                    return run_channels_last(kernels(), self.function, (x, *args), kwargs, video=True)
            except comfy.model_management.InterruptProcessingException:
                raise
            except Exception as error:
                why = "" if never_swallowed(error) else f"{type(error).__name__}: {error}"
        with self.trial.timed(shape, False):
            result = self.function(x, *args, **kwargs)
        if why:  # an error of the call's own would have come again
            self.trial.give_up()
            logger.warning("VAE: %s channels last failed, runs as without this pack from now on (%s)", self._word, why)
        elif why is not None:
            self._too_large.add(shape)
            logger.warning("VAE: no memory for %s channels last, images of this size run as without this pack", self._word)
        return result

    def _tell(self) -> None:
        """Once it is known."""
        trial = self.trial
        if self._told or trial.other is None or not trial.plain_seconds:
            return
        self._told = True
        before, now = f"{trial.plain_seconds:.3f}", f"{trial.other_seconds:.3f}"
        share = f"{1 - trial.other_seconds / trial.plain_seconds:.0%}"
        texts = _TEXTS[self._word]
        self.line.put(self._word, texts[0](share, before, now) if trial.other else texts[1](before, now), good=trial.other)


def attach_vae(vae: Any, node: str | None = None) -> Any:
    """The VAE with its functions laid out; the one given stays as it is, its weights are shared.

    Args:
        vae: of the host (comfy.sd.VAE).
        node: whose line in the page tells what was found.

    Raises:
        InvalidSetting: it is no VAE of the host.
    """
    network: Any = getattr(vae, "first_stage_model", None)
    patcher: Any = getattr(vae, "patcher", None)
    if not isinstance(network, nn.Module) or not hasattr(patcher, "add_object_patch"):
        raise InvalidSetting("vae", vae, "connect a VAE, such as that of Load VAE.")
    found = copy.copy(vae)
    found.torch_compile_kit_line = line = Line(node)
    reason = left_alone(vae)
    if reason is not None:
        line.put("decoding", told("vaeLeft", reason))
        return found
    prepare_kernels(vae.device)
    found.patcher = patcher.clone()
    found.patcher.remove_callbacks_with_key(CallbacksMP.ON_CLONE, KEY)
    found.patcher.add_callback_with_key(CallbacksMP.ON_CLONE, KEY, _bind_to_copy)
    found.patcher.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
    found.patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _forget_own_methods)
    for name in FUNCTIONS:
        function = patcher.object_patches.get(name) or getattr(network, name, None)
        if isinstance(function, LaidOut):  # of a node before
            function = function.function
        if callable(function):
            found.patcher.add_object_patch(name, LaidOut(name, function, vae.device, line))
    line.put("decoding", told("vaeReady"))
    return found


def prepare_kernels(device: torch.device) -> None:
    """Have them made, if a thread may."""
    if not forbids_threads():
        norm_kernels.prepare(device)


def _bind_to_copy(patcher: Any, clone: Any) -> None:
    """An ON_CLONE callback: a clone may have a network of its own (comfy/sd.py, `deepclone_multigpu`)."""
    if clone.model is patcher.model:
        return
    for name in FUNCTIONS:
        laid_out = clone.object_patches.get(name)
        if isinstance(laid_out, LaidOut):
            clone.add_object_patch(name, LaidOut(name, getattr(clone.model, name), clone.load_device, laid_out.line))


def _forget_own_methods(patcher: Any, *_: object) -> None:
    """An ON_DETACH callback, also called when a patcher is freed: taking ours back, the host leaves a method on its network,
    which keeps that in memory until garbage is collected."""
    for name in FUNCTIONS:
        if is_of_class(patcher.model, name, vars(patcher.model).get(name)):
            delattr(patcher.model, name)


def left_alone(vae: Any) -> list | None:
    """Why such a VAE runs as it is (see `words.told`); None: it need not."""
    if vae.device.type != "cuda" or kernels() is None:
        return told("vaeNoGpu")
    if vae.vae_dtype not in DTYPES:
        return told("vaeWide", str(vae.vae_dtype).removeprefix("torch."))
    compiled = (
        isinstance(m, private.OptimizedModule) or m._compiled_call_impl is not None for m in vae.first_stage_model.modules()
    )
    return told("vaeCompiled") if any(compiled) else None
