import threading
import time

import pytest

from recipes.cache import build_once, source_digest


def _writer(text, calls):
    def build(folder):
        calls.append(text)
        (folder / "result").write_text(text)

    return build


def test_built_once_for_the_same_settings_and_replaced_for_others(tmp_path):
    folder, calls = tmp_path / "made", []
    assert build_once(folder, {"seed": 0}, _writer("first", calls))
    assert not build_once(folder, {"seed": 0}, _writer("again", calls))
    assert build_once(folder, {"seed": 1}, _writer("second", calls))
    assert calls == ["first", "second"]
    assert (folder / "result").read_text() == "second"


def test_a_failed_build_leaves_nothing_and_the_next_one_starts_afresh(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise RuntimeError("power cut")

    folder = tmp_path / "made"
    with pytest.raises(RuntimeError, match="power cut"):
        build_once(folder, {}, fail)
    assert not folder.exists()
    build_once(folder, {}, _writer("whole", []))
    assert sorted(path.name for path in folder.iterdir()) == ["result", "settings.json"]


def test_a_folder_that_it_did_not_make_is_kept(tmp_path):
    (tmp_path / "thesis").write_text("")
    with pytest.raises(ValueError, match=r"no settings\.json"):
        build_once(tmp_path, {}, _writer("", []))
    assert (tmp_path / "thesis").exists()


def test_source_digest_follows_the_contents(tmp_path):
    source = tmp_path / "a.py"
    source.write_text("1")
    before = source_digest([source])
    source.write_text("2")
    assert source_digest([source]) != before


def test_two_who_start_together_build_once_and_mix_nothing(tmp_path):
    """The second one waits for the first, and finds what it made."""
    folder, calls, built = tmp_path / "made", [], {}
    begun = threading.Event()

    def slow(partial):
        (partial / "first").write_text("")
        begun.set()
        time.sleep(0.3)
        (partial / "second").write_text("")
        calls.append(partial)

    first = threading.Thread(target=lambda: built.update(first=build_once(folder, {}, slow)))
    first.start()
    assert begun.wait(10)
    built["second"] = build_once(folder, {}, slow)
    first.join()
    assert built == {"first": True, "second": False} and len(calls) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["first", "second", "settings.json"]
