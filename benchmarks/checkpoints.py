"""Write the files that ComfyUI's loaders read: random weights of real size, in the formats that people run.

    python -m benchmarks.checkpoints --host COMFYUI --model flux --folder BASE/models [--formats default int8]

All formats of a model are made in one pass over its tensors on the GPU, and written by several threads meanwhile.
"""

import argparse
import json
import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from devtools import inprocess

from . import models

KINDS = ("diffusion_models", "vae", "loras")
# format -> the end of the file's name
FORMATS = {
    "default": ".safetensors",
    "int8": "_int8.safetensors",
    "scaled": "_scaled.safetensors",
    "gguf": "_q4_k.gguf",
}
# Layers of the blocks, by their names in Flux, Flux 2 and Z-Image.
QUANTISED = re.compile(r"(double_blocks|single_blocks|layers)\..*(qkv|proj|mlp\.[02]|linear[12]|out|w[123])\.weight$")
CONVROT = {"convrot": True, "convrot_groupsize": 256}
DTYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
# Bytes before the first tensor of a file.
HEADER = 1 << 20
ALIGNMENT = 64
WRITING_THREADS = 6
STD = 0.02  # of random weights, as in `models.random_weight`
# Layers that K_M files keep in more bits, in some of the blocks.
FINER = ("attn.proj.weight", "linear2.weight")


class SafetensorsFile:
    """A file that is written tensor by tensor; its header, which has room at the beginning, comes last.

    Tensors stay on the GPU until a thread has copied them into its pinned buffer, of which only so many wait.
    """

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self.file, self._unfinished = file, file.with_suffix(".part")
        self._handle = os.open(self._unfinished, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)
        self._header, self._end = {}, 0
        self._unaligned: list[tuple[str, torch.Tensor]] = []
        self._threads, self._jobs = ThreadPoolExecutor(WRITING_THREADS), list[Future]()
        self._room, self._buffers = threading.Semaphore(2 * WRITING_THREADS), threading.local()

    def add(self, key: str, tensor: torch.Tensor) -> None:
        """Queue a tensor, which nobody may change any more. Small ones come last: what follows them would not be aligned."""
        if tensor.numel() * tensor.element_size() % ALIGNMENT:
            self._unaligned.append((key, tensor))
        else:
            self._append(key, tensor)

    def _append(self, key: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        about = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        self._header[key] = {**about, "data_offsets": [self._end, self._end + size]}
        self._room.acquire()
        self._jobs.append(self._threads.submit(self._write, tensor, HEADER + self._end))
        self._end += size

    def _write(self, tensor: torch.Tensor, at: int) -> None:
        try:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            if raw.is_cuda:
                buffer = getattr(self._buffers, "pinned", None)
                if buffer is None or len(buffer) < len(raw):
                    buffer = self._buffers.pinned = torch.empty(len(raw), dtype=torch.uint8, pin_memory=True)
                raw = buffer[: len(raw)].copy_(raw)
            self._write_bytes(memoryview(raw.numpy()), at)
        finally:
            self._room.release()

    def _write_bytes(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        for key, tensor in sorted(self._unaligned, key=lambda item: -item[1].element_size()):
            self._append(key, tensor)
        for job in self._jobs:
            job.result()
        self._threads.shutdown()
        header = json.dumps(self._header).encode()
        if len(header) > HEADER - 8:
            raise ValueError(f"{self.file}: a header of {len(header)} bytes needs a larger HEADER")
        self._write_bytes(memoryview(struct.pack("<Q", HEADER - 8) + header.ljust(HEADER - 8)), 0)
        os.close(self._handle)
        self._unfinished.rename(self.file)


def _int8(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """As ComfyUI quantises: INT8 a row, rotated (ConvRot)."""
    import comfy.quant_ops as quant

    values, about = quant.TensorWiseINT8Layout.quantize(tensor, is_weight=True, per_channel=True, **CONVROT)
    stem = key.removesuffix("weight")
    yield key, values
    yield f"{stem}weight_scale", about.scale
    yield f"{stem}comfy_quant", models.marker({"format": "int8_tensorwise", **CONVROT})


def _scaled(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield from models.quantised(key, tensor, "float8_e4m3fn").items()


LAYERS = {"int8": _int8, "scaled": _scaled}


def file_of(folder: Path, kind: str, name: str, weights: str = "default") -> Path:
    return folder / kind / f"{name}{FORMATS[weights]}"


def write(name: str, folder: Path, kinds=KINDS, formats=("default",)) -> None:
    """A model's files in a folder for each kind; those that are there stay."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader_knows = models.MODELS[name].family is None
    if "diffusion_models" in kinds and loader_knows:
        _write_models(name, folder, formats, device)
    if "vae" in kinds:
        weights = lambda: models.vae_weights(lambda: models.vae_class(name), device)  # noqa: E731
        _write_small(file_of(folder, "vae", name), weights)
    if "loras" in kinds:
        network = lambda: models.MODELS[name].host_config().get_model({}, "", torch.device("meta")).diffusion_model  # noqa: E731
        _write_small(file_of(folder, "loras", name), lambda: models.lora_weights(network(), 1))
    if hasattr(os, "sync"):
        os.sync()  # nothing is left to be written while the first prompt reads


def _write_models(name: str, folder: Path, formats, device: torch.device) -> None:
    """All formats from the same random tensors."""
    paths = {weights: file_of(folder, "diffusion_models", name, weights) for weights in formats}
    missing = {weights: path for weights, path in paths.items() if not path.exists()}
    began = time.perf_counter()
    beside = ThreadPoolExecutor(1)
    packed = [beside.submit(write_gguf, name, "Q4_K", path)] if (path := missing.pop("gguf", None)) else []
    files = {weights: SafetensorsFile(path) for weights, path in missing.items()}
    for key, tensor in models.weights(name, device) if files else ():
        for weights, file in files.items():
            if weights in LAYERS and QUANTISED.search(key):
                for part, value in LAYERS[weights](key, tensor):
                    file.add(part, value)
            else:
                file.add(key, tensor)
    for file in files.values():
        file.close()
    for job in packed:
        job.result()
    print(f"{name}: {', '.join(formats)} in {time.perf_counter() - began:.0f} s", flush=True)


def _write_small(file: Path, make) -> None:
    import safetensors.torch

    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(make(), str(file))


def _packed(shape, kind, generator):
    """Random bytes that unpack to about `STD`: what scales them is set."""
    import gguf
    import numpy as np

    of_block, of_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = int(np.prod(shape)) // of_block
    raw = generator.integers(0, 256, (blocks, of_bytes), dtype=np.uint8)

    def put(at, value):
        raw[:, at : at + 2] = np.full((blocks, 1), value, np.float16).view(np.uint8)

    name = kind.name
    if name in ("Q4_K", "Q5_K"):  # scale, and scale of the minima
        put(0, STD / 31 / (8 if name == "Q4_K" else 16))
        put(2, STD / 31)
    elif name == "Q6_K":
        put(208, STD / 32 / 40)
    elif name == "Q8_0":
        put(0, STD / 64)
    else:
        raise ValueError(f"--packings {name}: there is no way here to make such weights; there are Q4_K, Q5_K and Q8_0")
    return raw.reshape(*shape[:-1], -1)


def write_gguf(name: str, packing: str, file: Path) -> None:
    """A file of the model; matrices of the blocks are packed, some layers in Q6_K as in files called K_M."""
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
            finer = packing.endswith("_K") and key.endswith(FINER) and ".0." in key
            kind = kinds.Q6_K if finer else kinds[packing]
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
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["default"], help="gguf needs its package")
    options = parser.parse_args()
    os.environ["COMFYUI_PATH"] = options.host
    inprocess.enter_host(options.folder.resolve())
    write(options.model, options.folder.resolve(), options.kinds, options.formats)
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
