"""Keep the work of several threads on one device apart."""

import collections
import threading

import torch

# By device: a CUDA graph capture on it holds the lock, and the worker while it loads kernels and publishes code for it.
gpu_locks: collections.defaultdict[torch.device, threading.Lock] = collections.defaultdict(threading.Lock)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
