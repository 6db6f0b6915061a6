// A tab of the sidebar: what is compiled and what it has gained, and the cache on disk.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
import { colorOf } from "./node_report.js";
import { locale, onLanguage, say, wordsLoaded } from "./words.js";

const EVERY = 2000; // milliseconds
const STYLE = `
  .torch-compile-kit { padding: 12px; font-size: 13px; line-height: 1.5; overflow: auto; height: 100%; user-select: text; }
  .torch-compile-kit h2 { margin: 0 0 4px; font-size: 16px; }
  .torch-compile-kit h3 { margin: 12px 0 4px; font-size: 14px; }
  .torch-compile-kit .model { border: 1px solid var(--border-color, #555); border-radius: 6px; padding: 8px; margin: 6px 0; }
  .torch-compile-kit .quiet { opacity: 0.8; overflow-wrap: anywhere; }
  .torch-compile-kit .told { white-space: pre-line; overflow-wrap: anywhere; margin-top: 8px; }
  .torch-compile-kit button { margin: 6px 6px 0 0; padding: 3px 10px; cursor: pointer; border-radius: 4px;
    border: 1px solid var(--border-color, #555); background: var(--comfy-input-bg, #333); color: inherit; }
  .torch-compile-kit meter { width: 100%; }`;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

let element;
let told = ""; // what the last button did
let checked = { told: undefined, english: "" }; // what was told of this machine last
let shown = ""; // what was told of then: what has not changed stays, so that a text can be selected

function part(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function bytes(count) {
  const power = count > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  const value = count / 1024 ** power;
  return `${Number(value.toFixed(value < 10 ? 1 : 0))} ${UNITS[power]}`;
}

async function ask(path, given) {
  const sent = given && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ...given, language: locale() }) };
  const answer = await api.fetchApi(`/torch-compile-kit/${path}`, sent);
  return await answer.json();
}

function button(text, press) {
  const made = part("button", text);
  made.onclick = async () => {
    made.disabled = true;
    try {
      told = (await press()) ?? told;
    } catch (error) {
      told = error.message; // the server is gone
    } finally {
      made.disabled = false;
    }
    await refresh();
    element?.querySelector(".told")?.scrollIntoView?.({ block: "nearest" }); // the button may be far below it
  };
  return made;
}

function state(model) {
  const kinds = model.being_compiled.length;
  if (kinds && model.is_only_read) return ["compiling", say("readingFromDisk")];
  if (kinds) return ["compiling", kinds === 1 ? say("compilingKind") : say("compilingKinds", kinds)];
  if (model.failures.length) return ["failed", say("failed", model.failures.map(({ block }) => block).join(", "))];
  if (!model.graphs) return ["", say("nothingYet")];
  return [model.seconds_gained > 0 ? "faster" : model.seconds_gained < 0 ? "slower" : "ready", say("ready")];
}

function card(model) {
  const made = part("div", "", "model");
  const [name, text] = state(model);
  const dot = part("span", "● ");
  dot.style.color = colorOf(name);
  const title = part("b", model.name);
  made.append(dot, title, ` ${text}`);
  if (model.being_compiled.length) made.append(part("div", model.being_compiled.join(", "), "quiet"));
  const fromDisk = model.graphs_from_disk >= model.graphs;
  if (model.graphs && name !== "compiling") made.append(part("div", say(fromDisk ? "blocksFromDisk" : "blocksCompiled", model.blocks)));
  if (model.sizes.length) made.append(part("div", say("sizes", model.sizes.join(", "))));
  if (model.graphs) made.append(part("div", say("spent", model.compile_seconds.toFixed(0))));
  if (model.seconds_gained !== null) {
    const gained = model.seconds_gained;
    made.append(part("div", say(gained < 0 ? "lost" : "gained", Math.abs(gained).toFixed(1))));
  }
  for (const { message } of model.failures) made.append(part("div", say("inEnglish", message), "quiet"));
  const [heading, limit, ...others] = model.limits;
  if (heading) made.append(part("h3", say("limits")), part("div", heading, "quiet"), part("b", limit));
  for (const line of others) made.append(part("div", line, "quiet"));
  if (name === "compiling") {
    made.append(button(say("wait"), async () => ((await ask("wait", {})).waiting ? say("waiting") : say("ready"))));
  }
  return made;
}

const dialog = () => app.extensionManager.dialog;

async function clear() {
  if (!(await dialog().confirm({ title: say("clear"), message: say("clearSure") }))) return undefined;
  return say("cleared", bytes((await ask("cache/clear", {})).removed));
}

async function save() {
  const filename = await dialog().prompt({ title: say("save"), message: say("saveName"), defaultValue: "compile_cache" });
  if (!filename) return undefined;
  const { text, error } = await ask("cache/save", { filename });
  return text ? `${text}\n\n${say("savedNext")}` : say("inEnglish", error);
}

async function loadFile(file) {
  if (!(await dialog().confirm({ title: `${say("load")}: ${file}`, message: say("loadSure") }))) return undefined;
  const { text, error } = await ask("cache/load", { file });
  return text ?? say("inEnglish", error);
}

function cacheOnDisk(cache) {
  const made = part("div", "");
  made.append(part("h3", say("cache")));
  if (cache.error) return made.append(cache.error), made;
  const meter = document.createElement("meter");
  Object.assign(meter, { max: Math.max(cache.limit, 1), value: cache.bytes });
  made.append(meter, part("div", say("used", bytes(cache.bytes), bytes(cache.limit))));
  made.append(part("div", cache.folder, "quiet"), button(say("clear"), clear), button(say("save"), save));
  if (cache.files.length) {
    const files = document.createElement("select");
    files.style.cssText = "max-width:100%; color:inherit; background:var(--comfy-input-bg, #333);";
    files.append(...cache.files.map((file) => part("option", file)));
    files.onchange = () => files.blur(); // else the panel stands still, see `refresh`
    made.append(part("div", ""), files, button(say("load"), () => loadFile(files.value)));
  }
  return made;
}

// What compiling needs and this machine lacks, each with its cure.
async function check() {
  const { here, missing } = await ask("machine");
  const found = missing.length ? missing.map((cure) => say("inEnglish", cure)) : [say("machineReady")];
  checked = { told: [say("inEnglish", here), ...found].join("\n\n"), english: [here, ...missing].join("\n\n") };
  return checked.told;
}

// For a report of a bug.
function copying() {
  const made = part("button", say("copy"));
  made.onclick = async () => {
    try {
      await navigator.clipboard.writeText(checked.english);
    } catch { // closed to a page that came over http from another machine
      getSelection().selectAllChildren(element.querySelector(".told"));
      document.execCommand("copy");
    }
    made.textContent = say("copied");
  };
  return made;
}

async function refresh() {
  if (!element || element.querySelector("select:focus")) return; // somebody chooses
  let models, cache;
  try {
    [{ models }, cache] = await Promise.all([ask(`report?language=${locale() ?? ""}`), ask("cache")]);
  } catch {
    return; // the server starts anew, or is gone: what was known stays
  }
  if (!element) return;
  const chosen = element.querySelector("select")?.value;
  if (told === say("waiting") && !models.some((model) => model.being_compiled.length)) told = "";
  const news = JSON.stringify([models, cache, told]);
  if (news === shown) return;
  shown = news;
  const used = models.filter((model) => model.runs || model.graphs || model.being_compiled.length || model.failures.length);
  const cards = used.length ? used.map(card) : [part("div", say("noModel"), "quiet")];
  const machine = button(say("machine"), check);
  const head = [part("h2", "Torch Compile"), part("div", say("intro"), "quiet"), machine, part("div", told, "told")];
  if (told === checked.told) head.push(copying());
  element.replaceChildren(...head, part("h3", say("models")), ...cards, cacheOnDisk(cache));
  const files = element.querySelector("select");
  if (files && cache.files.includes(chosen)) files.value = chosen;
}

function show(where) {
  const style = part("style", STYLE);
  element = part("div", "", "torch-compile-kit");
  where.replaceChildren(style, element);
  told = shown = "";
  wordsLoaded().then(() => poll(element));
}

// Until it is hidden; the next time when the server has answered, however long it took.
async function poll(mine) {
  do {
    await refresh();
    await new Promise((resolve) => setTimeout(resolve, EVERY));
  } while (mine === element && mine.isConnected);
  if (mine === element) hide();
}

function hide() {
  element = undefined;
}

app.registerExtension({
  name: "torch-compile-kit.panel",

  async setup() {
    await wordsLoaded();
    onLanguage(() => {
      told = shown = "";
      return refresh();
    });
    app.extensionManager?.registerSidebarTab?.({
      id: "torch-compile-kit",
      icon: "pi pi-bolt",
      title: "Torch Compile",
      tooltip: say("panel"),
      type: "custom",
      render: show,
      destroy: hide,
    });
  },
});
