"""A process of its own that warms a tiny model up in the real host, and prints what its disk cache did as JSON.

    python restart.py BASE ACTIONS

ACTIONS, separated by commas, in any order: `before` (a torch.compile without us), `warm` (with `one`: one kind of block; with
`attention`: with a kernel of ours, as on a GPU; with `order`: after something has changed PyTorch's order of kernels), `after`
(as `before`). BASE is the host's base directory; restarting is running it again with the same one.
"""

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_pack(base):
    spec = importlib.util.spec_from_file_location(
        "devtools", ROOT / "devtools" / "__init__.py", submodule_search_locations=[str(ROOT / "devtools")]
    )
    sys.modules["devtools"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from devtools import inprocess

    inprocess.enter_host(base)
    import nodes

    assert asyncio.run(nodes.load_custom_node(str(ROOT)))
    return sys.modules[str(ROOT).replace(".", "_x_")]


def plain_compile(factor):
    """What another pack does; returns the folder that inductor wrote to."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    compiled = torch.compile(lambda x: torch.sin(x) * factor, backend="inductor")
    compiled(torch.ones(8))
    return cache_dir()


def one_step(patcher, positive, negative):
    import comfy.sample
    import torch

    noise = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    return comfy.sample.sample(
        patcher, noise, 1, 1.0, "euler", "simple", positive, negative, torch.zeros_like(noise), disable_pbar=True, seed=0
    )


def main(base, actions):
    sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() not in (ROOT, ROOT / "tests")]
    pack = load_pack(base)
    import torch
    from torch._dynamo.utils import counters

    from devtools import tiny_models

    def module(name):
        return importlib.import_module(f".{name}", pack.__name__)

    answer = {}
    if "before" in actions:
        answer["plain_before"] = plain_compile(2.0)
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    if "order" in actions:  # as the first attention call leaves it on a Hopper GPU
        torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
    counters.clear()
    with torch.inference_mode():
        if "warm" in actions:
            patcher = tiny_models.build_patcher("flux")
            settings = module("engine.settings").CompileSettings(
                compile_when="before first image", only_blocks="single_blocks.*" if "one" in actions else ""
            )
            compiled = module("engine.host.model.attach").attach(patcher, settings)
            if "attention" in actions:
                options = compiled.model_options["transformer_options"]
                options["optimized_attention_override"] = module("engine.attention_kernels").override_for("cudnn")
            positive, negative = tiny_models.conditioning("flux")
            size = module("engine.host.nodes.warmup_plan").Size
            began = time.perf_counter()
            answer["report"] = module("engine.host.nodes.warmup").warm_up(
                compiled, positive, negative, 1.0, [size(64, 64, 1, 1), size(96, 64, 1, 1)]
            )
            answer["wall"] = time.perf_counter() - began
            stats = module("engine.messages.report").stats_for(patcher.model.diffusion_model, settings)
            expected, result = (one_step(p, positive, negative) for p in (patcher, compiled))
            answer["error"] = float((result - expected).abs().max() / expected.abs().max())
            answer |= {"graphs": stats.graphs, "from_disk": stats.from_disk, "seconds": stats.seconds}
    # Of this process, where nothing is lowered; and how many compile processes there were.
    answer["lowered_here"] = sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss", "bypass"))
    answer["processes"] = module("engine.compile_process.client").compile_process.started
    answer["order"] = list(torch._C._get_sdp_priority_order())
    answer["variables_left"] = [name for name, value in before.items() if os.environ.get(name) != value]
    if "after" in actions:
        answer["plain_after"] = plain_compile(3.0)
    store = module("engine.cache.code_store").current()
    answer["store"] = store and str(store.folder)
    module("engine.compile_process.client").compile_process.stop()
    print("ANSWER", json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","))
