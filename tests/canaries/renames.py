"""Have each private name of PyTorch be another one in turn, as in a newer version, and call a model of blocks of ours.

    python tests/canaries/renames.py [NAME ...]

A process of its own for each name, forked from one that has imported PyTorch. It prints what went wrong; nothing: an image came
out each time, as without us.
"""

import dataclasses
import importlib
import logging
import os
import sys
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support import Block, Net, Plain  # noqa: E402

# What only compiling with inductor asks for; that takes seconds a name.
OF_INDUCTOR = ("compile_fx", "select_decomp_table", "InductorChoices", "V", "inductor_config", "run_node")


def images(backend, needs_code):
    """The model without us, and with us while the worker lowers and after it."""
    from engine.background.model_call import ModelCall
    from engine.background.thread import compiler
    from engine.compile.binding import Binding
    from engine.compile.session import watching
    from engine.settings import CompileSettings

    model, settings = Net(Plain if needs_code else Block, count=2), CompileSettings(backend=backend)
    given = {} if needs_code else {"transformer_options": {"cond_or_uncond": [0]}}
    with torch.inference_mode():
        x = torch.linspace(-1, 1, 64).view(2, 4, 8)
        expected = model(x, **given)
        for _ in range(3):
            with watching, Binding(model, settings, ModelCall(synchronous=False)).bound():
                yield model(x, **given), expected
            compiler.wait(60)
    if needs_code:
        from engine.compile.registry import code_of

        groups = list(code_of(model).groups.values())
        assert groups and not any(group.failure for group in groups) and all(group.stats.graphs for group in groups), "no code"


def check(name, entry, private):
    """In a child: what went wrong; whether anything can be compiled is asked first, as the nodes do."""
    private.NAMES[name] = dataclasses.replace(entry, path="torch:_renamed")
    vars(private).pop(name, None)
    if private.unsupported() is not None:
        if entry.without is None:
            return
        raise AssertionError("it is not needed, and nothing is compiled without it")
    assert entry.without is not None, "nobody says that nothing can be compiled"
    needs_code = entry.without == private._IN_CALL
    for image, expected in images("inductor" if needs_code or name in OF_INDUCTOR else "aot_eager", needs_code):
        assert torch.allclose(image, expected, rtol=1e-4, atol=1e-5), "another image"


def main():
    torch.set_num_threads(1)
    for module in ("torch._dynamo.backends.inductor", "torch._inductor.compile_fx"):  # each child needs them
        importlib.import_module(module)
    from engine.torch_compat import private

    with torch.inference_mode():  # what PyTorch makes when it first traces is made once, too
        torch.compile(Net(count=2), backend="aot_eager")(torch.ones(2, 4, 8))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    logging.getLogger("torch-compile-kit").addHandler(logging.NullHandler())
    wrong = 0
    chosen = {name: private.NAMES[name] for name in sys.argv[1:] or private.NAMES}
    for name, entry in chosen.items():
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                check(name, entry, private)
            except BaseException:
                print(f"{name} ({entry.path}):", traceback.format_exc(), flush=True)
                os._exit(1)
            os._exit(0)
        wrong += os.waitpid(child, 0)[1] != 0
    print(f"{len(chosen)} names, {wrong} times something went wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
