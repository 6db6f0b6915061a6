"""A process of its own that compiles a small model and prints, as JSON, what PyTorch compiled for that.

    python fleet_worker.py FOLDER

Its cache on disk is in FOLDER; the shared one is that of the environment. Two models with `Plain` blocks make two graphs.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder):
    package = types.ModuleType("kit")
    package.__path__ = [str(ROOT)]
    sys.modules["kit"] = package

    def engine(name):
        return importlib.import_module(f"kit.engine.{name}")

    import torch
    from support import CompiledNet, Net, Plain
    from torch._dynamo.utils import counters

    os.environ["TORCH_COMPILE_KIT_CACHE"] = folder
    cache = engine("cache.disk").open_cache(Path(folder))
    assert cache.root == Path(folder, "torch-compile-kit")
    engine("cache.shared").configure(Path(folder))
    engine("background.thread").RETRY_SECONDS = 1.0
    torch.manual_seed(0)
    equal, failures = True, []
    with torch.inference_mode():
        for width in (8, 12):
            runs, x = CompiledNet(engine, Net(Plain, 3, width), backend="inductor"), torch.ones(2, width)
            results = [runs(x)[0]]
            runs.wait()
            results.append(runs(x)[0])
            equal = equal and all(torch.equal(result, runs.net(x)) for result in results)
            failures += runs.failures
    inductor = counters["inductor"]
    found = {"compiled": inductor["fxgraph_cache_miss"], "taken": inductor["fxgraph_cache_hit"]}
    print("ANSWER", json.dumps({**found, "equal": equal, "failures": failures}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
