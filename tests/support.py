"""Shared by the tests: blocks and models of plain PyTorch, and ways to look at the engine."""

import os
from pathlib import Path

import torch
from torch import nn

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent


class Block(nn.Module):
    """A small residual block with an option, as DiT blocks have."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x, scale=None, transformer_options={}):  # noqa: B006  as the host writes it
        y = self.outer(torch.relu(self.inner(self.norm(x))))
        if scale is not None:
            y = y * scale
        for patch in transformer_options.get("patches", {}).get("attn1_output_patch", []):
            y = patch(y, transformer_options)
        return x + y


class Net(nn.Module):
    """A model in which `count` blocks repeat."""

    def __init__(self, block=Block, count: int = 3, width: int = 8):
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.requires_grad_(False)

    def forward(self, x, **kwargs):
        x = self.entry(x)
        for i, block in enumerate(self.blocks):
            if "transformer_options" in kwargs:
                kwargs["transformer_options"]["block_index"] = i
            x = block(x, **kwargs)
        return x


def nothing() -> None:
    """A poll that never interrupts."""


def torch_settings() -> dict:
    """Every setting of dynamo, inductor, fx shapes and the backends that code of ours could have touched."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    import torch.fx.experimental._config as shape_config

    settings = {}
    for config in (torch._dynamo.config, inductor_config, functorch_config, shape_config):
        for name, value in config.get_config_copy().items():
            # Equal sets may be written in different orders.
            settings[f"{config.__name__}.{name}"] = repr(sorted(value, key=repr) if isinstance(value, set) else value)
    settings["tf32"] = torch.backends.cuda.matmul.allow_tf32
    settings["cudnn"] = (torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    settings["folders"] = (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("TRITON_CACHE_DIR"))
    settings["libdevice"] = os.environ.get("TRITON_LIBDEVICE_PATH")
    settings["attention_order"] = list(torch._C._get_sdp_priority_order())
    settings["default_dtype"] = torch.get_default_dtype()
    settings["threads"] = torch.get_num_threads()
    settings["stance"] = repr(torch._dynamo.eval_frame._stance)
    settings["tracing"] = repr(torch._dynamo.symbolic_convert.InstructionTranslatorBase.call_function)
    settings["callbacks"] = (
        len(torch._dynamo.callback.callback_handler.start_callbacks),
        len(torch._dynamo.callback.callback_handler.end_callbacks),
    )
    return settings


def wait_until_compiled(engine) -> None:
    """Return when nothing is left to compile in the background."""
    assert engine("background.thread").compiler.wait(120), "code is still being made"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def compiled_code(function, backend, given):
    """PyTorch's caches know the operators of a graph, not what we put in their place: each test has a cache of its own."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    torch._dynamo.reset()
    with fresh_cache():
        result, code = run_and_get_code(torch.compile(function, backend=backend, dynamic=False), *given)
    assert len(code) == 1
    return result, "".join(code)
