"""Models whose weights are packed (GGUF): steps of eager, a peer and ours, with ComfyUI-GGUF's own loader beside the project.

    pip install gguf
    python -m benchmarks.gguf --host COMFYUI --pack ComfyUI-GGUF --model flux --kinds Q4_K Q8_0 --variants eager ours
    python -m benchmarks.gguf ... --variants eager kjnodes --kjnodes FILE     # apart: peers change PyTorch for good

The files are random, their numbers as large as real weights. In Q4_K and Q5_K some layers are Q6_K, as in files called K_M.
`ours, layers eager` is what the pack did before it traced such layers.
"""

import argparse
import json
import os
import sys
import tempfile
import types
from importlib import import_module
from pathlib import Path

from . import models, session, variants

STD = 0.02
# Layers that K_M files keep in more bits, in some of the blocks.
FINER = ("attn.proj.weight", "linear2.weight")
WITHOUT_TRACING = "ours, layers eager"


def packed(shape, kind, generator):
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
        raise SystemExit(f"--kinds {name}: there is no way here to make such weights; there are Q4_K, Q5_K and Q8_0")
    return raw.reshape(*shape[:-1], -1)


def write(name: str, kind_name: str, file: Path) -> None:
    """A file of the model; matrices of the blocks are packed."""
    import gguf
    import numpy as np
    import torch

    kinds, generator = gguf.GGMLQuantizationType, np.random.default_rng(1)
    writer = gguf.GGUFWriter(str(file), models.MODELS[name].config["image_model"])
    shapes = models.MODELS[name].host_config().get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    for key, weight in shapes.items():
        shape = tuple(weight.shape)
        if len(shape) == 2 and "blocks" in key and shape[-1] % 256 == 0:
            finer = kind_name.endswith("_K") and key.endswith(FINER) and ".0." in key
            kind = kinds.Q6_K if finer else kinds[kind_name]
            writer.add_tensor(key, packed(shape, kind, generator), raw_dtype=kind)
        else:
            plain = models.random_weight(key, shape, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(1))
            writer.add_tensor(key, plain.half().numpy() if len(shape) > 1 else plain.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(pack: Path, file: Path):
    """As the pack's loader node does it."""
    import folder_paths

    package = types.ModuleType("gguf_pack")
    package.__path__ = [str(pack)]
    sys.modules["gguf_pack"] = package
    folder_paths.add_model_folder_path("unet", str(file.parent))
    for key in ("unet", "diffusion_models"):
        if key in folder_paths.folder_names_and_paths:
            folder_paths.folder_names_and_paths[key][1].add(".gguf")
    nodes = import_module("gguf_pack.nodes")
    (patcher,) = nodes.UnetLoaderGGUF().load_unet(file.name)
    return patcher


def measure(options, kind: str, file: Path) -> list[dict]:
    import torch

    write(options.model, kind, file)
    patcher, rows, expected = load(options.pack, file), [], None
    blocks = import_module(f"{session.KIT}.engine.host.weights.blocks")
    traced = import_module(f"{session.KIT}.engine.host.weights.packed").can_be_traced
    for variant in options.variants:
        blocks.can_be_traced = (lambda _module: False) if variant == WITHOUT_TRACING else traced
        settings = {"compile": "at once"} if variant.startswith("ours") else {}
        run = variants.apply(variant.partition(",")[0], patcher, session.KIT, options.kjnodes, **settings)
        before = session.counts()
        torch.cuda.reset_peak_memory_stats() if torch.cuda.is_available() else None
        latent, first = session.sample(run, options.model, options.steps)
        _, steps = session.sample(run, options.model, options.steps)
        counts = {name: count - before[name] for name, count in session.counts().items()}
        expected = latent if expected is None else expected
        row = {"kind": "gguf", "model": options.model, "packing": kind, "variant": variant, "first_step": round(first[0], 2)}
        row |= {"step": round(session.median(steps[1:]), 4), "error": session.relative_error(latent, expected), **counts}
        if torch.cuda.is_available():
            row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        print("ROW", json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--pack", type=Path, required=True, help="folder of ComfyUI-GGUF")
    parser.add_argument("--kjnodes", help="its nodes/model_optimization_nodes.py, for the variant kjnodes")
    parser.add_argument("--model", default="flux", choices=list(models.MODELS))
    parser.add_argument("--kinds", nargs="+", default=["Q4_K", "Q5_K", "Q8_0"])
    parser.add_argument("--variants", nargs="+", default=["eager", "ours"], choices=[*variants.VARIANTS, WITHOUT_TRACING])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    options.pack = options.pack.resolve()
    session.enter(options.host)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, kind, Path(folder) / f"{options.model}-{kind}.gguf")
    os._exit(0)  # a process that made a CUDA context takes seconds to end


if __name__ == "__main__":
    main()
