"""What the compile process imports in these tests: an operator that, while a graph with it is lowered, does as a file tells.

The tests write one order a line into $ORDERS/orders, and each graph that is lowered takes the first. The operator is the
tests' own in their process.
"""

import dataclasses
import importlib
import os
import signal
import sys
import time
from pathlib import Path

import torch

main = sys.modules["__main__"]
IS_COMPILE_PROCESS = hasattr(main, "lowering_for")


@torch.library.custom_op("torch_compile_kit_tests::told", mutates_args=())
def told(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@told.register_fake
def _told(x):
    if IS_COMPILE_PROCESS:
        obey()
    return torch.empty_like(x)


class Told(torch.nn.Module):
    """A block without a kernel that a C++ compiler would build."""

    def __init__(self, width=8):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.inner(torch.ops.torch_compile_kit_tests.told(x))


def next_order():
    folder = Path(os.environ["ORDERS"])
    first, _, rest = (folder / "orders").read_text().partition("\n")
    (folder / "orders").write_text(rest)
    return folder, first


def obey():
    if obey.done:
        return
    obey.done = True
    folder, order = next_order()
    if order == "print":
        print("noise on stdout", flush=True)
        os.write(1, b"\0\1\2 more noise\n")
        sys.stderr.write("noise on stderr\n")
    elif order == "hold":
        (folder / "begun").touch()
        while not (folder / "go_on").exists():
            time.sleep(0.02)
    elif order == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif order == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order == "exit":
        os._exit(3)
    elif order == "refuse":
        raise RuntimeError("no kernel for this")
    elif order == "inline":
        raise importlib.import_module("torch_compile_kit.engine.compile_process.artefact").LowerInline("not here")
    elif order == "memory":
        raise MemoryError("no memory")
    elif order == "ask a worker":
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.process_pool().submit(os.getpid).result(30)
    elif order == "idle":
        main.IDLE_SECONDS = 0.2
    elif order == "idle slowly":
        main.IDLE_SECONDS, end = 0.2, main.end
        main.end = lambda: ((folder / "begun").touch(), time.sleep(5), end())
    elif order:
        main.write = ANSWERS[order]


obey.done = False


def cut(stream, header, body=b""):
    """Of an answer the first half, and an end."""
    if "code" not in header:
        return as_it_is(stream, header, body)
    main.write = as_it_is
    middle = len(body) // 2
    stream.write(main.HEADER.pack(len(main.json.dumps(header)), len(body)) + main.json.dumps(header).encode() + body[:middle])
    stream.flush()
    os._exit(0)


def changed(change):
    def write(stream, header, body=b""):
        if "code" in header:
            main.write = as_it_is
            header, body = change(header, body)
        as_it_is(stream, header, body)

    return write


def as_it_is(stream, header, body=b""):
    if "alive" not in header:
        obey.done = False
    written(stream, header, body)


def lengths(stream, header, body=b""):
    """Bytes that are no message."""
    if "code" not in header:
        return as_it_is(stream, header, body)
    stream.write(b"\xff" * 64)
    stream.flush()
    time.sleep(60)


def changed_content(change):
    def answer(header, body):
        line, _, rest = body.partition(b"\n")
        described, rest = change(main.json.loads(line), rest)
        return header, main.json.dumps(described).encode() + b"\n" + rest

    return changed(answer)


ANSWERS = {
    "cut": cut,
    "lengths": lengths,
    "lies": changed_content(lambda described, rest: ({**described, "parts": [["artefact", 10**9]]}, rest)),
    "says nothing": changed(lambda header, body: ({"of": "another kind"}, body)),
    "garbage": changed_content(lambda described, rest: (described, bytes(len(rest)))),
}

if IS_COMPILE_PROCESS:
    written = main.write
    main.write = as_it_is
    if Path(os.environ["ORDERS"], "renamed").exists():
        private = importlib.import_module(f"{main.PACKAGE}.engine.torch_compat.private")
        for name, entry in private.NAMES.items():
            if entry.without == private._IN_CALL:
                private.NAMES[name] = dataclasses.replace(entry, path="torch:_renamed")
                vars(private).pop(name, None)
