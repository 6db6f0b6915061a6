"""Workflows of tiny models as a test's server is sent them."""

from devtools.prompts import MODEL_FILES, MODEL_NODE, WARMUP_NODE

EMPTY = {
    "flux": "EmptySD3LatentImage",
    "qwen_image": "EmptySD3LatentImage",
    "wan": "EmptyHunyuanLatentVideo",
}
LENGTHS = {"wan": 5}
# Inputs of ComfyUI's Train LoRA, but for what is trained.
TRAINING = {
    "grad_accumulation_steps": 1, "learning_rate": 1e-4, "rank": 4, "optimizer": "AdamW", "loss_function": "MSE", "seed": 3,
    "training_dtype": "fp32", "lora_dtype": "fp32", "quantized_backward": False, "algorithm": "LoRA",
    "gradient_checkpointing": True, "checkpoint_depth": 2, "offloading": False, "existing_lora": "[None]",
    "bucket_mode": False, "bypass_mode": False,
}  # fmt: skip


def workflow(name, cfg, backend="eager", extra_sizes="", width=64, height=64):
    """Loader -> Torch Compile -> Torch Compile Warmup -> KSampler, of a tiny model with prompts of 24 tokens."""
    if name in MODEL_FILES:
        loader = {
            "class_type": "UNETLoader",
            "inputs": {"unet_name": MODEL_FILES[name].rpartition("/")[2], "weight_dtype": "default"},
        }
    else:
        loader = {"class_type": "TestTinyModel", "inputs": {"name": name}}
    size = {"width": width, "height": height, "batch_size": 1}
    if name in LENGTHS:
        size["length"] = LENGTHS[name]
    warmup = {"cfg": cfg, "extra_sizes": extra_sizes, "length": 1, **size}
    prompts = {"name": name, "positive_tokens": 24, "negative_tokens": 24, "seed": 0}
    settings = {
        "backend": backend, "mode": "default", "dynamic": "auto", "fullgraph": False, "cache_limit": 0, "block_swap": "auto",
        "attention": "auto", "on_failure": "run uncompiled", "allow_tf32": False, "cudnn_benchmark": False, "only_blocks": "",
        "compile_when": "before first image",
    }  # fmt: skip
    sampler = {"seed": 1, "steps": 2, "cfg": cfg, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    given = {"positive": ["prompts", 0], "negative": ["prompts", 1]}
    return {
        "loader": loader,
        "prompts": {"class_type": "TestTinyPrompts", "inputs": prompts},
        "compile": {"class_type": MODEL_NODE, "inputs": {"model": ["loader", 0], **settings}},
        "warmup": {"class_type": WARMUP_NODE, "inputs": {"model": ["compile", 0], **given, **warmup}},
        "latent": {"class_type": EMPTY[name], "inputs": size},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {"model": ["warmup", 0], **given, "latent_image": ["latent", 0], **sampler},
        },
        "save": {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": name}},
    }
