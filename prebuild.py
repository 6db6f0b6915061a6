"""Compile the graphs that a workflow needs, for a GPU that this machine need not have.

    python custom_nodes/torch-compile-kit/prebuild.py WORKFLOW.json --gpu rtx4090 --out FILE.tckcache

Compiled code goes into the pack's store in this ComfyUI's user folder, and with --out into a file for Load Compile Cache.
docs/fleet.md says which versions must match. Arguments after `--` go to ComfyUI's main.py: pass those of the server.
"""

import argparse
import functools
import importlib
import json
import os
import sys
import types
from pathlib import Path

HERE = Path(__file__).absolute().parent  # not resolved: may be a symlink in custom_nodes
PACKAGE = "torch_compile_kit"
# Compiled code does not depend on where weights lie, and ComfyUI's dynamic VRAM needs a GPU, which this process hides.
OWN_ARGUMENTS = ["--disable-auto-launch", "--disable-dynamic-vram", "--database-url", "sqlite:///:memory:"]
QUIET = ["--verbose", "WARNING"]


def known_cards() -> dict[str, dict]:
    table = json.loads((HERE / "engine" / "host" / "cards.json").read_text(encoding="utf-8"))
    cards = {}
    for name, card in table["cards"].items():
        architecture = card.pop("architecture")
        major, minor = map(int, architecture.split("."))
        cards[name] = {**table["all"], **table["architectures"][architecture], "major": major, "minor": minor, **card}
    return cards


def parse(given: list[str], cards: dict[str, dict]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "workflow", type=Path, nargs="?", help="exported with Workflow > Export (API), with Torch Compile in it"
    )
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", choices=cards, help="one of " + ", ".join(cards), metavar="NAME")
    card.add_argument("--gpu-file", type=Path, metavar="FILE", help="what --describe-gpu has written where the card is")
    card.add_argument("--describe-gpu", type=Path, metavar="FILE", help="write what the card here is, and do nothing else")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the cache file, whose name ends in .tckcache")
    kernels = "cudnn", "flash", "efficient", "comfyui"
    parser.add_argument(
        "--attention", choices=kernels, help="the card's fastest kernel (cudnn for 9.0, else what ComfyUI takes)"
    )
    parser.add_argument("--comfyui", type=Path, default=HERE.parent.parent, metavar="FOLDER", help="default: around this pack")
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = parser.parse_args(own, argparse.Namespace(rest=rest))
    if options.describe_gpu is None and options.workflow is None:
        parser.error("name the workflow, a file of Workflow > Export (API)")
    if not (options.comfyui / "comfy").is_dir() and options.describe_gpu is None:
        parser.error(f"{options.comfyui} is no folder of ComfyUI; name it with --comfyui")
    return options


def read(what: str, file: Path):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"{what}: {file} cannot be read ({error})")


def card_of(options: argparse.Namespace, cards: dict[str, dict]) -> dict:
    if options.gpu:
        return cards[options.gpu]
    card = read("--gpu-file", options.gpu_file)
    if not isinstance(card, dict) or not cards["h100"].keys() <= card.keys() | {"is_multi_gpu_board"}:
        sys.exit(f"--gpu-file: {options.gpu_file} is no file of --describe-gpu")
    return card


def engine(name: str):
    """Import a module of engine/ that needs no ComfyUI."""
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = package = types.ModuleType(PACKAGE)
        package.__path__ = [str(HERE)]
    return importlib.import_module(f"{PACKAGE}.engine.{name}")


def describe(file: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        sys.exit("--describe-gpu: PyTorch sees no CUDA card here; run it where the card is")
    torch.cuda.init()
    file.write_text(json.dumps(engine("torch_compat.stand_in_card").describe()[0], indent=1))


def main() -> int:
    cards = known_cards()
    options = parse(sys.argv[1:], cards)
    sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE.resolve()]  # `nodes` is ComfyUI's
    if options.describe_gpu is not None:
        describe(options.describe_gpu)
        return 0
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # hides a GPU of this machine: the code is for another
    workflow, card = read("workflow", options.workflow), card_of(options, cards)
    mode = engine("torch_compat.fake_card").begin(card)
    sys.path.insert(0, str(options.comfyui.resolve()))
    sys.argv = [
        str(options.comfyui / "main.py"),
        *OWN_ARGUMENTS,
        *(QUIET if "--verbose" not in options.rest else ()),
        *options.rest,
    ]
    _loop, server, _start = importlib.import_module("main").start_comfyui()
    classes = sys.modules["nodes"].NODE_CLASS_MAPPINGS
    if (node := classes.get("TorchCompileKitModel")) is None:
        sys.exit(f"{options.comfyui} has not loaded this pack; put it into its custom_nodes, or see the log")
    prebuild = importlib.import_module(node.__module__.rpartition(".nodes.")[0] + ".engine.host.nodes.prebuild")
    attention = options.attention or ("cudnn" if card["major"] == 9 else "comfyui")
    cache = {"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
    executor = sys.modules["execution"].PromptExecutor(server, cache_args=cache)
    say = functools.partial(print, flush=True)
    try:
        failures = prebuild.prebuild(workflow, options.workflow.name, executor, classes, mode, attention, options.out, say)
    except prebuild.TorchCompileKitError as error:
        failures = [str(error)]
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
