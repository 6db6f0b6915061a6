"""What the Benchmark node says of five workflows whose limit is known, each on a server of its own; prints a table.

python -m benchmarks.limits --host COMFYUI --out FILE           # CUDA: ends with 1 where a first line names another limit
python -m benchmarks.limits --host COMFYUI --out FILE --tiny    # small models on the CPU, where no limit is known
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from devtools.prompts import BENCHMARK_NODE
from devtools.server import ServerError, error_of

from . import sessions

HEADING = "What limits this workflow"


@dataclass(frozen=True)
class Workflow:
    """A workflow that the benchmark measures.

    Args:
        says: what the first line must hold, of which a sentence of locales/en/report.json begins.
        small: the model in its place with --tiny.
        free: GiB that are left free on the GPU; 0: all.
        node: what else patches the model, before Torch Compile (session_nodes.py).
        size: of the latent, the model's own if it is not said.
    """

    says: str
    model: str = "flux"
    small: str = "flux_small"
    free: float = 0
    node: str = ""
    size: int = 0
    settings: dict = field(default_factory=dict)


WORKFLOWS = {
    "transfers": Workflow("transfers between RAM and the GPU", free=8),
    "matrix products": Workflow("matrix products"),
    "another node's attention": Workflow("another node: attention_of_a_node", node="SessionOtherAttention", size=2048),
    "a block that cannot be compiled": Workflow("blocks that run uncompiled. SingleStreamBlock", node="SessionHook"),
    "launching": Workflow("launching: the GPU waits for the CPU", "sd15", "sdxl_small", settings={"mode": "default"}),
}


def graph(workflow: Workflow, model: str, info: dict, steps: int, tiny: bool) -> dict:
    """The session's prompt with a benchmark in place of the sampler and what follows it."""
    nodes = sessions.graph(model, sessions.Prompt("limits"), 1, "ours", info, workflow.settings)
    if workflow.node:
        nodes["patch"] = {"class_type": workflow.node, "inputs": {"model": nodes["compile"]["inputs"]["model"]}}
        nodes["compile"]["inputs"]["model"] = ["patch", 0]
    if workflow.size and not tiny:
        nodes["latent"]["inputs"] |= {"width": workflow.size, "height": workflow.size}
    sampler = nodes["sampler"]["inputs"]
    inputs = {name: sampler[name] for name in ("model", "positive", "negative", "cfg", "latent_image")}
    inputs = {**sessions.widgets(info[BENCHMARK_NODE]), **inputs, "steps": steps}
    if not tiny:  # whose decoder is large beside them
        inputs["vae"] = nodes["decode"]["inputs"]["vae"]
    nodes["benchmark"] = {"class_type": BENCHMARK_NODE, "inputs": inputs}
    return {name: node for name, node in nodes.items() if name not in ("sampler", "decode", "save")}


def lines_of(bench: sessions.Bench, workflow: Workflow) -> list[str]:
    """The lines about limits, the first of which names the limit; what went wrong where there are none."""
    options = bench.options
    model = workflow.small if options.tiny else workflow.model
    sessions.make_files(bench, model)
    try:
        with bench.server("ours", 0) as server:
            if workflow.free and not options.tiny:
                server.post("/session/free", {"gib": workflow.free})
            prompt = graph(workflow, model, server.get("/object_info"), options.steps, options.tiny)
            entry = server.finished(server.start(prompt), options.prompt_limit)
    except ServerError as error:
        return [f"died: {str(error)[-300:]}"]
    if (error := error_of(entry)) is not None:
        return [f"died: {error['exception_type']}: {error['exception_message'][:200]}"]
    text = "\n".join(entry["outputs"]["benchmark"]["text"])
    print(text, flush=True)
    heading, *lines = (HEADING + text.partition(HEADING)[2]).partition("\n\n")[0].splitlines()
    return lines or [f"no line: {heading}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", required=True)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to those that are there; .log is beside it")
    parser.add_argument("--workflows", nargs="+", choices=list(WORKFLOWS), default=list(WORKFLOWS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt-limit", type=float, default=600, help="seconds after which a benchmark counts as dead")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing more is begun")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "kit-sessions", help="models and servers' files"
    )
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.set_defaults(kjnodes=None, weights="default")
    options = parser.parse_args()
    options.host = str(Path(options.host).resolve())
    bench, rows = sessions.Bench(options, "limits"), []
    for name in options.workflows:
        lines = lines_of(bench, WORKFLOWS[name])
        rows.append({"kind": "limits", "workflow": name, "named": WORKFLOWS[name].says in lines[0], "lines": lines})
        bench.known["rows"].append(rows[-1])
        bench.save()
    print(f"\n{'workflow':<32} {'named':<6} first line")
    for row in rows:
        named = "-" if options.tiny else "yes" if row["named"] else "NO"
        print(f"{row['workflow']:<32} {named:<6} {row['lines'][0]}")
    died = any(row["lines"][0].startswith(("died", "no line")) for row in rows)
    sys.exit(died or (not options.tiny and not all(row["named"] for row in rows)))


if __name__ == "__main__":
    main()
