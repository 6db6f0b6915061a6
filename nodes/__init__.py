"""Register the nodes of the pack."""

from comfy_api.latest import ComfyExtension, io

from .benchmark import Benchmark
from .block_swap import BlockSwap
from .controlnet import CompileControlNet
from .fix_keys import FixKeys
from .load_cache import LoadCache
from .routes import register_routes
from .save_cache import SaveCache
from .torch_compile_model import TorchCompile
from .vae_channels_last import VAEChannelsLast
from .warmup import Warmup


class TorchCompileKit(ComfyExtension):
    async def on_load(self) -> None:
        register_routes()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [TorchCompile, Warmup, CompileControlNet, VAEChannelsLast, BlockSwap, Benchmark, SaveCache, LoadCache, FixKeys]
