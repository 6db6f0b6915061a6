"""Sentences are there from the start: an update may exchange the files of a pack that runs."""


def test_no_text_is_read_while_a_prompt_runs(engine, monkeypatch, tmp_path):
    words = engine("messages.words")
    monkeypatch.setattr(words, "FOLDER", tmp_path)
    for language in words.LANGUAGES:
        with words.speaking(language):
            assert words.say("firstRun") and words.in_words(words.told("compilingKind"))
