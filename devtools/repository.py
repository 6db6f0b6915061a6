"""Write the repository's address into pyproject.toml, where the registry reads it.

python -m devtools.repository https://github.com/OWNER/NAME

README and docs need no address: their links are relative, and the files are in the archive (tests/project/test_packaging.py).
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


def main():
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    file = ROOT / "pyproject.toml"
    file.write_text(with_address(file.read_text(encoding="utf-8"), sys.argv[1]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
