"""Parse dev.py's command line, set up, and run the command; commands that need torch run in the venv's interpreter."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

from . import hosts, lint, matrix, suite, venvs
from .commands import ROOT, SetupError
from .setup import set_up

INSIDE = "TORCH_COMPILE_KIT_INSIDE"


def add_choices(parser, comfyui, torch):
    """Add the options that choose a ComfyUI and a PyTorch; `comfyui` and `torch` are their defaults."""
    parser.add_argument(
        "--comfyui",
        metavar="FOLDER",
        default=comfyui,
        help="use this ComfyUI, or this version of it, instead of the pinned one (or set COMFYUI_PATH)",
    )
    parser.add_argument(
        "--torch",
        choices=venvs.TORCH,
        default=torch,
        help=f"a venv with the newest of this PyTorch instead of {venvs.PINNED}",
    )


def add_part(group, part, text):
    group.add_argument(f"--{part}", dest="part", action="store_const", const=part, help=text)


def parse(argv):
    """(options, arguments for pytest)."""
    parser = argparse.ArgumentParser(prog="dev.py", description="Run Torch Compile Kit in a real ComfyUI.")
    add_choices(parser, os.environ.get("COMFYUI_PATH"), None)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, **more):
        # The options may stand before or after the command; after it without defaults, which would overwrite earlier values.
        # No abbreviations, since options of pytest begin alike.
        added = commands.add_parser(name, allow_abbrev=False, **more)
        add_choices(added, *[argparse.SUPPRESS] * 2)
        return added

    command("setup", help="only set up")
    command("lint", help="style, types, texts, tables: what can be checked without running the pack")
    command("demo", help="how long one waits for an image, uncompiled, with our node, with core's; and that it is the same")
    test = command("test", help="the tests; further arguments go to pytest", add_help=False)
    table = command("matrix", help="all tests, and how they ended as a line of the compatibility table")
    for command_, part in ((test, "first"), (table, "whole")):
        command_.set_defaults(part=part)
        chosen = command_.add_mutually_exclusive_group()
        add_part(chosen, "core", "the core of the suite, as for other versions of ComfyUI")
        if command_ is test:
            add_part(chosen, "rest", "other hosts, and the same code at more places: what GitHub runs beside")
            add_part(chosen, "whole", "the suite and the rest in one session, which starts servers and compiles once for both")
            add_part(chosen, "windows", "what needs no C++ compiler, which CI has not on Windows")
        add_part(chosen, "pytorch", "what another PyTorch can break: its private names, compiling, settings")
        add_part(chosen, "newest", f"what newer versions can break, on ComfyUI {hosts.NEWEST[0]} and PyTorch {venvs.NEWEST}")
    serve = command("serve", help="start ComfyUI with the pack and tiny models, until Ctrl+C")
    serve.add_argument("--port", type=int, default=8188)
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "test":
        parser.error("unrecognized arguments: " + " ".join(rest))
    if getattr(options, "part", None) == "newest":
        options.comfyui = options.comfyui or hosts.NEWEST[0]
        options.torch = options.torch or venvs.NEWEST
    return options, rest


def main(argv):
    options, rest = parse(argv)
    if os.environ.get(INSIDE):
        return inside(options)
    try:
        python, host = set_up(options.comfyui, options.torch)
    except SetupError as error:
        print(f"dev.py: {error}", file=sys.stderr)
        return 2
    if options.command == "setup":
        print(f"ComfyUI: {host}\nPython:  {python}")
        return 0
    if options.command == "lint":
        return lint.main(python, host)
    environment = {**os.environ, "COMFYUI_PATH": str(host)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles ComfyUI's sources: 3 s of a core
    if options.command not in ("test", "matrix"):
        return run([python, ROOT / "dev.py", *argv], {**environment, INSIDE: "1"})
    # Without confcutdir, pytest would also import our __init__.py above tests/, as a package of tests.
    pytest = [python, "-m", "pytest", f"--confcutdir={ROOT / 'tests'}"]
    if options.part == "first" and rest:  # tests that are named run, whatever their part
        options.part = "whole"
    part = suite.arguments(options.part)
    if options.command == "test":
        return run([*pytest, *(rest or in_parallel()), *part], environment)
    junit = matrix.junit_file(options.part)
    code = run([*pytest, *in_parallel(), *part, f"--junitxml={junit}"], environment)
    # Another exit status is no result: interrupted, nothing collected, wrongly called.
    if code in (0, 1):
        matrix.record(junit, python, host, options.part, " ".join(["python dev.py", *argv]))
    return code


def run(command, environment):
    """Run a command until it ends, even if this process is told to end; returns its exit status, or 143 if told to end."""
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=environment)
    told = []

    def end(*_):
        told.append(True)
        process.terminate()

    signal.signal(signal.SIGTERM, end)
    while True:
        try:
            code = process.wait()
            return 143 if told else code  # a terminated pytest exits with 0 if all finished tests passed
        except KeyboardInterrupt:
            # The child is interrupted too, and ends its own server.
            continue


def in_parallel():
    """Arguments that have pytest use up to four of the machine's cores; a process takes about 4 GB.

    Each process gets a run of neighbouring tests, so that a module's models and servers are made once. When its run is done, it
    takes tests from the end of another process's run.
    """
    workers = min(4, os.cpu_count() or 1)
    return ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []


def inside(options):
    # SIGTERM becomes an exception, so that the server is ended on the way out.
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
