"""What went wrong while compiling, in words that lead to a cure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..torch_compat import private
from .machine import Machine
from .toolchain import diagnose


@dataclass(frozen=True)
class Failure:
    """Why a block group runs eager.

    Args:
        block: class name.
        reason: first line of the error.
        cure: what the user can do.
        details: the full error, for those who ask.
        may_pass: another try may succeed (a full disk, a compiler that was killed).
    """

    block: str
    reason: str
    cure: str
    details: str
    may_pass: bool = False

    def message(self) -> str:
        return f"{self.block} could not be compiled and runs eager: {self.reason} {self.cure}"


# Errors without a text of their own, by class name; names that only some PyTorch versions have need no import.
_CURES = {
    "GPUTooOldForTriton": "This GPU is too old for Triton (compute capability 7.0 is needed); use backend aot_eager or none.",
    "CppCompileError": "The C++ compiler failed; check that g++ (Windows: Visual Studio Build Tools) is complete.",
    "Unsupported": "Its code has parts PyTorch cannot trace; set fullgraph to false, or leave it out with only_blocks.",
    "OutOfMemoryError": "There was too little memory for it; the next run tries again.",
    "Postponed": "The next run tries again.",
    "UserError": "Its code has parts PyTorch cannot trace; leave it out with only_blocks.",
}
_DEFAULT_CURE = "Try backend aot_eager or mode default; leave the block out with only_blocks if it stays."


def chain(error: BaseException) -> list[BaseException]:
    """The error and all it was raised from, outermost first."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        current = getattr(current, "inner_exception", None) or current.__cause__ or current.__context__
    return found


def _unwrapped(error: BaseException) -> BaseException:
    """What the backend raised, without PyTorch's wrapping."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return error


def never_swallowed(error: BaseException) -> bool:
    """Out of memory is the host's to handle: it frees models and tries again. Gradient checkpointing ends a block's second run
    so, as soon as it has all that the backward needs (torch/utils/checkpoint.py)."""
    return any(
        isinstance(e, MemoryError | private.StopRecomputation)
        or is_out_of_memory(e)
        # The user's cancel: an Exception up to ComfyUI 0.25, a BaseException since.
        or type(e).__name__ == "InterruptProcessingException"
        for e in chain(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device; CUDA's own error PyTorch has no class for (comfy/model_management.py, `is_oom`)."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "CUDA error: out of memory" in str(error)


def is_limit_hit(error: BaseException) -> bool:
    """The limit of compiled variants was reached."""
    return isinstance(error, private.FailOnRecompileLimitHit)


# What a compiler says that was stopped from outside, or had no room: gcc, clang, ptxas.
_OF_THE_MOMENT = ("No space left on device", "Disk quota exceeded", "Killed", "signal 9", "SIGKILL", "out of memory allocating")


def _is_switched(error: BaseException) -> bool:
    """Another thread has switched something of the process (TF32) while code was traced."""
    texts = ("state changed while dynamo tracing", "GLOBAL_STATE changed")  # torch/_dynamo/convert_frame.py and guards.py
    return isinstance(error, AssertionError) and any(text in str(error) for text in texts)


def _may_pass(causes: list[BaseException]) -> bool:
    names = {type(e).__name__ for e in causes}
    if any(isinstance(e, OSError | EOFError) for e in causes) or names & {"BrokenProcessPool", "SubprocException", "Postponed"}:
        return True
    if any(never_swallowed(e) or _is_switched(e) for e in causes):
        return True
    return "CppCompileError" in names and any(words in str(e) for e in causes for words in _OF_THE_MOMENT)


def describe_failure(block: str, error: Exception, machine: Machine | None = None) -> Failure:
    """Name the cause that has a known cure, which is for `machine`, this one if left out."""
    causes = chain(error)
    found = diagnose(causes, machine)
    if found is not None:
        return Failure(block, _sentence(*found[:2]), found[2], str(error), _may_pass(causes))
    known = next((e for e in causes if type(e).__name__ in _CURES), None)
    shown = known or _unwrapped(error)
    lines = [line.strip() for line in str(shown).splitlines() if line.strip()]
    cure = _CURES[type(known).__name__] if known else _DEFAULT_CURE
    return Failure(block, _sentence(shown, lines[0] if lines else "no message"), cure, str(error), _may_pass(causes))


def _sentence(error: BaseException, line: str) -> str:
    """The line of the error that says most; of a long command its beginning and its end."""
    name = type(error).__name__
    line = line if line.startswith(f"{name}:") else f"{name}: {line}"
    line = line if len(line) <= 240 else f"{line[:160]} ... {line[-60:]}"
    return line if line.endswith(".") else f"{line}."
