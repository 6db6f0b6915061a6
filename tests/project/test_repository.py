"""What people see of the repository and of the pack's page in the registry, before they have installed it."""

import struct

import pytest
import tomlkit
from support import ROOT

from devtools import repository


def test_one_command_writes_the_repositorys_address_wherever_it_is_needed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    once = repository.with_address(text, "https://github.com/someone/a-pack")
    project = tomlkit.parse(once)
    addresses = [*project["project"]["urls"].values(), project["tool"]["comfy"]["Icon"], project["tool"]["comfy"]["Banner"]]
    assert len(addresses) == 5 and all("someone/a-pack" in address for address in addresses)
    assert project["project"]["urls"]["Repository"] == "https://github.com/someone/a-pack"
    for picture in addresses[-2:]:
        assert (ROOT / picture.partition("/main/")[2]).is_file()
    assert once.count("someone/a-pack") == 5 and len(once.splitlines()) == len(text.splitlines())
    assert repository.with_address(once, "https://github.com/other/name").count("someone") == 0


def test_texts_that_name_the_repository_get_its_name_once_and_again(tmp_path):
    for file in ("pyproject.toml", *repository.TEXTS):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text(encoding="utf-8"), encoding="utf-8")
    lacking = repository.lacking(tmp_path)
    assert set(repository.TEXTS) <= set(lacking) and len(lacking) == 5 + len(repository.TEXTS)
    for name in ("someone/a-pack", "other/name.x"):
        for file, form in repository.TEXTS.items():
            text = repository.renamed((tmp_path / file).read_text(encoding="utf-8"), form, name)
            assert form.format(name) in text
            (tmp_path / file).write_text(text, encoding="utf-8")
    assert all("pyproject" in line for line in repository.lacking(tmp_path))


@pytest.mark.parametrize(
    "address", ["", "torch-compile-kit", "http://github.com/a/b", "https://github.com/a", "https://x.org/a/b"]
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="is not an address like"):
        repository.with_address((ROOT / "pyproject.toml").read_text(encoding="utf-8"), address)


def test_a_key_that_is_gone_is_named():
    with pytest.raises(ValueError, match=r"no Banner in \[tool.comfy\]"):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace("Banner = ", "Other = ")
        repository.with_address(text, "https://github.com/a/b")


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
