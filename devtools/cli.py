"""The command line of dev.py. The outer process sets up; what needs torch runs in the chosen interpreter."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

from .setup import ROOT, SetupError, set_up

INSIDE = "TORCH_COMPILE_KIT_INSIDE"


def parse(argv):
    parser = argparse.ArgumentParser(prog="dev.py", description="Run Torch Compile Kit in a real ComfyUI.")
    parser.add_argument(
        "--comfyui",
        metavar="FOLDER",
        default=os.environ.get("COMFYUI_PATH"),
        help="use this ComfyUI instead of the pinned one (or set COMFYUI_PATH)",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        default=os.environ.get("COMFYUI_PYTHON"),
        help="use this interpreter as it is instead of a venv of ours (or set COMFYUI_PYTHON)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("setup", help="only set up")
    commands.add_parser("demo", help="the shipped workflow without and with our nodes, on tiny models")
    commands.add_parser("test", help="all tests; further arguments go to pytest", add_help=False)
    serve = commands.add_parser("serve", help="start ComfyUI with the pack and tiny models, until Ctrl+C")
    serve.add_argument("--port", type=int, default=8188)
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "test":
        parser.error("unrecognized arguments: " + " ".join(rest))
    return options, rest


def main(argv):
    options, rest = parse(argv)
    if os.environ.get(INSIDE):
        return inside(options)
    try:
        python, host = set_up(options.comfyui, options.python)
    except SetupError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2
    if options.command == "setup":
        print(f"ComfyUI: {host}\nPython:  {python}")
        return 0
    environment = {**os.environ, "COMFYUI_PATH": str(host)}
    if options.command == "test":
        # Above tests/ pytest would import our __init__.py once more, as a package of tests.
        command = ["-m", "pytest", f"--confcutdir={ROOT / 'tests'}", *(rest or in_parallel())]
    else:
        command = [str(ROOT / "dev.py"), *argv]
        environment[INSIDE] = "1"
    process = subprocess.Popen([str(python), *command], cwd=ROOT, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The child has it too, and ends its own server.
            continue


def in_parallel():
    """For the whole suite: file by file on the cores that there are; a process takes about 4 GB."""
    workers = min(4, os.cpu_count() or 1)
    return ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []


def inside(options):
    # As an exception, so that the server is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "demo":
        from .demo import main as demo

        return demo(ROOT / ".dev" / "demo")
    return serve(options.port)


def serve(port):
    from . import inprocess
    from .server import Server, ServerError

    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-serve-", ignore_cleanup_errors=True) as base:
        inprocess.enter_host(base)
        inprocess.write_models(base)
        try:
            with Server(inprocess.host_folder(), base, inprocess.has_gpu(), port=port) as server:
                print(f"ComfyUI with Torch Compile Kit: {server.url}\nbase directory: {base}\nCtrl+C ends it.", flush=True)
                return server.process.wait()
        except ServerError as error:
            print(f"dev.py: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 0
