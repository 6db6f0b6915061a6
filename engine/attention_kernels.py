"""Choose the attention kernel of compiled blocks, through ComfyUI's `optimized_attention_override`.

ComfyUI asks PyTorch for flash attention first (comfy/ops.py); on Hopper cuDNN's kernel is nearly twice as fast. The fastest
kernel depends on card, shape and dtype, so `auto` measures them once on the model's own calls.
"""

import functools
import operator
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from .errors import InvalidSetting
from .log import logger
from .tensor_spec import TensorSpec
from .torch_compat import attention, private

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Name -> the kernels that PyTorch tries, in this order. Never one kernel alone: that would switch the others off for the whole
# process, in which other threads lower graphs and call other models.
PRIORITIES = {
    name: [first, *(kernel for kernel in KERNELS.values() if kernel is not first), SDPBackend.MATH]
    for name, first in KERNELS.items()
}
# The host's only function whose kernel may be replaced. With any other function, the user has chosen a kernel (sage, xformers).
HOST_FUNCTION = "attention_pytorch"
# The largest batch that PyTorch's flash attention can launch (70,000: "CUDA error: invalid argument" on an H100). The host
# splits larger ones (comfy/ldm/modules/attention.py, SDP_BATCH_LIMIT).
_MOST_IN_BATCH = 2**15
# The choice if a checkpoint asks the host for a particular attention.
CHECKPOINT = "checkpoint"
# A kernel must take less than this share of flash attention's time: a smaller gain is noise.
_WORTHWHILE = 0.95
_REPEATS = 5
# For how many cycles the GPU sleeps: about 5 ms, longer than launching all calls takes. Doubled if that was too short.
_CYCLES = 10_000_000
_ATTEMPTS = 7
# The costliest calls are measured, up to this share of the arithmetic of all calls.
_SHARE = 0.9
# Channels per head for which cuDNN has kernels. For other widths it compiles one for each shape and thread, a quarter of a
# second each: SD 1.5's first image took 1.5 times as long, to save half a millisecond a step.
_READY_WIDTHS = {64, 128}
# The most tokens in the calls of `prepare`, to save memory. On an H200, 64 tokens load cuDNN in 1.1 s, and 4,608 in 0.5 s more;
# numbers between were not measured.
_PREPARED_TOKENS = 1024


def override_with(priority: list[SDPBackend]) -> Callable:
    """An override that tries these kernels in their order, and raises RuntimeError where none of them can run."""

    def override(func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if not _may_be_exchanged(func, q, kwargs):
            return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)
        q, k, v, mask = _as_sdpa(q, k, v, heads, mask, skip_reshape)
        with sdpa_kernel(priority, set_priority=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
        return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])

    override.__dict__["reads_no_options"] = True  # for transformer_options/filter.py
    override.__name__ = f"attention_{priority[0].name.removesuffix('_ATTENTION').lower()}"
    return override


def _may_be_exchanged(func: Callable, q: torch.Tensor, options: dict) -> bool:
    return func.__name__ == HOST_FUNCTION and not options.get("enable_gqa", False) and q.shape[0] <= _MOST_IN_BATCH


def _as_sdpa(q, k, v, heads, mask, skip_reshape):
    """Reshape q, k, v to `[batch, heads, tokens, width]`; give the mask batch and heads (comfy/ldm/modules/attention.py)."""
    if not skip_reshape:
        q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.ndim == 2 else mask
        mask = mask.unsqueeze(1) if mask.ndim == 3 else mask
    return q, k, v, mask


@functools.cache  # guards compare functions by identity
def override_for(choice: str) -> Callable | None:
    """The override that prefers the kernel `choice`, a result of `AttentionSurvey.best`; None if `choice` is no kernel."""
    return override_with(PRIORITIES[choice]) if choice in PRIORITIES else None


def in_words(choice: str) -> str:
    return {"comfyui": "the kernel ComfyUI uses", CHECKPOINT: "the one that the checkpoint asks for"}.get(choice, choice)


# Queries, keys, values, mask, and the scale.
_Call = tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec | None, float | None]


@dataclass
class AttentionSurvey:
    """An override for one eager call of a model that records its attention calls; `best` times the kernels on those.

    Args:
        wanted: a kernel that must be able to run the calls, or `auto`.
        complete: False if `best` could not measure: there were no calls, memory was short, or the machine was too busy.
        was_asked: the model has called the host's attention.
    """

    wanted: str
    calls: Counter[_Call] = field(default_factory=Counter)
    complete: bool = True
    was_asked: bool = False

    def __call__(
        self, func, q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs
    ):
        self.was_asked = True
        if _may_be_exchanged(func, q, kwargs):
            tensors = _as_sdpa(q, k, v, heads, mask, skip_reshape)
            call: Any = (*(None if t is None else TensorSpec.of(t) for t in tensors), kwargs.get("scale"))
            if self.wanted != "auto" and call not in self.calls:
                self._check(*tensors)
            self.calls[call] += 1
        return func(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> None:
        with sdpa_kernel(PRIORITIES[self.wanted], set_priority=True):
            if not _can_run(self.wanted, q, k, v, mask):
                shape = "x".join(map(str, q.shape))
                why = f"this card cannot run it for {shape} {q.dtype}; set attention to auto."
                raise InvalidSetting("attention", self.wanted, why)

    def prepare(self) -> bool:
        """Load kernels that calls like the recorded ones may use, by calls with small tensors, on any thread and while a model
        may be sampling. Returns whether any were loaded."""
        some = False
        for queries, keys, _values, _mask, scale in _costliest(self.calls) if self._suits_cudnn() else ():
            shapes = [(1, spec.shape[1], min(spec.shape[2], _PREPARED_TOKENS), spec.shape[3]) for spec in (queries, keys, keys)]
            with suppress(RuntimeError):  # no memory
                q, k, v = (torch.zeros(shape, dtype=queries.dtype, device=queries.device) for shape in shapes)
                if _can_run("cudnn", q, k, v, None):
                    with attention.WithoutPlans():
                        attention.cudnn_attention(q, k, v, scale=scale)  # `sdpa_kernel` would switch the other kernels off
                    some = True
        return some

    def _suits_cudnn(self) -> bool:
        return {call[0].shape[-1] for call in self.calls} <= _READY_WIDTHS

    def best(self) -> str:
        """The kernel with the least time over the costliest calls; `comfyui` if none takes clearly less than the host's own.

        A call that the chosen kernel cannot run (a short prompt) goes to the next in `PRIORITIES`, as the host does.
        """
        if self.wanted != "auto":
            return self.wanted
        chosen = _costliest(self.calls)
        if not chosen:
            self.complete = False
            return "comfyui"
        ready = self._suits_cudnn()
        try:
            measured = {name: [_measure(name, call) for call in chosen] for name in KERNELS if ready or name != "cudnn"}
        except (torch.OutOfMemoryError, _NotMeasured) as error:
            reason = "the machine is too busy" if isinstance(error, _NotMeasured) else "there is no memory left for it"
            logger.info("attention is not measured this time, %s: ComfyUI's own is used", reason)
            self.complete = False
            return "comfyui"
        totals = {name: sum(map(operator.mul, chosen.values(), seconds)) for name, seconds in measured.items()}
        fastest = min(totals, key=totals.__getitem__)
        if totals[fastest] == float("inf") or totals[fastest] >= _WORTHWHILE * totals["flash"]:
            return "comfyui"
        return fastest


def _costliest(calls: Counter[_Call]) -> dict[_Call, int]:
    """The calls that make up most of the work. Other calls are not measured, as cuDNN's plan takes far longer than the call."""

    def work(call: _Call) -> int:
        (batch, heads, tokens, width), keys = call[0].shape, call[1].shape[2]
        return calls[call] * batch * heads * tokens * width * keys

    total, covered, chosen = sum(map(work, calls)), 0, {}
    for call in sorted(calls, key=work, reverse=True):
        if covered >= _SHARE * total:
            break
        chosen[call] = calls[call]
        covered += work(call)
    return chosen


class _NotMeasured(Exception):
    """The machine was too busy."""


def _can_run(kernel: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    asked = getattr(torch.backends.cuda, f"can_use_{kernel}_attention")
    return asked(torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, False, False))


def _measure(kernel: str, call: _Call) -> float:
    """Time one call, in seconds; infinite if the kernel cannot run the call. Raises _NotMeasured."""
    *specs, scale = call
    try:
        with torch.cuda.device(call[0].device), sdpa_kernel(PRIORITIES[kernel], set_priority=True):
            q, k, v, mask = (None if spec is None else spec.zeros() for spec in specs)
            if not _can_run(kernel, q, k, v, mask):
                return float("inf")
            attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, attn_mask=mask, scale=scale)
            attend()
            seconds = _seconds_on_gpu(attend)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return float("inf")
    if seconds is None:
        raise _NotMeasured
    return seconds


def _seconds_on_gpu(function: Callable[[], object]) -> float | None:
    """The seconds that one call takes on the GPU, the lesser of two rounds; None if the calls were never launched in time.

    All calls are launched while the GPU sleeps. If the GPU wakes too early, another thread has kept this one from launching,
    and the result would be the time of launching: small kernels would all look alike, and any could win.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles, rounds = _CYCLES, []
    for _ in range(_ATTEMPTS):
        private.sleep_on_gpu(cycles)
        begin.record()
        for _ in range(_REPEATS):
            function()
        end.record()
        in_time = not begin.query()
        end.synchronize()
        if in_time:
            rounds.append(begin.elapsed_time(end) / 1000 / _REPEATS)
            if len(rounds) == 2:
                break
        else:
            cycles *= 2
    return min(rounds, default=None)
