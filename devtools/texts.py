"""Check all texts: locales/ against the nodes' schemas, the page's scripts and the reports, and the help pages.

python -m devtools.texts --comfyui FOLDER    # with the Python that runs this ComfyUI; ends with 1 where a text is wrong
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from . import help_pages, locales
from .commands import ROOT

REPORT = "report.json"
# Names of inputs and values, which stay as they are in every language.
KEPT = ("extra_sizes", "cache_limit", "dynamic", "cfg", "LoRA", "ControlNet", "auto", "true")
# Sentences that may be the same in any language, since they consist of other sentences.
FRAMES = ("cure", "or", "details", "phase", "limit", "inEnglish", "cacheSaved")
ROOMS = (
    "nodes",
    "engine/messages",
    "engine/host/nodes",
    "engine/host/model",
    "engine/host/graphs",
    "engine/benchmark",
)


def keys_said(code, function="say"):
    """The keys in the calls of `say` in some code, Python or JavaScript."""
    return {key for call in re.findall(rf"\b{function}\((?=([^()]*))", code) for key in re.findall(r'"(\w+)"', call)}


def keys_of_scripts(root=ROOT):
    scripts = "\n".join(file.read_text(encoding="utf-8") for file in (root / "js").glob("*.js"))
    lines = keys_said(code_of_reports(root), "told")  # which the page says
    return keys_said(scripts) | lines


def code_of_reports(root=ROOT):
    code = "\n".join(file.read_text(encoding="utf-8") for room in ROOMS for file in (root / room).glob("*.py"))
    return re.sub(r"\s+", " ", code)


def keys_of_reports(root=ROOT):
    return keys_said(code_of_reports(root)) - {"en"}


def report(language, folder=locales.FOLDER):
    return json.loads((folder / language / REPORT).read_text(encoding="utf-8"))


def unequal(what, used, there):
    lines = [f"{what}: {key} is used, and is no text" for key in sorted(used - there)]
    return lines + [f"{what}: nothing uses {key}" for key in sorted(there - used)]


def wrong_report(english, translated):
    """What is wrong with the sentences of reports in another language, a line each."""
    lines = [f"{REPORT}/{key}: lacks" for key in english if key not in translated]
    for key, text in translated.items():
        if key not in english:
            lines.append(f"{REPORT}/{key}: English has no such text")
            continue
        if Counter(re.findall(r"%\d", text)) != Counter(re.findall(r"%\d", english[key])):
            lines.append(f"{REPORT}/{key}: has other places for values than English")
        if text == english[key] and key not in FRAMES:
            lines.append(f"{REPORT}/{key}: is English")
        lines += [
            f"{REPORT}/{key}: {name} is in one of the languages only"
            for name in KEPT
            if locales.names(english[key], name) != locales.names(text, name)
        ]
    return lines


def unused_or_missing(root=ROOT):
    """Texts of the scripts, of the settings and of reports that are missing, or that nothing uses."""
    english = locales.read("en")
    script = (root / "js" / "settings.js").read_text(encoding="utf-8")
    settings = {name.replace(".", "_") for name in re.findall(r'"(TorchCompileKit\.\w+)"', script)}
    lines = unequal("main.json", keys_of_scripts(root), set(english["main.json"]["torchCompileKit"]))
    lines += unequal("settings.json", settings, set(english["settings.json"]))
    lines += [
        f'js/settings.js: has no name: "{texts["name"]}"'
        for texts in english["settings.json"].values()
        if f'name: "{texts["name"]}"' not in script
    ]
    return lines + unequal(REPORT, keys_of_reports(root), set(report("en")))


def wrong_files(folder=locales.FOLDER):
    """Languages and files that are missing or unknown, and files that are not formatted as devtools.locales writes files."""
    wanted = {f"{language}/{name}" for language in ("en", *locales.LANGUAGES) for name in locales.FILES}
    wanted |= {f"{language}/{REPORT}" for language in ("en", *locales.LANGUAGES)}
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    lines = [f"{name}: is missing" for name in sorted(wanted - found)]
    lines += [f"{name}: is no file of a known language" for name in sorted(found - wanted)]
    for name in sorted(wanted & found):
        text = (folder / name).read_bytes().decode("utf-8")
        if text != json.dumps(json.loads(text), ensure_ascii=False, indent=2) + "\n":
            lines.append(f"{name}: is not indented by two spaces with one newline at the end, in UTF-8")
    return lines


def same_names(language):
    """Names that several nodes share in a language, a line each."""
    titles = [node["display_name"] for node in locales.read(language)["nodeDefs.json"].values()]
    return [f"nodeDefs.json: two nodes are named {title}" for title in sorted({t for t in titles if titles.count(t) > 1})]


def check(schemas):
    """What is wrong with any text in any language, a line each; nothing is written."""
    content, values = locales.english(schemas), locales.choices(schemas)
    lines = wrong_files() + unused_or_missing()
    if locales.read("en") != content:
        lines.append("en: is not what the nodes say: run python -m devtools.locales --comfyui FOLDER")
    for language in ("en", *locales.LANGUAGES):
        found = same_names(language)
        if language != "en":
            found += locales.wrong(content, locales.read(language), values)
            found += wrong_report(report("en"), report(language))
        lines += [f"{language}: {line}" for line in found]
    return lines + help_pages.check([schema.node_id for schema in schemas])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="the folder of ComfyUI")
    schemas = locales.load_schemas(parser.parse_args().comfyui)
    lines = check(schemas)
    count = len(locales.texts(locales.english(schemas)))
    print("\n".join(lines) or f"{count} texts in English and {len(locales.LANGUAGES)} other languages, and help pages")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
