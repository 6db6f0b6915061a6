"""Text encoders with their blocks compiled: seconds of an encoded prompt and of a generated token, eager and compiled.

python -m benchmarks.text_encoder --host COMFYUI --models flux z_image

There is no node for it: docs/figures.md says why, from these figures.
"""

import argparse
import functools
import json
import os
import time
from importlib import import_module

from . import models, session

RUNS = 5
# By model: the module and function of the host that makes it, tokens of a prompt by encoder, and changes of its size.
ENCODERS = {
    "flux": ("flux", "flux_clip", {"l": 77, "t5xxl": 256}, {}),
    "flux, long prompt": ("flux", "flux_clip", {"l": 77, "t5xxl": 512}, {}),
    "sdxl": ("..sdxl_clip", "SDXLClipModel", {"l": 77, "g": 77}, {}),
    "z_image": ("z_image", "te", {"qwen3_4b": 200}, {}),
    "qwen_image": ("qwen_image", "te", {"qwen25_7b": 200}, {}),
    "qwen_image, long prompt": ("qwen_image", "te", {"qwen25_7b": 1000}, {}),
    "sd15": ("..sd1_clip", "SD1ClipModel", {"l": 77}, {}),
    "flux_small": (
        "flux", "flux_clip", {"l": 77, "t5xxl": 256},
        {"t5xxl_model_config": {"num_layers": 3, "d_model": 256, "d_ff": 512, "num_heads": 4, "vocab_size": 1000}},
    ),
    "z_image_small": (
        "z_image", "te", {"qwen3_4b": 200}, {"qwen3_4b_model_config": {"num_hidden_layers": 3, "vocab_size": 1000}},
    ),
}  # fmt: skip


class Compiled:
    """In place of a CLIP's network: its blocks run compiled, at once."""

    def __init__(self, network, mode: str):
        module = functools.partial(import_module, package=session.KIT)
        self._network, self._weights = network, module(".engine.host.weights.blocks")
        settings = module(".engine.settings").CompileSettings(compile="at once", mode=mode)
        self._calls = module(".engine.host.model.network_calls").NetworkCalls(settings)

    def __getattr__(self, name):
        return getattr(self.__dict__["_network"], name)

    def _run(self, run):
        import torch

        network = self._network
        loaded = self._weights.Loaded(network, network, torch.float32, network.execution_device_now)
        with self._calls.prepared() as call:
            return self._calls.run(loaded, call, run)

    def encode_token_weights(self, tokens):
        return self._run(functools.partial(self._network.encode_token_weights, tokens))

    def generate(self, *args, **options):
        return self._run(functools.partial(self._network.generate, *args, **options))


def build(name: str, device, dtype):
    """The host's CLIP with random weights."""
    import comfy.model_management
    import comfy.sd
    import comfy.supported_models_base
    import torch

    place, factory, _tokens, changes = ENCODERS[name]
    made = getattr(import_module(f".text_encoders.{place}" if "." not in place else place[1:], "comfy"), factory)
    encoder = made if factory.endswith("Model") else made(dtype)
    target = comfy.supported_models_base.ClipTarget(lambda **_: None, encoder)
    target.params = {}
    options = {"model_name": "clip_l", **changes, "dtype": dtype, "load_device": device, "initial_device": device}
    del options["model_name"]
    clip = comfy.sd.CLIP(target, model_options=options)
    generator = torch.Generator(device=device).manual_seed(1)
    for key, parameter in clip.cond_stage_model.named_parameters():
        parameter.data = models.random_weight(key, parameter.shape, parameter.dtype, device, generator)
    clip.cond_stage_model.execution_device_now = device
    return clip


def seconds(call) -> tuple[float, object]:
    import torch

    def now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    began = now()
    with torch.inference_mode():
        result = call()
    return now() - began, result


def measure(name: str, clip, mode: str, generated: int) -> list[dict]:
    tokens = {key: [[(7 + n % 900, 1.0) for n in range(count)]] for key, count in ENCODERS[name][2].items()}
    compiled = clip.clone()
    compiled.cond_stage_model = Compiled(clip.cond_stage_model, mode)
    tasks = {"encode": lambda clip: clip.encode_from_tokens(tokens)}
    if generated and hasattr(getattr(clip.cond_stage_model, next(iter(tokens)), None), "generate"):
        tasks["generate"] = lambda clip: clip.generate(tokens, do_sample=False, max_length=generated)
    rows = []
    for task, act in tasks.items():
        for variant, given in {"eager": clip, "compiled": compiled}.items():
            row = {"kind": "text_encoder", "model": name, "task": task, "variant": variant, "mode": mode}
            before = session.counts()
            try:
                first, result = seconds(functools.partial(act, given))
                runs = [seconds(functools.partial(act, given)) for _ in range(RUNS)]
                per = len(runs[-1][1]) if task == "generate" else 1
                row |= {"first": round(first, 3), "seconds": round(session.median([s for s, _ in runs]) / per, 5)}
                if task == "encode":
                    expected = result if variant == "eager" else locals().get("expected", result)
                    row["error"] = session.relative_error(runs[-1][1], expected)
                else:
                    row["tokens"] = per
            except Exception as error:
                row["died"] = f"{type(error).__name__}: {error}"[:300]
            row |= {key: count - before[key] for key, count in session.counts().items()}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--models", nargs="+", default=["flux"], choices=list(ENCODERS))
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--generate", type=int, default=0, help="tokens to generate, where the encoder can")
    options = parser.parse_args()
    torch = session.enter(options.host)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for name in options.models:
        clip = build(name, device, dtype)
        for row in measure(name, clip, options.mode, options.generate):
            print("ROW", json.dumps(row), flush=True)
        del clip
        import comfy.model_management

        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()
    os._exit(0)


if __name__ == "__main__":
    main()
