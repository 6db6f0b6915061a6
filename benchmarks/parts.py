"""Measure what is compiled beside a model that samples: ControlNet, VAE, LoRA training."""

import itertools
import statistics
import time

import torch

from . import host, low_vram, models

STRENGTH = 0.8
# Options of the UNet that a ControlNet has not.
NOT_OF_CONTROLNET = ("out_channels", "transformer_depth_output", "use_temporal_resblock", "use_temporal_attention")
# Latents of 1024x1024, 1328x1328, and videos: 832x480 with 33 frames, 768x512 with 97.
LATENTS = {
    "flux": (1, 16, 128, 128), "sdxl": (1, 4, 128, 128), "qwen": (1, 16, 1, 166, 166), "wan": (1, 16, 9, 60, 104),
    "hunyuan": (1, 16, 9, 60, 104), "ltx": (1, 128, 13, 16, 24),
}  # fmt: skip
VAE_CALLS, LAST_CALLS = 13, 5


def wait_for_code(seconds: float) -> None:
    """Until what is compiled in the background is there."""
    host.kit("background.thread").compiler.wait(seconds)


def _build_controlnet(name: str, device, load_device):
    """The host's ControlNet for the model, random weights on `device`."""
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops

    model = models.MODELS[name]
    config = {key: value for key, value in model.config.items() if key not in NOT_OF_CONTROLNET}

    def network(device, operations):
        made = {"device": device, "dtype": model.dtype, "operations": operations}
        with torch.device(device):
            if name.startswith("flux"):  # the size of InstantX's union
                sizes = {**model.config, "depth": min(5, model.config["depth"]), "depth_single_blocks": 0}
                return comfy.ldm.flux.controlnet.ControlNetFlux(**sizes, **made)
            return comfy.cldm.cldm.ControlNet(hint_channels=3, **made, **config)

    # With dynamic VRAM the host's layers have no weights before they are loaded: as from a file.
    generator = torch.Generator(device=device).manual_seed(3)
    weights = {
        key: models.random_weight(key, parameter.shape, model.dtype, device, generator)
        for key, parameter in network(torch.device("meta"), torch.nn).named_parameters()
    }
    network = comfy.controlnet.controlnet_load_state_dict(network(device, comfy.ops.disable_weight_init), weights)
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    extra = ["y", "guidance"] if name.startswith("flux") else ["y"]
    return comfy.controlnet.ControlNet(network.eval(), load_device=load_device, extra_conds=extra)


def controlnet(options):
    """A model with a ControlNet, each compiled or not. With `--free` the host loads both partly, or streams them."""
    name, device = options.model, host.device()
    free = (options.free or [0])[0]
    with torch.inference_mode():
        if free:
            ballast, patcher = low_vram.Ballast(), low_vram.load_from_file(name)
            control = _build_controlnet(name, torch.device("cpu"), device)
            ballast.leave(free)
        else:
            patcher, control = models.build(name, device), _build_controlnet(name, device, device)
    width, height, _ = models.MODELS[name].size
    hint = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(5))

    def sample(model, control):
        positive, negative = models.conditioning(name)
        if control is not None:
            applied = control.copy().set_cond_hint(hint, STRENGTH, (0.0, 1.0))
            for _, entry in (*positive, *negative):
                entry.update(control=applied, control_apply_to_uncond=True)
        result = host.sample(model, name, options.steps, conditioning=(positive, negative))
        wait_for_code(200)
        return result

    attach = host.kit("host.model.controlnet").attach_control
    settings = host.kit("settings").CompileSettings(**options.settings)
    graphs_of = host.kit("cuda_graphs.capture").graphs_of
    without, _ = sample(patcher, None)
    expected, seconds = sample(patcher, control)
    ours = host.apply("ours", patcher, **options.settings)
    whole = control.copy()  # as KJNodes' TorchCompileControlNet
    whole.control_model = torch.compile(control.control_model)
    common = {"free_gib": free, "vram": options.vram} if free else {}
    changes = host.relative_error(expected, without)
    yield {**common, "variant": "eager", "step": host.median(seconds[1:]), "changes_image": changes}
    variants = {
        "model alone": (ours, control),
        "both": (ours, attach(control, settings)),
        "controlnet alone": (patcher, attach(control, settings)),
        "controlnet whole": (patcher, whole),
    }
    for variant in options.variants or variants:
        row = {**common, "variant": variant}
        with host.noted(row):
            runs = [sample(*variants[variant]) for _ in range(3)]
            row |= {"first": runs[0][1][0], "step": host.median(runs[-1][1][1:])}
            row["errors"] = [host.relative_error(latent, expected) for latent, _ in runs]
            graphs = [graphs_of(network) for network in (patcher.model.diffusion_model, control.control_model)]
            row |= {"captured": [g.captures for g in graphs], "replayed": [g.replays for g in graphs]}
        yield row


def _vae_network(name: str, tiny: bool):
    """The network that comfy.sd.VAE makes for such a file."""
    if name in ("flux", "sdxl"):
        return models.vae_class(f"{name}_small" if tiny else name)
    if name in ("qwen", "wan"):
        return models.vae_class("wan_small" if tiny else "wan14")
    if name == "hunyuan":
        from comfy.ldm.models.autoencoder import AutoencoderKL

        return AutoencoderKL(ddconfig={**models.VAE, "z_channels": 16, "conv3d": True, "time_compress": 4}, embed_dim=16)
    from comfy.ldm.lightricks.vae.causal_video_autoencoder import VideoVAE

    return VideoVAE(version=1)


class _Vae:
    """One VAE, used in its variant's way, and what that took."""

    def __init__(self, options, variant: str):
        import comfy.sd

        self.variant, self.decodes, self.encodes = variant, [], []
        self.vae = comfy.sd.VAE(models.vae_weights(lambda: _vae_network(options.model, options.tiny), host.device()))
        if variant == "ours":
            self.vae = host.kit("host.vae.attach").attach_vae(self.vae)
        elif variant == "kjnodes":
            self.vae = host.kjnodes_vae(self.vae, options.kjnodes)
        self.row = {"variant": variant, "vram": options.vram, "dtype": str(self.vae.vae_dtype)}

    def call(self, method: str, argument):
        """What the VAE's method gives; its seconds are added to `decodes` or `encodes`."""
        began = time.perf_counter()
        with torch.inference_mode():
            result = getattr(self.vae, method)(argument)
        getattr(self, f"{method}s").append(time.perf_counter() - began)
        return result

    def finish(self) -> dict:
        """The row: seconds are the median of the last calls."""
        for key, seconds in (("seconds", self.decodes), ("encode", self.encodes)):
            if seconds:
                self.row[key] = statistics.median(seconds[-LAST_CALLS:])
        self.row |= {"first": self.decodes[0], "calls": self.decodes}
        if self.variant == "ours":
            trials = {n: getattr(p, "trial", None) for n, p in self.vae.patcher.object_patches.items()}
            self.row["channels_last"] = {n: trial.other for n, trial in trials.items() if trial is not None}
        return self.row


def vae(options):
    """Decoding with the host's VAEs as they are, with VAE Channels Last, and compiled by KJNodes' node.

    Through `VAE.decode`, so with the host's casts and memory management; each variant has a VAE of its own, and they take turns
    call by call, so that what the GPU's clock does falls on each alike. `ours` is the node's way from the first call on: the
    first is plain, then both ways are timed, then the faster one stays (`channels_last`).
    """
    shape = [min(n, 8) if options.tiny and i > 1 else n for i, n in enumerate(LATENTS[options.model])]
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    running, expected = [_Vae(options, variant) for variant in options.variants], None
    for number in range(VAE_CALLS):
        if number == 1:  # between two images of a person there is time for what is made in the background
            wait_for_code(60)
        for one in list(running):
            with host.noted(one.row):
                image = one.call("decode", latent).float()
            if one.variant in ("eager", "ours") and "died" not in one.row:
                with host.noted(encoding := {}):  # its memory is not that of decoding
                    one.call("encode", image[0] if image.dim() == 5 else image)
                one.row |= {key: value for key, value in encoding.items() if key == "died"}
            if "died" in one.row:
                running.remove(one)
                yield one.row
                continue
            expected = image if expected is None else expected
            one.row["largest_error"] = float((image - expected).abs().max())  # of an image from 0 to 1
            one.row["mean_error"] = float((image - expected).abs().mean())
    for one in running:
        yield one.finish() | {"latent": shape}


def training_jobs(options) -> list[dict]:
    """A process a variant: what one that died has left in memory is not the next one's."""
    return [{"model": model, "variants": [variant]} for model in options.models for variant in options.variants]


def training(options):
    """LoRA training through the host's TrainLoraNode.

    The trainer's own model is built again with random weights, as the host loads its file again. Losses are those of the same
    seed; where they differ is told in docs/measurements.md.
    """
    import comfy.model_management
    import comfy.ops
    import comfy_extras.nodes_train as nodes

    if options.without_cudnn:
        comfy.ops.SDPA_BACKEND_PRIORITY[:] = [b for b in comfy.ops.SDPA_BACKEND_PRIORITY if "CUDNN" not in b.name]
    (variant,), device, times = options.variants, host.device(), []
    patcher = models.build(options.model, device)

    def build_again(name: str, disable_dynamic: bool = False):
        with torch.inference_mode(False):  # the trainer's weights are no inference tensors
            return models.build(name, device, inference=False)

    patcher.cached_patcher_init = (build_again, (options.model,))

    class Bar:
        """In place of the node's progress bar: told after each step."""

        def __init__(self, _total):
            pass

        def update(self, _steps):
            times.append(host.now())
            print(f"step {len(times)} after {times[-1] - began:.1f} s", flush=True)

    nodes.ProgressBar = Bar
    model = host.apply(variant, patcher, **options.settings)
    positive = [[t, dict(extra)] for t, extra in models.conditioning(options.model)[0]]
    size = models.latent(options.model, options.size and (options.size, options.size, 1))
    latents = [{"samples": torch.randn(size.shape, generator=torch.Generator().manual_seed(n))} for n in range(options.batch)]
    inputs = {
        "model": model, "batch_size": options.batch, "steps": options.steps, "grad_accumulation_steps": 1,
        "learning_rate": 1e-4, "rank": 16, "optimizer": "AdamW", "loss_function": "MSE", "seed": 3,
        "training_dtype": options.dtype, "lora_dtype": options.dtype,
        "quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": options.depth > 0,
        "checkpoint_depth": options.depth or 1, "offloading": False, "existing_lora": "[None]", "bucket_mode": False,
        "bypass_mode": options.bypass,
    }  # fmt: skip
    row = {"variant": variant, "batch": options.batch, "depth": options.depth}
    row |= {"bypass": options.bypass, "cudnn": not options.without_cudnn}
    patcher.model.to("cpu")  # a trainer needs the room, and the host's loader would give it back
    comfy.model_management.soft_empty_cache()
    began = time.perf_counter()
    with torch.inference_mode(), host.noted(row):
        listed = {name: [value] for name, value in inputs.items()}
        _lora, losses, _ = nodes.TrainLoraNode.execute(**listed, latents=latents, positive=[positive]).args
        seconds = [after - earlier for earlier, after in itertools.pairwise(times)]
        row |= {"first": times[0] - began, "step": host.median(seconds), "losses": losses["loss"], "steps": seconds}
    if device.type == "cuda":
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    if variant == "ours":
        row["notes"] = host.kit("host.model.attach").notes_about(model)
    yield row
