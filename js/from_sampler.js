// What the sampler behind a node knows already is not asked for again: filled in when they are connected, compared afterwards.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
import { FILLED, nodesOf, rootGraph } from "./graph.js";
import { warn } from "./node_report.js";
import { onLanguage, say } from "./words.js";

const SLOTS = ["positive", "negative", "latent_image"];
const SIZE = ["width", "height", "length", "batch_size"];
const FARTHEST = 50; // nodes
const OUTPUT = 2; // of the two types of slots (LiteGraph.OUTPUT)

const linkOf = (graph, id) => (id == null ? undefined : (graph.getLink?.(id) ?? graph.links?.get?.(id) ?? graph.links?.[id]));
const inputOf = (node, name) => node?.inputs?.find((input) => input.name === name);
const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name);
// An input's name in the page's language.
const called = (node, name) => inputOf(node, name)?.localized_name ?? name;
const isLinked = (node, name) => inputOf(node, name)?.link != null;
// What a widget holds; nobody knows where it is linked.
const valueOf = (node, name) => (isLinked(node, name) ? undefined : widgetOf(node, name)?.value);

// Where an input comes from: node and slot.
function originOf(node, name) {
  const link = linkOf(node.graph, inputOf(node, name)?.link);
  return link && { id: link.origin_id, slot: link.origin_slot };
}

function* behind(node, type) {
  for (const output of node.outputs ?? []) {
    if (output.type !== type) continue;
    for (const id of output.links ?? []) {
      const link = linkOf(node.graph, id);
      const found = link && node.graph.getNodeById(link.target_id);
      if (found) yield found;
    }
  }
}

// The first node behind these, through models, guiders and reroutes, for which something holds.
function firstBehind(starts, holds) {
  const seen = new Set();
  const waiting = [...starts];
  while (waiting.length && seen.size < FARTHEST) {
    const node = waiting.shift();
    if (seen.has(node)) continue;
    seen.add(node);
    if (!FILLED.includes(node.comfyClass) && holds(node)) return node;
    for (const type of ["MODEL", "GUIDER", "*"]) waiting.push(...behind(node, type));
  }
}

// What the sampler gets: prompts of it or of its guider, and its latent.
function samplerOf(node) {
  const prompted = (found) => inputOf(found, "positive") || inputOf(found, "conditioning");
  const source = node.graph?.getNodeById(originOf(node, "model")?.id);
  for (const start of [node, source]) {
    if (!start) continue;
    const guided = firstBehind(behind(start, "MODEL"), (found) => prompted(found) && !inputOf(found, "clip"));
    if (!guided) continue;
    const latent = inputOf(guided, "latent_image") ? guided : firstBehind([guided], (found) => inputOf(found, "latent_image"));
    const of = (name) => (inputOf(guided, name) ? originOf(guided, name) : originOf(guided, "conditioning"));
    const alone = inputOf(guided, "conditioning") ? 1 : undefined; // a guider without a negative prompt
    const cfg = isLinked(guided, "cfg") ? undefined : (valueOf(guided, "cfg") ?? alone);
    return {
      name: guided.title ?? guided.comfyClass,
      origins: { positive: of("positive"), negative: of("negative"), latent_image: latent && originOf(latent, "latent_image") },
      widgets: { cfg, steps: valueOf(guided, "steps") },
    };
  }
}

// Fill what is not connected, and values where prompts were filled, else they are the user's; or all of it.
function fill(node, all = false) {
  const sampler = samplerOf(node);
  if (!sampler) return;
  let filled = false;
  for (const name of SLOTS) {
    const from = sampler.origins[name];
    const at = node.inputs?.findIndex((input) => input.name === name) ?? -1;
    if (!from || at < 0 || (!all && node.inputs[at].link != null)) continue;
    const source = node.graph.getNodeById(from.id); // none for an input of the subgraph
    if (!source) continue;
    source.connect(from.slot, node, at);
    filled ||= name !== "latent_image";
  }
  if (!filled && !all) return;
  for (const [name, value] of Object.entries(sampler.widgets)) {
    const widget = widgetOf(node, name);
    if (!widget || value === undefined) continue;
    widget.value = value;
    widget.callback?.(value);
  }
}

// "512 X 512 batch 1" is 512x512.
const spelled = (size) => size.trim().toLowerCase().replace(/\s*[x×]\s*/g, "x").replace(/\s+/g, " ").replace(/ batch 1$/, "");

// As a line of extra_sizes; none where part of it is linked.
function sizeOf(latent) {
  if (SIZE.some((name) => isLinked(latent, name))) return;
  const [width, height, length, batch] = SIZE.map((name) => valueOf(latent, name) ?? 1);
  return `${width}x${height}${length > 1 ? `x${length}` : ""}${batch > 1 ? ` batch ${batch}` : ""}`;
}

function differences(node) {
  const sampler = samplerOf(node);
  if (!sampler) return [];
  const found = [];
  for (const name of SLOTS) {
    const ours = originOf(node, name);
    const theirs = sampler.origins[name];
    if (ours && theirs && (ours.id !== theirs.id || ours.slot !== theirs.slot)) found.push(say("another", called(node, name), sampler.name));
  }
  const compare = (name, theirs, whose) => {
    const ours = valueOf(node, name);
    if (ours !== undefined && theirs !== undefined && ours !== theirs) found.push(say("differs", called(node, name), ours, theirs, whose));
  };
  compare("cfg", sampler.widgets.cfg, sampler.name);
  const latent = sampler.origins.latent_image && node.graph.getNodeById(sampler.origins.latent_image.id);
  if (latent && !originOf(node, "latent_image")) {
    const listed = (widgetOf(node, "extra_sizes")?.value ?? "").split(/[\n,;]/).map(spelled);
    const whose = latent.title ?? latent.comfyClass;
    if (!listed.includes(sizeOf(latent))) for (const name of SIZE) compare(name, valueOf(latent, name), whose);
  }
  return found;
}

function look(node) {
  for (const name of SIZE) {
    const widget = widgetOf(node, name);
    if (widget) widget.disabled = isLinked(node, "latent_image");
  }
  const lines = differences(node);
  if (lines.join() !== (node.torchCompileKitWarnings ?? []).join()) warn(node, lines);
}

function lookAtAll() {
  for (const node of nodesOf(rootGraph(), (found) => FILLED.includes(found.comfyClass))) look(node);
}

app.registerExtension({
  name: "torch-compile-kit.from-sampler",

  setup() {
    api.addEventListener("graphChanged", lookAtAll);
    onLanguage(lookAtAll);
  },

  afterConfigureGraph: lookAtAll,

  nodeCreated(node) {
    if (!FILLED.includes(node.comfyClass)) return;
    const changed = node.onConnectionsChange;
    node.onConnectionsChange = function (type, index, connected) {
      changed?.apply(this, arguments);
      if (app.configuringGraph) return;
      setTimeout(() => {
        if (!this.graph) return;
        const leadsToSampler = type === OUTPUT || this.inputs[index]?.name === "model";
        if (connected && leadsToSampler) fill(this); // what the user has taken off stays off
        look(this);
      });
    };
    const menu = node.getExtraMenuOptions;
    node.getExtraMenuOptions = function () {
      const more = menu?.apply(this, arguments) ?? [];
      return samplerOf(this) ? [{ content: say("fromSampler"), callback: () => (fill(this, true), look(this)) }, ...more] : more;
    };
  },
});
