"""Compare the translated help pages of the nodes (js/docs/NODE/LANGUAGE.md) with the English ones (js/docs/NODE.md)."""

import re
from collections import Counter

from .commands import ROOT

FOLDER = ROOT / "js" / "docs"
LANGUAGES = ("ja", "zh")


def outline(page):
    """What a help page and its translations must share: headings, folded sections, lists, code, links, names of inputs."""
    lines = page.splitlines()
    return {
        "headings": [re.match("#+", line)[0] for line in lines if line.startswith("#")],
        "named": [
            re.findall(r"\w+", re.sub(r"[(\uff08].*?[)\uff09]", "", line), re.ASCII)
            for line in lines
            if re.match(r"### \w", line, re.ASCII)
        ],
        "folded": page.count("<details>"),
        "lists": sum(line.startswith("- ") for line in lines),
        "code": Counter(re.findall(r"`[^`]+`", page)),
        "links": re.findall(r"\]\((\S+?)\)", page),
    }


def differences(page, translated):
    """What is wrong with a translated page, a line each."""
    here, there = outline(page), outline(translated)
    lines = [f"{part}: English has {here[part]}, the translation {there[part]}" for part in here if here[part] != there[part]]
    same = set(translated.splitlines()[1:]) & set(page.splitlines())  # the title may be a product name
    return lines + [f"is English: {line}" for line in sorted(same) if not re.fullmatch(r"(### [\w, ]+|</details>)?", line)]


def check(nodes, folder=FOLDER):
    """What is wrong with the help pages of these nodes, a line each.

    Args:
        nodes: the id of each node.
    """
    wanted = {f"{node}.md" for node in nodes} | {f"{node}/{language}.md" for node in nodes for language in LANGUAGES}
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*.md")}
    lines = [f"{name}: is missing" for name in sorted(wanted - found)]
    lines += [f"{name}: there is no such node or language" for name in sorted(found - wanted)]
    for name in sorted(wanted & found):
        if re.search(r"^\|", (folder / name).read_text(encoding="utf-8"), re.MULTILINE):
            lines.append(f"{name}: has a table, and the page shows it 282 pixels wide")
        node, _, translated = name.removesuffix(".md").partition("/")
        if translated and f"{node}.md" in found:
            texts = [(folder / file).read_text(encoding="utf-8") for file in (f"{node}.md", name)]
            lines += [f"{name}: {line}" for line in differences(*texts)]
    return lines
