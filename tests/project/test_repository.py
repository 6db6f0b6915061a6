"""What people see of the repository and of the pack's page in the registry, before they have installed it."""

import re
import struct

import pytest
import tomlkit
from support import ROOT


def test_addresses_name_one_repository_that_a_release_must_have_named():
    project = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    addresses = [*project["project"]["urls"].values(), project["tool"]["comfy"]["Icon"], project["tool"]["comfy"]["Banner"]]
    (name,) = {
        re.match(r"https://(?:raw\.githubusercontent|github)\.com/([\w-]+/[\w.-]+)", address)[1] for address in addresses
    }
    for picture in addresses[-2:]:
        assert (ROOT / picture.partition("/main/")[2]).is_file()
    assert f"https://github.com/{name}" in (ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8")
    publish = (ROOT / ".github" / "workflows" / "publish.yml").read_text(encoding="utf-8")
    assert "! grep -rn OWNER/NAME pyproject.toml .github/ISSUE_TEMPLATE" in publish


@pytest.mark.parametrize(("name", "ratio"), [("icon", 1), ("banner", 21 / 9)])
def test_icon_and_banner_are_what_the_registry_takes(name, ratio):
    """An icon of at most 400 by 400, a banner of 21:9; drawn as .svg, of which the .png is made."""
    data = (ROOT / "docs" / f"{name}.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert abs(width / height - ratio) < 0.01 and (name != "icon" or width <= 400)
    assert len(data) < 100_000
    svg = (ROOT / "docs" / f"{name}.svg").read_text(encoding="utf-8")
    assert f'width="{width}" height="{height}"' in svg and "<title>Torch Compile Kit" in svg and "href" not in svg


def test_each_document_of_the_requirements_is_in_a_row_and_each_row_names_a_test():
    text = (ROOT / "tests" / "documents.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}[\d, ]*) \|[^|]*\| ([^|:]+)(?:::(\w+))? \|$", text, re.MULTILINE)
    assert len(rows) > 40 and {n for numbers, *_ in rows for n in numbers.split(", ")} == {f"00{n}" for n in range(5)}
    for _, file, name in rows:
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


def test_issue_forms_ask_for_what_answers_need():
    yaml = pytest.importorskip("yaml")
    forms = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}
    config = forms.pop("config")
    assert config["blank_issues_enabled"] is False and config["contact_links"][0]["url"].endswith("/security/advisories/new")
    assert set(forms) == {"bug", "slow", "idea"}
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert fields and all(part["attributes"]["label"] and part["id"] for part in fields)
        assert any(part.get("validations", {}).get("required") for part in fields)
    asked = {part.get("id") for form in ("bug", "slow") for part in forms[form]["body"]}
    assert {"machine", "benchmark", "log", "workflow"} <= asked
