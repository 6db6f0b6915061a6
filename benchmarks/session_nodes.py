"""A custom node file for the sessions' server: prompts without a text encoder, and when each step of a sampler, a trainer or a
decode was done.

A step is over when the GPU has done it. The sampler's callback is called as soon as the step's work is queued, so the callback
records an event, whose time is read after the prompt. The first step begins where the sampler does, after the host has loaded
what it loads of the model beforehand. Nothing here waits, so the host runs ahead as it does without this file. No function of
this file is on the stack while the model runs: with code of another pack on the stack, the model gets no CUDA graphs.
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

_samplings = []  # for each sampling since they were last asked for, its marks: the beginning, and the end of each step
_counts = []  # what our pack has counted at each mark of the last sampling
_latents = []  # what the last sampling returned
_ballast = []
_worked = []  # what our pack's worker has said of code that it got, by when
GIB = 1024**3


class _Worked(logging.Handler):
    """Keeps what the worker says: for how long it waited for code, and for how long it loaded and tuned kernels."""

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
    """Note when a LoRA's training begins and when each of its steps is done: as it makes and moves its bar of progress."""

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
    """Seconds of the steps of each sampling since this was last asked, and what PyTorch has compiled in this process so far.

    `traced`, `uncompiled`: of each step of the last sampling, how many blocks our pack traced, and in how many calls of the
    model a block ran uncompiled. `worked`: what the worker has said since this was last asked, each with the system's clock.
    """
    taken = list(_samplings)
    _samplings.clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    answer = {"samplings": [[_seconds(a, b) for a, b in itertools.pairwise(marks)] for marks in taken]}
    for at, name in enumerate(("traced", "uncompiled")):
        answer[name] = [after[at] - before[at] for before, after in itertools.pairwise(_counts)]
    answer["worked"], _worked[:] = list(_worked), []
    if dynamo := sys.modules.get("torch._dynamo.utils"):  # importing it would take the first compilation's time away
        answer["graphs"] = dynamo.counters["stats"].get("unique_graphs", 0)
        answer["breaks"] = sum(dynamo.counters["graph_break"].values())
        answer["compiled"] = dynamo.counters["inductor"].get("fxgraph_cache_miss", 0)
    return web.json_response(answer)


@PromptServer.instance.routes.post("/session/latent")
async def latent(request: web.Request) -> web.Response:
    """Write the last latent to `file`, or, with `compare`, its relative error against the one in that file."""
    asked = await request.json()
    actual = _latents[0].float().cpu()
    if not asked.get("compare"):
        torch.save(actual, asked["file"])
        return web.json_response({})
    expected = torch.load(asked["file"])
    return web.json_response({"error": ((actual - expected).norm() / expected.norm()).item()})


@PromptServer.instance.routes.post("/session/free")
async def free(request: web.Request) -> web.Response:
    """Take memory with a plain allocation until so many GiB are free; answers with what is free then."""
    wanted = (await request.json())["gib"]
    _ballast.append(torch.empty(max(0, int(torch.cuda.mem_get_info()[0] - wanted * GIB)), dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    return web.json_response({"free_gib": torch.cuda.mem_get_info()[0] / GIB})


@PromptServer.instance.routes.get("/session/memory")
async def memory(_request: web.Request) -> web.Response:
    """GiB of the GPU that are in use by whoever, and that PyTorch has given out; nothing without a GPU."""
    if not torch.cuda.is_available():
        return web.json_response({})
    torch.cuda.synchronize()
    left, total = torch.cuda.mem_get_info()
    return web.json_response({"vram": (total - left) / GIB, "allocated": torch.cuda.memory_allocated() / GIB})


@PromptServer.instance.routes.get("/session/graphs")
async def graphs(_request: web.Request) -> web.Response:
    """CUDA graphs captured and replayed for the models that are in memory."""
    # A list of all objects keeps garbage alive: the host's only collection after /free may have come upon such a one.
    gc.collect()
    module = next((m for name, m in sys.modules.copy().items() if name.endswith("engine.cuda_graphs.capture")), None)
    found = [item for item in gc.get_objects() if module is not None and type(item) is module.ModelGraphs]
    return web.json_response({name: sum(getattr(item, name) for item in found) for name in ("captures", "replays")})


class SessionPrompts:
    """What text encoders give for a prompt of so many tokens."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"name": (list(models.MODELS),), "tokens": ("INT",), "negative_tokens": ("INT",)}}
    )
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    FUNCTION = "encode"
    CATEGORY = "sessions"

    def encode(self, name, tokens, negative_tokens):
        return models.conditioning(name, tokens, negative_tokens)


class SessionModel:
    """A small model whose configuration the host's loader does not know."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"name": (list(models.MODELS),)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "sessions"

    def load(self, name):
        patcher = models.build(name, torch.device("cpu"))
        # A trainer loads it again, as the host's loaders have it.
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
    """VAE Decode, noted as a sampling of one step that returns the images; nothing is saved."""

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
    """The model with what image-prompt packs do: each cross-attention also attends to the tokens of an image."""

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
    """Where a UNet has transformer blocks: the part, the block's number as the host counts, and how many there are."""
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
