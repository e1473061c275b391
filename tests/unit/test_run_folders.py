"""Folders that are whole or not there."""

import pytest

from megatrain.errors import InputError
from megatrain.train.folders import model_folder, new_run_folder, whole_folder


def test_a_folder_appears_only_when_its_content_is_complete(tmp_path):
    target = tmp_path / "deep" / "model"
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_and_what_was_there(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(RuntimeError, match="full"), whole_folder(target) as folder:
        (folder / "a").write_text("1")
        raise RuntimeError("full")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_and_a_full_one_never(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    with whole_folder(target) as folder:
        (folder / "a").write_text("1")
    with pytest.raises(OSError, match="not empty"), whole_folder(target) as folder:
        (folder / "a").write_text("2")
    assert (target / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "old").write_text("half")
    with whole_folder(tmp_path / "model") as folder:
        assert list(folder.iterdir()) == []


def test_a_run_folder_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(new_run_folder(None, "demo")).startswith("runs/demo-20")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file is a file"):
        new_run_folder("file", "demo")


def test_a_runs_folder_stands_for_its_model(tmp_path):
    assert model_folder(str(tmp_path)) == str(tmp_path)
    assert model_folder("org/name") == "org/name"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == str(tmp_path / "model")
