// Shows the text that a node of ours reports in the node, in both renderers.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
import { FILLED, isOpen, isOurs, locatorOf, nodeOf, nodesOf, rootGraph } from "./graph.js";
import { ifRunningIsOpen, onAnswer, runningWorkflow } from "./running.js";
import { inWords, locale, onLanguage, say, wordsLoaded } from "./words.js";

const MODEL = "TorchCompileKitModel";
const VAE = "TorchCompileKitVAEChannelsLast";
const CONTROLNET = "TorchCompileKitControlNet";
const BENCHMARK = "TorchCompileKitBenchmark";
// Their line comes while they are used, not when they have run.
const HAVE_LINE = [MODEL, VAE, CONTROLNET];
const hasLine = (node) => HAVE_LINE.includes(node?.comfyClass);
// Pixels, at the least: a table has columns, and titles and names of inputs are to be read.
const WIDTHS = { TorchCompileKitModel: 270, TorchCompileKitBenchmark: 520, TorchCompileKitVAEChannelsLast: 260, TorchCompileKitFixKeys: 300, TorchCompileKitControlNet: 300 };
const WIDGET = "torch_compile_kit_report";

const RULE = "\n------------------------\n"; // engine/messages/report.py
const TALLEST = 150; // pixels of text; more is scrolled, so that a node does not grow over those below
const LEAST = { TorchCompileKitModel: 44, TorchCompileKitVAEChannelsLast: 44, TorchCompileKitFixKeys: 44, TorchCompileKitControlNet: 44, TorchCompileKitBlockSwap: 44, TorchCompileKitSaveCache: 60, TorchCompileKitLoadCache: 60 };
// Green is faster and nothing else. Each has a contrast of at least 4.5:1 with the nodes of its theme.
const AMBER = { dark: "#e0b040", light: "#7a5200" };
const GREY = { dark: "#b0b0b0", light: "#555555" };
const COLORS = { compiling: AMBER, ready: GREY, faster: { dark: "#60c060", light: "#1f6b1f" }, unclear: GREY, slower: AMBER, failed: { dark: "#f09090", light: "#a11a1a" } };
export const colorOf = (state) => COLORS[state]?.[document.querySelector("html.dark-theme, body.dark-theme") ? "dark" : "light"] ?? "";

const REPORT = "torch-compile-kit-report";

// Nodes 2.0 goes on showing the element of a node with the same id, of the workflow that was open before.
function putInPlace(node) {
  const { element } = reportWidget(node);
  if (element.isConnected || !globalThis.LiteGraph?.vueNodesMode) return;
  document.querySelector(`[data-node-id="${node.id}"] .${REPORT}`)?.replaceWith(element);
}

// Where there is nothing to report. ComfyUI runs a prompt without a word around a node that is not connected.
function hint(node) {
  const input = node.inputs?.[0];
  const isUsed = !hasLine(node) || node.outputs?.[0]?.links?.length > 0;
  if (node.mode || (input?.link != null && isUsed)) return say("statusHere");
  if (FILLED.includes(node.comfyClass)) return say("connectInput", input?.localized_name ?? input?.name);
  if (node.comfyClass === MODEL) return say("connectLoader");
  return hasLine(node) ? say("connectBoth") : say("statusHere");
}

function reportWidget(node) {
  const known = node.widgets?.find((widget) => widget.name === WIDGET);
  if (known) return known;
  const text = document.createElement("pre");
  text.style.cssText = "margin:0; padding:5px 6px; overflow:auto; white-space:pre-wrap; font-size:11px; user-select:text;";
  text.className = REPORT;
  text.textContent = hint(node);
  return node.addDOMWidget(WIDGET, "torch-compile-kit.report", text, {
    serialize: false,
    getMinHeight: () => node.torchCompileKitTextHeight ?? LEAST[node.comfyClass] ?? TALLEST + 20,
    getValue: () => text.textContent,
    setValue: (value) => { text.textContent = value; },
  });
}

// A text that is new and does not fit makes its node taller; none: nothing to report yet.
function show(node, text) {
  const widget = reportWidget(node);
  const { element } = widget;
  node.torchCompileKitText = text;
  putInPlace(node);
  const { torchCompileKitError: error, torchCompileKitLine: line } = node;
  element.style.color = colorOf(error ? "failed" : line?.state);
  const begins = error ? null : line?.begins;
  const whole = error ?? [...(node.torchCompileKitWarnings ?? []), text ?? hint(node)].join("\n");
  const size = node.torchCompileKitSize;
  const shown = `${size} ${begins} ${whole}`;
  if (node.torchCompileKitShown === shown) return;
  node.torchCompileKitShown = shown;
  const [above, ...details] = whole.split(RULE);
  const [first, ...rest] = above.split("\n");
  if (node.comfyClass === BENCHMARK && rest.length) element.replaceChildren(headline(first), rest.join("\n"));
  else element.textContent = above;
  if (size) element.append(adding(node, size));
  if (begins) element.append(beginning(node, begins));
  if (details.length) element.append(folded(details.join(RULE), () => fit(node, widget)));
  delete node.torchCompileKitTextHeight;
  element.style.maxHeight = globalThis.LiteGraph?.vueNodesMode ? `${TALLEST}px` : ""; // in the classic renderer the node bounds it
  fit(node, widget);
}

function headline(text) {
  const line = document.createElement("div");
  line.textContent = text;
  line.style.cssText = "font-size:17px; font-weight:bold; white-space:normal; margin-bottom:4px;";
  return line;
}

function folded(text, changed) {
  const fold = document.createElement("details");
  const title = document.createElement("summary");
  title.textContent = say("details");
  title.style.cursor = "pointer";
  fold.append(title, text);
  fold.ontoggle = changed;
  return fold;
}

function button(text, press) {
  const element = document.createElement("button");
  element.textContent = text;
  element.style.cssText = "display:block; margin:4px 0; padding:2px 8px; cursor:pointer;";
  element.onclick = press;
  return element;
}

// A button that makes a size one of the warmup's.
const adding = (node, size) => button(say("add", size), () => {
  const sizes = node.widgets.find((widget) => widget.name === "extra_sizes");
  sizes.value = [sizes.value, size].filter(Boolean).join("\n");
  sizes.callback?.(sizes.value);
  offer(node, undefined);
});

// A button that ends the waiting until compiling pays (engine/host/model/payback.py).
const beginning = (node, model) => button(say("beginNow"), async () => {
  const sent = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model }) };
  const answer = await api.fetchApi("/torch-compile-kit/begin", sent);
  if (!answer.ok || !(await answer.json()).begins || node.torchCompileKitLine?.begins !== model) return;
  node.torchCompileKitLine = { ...node.torchCompileKitLine, says: ["beginsNext"], begins: null };
  draw(node);
});

// A size that was compiled outside the warmup, to be added to it; none: no longer.
export function offer(node, size) {
  node.torchCompileKitSize = size;
  show(node, node.torchCompileKitText);
}

function fit(node, widget) {
  const { element } = widget;
  requestAnimationFrame(() => {
    node.torchCompileKitUnseen = !element.clientHeight; // out of sight: it is not drawn
    if (element.scrollHeight <= element.clientHeight) return;
    node.torchCompileKitTextHeight = Math.min(element.scrollHeight, TALLEST) + 2 * (widget.margin ?? 10);
    node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
    node.setDirtyCanvas?.(true, true); // the classic renderer lays the text out when it draws
  });
}

// In place of a node's text: why its prompt was refused, or what has ended it. Stays until the next prompt.
function showError(node, error) {
  node.torchCompileKitError = error;
  show(node, node.torchCompileKitText);
}

// A text of ours comes as "input - text", beside a message that says nothing.
const inAText = ({ type, message, details }) =>
  type === "custom_validation_failed" && details ? details.replace(/^\w+ - /, "") : [message, details].filter(Boolean).join(": ");

function forgetErrors() {
  for (const node of nodesOf(rootGraph(), (found) => found.torchCompileKitError)) showError(node, undefined);
}

// The server's answer to a prompt that it does not run: by node the errors, each with a text of ours for what we refuse.
function showRefusals(errorsOf) {
  forgetErrors();
  for (const [id, { errors }] of Object.entries(errorsOf ?? {})) {
    const node = nodeOf(id);
    if (isOurs(node)) showError(node, errors.map(inAText).join("\n"));
  }
}

// What has ended a prompt: in the node that ran, or, of an error of ours in a sampler, in the nodes that compile.
function showStopped({ node_id: id, exception_message: message, exception_type: type }) {
  const node = nodeOf(id);
  const ours = type?.startsWith("torch_compile_kit.") ? nodesOf(rootGraph(), (found) => found.comfyClass === MODEL && !found.mode) : [];
  for (const told of isOurs(node) ? [node] : ours) showError(told, message.trim());
}

// Lines above a node's text.
export function warn(node, lines) {
  node.torchCompileKitWarnings = lines;
  show(node, node.torchCompileKitText);
}

// The id of the node that runs, and nodes that have begun and not reported yet. The server's answer to the prompt, which tells whose
// the node is, may come later than what the node tells of itself.
let executing;
const running = new Set();
// Not in `setup`: a page that is opened anew during a run is told but once, before that.
api.addEventListener("executing", ({ detail }) => { executing = detail; });

function begin() {
  const node = executing && nodeOf(executing);
  if (!isOurs(node) || hasLine(node) || running.has(node)) return;
  running.add(node);
  show(node, say("running"));
}

function stop(text) {
  for (const node of nodesOf(rootGraph(), (found) => running.has(found))) show(node, text); // others are of a closed tab
  running.clear();
}

// What is made for a node's model, and how fast its steps are; how fast a VAE is (engine/messages/status.py, News).
function tell(id, line) {
  const node = nodeOf(id);
  if (!hasLine(node)) return;
  node.torchCompileKitLine = { ...line, began: Date.now() - 1000 * line.seconds };
  draw(node);
}

function draw(node) {
  if (node.mode) delete node.torchCompileKitLine; // bypassed or muted: it does nothing
  const { state, says, seconds, began } = node.torchCompileKitLine ?? {};
  const passed = seconds == null ? [] : [Math.floor((Date.now() - began) / 1000)];
  show(node, state ? inWords([...says, ...passed]) : undefined);
}

function drawAll() {
  for (const node of nodesOf(rootGraph(), (found) => found.torchCompileKitLine)) draw(node);
  for (const node of nodesOf(rootGraph(), (found) => found.torchCompileKitUnseen)) fit(node, reportWidget(node));
}

// In another language: what the server has told, and what stands where it has told nothing. Reports stay as they came.
function drawAnew() {
  for (const node of nodesOf(rootGraph(), isOurs)) {
    delete node.torchCompileKitShown;
    show(node, node.torchCompileKitText);
  }
  drawAll();
}

// Show the lines that the server has for the open workflow, and no other: a server that was started anew has none.
async function ask() {
  const workflow = rootGraph().id;
  const before = Array.from(nodesOf(rootGraph(), (node) => node.torchCompileKitLine), (node) => [node, node.torchCompileKitLine]);
  const asked = new URLSearchParams({ client_id: api.clientId ?? api.initialClientId ?? "", workflow, language: locale() ?? "" });
  const answer = await api.fetchApi(`/torch-compile-kit/status?${asked}`);
  if (!answer.ok) return;
  const lines = await answer.json();
  if (!isOpen(workflow)) return; // another was opened meanwhile
  const answered = new Set(Object.keys(lines).map(nodeOf));
  for (const [node, line] of before) {
    if (answered.has(node) || node.torchCompileKitLine !== line) continue; // there was news meanwhile
    delete node.torchCompileKitLine;
    draw(node);
  }
  for (const [id, line] of Object.entries(lines)) tell(id, line);
}

// Another tab, undo and redo make all nodes anew; their outputs are put back without a call of `onExecuted`.
// The page puts them back when the workflow has become the active one, which other packs may delay.
async function showOutputs() {
  const workflow = rootGraph().id;
  for (let tries = 0; tries < 100; tries++) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    if (!isOpen(workflow)) return;
    if ((app.extensionManager?.workflow?.activeWorkflow?.activeState?.id ?? workflow) === workflow) break;
  }
  const located = new Map(Array.from(nodesOf(rootGraph(), isOurs), (node) => [locatorOf(node), node]));
  located.forEach(putInPlace);
  for (const [id, output] of Object.entries(app.nodeOutputs ?? {})) {
    const node = located.get(id) ?? nodeOf(id); // older pages keep what has run in the background by the server's ids
    if (!isOurs(node) || hasLine(node) || !output?.text || foreign.has(`${workflow} ${locatorOf(node)}`)) continue;
    show(node, [output.text].flat().join("\n"));
  }
  ifRunningIsOpen(begin);
}

// The page gives what a node has put out to the node of the same id in the workflow that is open, whichever runs.
const foreign = new Set(); // so given, by the workflow's id and the page's key for the node's output

async function noteForeign(id) {
  const open = rootGraph().id;
  const node = nodeOf(id);
  const ran = await runningWorkflow();
  if (!isOurs(node)) return;
  if (ran == null || ran === open) foreign.delete(`${open} ${locatorOf(node)}`);
  else foreign.add(`${open} ${locatorOf(node)}`);
}

app.registerExtension({
  name: "torch-compile-kit.node-report",

  init: wordsLoaded,

  setup() {
    api.addEventListener("torch-compile-kit.status", ({ detail }) => isOpen(detail.workflow) && tell(detail.node, detail));
    api.addEventListener("torch-compile-kit.progress", ({ detail: { workflow, node, text } }) => {
      if (!isOpen(workflow) || !isOurs(nodeOf(node))) return;
      running.add(nodeOf(node));
      show(nodeOf(node), text);
    });
    setInterval(drawAll, 1000);
    onLanguage(() => (drawAnew(), ask()));
    api.addEventListener("reconnected", () => {
      executing = undefined; // the server tells it again if it still runs
      stop();
      ask();
    });
    api.addEventListener("executing", () => ifRunningIsOpen(begin));
    api.addEventListener("executed", ({ detail }) => noteForeign(detail.node));
    api.addEventListener("execution_start", () => running.clear());
    api.addEventListener("execution_interrupted", () => stop(say("cancelled")));
    api.addEventListener("execution_error", ({ detail }) => {
      stop(say("stopped"));
      ifRunningIsOpen(() => showStopped(detail));
    });
    onAnswer(showRefusals);
  },

  afterConfigureGraph() {
    showOutputs();
    ask(); // not awaited: the page would put back outputs only then
  },

  nodeCreated(node) {
    if (!isOurs(node)) return;
    reportWidget(node).serialize = false;
    const least = WIDTHS[node.comfyClass];
    if (least) node.setSize([Math.max(node.size[0], least), node.size[1]]);
    const onConnectionsChange = node.onConnectionsChange;
    node.onConnectionsChange = function () {
      onConnectionsChange?.apply(this, arguments);
      setTimeout(() => show(this, this.torchCompileKitText)); // when its links are those of the graph
    };
    const onExecuted = node.onExecuted;
    node.onExecuted = function (output) {
      onExecuted?.apply(this, arguments);
      ifRunningIsOpen(() => {
        running.delete(this);
        if (output?.text) show(this, output.text.join("\n"));
      });
    };
  },
});
