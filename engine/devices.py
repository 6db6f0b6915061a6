"""Lock a device among threads, tell whether a graph is captured, and tell when a device has done its work."""

import collections
import threading
import time

import torch

from .torch_compat import private

# By device: held during a CUDA graph capture on the device, and by the worker while it loads kernels and publishes code for it.
gpu_locks: collections.defaultdict[torch.device, threading.Lock] = collections.defaultdict(threading.Lock)


def is_capturing(device: torch.device | None = None) -> bool:
    """Whether a CUDA graph is captured on the current stream; never on a `device` that is no GPU."""
    has_stream = torch.cuda.is_initialized() if device is None else device.type == "cuda"
    return has_stream and torch.cuda.is_current_stream_capturing()


def others_in_use(device: torch.device) -> list[torch.device]:
    """The other GPUs on which this process has had tensors since it was started. The host makes a context on all GPUs of a
    machine when it starts; asking a GPU without a context for its memory may make a context, which takes some hundred MiB."""
    index = torch.cuda.current_device() if device.index is None else device.index
    others = [i for i in range(torch.cuda.device_count()) if i != index]
    _used.update(i for i in others if i not in _used and _has_had_tensors(i))
    return [torch.device("cuda", i) for i in others if i in _used]


# Indices of GPUs on which tensors were found.
_used: set[int] = set()


def _has_had_tensors(index: int) -> bool:
    try:
        if not private.has_primary_context(index):
            return False
        return torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]["peak"] > 0
    except KeyError:  # CUDA is not initialised
        return False
    except RuntimeError:  # a GPU that has failed cannot be asked
        return True


def seconds_when_done(device: torch.device) -> float:
    """Wait until a device has done the work of this thread; returns the time then (`time.perf_counter`)."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif hasattr(torch, device.type):
        getattr(torch, device.type).synchronize()
    return time.perf_counter()


def moment_of(device: torch.device) -> "torch.cuda.Event | float":
    """Record, without waiting, when a device has done the work of this thread: by an event, or the time now without CUDA."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    """Seconds between two results of `moment_of`; waits for both, as they may be on different streams."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin
    begin.synchronize()
    end.synchronize()
    return begin.elapsed_time(end) / 1000
