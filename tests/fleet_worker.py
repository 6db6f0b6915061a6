"""A process of its own that compiles a small model and prints, as JSON, how many graphs it has compiled, and how many taken.

    python fleet_worker.py FOLDER [real]

Its store is in FOLDER; the shared cache is that of the environment. Two models with `Plain` blocks make two graphs. Without
`real` no compile process is started, and a graph takes a second (`support.NoCompiler`).
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(folder, real):
    package = types.ModuleType("kit")
    package.__path__ = [str(ROOT)]
    sys.modules["kit"] = package

    def engine(name):
        return importlib.import_module(f"kit.engine.{name}")

    import torch
    from support import CompiledNet, Net, NoCompiler, Plain

    process = engine("compile_process.client").compile_process
    if not real:
        NoCompiler(engine, seconds=1.0)
    engine("cache.shared").configure(Path(folder))
    store = engine("cache.code_store").open_store(Path(folder, "store"))
    assert store.folder == Path(folder, "store")
    engine("background.thread").RETRY_SECONDS = 1.0
    torch.manual_seed(0)
    is_equal, failures, graphs, taken = True, [], 0, 0
    with torch.inference_mode():
        for width in (8, 12):
            runs, x = CompiledNet(engine, Net(Plain, 3, width), backend="inductor"), torch.ones(2, width)
            results = [runs(x)[0]]
            graphs += runs.wait()
            result, uncompiled = runs(x)
            is_equal = is_equal and not uncompiled and all(torch.equal(r, runs.net(x)) for r in (*results, result))
            failures += runs.failures
            taken += sum(group.stats.from_disk for group in runs._groups)
    answer = {"compiled": graphs - taken, "taken": taken, "processes": process.started}
    print("ANSWER", json.dumps({**answer, "equal": is_equal, "failures": failures}), flush=True)
    process.stop()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], "real" in sys.argv)
