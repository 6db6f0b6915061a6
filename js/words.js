// The pack's texts in the page's language: `torchCompileKit` of locales/LANGUAGE/main.json, else English.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

let words;

export const locale = () => app.extensionManager?.setting?.get("Comfy.Locale");

async function load(language = locale() ?? "en") {
  const all = await (await api.fetchApi("/i18n")).json();
  words = { ...all.en?.torchCompileKit, ...all[language]?.torchCompileKit };
}

let loading;
export const wordsLoaded = () =>
  (loading ??= load().catch((error) => {
    loading = undefined; // asked again by the next who needs them
    console.warn("torch-compile-kit: no texts:", error);
  }));

// A text by its key, with values in the places of %1, %2.
export const say = (key, ...values) => (words?.[key] ?? key).replace(/%(\d)/g, (_sign, place) => values[place - 1]);

// What the server tells: a key with its values, which may be such texts themselves, or a list of these (engine/messages/words.py).
export function inWords(told) {
  if (!Array.isArray(told)) return told;
  const [key, ...values] = told.map(inWords);
  return Array.isArray(told[0]) ? [key, ...values].join("; ") : say(key, ...values);
}

// After the user has chosen another language.
export const onLanguage = (redraw) =>
  app.ui?.settings?.addEventListener?.("Comfy.Locale.change", ({ detail }) => load(detail.value).then(redraw));
