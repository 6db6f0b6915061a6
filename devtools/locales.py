"""Write locales/en, the nodes' texts, from the nodes' schemas, and compare the other languages with it.

python -m devtools.locales --comfyui FOLDER      # with the Python that runs this ComfyUI; ends with 1 where a text is wrong

`python dev.py lint` runs devtools/texts.py instead, which checks these and all other texts and writes nothing.
ComfyUI reads locales/LANGUAGE/main.json (the page's menu shows its `nodeCategories`, our scripts its `torchCompileKit`),
nodeDefs.json and settings.json. The English texts of our scripts and settings are written by hand.
"""

import argparse
import asyncio
import importlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from .commands import ROOT
from .inprocess import enter_host

FOLDER = ROOT / "locales"
FILES = ("main.json", "nodeDefs.json", "settings.json")
LANGUAGES = ("ja", "zh", "zh-TW", "ko", "fr", "de", "es", "ru")
# vue-i18n parses display names, descriptions and names as messages, in which these characters are syntax.
SYNTAX = re.compile(r"[{}@|]")
NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?:[.x]\d+)*")


def english(schemas):
    """The content of each English file by its name.

    Args:
        schemas: what `define_schema` of each node returns.
    """
    written = read("en")
    return {
        "main.json": {
            "nodeCategories": {part: part for schema in schemas for part in schema.category.split("/")},
            "torchCompileKit": written["main.json"].get("torchCompileKit", {}),
        },
        "settings.json": written["settings.json"],
        "nodeDefs.json": {
            schema.node_id: {
                "display_name": schema.display_name,
                "description": schema.description,
                "inputs": {
                    given.id: {"name": given.display_name or given.id, "tooltip": given.tooltip} for given in schema.inputs
                },
                "outputs": {
                    str(index): {"name": given.display_name, "tooltip": given.tooltip}
                    for index, given in enumerate(schema.outputs)
                },
            }
            for schema in sorted(schemas, key=lambda schema: schema.node_id)
        },
    }


def choices(schemas):
    """The values of the inputs that offer a choice, by the path of the tooltip that may name them."""
    return {
        f"nodeDefs.json/{schema.node_id}/inputs/{given.id}/tooltip": [str(option) for option in given.options]
        for schema in schemas
        for given in schema.inputs
        if getattr(given, "options", None)
    }


def texts(tree, path=""):
    """Each text of a tree of dicts by its path; a value that is neither text nor dict counts as a text, a wrong one."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: text for name, below in tree.items() for key, text in texts(below, f"{path}/{name}".lstrip("/")).items()}


def read(language, folder=FOLDER):
    """The content of each file of a language by its name; empty where there is none."""
    files = {name: folder / language / name for name in FILES}
    return {name: json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for name, file in files.items()}


def wrong(source, translation, values):
    """What is wrong with a translation, a line each.

    Args:
        source, translation: the content of the files of English and of the other language.
        values: what `choices` returns; values and numbers in the English text must be in the translation, too.
    """
    source, translation = texts(source), texts(translation)
    lines = [f"{key}: lacks" for key in source if key not in translation]
    for key, text in translation.items():
        if key not in source:
            lines.append(f"{key}: English has no such text")
        elif not isinstance(text, str) or not text.strip():
            lines.append(f"{key}: is empty")
        elif key.endswith(("/tooltip", "/description")) and text == source[key]:
            lines.append(f"{key}: is English")
        else:
            kept = [*NUMBER.findall(source[key]), *(word for word in values.get(key, ()) if names(source[key], word))]
            lines += [f"{key}: lacks {word}" for word in sorted(set(kept)) if not names(text, word)]
            lines += [f"{key}: {sign} is syntax to the page" for sign in sorted(set(SYNTAX.findall(text)))]
    return lines


def names(text, word):
    """Whether a text has the word, and not only as a part of a longer word in Latin letters."""
    return re.search(rf"(?<![A-Za-z0-9_-]){re.escape(word)}(?![A-Za-z0-9_-])", text) is not None


def schemas_in(pack):
    """The schema of each node of the loaded pack."""
    module = importlib.import_module(".nodes", pack)
    return [node.define_schema() for node in asyncio.run(module.TorchCompileKit().get_node_list())]


def write_english(content, folder=FOLDER):
    """Write the English files, and return the paths of the texts that are new or changed."""
    before, now = texts(read("en", folder)), texts(content)
    (folder / "en").mkdir(parents=True, exist_ok=True)
    for name, tree in content.items():
        text = json.dumps(tree, ensure_ascii=False, indent=2) + "\n"
        (folder / "en" / name).write_text(text, encoding="utf-8", newline="\n")
    return [key for key, text in now.items() if before.get(key) != text]


def load_schemas(comfyui):
    """The schema of each node, from the pack as this ComfyUI loads it; call this once per process."""
    os.environ["COMFYUI_PATH"] = str(comfyui.resolve())
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]  # its nodes/ is not ComfyUI's
    with tempfile.TemporaryDirectory(prefix="torch-compile-kit-locales-") as base:
        enter_host(base)
        import nodes

        if not asyncio.run(nodes.load_custom_node(str(ROOT))):
            sys.exit("ComfyUI did not load the pack; see its log above")
        return schemas_in(str(ROOT).replace(".", "_x_"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, required=True, help="the folder of ComfyUI")
    schemas = load_schemas(parser.parse_args().comfyui)
    content = english(schemas)
    for key in write_english(content):
        print(f"en: {key}: new or changed, translate it anew")
    lines = [f"{language}: {line}" for language in LANGUAGES for line in wrong(content, read(language), choices(schemas))]
    print("\n".join(lines) or f"{len(texts(content))} texts in English and {len(LANGUAGES)} other languages")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
