"""Sentences are there from the start: an update may exchange the files of a pack that runs."""

import importlib.util
import shutil


def test_no_text_is_read_while_a_prompt_runs(engine, monkeypatch, tmp_path):
    words = engine("messages.words")
    monkeypatch.setattr(words, "FOLDER", tmp_path)
    for language in words.LANGUAGES:
        with words.speaking(language):
            assert words.say("firstRun") and words.in_words(words.told("compilingKind"))


def test_what_is_no_language_is_left_alone(engine, tmp_path):
    """A folder of Finder's or Jupyter's, a language that was copied by half."""
    words, pack = engine("messages.words"), tmp_path / "pack"
    shutil.copytree(words.FOLDER, pack / "locales")
    (pack / "locales" / ".DS_Store").touch()
    (pack / "locales" / ".ipynb_checkpoints").mkdir()
    (pack / "locales" / "ja" / "main.json").unlink()
    (pack / "locales" / "ko" / "report.json").write_text("{")
    (pack / "engine" / "messages").mkdir(parents=True)
    source = shutil.copy(words.__file__, pack / "engine" / "messages")
    spec = importlib.util.spec_from_file_location("words_of_a_copy", source)
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    assert {*copied.LANGUAGES} == {*words.LANGUAGES} - {"ja", "ko"}
    for language, spoken in (("de", "de"), ("ko", "en")):
        with copied.speaking(language):
            assert copied.say("firstRun") == words._texts(spoken)["firstRun"]
