"""Caches of steps with and without compiling: seconds of a whole sampling run, and how many steps really ran.

python -m benchmarks.step_caches --host COMFYUI --model sdxl
"""

import argparse
import json
import os
from importlib import import_module

from . import models, session, variants

STEPS = 24
NODES = {"EasyCache": "EasyCacheNode", "LazyCache": "LazyCacheNode"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", default="sdxl", choices=list(models.MODELS))
    parser.add_argument("--threshold", type=float, default=0.2)
    options = parser.parse_args()
    torch = session.enter(options.host)
    import comfy_extras.nodes_easycache as caches

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    patcher = models.build(options.model, device)
    network, calls = type(patcher.model.diffusion_model), [0]
    ours = variants.apply("ours", patcher, session.KIT)
    wait = import_module(f"{session.KIT}.engine.background.thread").compiler.wait
    graphs = import_module(f"{session.KIT}.engine.cuda_graphs.capture").graphs_of(patcher.model.diffusion_model)
    own, expected = network._forward, None

    def counted(self, *args, **kwargs):
        calls[0] += 1
        return own(self, *args, **kwargs)

    for label, base in (("eager", patcher), ("ours", ours)):
        for name, node in (("none", None), *NODES.items()):
            model = getattr(caches, node).execute(base, options.threshold, 0.15, 0.95, False).result[0] if node else base
            seconds = []
            for number in range(4):
                if label == "eager" and number == 3:  # counting would be in the code that is compiled
                    network._forward, calls[0] = counted, 0
                replays = graphs.replays
                latent, steps = session.sample(model, options.model, STEPS)
                wait(120)
                seconds.append(sum(steps))
            network._forward = own
            row = {"kind": "step_caches", "model": options.model, "variant": label, "cache": name}
            row |= {"step": round(min(seconds[1:]) / STEPS, 5), "runs": [round(s, 3) for s in seconds]}
            row |= {"ran": calls[0]} if label == "eager" else {"replayed": graphs.replays - replays}
            if name == "none" and label == "eager":
                expected = latent
            if label == "eager":
                eager = {**locals().get("eager", {}), name: latent}
            row["error"] = round(session.relative_error(latent, eager[name]), 5)
            row["cache_changes"] = round(session.relative_error(latent, expected), 5)
            print("ROW", json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
