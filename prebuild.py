"""Compile what a workflow needs for a graphics card that this machine need not have, into a file or this ComfyUI's store.

    python custom_nodes/torch-compile-kit/prebuild.py WORKFLOW.json --gpu rtx4090 --out FILE.tckcache

docs/fleet.md says how, and what must match.
"""

import argparse
import importlib
import json
import os
import sys
import types
from pathlib import Path

HERE = Path(__file__).absolute().parent  # not resolved: it may be linked into custom_nodes
PACKAGE = "torch_compile_kit"


def module(name: str):
    """A module of engine/, without this pack's nodes and so without ComfyUI."""
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = package = types.ModuleType(PACKAGE)
        package.__path__ = [str(HERE)]
    return importlib.import_module(f"{PACKAGE}.engine.{name}")


def arguments(given: list[str], cards: dict[str, dict]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workflow", type=Path, help="exported with Workflow > Export (API), with a node Torch Compile")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--gpu", choices=cards, help="a card that is known: " + ", ".join(cards), metavar="NAME")
    which.add_argument("--gpu-file", type=Path, help="a file that --describe has written on a machine with the card")
    which.add_argument("--describe", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="the cache file; without it the code goes into the store of this ComfyUI")
    parser.add_argument("--attention", choices=("cudnn", "flash", "efficient", "comfyui"), help="the card's fastest kernel")
    parser.add_argument("--comfyui", type=Path, default=HERE.parents[1], help="its folder, by default that of this pack")
    parser.add_argument("rest", nargs="*", metavar="-- ARGUMENT", help="arguments of ComfyUI's main.py, as on the server")
    return parser.parse_args(given)
