// Where nodes are in the workflow, its subgraphs as well.
import { app } from "/scripts/app.js";

export const rootGraph = () => app.rootGraph ?? app.graph;

// The page connects their other inputs as the sampler's are (from_sampler.js).
export const FILLED = ["TorchCompileKitWarmup", "TorchCompileKitBenchmark"];

// Whether a workflow is what is open in this tab of the page; the server's node ids say nothing about that.
export const isOpen = (workflow) => workflow != null && rootGraph()?.id === workflow;

export const isOurs = (node) => !!node?.comfyClass?.startsWith("TorchCompileKit");

// All of them for which something holds.
export function* nodesOf(graph, holds) {
  for (const node of graph?.nodes ?? graph?._nodes ?? []) {
    if (holds(node)) yield node;
    if (node.subgraph) yield* nodesOf(node.subgraph, holds);
  }
}

// A node by the id that the server has for it: "3", or "7:3" inside subgraph 7.
export function nodeOf(id) {
  let graph = rootGraph();
  let node;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(part) ?? graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

// The page's key for what a node has put out: "3", or "<id of the subgraph>:3" (createNodeLocatorId in ComfyUI's page).
export const locatorOf = (node) => (node.graph?.isRootGraph === false ? `${node.graph.id}:${node.id}` : String(node.id));
