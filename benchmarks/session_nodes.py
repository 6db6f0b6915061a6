"""Time the steps of samplers, trainers and decodes on a benchmark's server, and define its nodes (no text encoder is needed).

ComfyUI loads this file as a custom node. A step ends when the GPU has finished it. A sampler calls its callback once the step's
kernels are queued, so the callback records a CUDA event, whose time is read after the prompt. The first step begins when the
sampler does, after ComfyUI has loaded weights for it. Nothing here synchronises, so the CPU runs ahead of the GPU as without
this file. No function of this file is on the stack while the model runs: with foreign code there, a model gets no CUDA graphs.
"""

import gc
import importlib.util
import itertools
import logging
import os
import sys
import time

import comfy.model_base
import comfy.samplers
import latent_preview
import torch
from aiohttp import web
from comfy.ldm.modules.attention import optimized_attention
from server import PromptServer
from torch.nn.attention import SDPBackend, sdpa_kernel

import nodes

_file = os.path.join(os.path.dirname(os.path.realpath(__file__)), "models.py")
_spec = importlib.util.spec_from_file_location("session_models", _file)
models = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

_samplings = []  # marks of each sampling since the last GET of /session/steps: the beginning, and the end of each step
_counts = []  # `_counted()` at each mark of the last sampling
_latents = []  # what the last sampling returned
_ballast = []
_worked = []  # [time, message] for each log line of our pack's worker about code that it got
GIB = 1024**3


class _Worked(logging.Handler):
    """Keep the worker's log lines about code: seconds until the code came, and seconds of loading and tuning its kernels."""

    def emit(self, record: logging.LogRecord) -> None:
        if "kernels loaded" in record.msg:
            _worked.append([record.created, record.getMessage()])


_logger = logging.getLogger("torch-compile-kit")
_logger.setLevel(logging.DEBUG)
_logger.addHandler(_Worked())


def _mark():
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _counted() -> tuple[int, int]:
    """How many blocks our pack has traced so far, and in how many calls of models a block ran uncompiled."""
    registry = next((m for name, m in sys.modules.copy().items() if name.endswith("engine.compile.registry")), None)
    codes = [code for _model, code in registry.live_models()] if registry is not None else []
    traces = sum(group.code.traces for code in codes for group in code.groups.values())
    return traces, sum(code.eager_calls for code in codes)


def _seconds(before, after) -> float:
    return after - before if isinstance(before, float) else before.elapsed_time(after) / 1000


_max_denoise = comfy.samplers.KSAMPLER.max_denoise
_prepare_callback = latent_preview.prepare_callback
_process_latent_out = comfy.model_base.BaseModel.process_latent_out


def max_denoise(*args):
    """Note the beginning of a sampling: a sampler calls this first."""
    _samplings.append([_mark()])
    _counts[:] = [_counted()]
    return _max_denoise(*args)


def prepare_callback(*args, **kwargs):
    """The callback that a sampler's node makes, which also notes the end of each step."""
    callback = _prepare_callback(*args, **kwargs)

    def step_done(*arguments):
        if _samplings:
            _samplings[-1].append(_mark())
            _counts.append(_counted())
        return callback(*arguments)

    return step_done


def process_latent_out(self, latent):
    """Note the latent that a sampler returns: it passes through this function."""
    _latents[:] = [latent]
    return _process_latent_out(self, latent)


comfy.samplers.KSAMPLER.max_denoise = max_denoise
latent_preview.prepare_callback = prepare_callback
comfy.model_base.BaseModel.process_latent_out = process_latent_out


def _note_training(trainer) -> None:
    """Mark the beginning and each step of LoRA training: the trainer makes its ProgressBar then, and updates it."""

    class ProgressBar(trainer.ProgressBar):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            _samplings.append([_mark()])

        def update(self, value):
            super().update(value)
            _samplings[-1].append(_mark())

    trainer.ProgressBar = ProgressBar


if "TrainLoraNode" in nodes.NODE_CLASS_MAPPINGS:
    _note_training(sys.modules[nodes.NODE_CLASS_MAPPINGS["TrainLoraNode"].__module__])


@PromptServer.instance.routes.get("/session/steps")
async def steps(_request: web.Request) -> web.Response:
    """Seconds of the steps of each sampling since the last request, and what PyTorch has compiled in this process so far.

    `traced`, `uncompiled`: of each step of the last sampling, how many blocks our pack traced, and in how many calls of the
    model a block ran uncompiled. `worked`: [system time, message] of the worker since the last request.
    """
    taken = list(_samplings)
    _samplings.clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    answer = {"samplings": [[_seconds(a, b) for a, b in itertools.pairwise(marks)] for marks in taken]}
    for at, name in enumerate(("traced", "uncompiled")):
        answer[name] = [after[at] - before[at] for before, after in itertools.pairwise(_counts)]
    answer["worked"], _worked[:] = list(_worked), []
    if dynamo := sys.modules.get("torch._dynamo.utils"):  # not imported here: that is part of the first compilation's time
        answer["graphs"] = dynamo.counters["stats"].get("unique_graphs", 0)
        answer["breaks"] = sum(dynamo.counters["graph_break"].values())
        answer["compiled"] = dynamo.counters["inductor"].get("fxgraph_cache_miss", 0)
    return web.json_response(answer)


@PromptServer.instance.routes.post("/session/latent")
async def latent(request: web.Request) -> web.Response:
    """Write the last latent to `file`; with `compare`, answer with its relative error against the latent in that file."""
    asked = await request.json()
    actual = _latents[0].float().cpu()
    if not asked.get("compare"):
        torch.save(actual, asked["file"])
        return web.json_response({})
    expected = torch.load(asked["file"])
    return web.json_response({"error": ((actual - expected).norm() / expected.norm()).item()})


@PromptServer.instance.routes.post("/session/free")
async def free(request: web.Request) -> web.Response:
    """Allocate GPU memory until only `gib` GiB are free; answers with the GiB that are free then."""
    wanted = (await request.json())["gib"]
    _ballast.append(torch.empty(max(0, int(torch.cuda.mem_get_info()[0] - wanted * GIB)), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return web.json_response({"free_gib": torch.cuda.mem_get_info()[0] / GIB})


@PromptServer.instance.routes.get("/session/memory")
async def memory(_request: web.Request) -> web.Response:
    """GiB of the GPU in use by all processes (`vram`) and in PyTorch's tensors (`allocated`); empty without a GPU."""
    if not torch.cuda.is_available():
        return web.json_response({})
    torch.cuda.synchronize()
    left, total = torch.cuda.mem_get_info()
    return web.json_response({"vram": (total - left) / GIB, "allocated": torch.cuda.memory_allocated() / GIB})


@PromptServer.instance.routes.get("/session/graphs")
async def graphs(_request: web.Request) -> web.Response:
    """CUDA graphs captured and replayed for the models that are in memory."""
    # `gc.get_objects()` keeps garbage alive: ComfyUI's only collection after /free may have run while such a list existed.
    gc.collect()
    module = next((m for name, m in sys.modules.copy().items() if name.endswith("engine.cuda_graphs.capture")), None)
    found = [item for item in gc.get_objects() if module is not None and type(item) is module.ModelGraphs]
    return web.json_response({name: sum(getattr(item, name) for item in found) for name in ("captures", "replays")})


class SessionPrompts:
    """Conditioning as text encoders return it for prompts of `tokens` and `negative_tokens` tokens."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"name": (list(models.MODELS),), "tokens": ("INT",), "negative_tokens": ("INT",)}}
    )
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    FUNCTION = "encode"
    CATEGORY = "sessions"

    def encode(self, name, tokens, negative_tokens):
        return models.conditioning(name, tokens, negative_tokens)


class SessionModel:
    """A small model whose configuration ComfyUI's loader does not know."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"name": (list(models.MODELS),)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "sessions"

    def load(self, name):
        patcher = models.build(name, torch.device("cpu"))
        # Train LoRA loads the model again through this attribute, which ComfyUI's loaders set.
        patcher.cached_patcher_init = (lambda name, disable_dynamic=False: self.load(name)[0], (name,))
        return (patcher,)


class SessionLatent:
    """Random latents of the model's size."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"name": (list(models.MODELS),), "seed": ("INT",), "batch_size": ("INT",)}}
    )
    RETURN_TYPES = ("LATENT",)
    FUNCTION = "generate"
    CATEGORY = "sessions"

    def generate(self, name, seed, batch_size):
        return ({"samples": models.latent(name, seed, batch_size)},)


class SessionDecode:
    """VAE Decode, timed as a sampling of one step, with the images as its latent; nothing is saved."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"samples": ("LATENT",), "vae": ("VAE",)}})
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "decode"
    CATEGORY = "sessions"

    def decode(self, samples, vae):
        before = _mark()
        (images,) = nodes.VAEDecode().decode(vae, samples)
        _samplings.append([before, _mark()])
        _latents[:] = [images]
        return {}


class SessionControlNet:
    """A ControlNet of real size for the model, and a random image of the model's size for it."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"name": (list(models.MODELS),)}})
    RETURN_TYPES = ("CONTROL_NET", "IMAGE")
    FUNCTION = "load"
    CATEGORY = "sessions"

    def load(self, name):
        width, height, _ = models.MODELS[name].size
        image = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(5))
        return models.build_control(name), image


class SessionAttention:
    """The model with one of PyTorch's attention kernels, where ComfyUI would leave the choice to PyTorch."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "kernel": (list(SDPBackend.__members__),)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "sessions"

    def patch(self, model, kernel):
        model = model.clone()
        options = model.model_options["transformer_options"]
        options["optimized_attention_override"] = _attention_with(getattr(SDPBackend, kernel))
        return (model,)


class SessionImagePrompt:
    """The model patched as by image-prompt packs: each cross-attention also attends to the tokens of an image."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "sessions"

    def patch(self, model):
        model, seeds = model.clone(), itertools.count()
        for place, number, count in _transformers(model.model.diffusion_model):
            for index in range(count):
                model.set_model_attn2_replace(_ImagePrompt(next(seeds)), place, number, index)
        return (model,)


def _transformers(unet):
    """Yield (part, number of the block as ComfyUI counts, number of transformer blocks in it) for each such block of a UNet."""
    for place, blocks in (("input", unet.input_blocks), ("middle", [unet.middle_block]), ("output", unet.output_blocks)):
        for number, block in enumerate(blocks):
            for layer in block:
                if hasattr(layer, "transformer_blocks"):
                    yield place, number, len(layer.transformer_blocks)


class _ImagePrompt:
    """Attention to the text, plus attention to 16 tokens of an image whose keys and values have weights of their own."""

    def __init__(self, seed):
        self._seed, self._weights = seed, None

    def __call__(self, q, k, v, extra_options):
        heads = extra_options["n_heads"]
        if self._weights is None or self._weights[0].device != q.device:
            random = torch.Generator().manual_seed(self._seed)
            shapes = (1, 16, 2048), (q.shape[-1], 2048), (q.shape[-1], 2048)
            made = [torch.randn(shape, generator=random) * shape[-1] ** -0.5 for shape in shapes]
            self._weights = [tensor.to(q.device, q.dtype) for tensor in made]
        tokens, *projections = self._weights
        keys, values = (torch.nn.functional.linear(tokens, weight).expand(q.shape[0], -1, -1) for weight in projections)
        return optimized_attention(q, k, v, heads) + 0.5 * optimized_attention(q, keys, values, heads)


def _attention_with(kernel):
    def attention(func, q, k, v, heads, mask=None, precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
        if kwargs.get("enable_gqa"):
            return func(q, k, v, heads, mask, precision, skip_reshape, skip_output_reshape, **kwargs)
        if not skip_reshape:
            q, k, v = (t.view(t.shape[0], -1, heads, t.shape[-1] // heads).transpose(1, 2) for t in (q, k, v))
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)] if mask.ndim != 3 else mask.unsqueeze(1)
        with sdpa_kernel([kernel]):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kwargs.get("scale"))
        return out if skip_output_reshape else out.transpose(1, 2).reshape(out.shape[0], -1, heads * out.shape[-1])

    return attention


NODE_CLASS_MAPPINGS = {
    node.__name__: node
    for node in (
        SessionPrompts, SessionModel, SessionLatent, SessionDecode, SessionControlNet, SessionAttention, SessionImagePrompt,
    )
}  # fmt: skip
