"""Thirteen prompts as a person makes them, on a real ComfyUI server, and how far each image is from the one without the pack.

    python tests/real_sessions.py --host COMFYUI --model flux_wide --folder FOLDER [--weights int8] [--pack CHECKOUT] [--cpu]

Prints a line for each prompt, then one line of JSON with all of it; ends with 1 if the server ended. The images without the
pack are made afterwards on the same server, so that the session is a person's; the yardstick is the same image, without the
pack, from another of PyTorch's attention kernels.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # behind the host, whose `nodes` is another

from benchmarks.sessions import ELSEWHERE, NODES, SESSIONS, Prompt, graph, make_bytecode  # noqa: E402
from devtools.server import PACK_NAME, Server, ServerError, error_of, prepare_base, wait_until  # noqa: E402

CANCELLED, BYPASSED = "cancelled", "bypassed"
PROMPTS = (
    Prompt("first image"),
    Prompt("next seed"),
    Prompt("LoRA on", lora=0.8),
    Prompt("LoRA stronger", lora=1.0),
    Prompt("LoRA off"),
    Prompt("new size", other_size=True),
    Prompt("new size again", other_size=True),
    Prompt("back to the first size"),
    Prompt("batch of 2", batch=2),
    Prompt("other prompt length", other_text=True),
    Prompt(CANCELLED),
    Prompt(BYPASSED),
    Prompt("again"),
)
# The yardstick is taken for these: a prompt of each kind.
YARDSTICKS = {"first image", "LoRA on", "new size", "batch of 2", "other prompt length"}
# As many times the session's steps as a cancelled prompt asks for: a replay is launched long before the GPU has done it.
LONGER = 20
FOLDERS = "home", "tmp", "page", "latents"


class Session:
    """The prompts of one model on one server.

    Args:
        options: of the command line.
    """

    def __init__(self, options):
        self.options = options
        self.base = prepare_base(options.folder.resolve(), options.pack)
        nodes = self.base / "custom_nodes" / NODES.name
        if not nodes.exists():
            nodes.symlink_to(NODES)
        for folder in FOLDERS:
            (self.base / folder).mkdir(exist_ok=True)
        (self.base / "page" / "index.html").write_text("<title>session</title>")
        self.rows, self.info, self.more_packs = [], {}, []

    def write_weights(self):
        command = [sys.executable, "-m", "benchmarks.checkpoints", "--host", self.options.host, "--model", self.options.model]
        command += ["--folder", str(self.base / "models"), "--formats", self.options.weights]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.options.cpu else {}
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **hidden})

    def server(self):
        arguments = ["--front-end-root", str(self.base / "page"), "--disable-all-custom-nodes"]
        arguments += ["--whitelist-custom-nodes", NODES.name, PACK_NAME, *self.more_packs]
        places = {"HOME": str(self.base / "home"), "TMPDIR": str(self.base / "tmp")}  # caches are empty
        return Server(self.options.host, self.base, not self.options.cpu, arguments=arguments, environment=places)

    def graph(self, number, prompt, compiled):
        variant = "ours" if compiled else "eager"
        return graph(self.options.model, prompt, number, variant, self.info, self.options.settings, self.options.weights)

    def sampled(self, server, nodes, name):
        """Run a prompt; what its sampler returned."""
        entry = server.finished(server.start(nodes), self.options.prompt_limit)
        if (error := error_of(entry)) is not None:
            raise ServerError(f"{name}: {error['exception_type']}: {error['exception_message']}")
        if any("sampler" in data["nodes"] for kind, data in entry["status"]["messages"] if kind == "execution_cached"):
            raise ServerError(f"{name}: the host answered from its cache")
        file = self.base / "latents" / "latent.pt"
        server.post("/session/latent", {"file": str(file)})
        return torch.load(file)

    def run(self, server):
        self.info = server.get("/object_info")
        latents = {}
        with server.progress() as steps:
            for number, prompt in enumerate(PROMPTS, 1):
                nodes, row = self.graph(number, prompt, prompt.name != BYPASSED), {"prompt": prompt.name}
                self.rows.append(row)
                began = time.monotonic()
                if prompt.name == CANCELLED:
                    row["messages"] = self.cancelled(server, nodes, steps)
                else:
                    latents[prompt] = number, self.sampled(server, nodes, prompt.name)
                row["seconds"] = round(time.monotonic() - began, 2)
                if number == 1 and self.options.compile_now:
                    row["asked"] = self.compile_now(server)
                row |= server.get("/session/graphs")
                models = server.get("/torch-compile-kit/report")["models"]
                row["compiled"] = sum(model["graphs"] for model in models if not model["being_compiled"])
                counted = server.get("/session/steps")
                # Nothing is lowered in ComfyUI's own process.
                row["lowered"] = counted.get("compiled", 0)
                row["steps"] = len(counted["uncompiled"])
                row["uncompiled"] = sum(map(bool, counted["uncompiled"]))
                print(f"{number} {row}", flush=True)
        for row, prompt in zip(self.rows, PROMPTS, strict=True):
            if prompt in latents:
                row |= self.errors(server, prompt, *latents[prompt])
                print(f"{prompt.name}: errors {row['errors']}, yardstick {row.get('yardstick')}", flush=True)

    def compile_now(self, server):
        """Press "Compile now" in each line that has it; how many there were."""
        lines = server.get("/torch-compile-kit/status").values()
        asked = [line["begins"] for line in lines if line.get("begins")]
        return sum(server.post("/torch-compile-kit/begin", {"model": model})["begins"] for model in asked)

    def cancelled(self, server, nodes, steps):
        nodes["sampler"]["inputs"]["steps"] *= LONGER
        del steps[:]
        prompt_id = server.start(nodes)
        wait_until(lambda: any(node == "sampler" for _, node, _ in steps), "a step", self.options.prompt_limit)
        server.interrupt()
        return [kind for kind, _ in server.finished(prompt_id, self.options.prompt_limit)["status"]["messages"]]

    def errors(self, server, prompt, number, actual):
        """How far each image is from its twin, and the twin from itself with another attention kernel."""
        nodes = self.graph(number, prompt, False)
        # A LoRA of no strength: else the bypassed prompt comes from the host's cache.
        sampler = nodes["sampler"]["inputs"]
        nodes["twin"] = {"class_type": "LoraLoaderModelOnly", "inputs": {**self.lora(), "model": sampler["model"]}}
        sampler["model"] = ["twin", 0]
        expected = self.sampled(server, nodes, f"twin of {prompt.name}")
        row = {"errors": relative_errors(actual, expected)}
        if prompt.name in YARDSTICKS and not self.options.cpu:
            nodes["other"] = {"class_type": "SessionAttention", "inputs": {"model": ["twin", 0], "kernel": self.options.kernel}}
            sampler["model"] = ["other", 0]
            row["yardstick"] = max(relative_errors(self.sampled(server, nodes, f"yardstick of {prompt.name}"), expected))
        return row

    def lora(self):
        name = SESSIONS[self.options.model].model or self.options.model
        return {"lora_name": f"{name}.safetensors", "strength_model": 0.0}


def relative_errors(actual, expected):
    """Of each image of a batch."""
    return [float(f"{((a - e).norm() / e.norm()).item():.4g}") for a, e in zip(actual, expected, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--model", required=True, choices=list(SESSIONS))
    parser.add_argument("--weights", choices=["default", "int8"], default="default")
    parser.add_argument("--folder", type=Path, required=True, help="for models, caches and images; the server's log is there")
    parser.add_argument("--pack", type=Path, default=ROOT, help="the checkout whose nodes run")
    parser.add_argument("--settings", type=json.loads, default={}, help="inputs of Torch Compile, as JSON")
    parser.add_argument("--kernel", default="EFFICIENT_ATTENTION", help="of the yardstick")
    parser.add_argument("--prompt-limit", type=float, default=240, help="seconds")
    parser.add_argument("--compile-now", action="store_true", help='press "Compile now" after the first image')
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    for name in ELSEWHERE:
        os.environ.pop(name, None)
    session, problem = Session(options), None
    if not options.cpu:  # there the tests' machine has it
        make_bytecode(session.base, options.host)
    session.write_weights()
    server = session.server()
    try:
        server.wait_until_ready()
        session.run(server)
    except ServerError as error:
        problem = str(error)
    lives = server.process.poll() is None
    server.stop()
    print(json.dumps({"lives": lives, "problem": problem, "log": str(server.log_file), "rows": session.rows}), flush=True)
    sys.exit(not lives)


if __name__ == "__main__":
    main()
