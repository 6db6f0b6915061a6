// The pack's texts in the page's language: `torchCompileKit` of locales/LANGUAGE/main.json, else English.
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";

let words;

async function load() {
  const all = await (await api.fetchApi("/i18n")).json();
  const language = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
  words = { ...all.en?.torchCompileKit, ...all[language]?.torchCompileKit };
}

let loading;
export const wordsLoaded = () => (loading ??= load());

// A text by its key, with values in the places of %1, %2.
export const say = (key, ...values) => (words?.[key] ?? key).replace(/%(\d)/g, (_sign, place) => values[place - 1]);
