"""The check of the rooms of engine/ finds what is planted (devtools/rooms.py)."""

import shutil

import pytest
from support import ROOT

from devtools import rooms


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("engine/cache/disk.py", "from ..compile.compiled_code import BlockCode", "engine/cache/disk imports engine/compile/"),
        (
            "engine/cache/places.py",
            "from ..transformer_options.filter import OptionsFilter",
            "engine/cache/places imports engine/transformer_options/",
        ),
        ("engine/errors.py", "if TYPE_CHECKING:\n    from .settings import CompileSettings", "imports itself through others"),
        ("engine/more/module.py", "", "engine/more is a room without a floor"),
    ],
)
def test_what_is_planted_is_found(tmp_path, file, text, found):
    for room in ("nodes", "engine"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    assert not rooms.check(tmp_path)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with open(tmp_path / file, "a", encoding="utf-8") as opened:
        opened.write(f"\n{text}\n")
    assert any(found in line for line in rooms.check(tmp_path))


def test_a_room_without_its_rule_is_found(tmp_path):
    for room in ("nodes", "engine"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "engine" / "transformer_options" / "__init__.py").write_text('"""Options."""\n')
    assert "engine/transformer_options/__init__.py does not say what may be imported there" in rooms.check(tmp_path)
