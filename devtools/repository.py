"""Write the repository's address wherever it stands for itself; links in README and docs are relative.

python -m devtools.repository https://github.com/OWNER/NAME
python -m devtools.repository --check    # end with 1, and name what still lacks an address; publish.yml asks
"""

import re
import sys

from .commands import ROOT

GITHUB = r"https://github\.com/([\w-]+/[\w.-]+)"
# Table and key in pyproject.toml, and what is written there. The registry shows pictures by their address.
ADDRESSES = {
    ("project.urls", "Repository"): "https://github.com/{}",
    ("project.urls", "Documentation"): "https://github.com/{}/blob/main/docs/guide.md",
    ("project.urls", "Bug Tracker"): "https://github.com/{}/issues",
    ("tool.comfy", "Icon"): "https://raw.githubusercontent.com/{}/main/docs/icon.png",
    ("tool.comfy", "Banner"): "https://raw.githubusercontent.com/{}/main/docs/banner.png",
}
# Texts that name the repository; NOBODY's until it has an address.
NOBODY = "OWNER/NAME"
TEXTS = {"README.md": "git clone https://github.com/{}", ".github/ISSUE_TEMPLATE/config.yml": "https://github.com/{}/security"}


def with_address(text, address):
    """The text of pyproject.toml with this address.

    Raises:
        ValueError: the address is none of a repository on GitHub, or a key is missing.
    """
    match = re.fullmatch(GITHUB, address)
    if not match:
        raise ValueError(f"{address} is not an address like https://github.com/OWNER/NAME")
    for (table, key), form in ADDRESSES.items():
        name = f'"{key}"' if " " in key else key
        pattern = rf'(^\[{re.escape(table)}\]\n(?:(?!\[).*\n)*?{re.escape(name)} = )".*"'
        text, count = re.subn(pattern, rf'\g<1>"{form.format(match[1])}"', text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"pyproject.toml has no {key} in [{table}]")
    return text


def renamed(text, form, name):
    """A text of TEXTS for the repository `name`."""
    before, after = map(re.escape, form.split("{}"))
    text, count = re.subn(rf"({before})[\w-]+/[\w.-]+({after})", rf"\g<1>{name}\g<2>", text)
    if count != 1:
        raise ValueError(f"{form} is there {count} times, not once")
    return text


def lacking(root=ROOT):
    """What has no address yet, a line each."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    lines = [
        f"pyproject.toml: {key} in [{table}]" for table, key in ADDRESSES if re.search(rf'^"?{key}"? = ""', text, re.MULTILINE)
    ]
    return lines + [file for file in TEXTS if NOBODY in (root / file).read_text(encoding="utf-8")]


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    if sys.argv[1] == "--check":
        print("\n".join(lacking()) or "every address is set")
        return 1 if lacking() else 0
    texts = {"pyproject.toml": with_address((ROOT / "pyproject.toml").read_text(encoding="utf-8"), sys.argv[1])}
    name = re.fullmatch(GITHUB, sys.argv[1])[1]
    texts |= {file: renamed((ROOT / file).read_text(encoding="utf-8"), form, name) for file, form in TEXTS.items()}
    for file, text in texts.items():
        (ROOT / file).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
