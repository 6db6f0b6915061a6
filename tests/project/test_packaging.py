"""What the registry gets: packed by comfy-cli, as it does it (validated: `python dev.py lint`)."""

import posixpath
import re
from urllib.parse import unquote

import pytest
import tomlkit
from packing import pack
from support import ROOT

PICTURES = (".png", ".jpg", ".svg", ".gif", ".webp")
# At the top of the archive, and nothing else.
TOP = {
    "__init__.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md",
    "nodes", "engine", "js", "locales", "workflows", "docs", "prebuild.py",
}  # fmt: skip
MIB = 1024**2


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    return pack(tmp_path_factory.mktemp("checkout"))


def page_links(text):
    """(file, anchor) of each link and picture of a Markdown page to a file; the file is "" for the page itself."""
    code = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", code) + re.findall(r"(?:src|href)=\"([^\"]+)\"", code)
    return [target.partition("#")[::2] for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(pages, names):
    """Links of the pages to files that are not among the names, or to headings that are not there."""
    dead = []
    for page, text in pages.items():
        for target, anchor in page_links(text):
            file = posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(target))) if target else page
            if file not in names or (anchor and anchor not in anchors(pages.get(file, ""))):
                dead.append(f"{page}: {target}{'#' * bool(anchor)}{anchor}")
    return dead


def test_the_archive_holds_what_a_user_needs_and_no_more(archive):
    names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names} == TOP
    needed = "nodes/warmup.py", "engine/host/cards.json", "js/node_report.js", "docs/use.png", "docs/fleet.md"
    assert set(needed) <= names
    assert {"locales/en/nodeDefs.json", "locales/ja/nodeDefs.json", "locales/zh-TW/main.json"} <= names
    assert {"js/docs/TorchCompileKitModel.md", "js/docs/TorchCompileKitModel/ja.md"} <= names
    assert "workflows/3 Flux with Torch Compile and Warmup.json" in names
    kinds = {posixpath.splitext(name)[1] for name in names}
    assert kinds <= {".py", ".md", ".json", ".js", ".toml", "", *PICTURES}
    assert {name for name in names if "." not in posixpath.basename(name)} == {"LICENSE"}


def test_without_its_pictures_the_archive_is_small(archive):
    texts = [entry for entry in archive.infolist() if not entry.filename.endswith(PICTURES)]
    assert sum(entry.compress_size for entry in texts) < MIB
    assert max(entry.file_size for entry in texts) < MIB / 8
    assert sum(entry.file_size for entry in archive.infolist()) < 3 * MIB


def test_no_link_of_an_installed_pack_is_dead(archive):
    names = set(archive.namelist())
    pages = {name: archive.read(name).decode() for name in names if name.endswith(".md")}
    assert len(pages) > 20 and sum(len(page_links(text)) for text in pages.values()) > 20
    assert dead_links(pages, names) == []
    # A page that no other leads to is not read.
    linked = {target for page in ("README.md", "docs/guide.md", "docs/figures.md") for target, _ in page_links(pages[page])}
    assert {posixpath.basename(name) for name in names if name.startswith("docs/")} <= {posixpath.basename(t) for t in linked}


def test_every_page_that_code_names_is_in_the_archive(archive):
    names = set(archive.namelist())
    code = {name: archive.read(name).decode() for name in names if name.endswith((".py", ".js", ".json"))}
    named = {
        page
        for text in code.values()
        for page in re.findall(r"[\w/]*\bdocs/\w+\.md\b|\b(?:README|SECURITY|CHANGELOG)\.md\b", text)
    }
    assert named and named <= names


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](docs/guide.md) ![b](docs/use.png) [c](#one-two) [d](docs/guide.md#three) [e](https://x.org/y#z)", []),
        ("`[a](gone.md)`\n```\n[a](gone.md)\n```", []),
        ("[a](docs/gone.md)", ["README.md: docs/gone.md"]),
        ("![a](gone.png)", ["README.md: gone.png"]),
        ('<img src="gone.png">', ["README.md: gone.png"]),
        ("[a](#gone)", ["README.md: #gone"]),
        ("[a](docs/guide.md#gone)", ["README.md: docs/guide.md#gone"]),
    ],
)
def test_a_dead_link_is_found(text, dead):
    pages = {"README.md": f"# One: two\n{text}", "docs/guide.md": "## Three\n[up](../README.md#one-two)"}
    assert dead_links(pages, {*pages, "docs/use.png"}) == dead


@pytest.mark.parametrize(("page", "lines"), [("README.md", 110), ("docs/figures.md", 45), ("docs/guide.md", 110)])
def test_pages_for_users_stay_short(page, lines):
    """Rows of tables aside, in pages that are made of them."""
    text = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert len([line for line in text if page == "README.md" or not line.startswith("|")]) <= lines


def test_versions_that_users_read_are_those_that_are_tested(engine):
    tested = engine("torch_compat.private").TESTED
    first, last = tested[0], tested[-1]
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["torch-compile-kit"] == {"requires-torch": f">={first}", "tested-torch": last}
    oldest = project["tool"]["comfy"]["requires-comfyui"].removeprefix(">=").removesuffix(".0")
    for page in ("README.md", "docs/compatibility.md", "docs/troubleshooting.md", "CHANGELOG.md"):
        assert f"PyTorch {first} to {last}" in (ROOT / page).read_text(encoding="utf-8")
    assert f"ComfyUI {oldest} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    rows = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    ended = re.findall(r"^\| [\d.]+ \| (\d+\.\d+)\.[^|]*\|[^|]*\| \d+ \| (\d+) \|", rows, re.MULTILINE)
    assert {torch for torch, _ in ended} - {torch for torch, failed in ended if failed != "0"} == set(tested)
    version = project["project"]["version"]
    assert re.search(
        rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
