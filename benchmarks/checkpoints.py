"""Write model files for ComfyUI's loaders: random weights of real size, in the formats that people run.

    python -m benchmarks.checkpoints --host COMFYUI --model flux --folder BASE/models [--formats default int8]

Tensors are made on the GPU if there is one, and written one by one: on a virtual machine the first use of memory is slow.
"""

import argparse
import json
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from devtools import inprocess

from . import models

# format -> suffix of the file's name
FORMATS = {
    "default": ".safetensors",
    "int8": "_int8.safetensors",
    "scaled": "_scaled.safetensors",
    "gguf": "_q4_k.gguf",
}
# Layers that are quantised, by their names in the blocks of Flux, Flux 2 and Z-Image.
QUANTISED = re.compile(r"(double_blocks|single_blocks|layers)\..*(qkv|proj|mlp\.[02]|linear[12]|out|w[123])\.weight$")
CONVROT = {"convrot": True, "convrot_groupsize": 256}
# safetensors: bytes for the header, more than any model needs, and the format's names of dtypes.
HEADER = 2**20
CODES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8",
    torch.uint8: "U8",
}  # fmt: skip
STD = 0.02  # of random weights, as in `models.random_weight`
# Layers that Q4_K_M files store with more bits (Q6_K) in some blocks.
FINER = ("attn.proj.weight", "linear2.weight")


def _int8(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer as ComfyUI quantises it: INT8 with a scale per row, rotated (ConvRot)."""
    import comfy.quant_ops as quant

    values, about = quant.TensorWiseINT8Layout.quantize(tensor, is_weight=True, per_channel=True, **CONVROT)
    scale = {key.removesuffix("weight") + "weight_scale": about.scale}
    return {key: values} | scale | _marker(key, {"format": "int8_tensorwise", **CONVROT})


def _scaled(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A layer as a checkpoint in scaled fp8 has it (comfy/ops.py, `_load_quantized_module`)."""
    import comfy.quant_ops as quant

    layout = quant.QUANT_ALGOS["float8_e4m3fn"]["comfy_tensor_layout"]
    stored = quant.QuantizedTensor.from_float(tensor, layout).state_dict(key)
    return stored | _marker(key, {"format": "float8_e4m3fn"})


def _marker(key: str, about: dict) -> dict[str, torch.Tensor]:
    """The tensor `comfy_quant` with which a checkpoint describes a quantised layer: JSON as bytes."""
    said = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    return {key.removesuffix("weight") + "comfy_quant": said}


LAYERS = {"int8": _int8, "scaled": _scaled}


def write(name: str, folder: Path, formats=("default",)) -> None:
    """Write a model's weights, VAE and LoRA into the subfolders of ComfyUI's models/; existing files stay."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if models.MODELS[name].family is None:  # ComfyUI's loader knows this model
        for weights in formats:
            _write_model(name, weights, folder / "diffusion_models" / f"{name}{FORMATS[weights]}", device)
    if not (file := folder / "vae" / f"{name}.safetensors").exists():
        _save(file, models.vae_weights(lambda: models.vae_class(name), device))
    if not (file := folder / "loras" / f"{name}.safetensors").exists():
        network = models.MODELS[name].host_config().get_model({}, "", torch.device("meta")).diffusion_model
        _save(file, models.lora_weights(network, 1))
    if hasattr(os, "sync"):
        os.sync()  # else the disk still writes while the first prompt reads


def _write_model(name: str, weights: str, file: Path, device: torch.device) -> None:
    if file.exists():
        return
    began = time.perf_counter()
    if weights == "gguf":
        _write_gguf(name, file)
    else:
        _write_one_by_one(file, _tensors(name, LAYERS.get(weights), device))
    print(f"{file.name} in {time.perf_counter() - began:.0f} s", flush=True)


def _tensors(name: str, layer, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (key, tensor) of a model; `layer` turns one layer into its quantised tensors, None quantises nothing."""
    for key, tensor in models.weights(name, device):
        yield from (layer(key, tensor) if layer and QUANTISED.search(key) else {key: tensor}).items()


def _write_one_by_one(file: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a safetensors file tensor by tensor; `safetensors.torch.save_file` takes all tensors, and twice their RAM."""
    header, end, last = {}, 0, []
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(unfinished := file.with_suffix(".part"), "wb") as out:
        out.write(bytes(8 + HEADER))

        def write(key: str, tensor: torch.Tensor) -> None:
            nonlocal end
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            header[key] = {"dtype": CODES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [end, end + data.nbytes]}
            end += out.write(data)

        for key, tensor in tensors:
            if tensor.dtype is torch.uint8:  # JSON of any length: tensors after it would not be aligned
                last.append((key, tensor))
            else:
                write(key, tensor)
        for key, tensor in last:
            write(key, tensor)
        out.seek(0)
        out.write(struct.pack("<Q", HEADER) + json.dumps(header).encode().ljust(HEADER))
    unfinished.rename(file)


def _save(file: Path, state: dict[str, torch.Tensor]) -> None:
    import safetensors.torch

    file.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, str(unfinished := file.with_suffix(".part")))
    unfinished.rename(file)


def _packed(shape, kind, generator):
    """Random blocks of a GGUF type, with their scales set so that they unpack to numbers of about `STD`."""
    import gguf
    import numpy as np

    of_block, of_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = int(np.prod(shape)) // of_block
    raw = generator.integers(0, 256, (blocks, of_bytes), dtype=np.uint8)
    # Offset in a block -> fp16 scale: first the scale of the values, then (Q4_K) the scale of the minima.
    scales = {"Q4_K": {0: STD / 31 / 8, 2: STD / 31}, "Q6_K": {208: STD / 32 / 40}}
    for at, value in scales[kind.name].items():
        raw[:, at : at + 2] = np.full((blocks, 1), value, np.float16).view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def _write_gguf(name: str, file: Path) -> None:
    """Write a file like those named Q4_K_M: matrices of the blocks in Q4_K, some in Q6_K."""
    import gguf
    import numpy as np

    file.parent.mkdir(parents=True, exist_ok=True)
    kinds, generator = gguf.GGMLQuantizationType, np.random.default_rng(1)
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(unfinished), models.MODELS[name].config["image_model"])
    shapes = models.MODELS[name].host_config().get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    for key, weight in shapes.items():
        shape = tuple(weight.shape)
        if len(shape) == 2 and "blocks" in key and shape[-1] % 256 == 0:
            kind = kinds.Q6_K if key.endswith(FINER) and ".0." in key else kinds.Q4_K
            writer.add_tensor(key, _packed(shape, kind, generator), raw_dtype=kind)
        else:
            plain = models.random_weight(key, shape, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(1))
            writer.add_tensor(key, plain.half().numpy() if len(shape) > 1 else plain.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", required=True, choices=list(models.MODELS))
    parser.add_argument("--folder", type=Path, required=True)
    only_vae = "none: the VAE and a LoRA alone; gguf needs its package"
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=["default"], help=only_vae)
    options = parser.parse_args()
    os.environ["COMFYUI_PATH"] = options.host
    inprocess.enter_host(options.folder.resolve())
    write(options.model, options.folder.resolve(), options.formats)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
