"""Validate the inputs of the node Torch Compile, and derive what depends on them alone."""

import functools
from dataclasses import dataclass, fields

import torch

from .errors import InvalidSetting
from .torch_compat import private
from .user_input import check_switch, check_text, check_whole

BACKENDS = ("inductor", "cudagraphs", "aot_eager", "eager", "none")
MODES = ("auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DYNAMIC = ("auto", "true", "false")
BLOCK_SWAP = ("auto", "uncompiled linears", "off")
ATTENTION = ("auto", "comfyui", "cudnn", "flash", "efficient")
ON_FAILURE = ("run uncompiled", "stop")
COMPILE_WHEN = ("in background", "before first image")
MAX_CACHE_LIMIT = 4096
# Characters: enough to name each block of a large model. Limited, as each pattern is compared with each block.
MAX_ONLY_BLOCKS = 10_000
# Enough for every size and prompt length people meet with dynamic=false, small enough to notice a runaway.
AUTOMATIC_CACHE_LIMIT = 64

_CHOICES = {
    **{"backend": BACKENDS, "mode": MODES, "dynamic": DYNAMIC, "block_swap": BLOCK_SWAP},
    **{"attention": ATTENTION, "on_failure": ON_FAILURE, "compile_when": COMPILE_WHEN},
}


@dataclass(frozen=True)
class CompileSettings:
    """The inputs of the node Torch Compile, hashable; InvalidSetting if a value is unknown or contradicts another.

    Args:
        mode: `auto` (`default`, with CUDA graphs where they pay) or one of PyTorch's four inductor modes.
        dynamic: `auto` and `true` make one code for all sizes, `false` one for each.
        cache_limit: compiled variants per block group; 0 means `AUTOMATIC_CACHE_LIMIT`.
        only_blocks: comma-separated fnmatch patterns of block paths; empty means all.
    """

    mode: str = "auto"
    compile_when: str = "in background"
    backend: str = "inductor"
    dynamic: str = "auto"
    fullgraph: bool = False
    cache_limit: int = 0
    block_swap: str = "auto"
    attention: str = "auto"
    on_failure: str = "run uncompiled"
    allow_tf32: bool = False
    cudnn_benchmark: bool = False
    only_blocks: str = ""

    def __post_init__(self) -> None:
        for name in ("fullgraph", "allow_tf32", "cudnn_benchmark"):
            check_switch(name, getattr(self, name))
        check_text("only_blocks", self.only_blocks)
        check_whole("cache_limit", self.cache_limit, 0, MAX_CACHE_LIMIT)
        if len(self.only_blocks) > MAX_ONLY_BLOCKS:
            raise InvalidSetting(
                "only_blocks",
                self.only_blocks,
                f"use at most {MAX_ONLY_BLOCKS:,} characters; * and ? stand for many blocks, as in double_blocks.*.",
            )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InvalidSetting(name, value, f"choose one of {', '.join(choices)}.")
        if self.mode not in ("auto", "default") and self.backend not in ("inductor", "none"):
            raise InvalidSetting(
                "mode", self.mode, f"backend {self.backend} has no modes; set mode to default or backend to inductor."
            )

    @property
    def enabled(self) -> bool:
        return self.backend != "none"

    @property
    def waits(self) -> bool:
        """Whether a call waits for code that is not ready; always with max-autotune, as tuning kernels draws random numbers."""
        return self.compile_when == "before first image" or self.mode.startswith("max-autotune")

    @property
    def wants_graphs(self) -> bool:
        """Whether the user wants the whole model in CUDA graphs, whatever that saves."""
        return self.backend == "cudagraphs" or self.mode in ("reduce-overhead", "max-autotune")

    @property
    def may_have_graphs(self) -> bool:
        """Whether the model is captured if CUDA graphs pay for it."""
        return self.wants_graphs or (self.backend == "inductor" and self.mode == "auto")

    @property
    def compiles_convolutions(self) -> bool:
        """Whether blocks of convolutions are compiled: each costs seconds and saves little, unless kernels are tuned."""
        return self.mode.startswith("max-autotune")

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.strip() for p in self.only_blocks.split(",") if p.strip()))

    @property
    def variant_limit(self) -> int:
        return self.cache_limit or AUTOMATIC_CACHE_LIMIT

    def settings_key(self) -> tuple:
        """The part of the settings that compiled code depends on; settings with equal keys share code."""
        return self._settings_key

    @functools.cached_property
    def _settings_key(self) -> tuple:
        skipped = {"only_blocks", "allow_tf32", "cudnn_benchmark", "block_swap", "compile_when"}
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in skipped)

    def check_backend(self) -> None:
        """Raise InvalidSetting when this machine lacks what the chosen backend or attention kernel needs."""
        if not self.enabled:
            return
        if self.attention not in ("auto", "comfyui") and not torch.cuda.is_available():
            raise InvalidSetting("attention", self.attention, "this kernel needs an NVIDIA GPU; choose auto or comfyui.")
        if self.backend == "cudagraphs" and not torch.cuda.is_available():
            raise InvalidSetting("backend", self.backend, "CUDA graphs need an NVIDIA GPU; choose inductor.")

    def inductor_options(self) -> dict:
        """Inductor's options, with those of the mode: torch.compile takes either a mode or options.

        A new dict each time, since torch.compile pops entries (torch/__init__.py). CUDA graphs are left out: one tree per block
        overwrites its outputs (pytorch#152887).
        """
        if self.backend != "inductor":
            return {}
        options = dict(private.list_mode_options("default" if self.mode == "auto" else self.mode))
        options["triton.cudagraphs"] = False
        # Inductor's random numbers differ from PyTorch's: a patch that draws some (ToMe) would give another image.
        options["fallback_random"] = True
        return options

    def describe(self) -> str:
        parts = [
            self.backend,
            "" if self.mode in ("auto", "default") else self.mode,
            f"dynamic {self.dynamic}",
            "fullgraph" if self.fullgraph else "",
            f"cache limit {self.cache_limit}" if self.cache_limit else "",
            f"only {self.only_blocks}" if self.only_blocks else "",
        ]
        return ", ".join(filter(None, parts))
