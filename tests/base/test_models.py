"""Model names, the hub, and the cache of converted models."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.base.models import cache, hub


def silent(text: str) -> None:
    """A progress callback that shows nothing."""


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


# Names ------------------------------------------------------------------------------------------


def test_a_local_folder_is_served_under_the_name_it_was_given(model_folder):
    found = models.resolve(str(model_folder), None, silent)
    assert found == models.ResolvedModel(
        str(model_folder), str(model_folder), served_name=str(model_folder)
    )


def test_a_folder_of_this_directory_comes_before_a_hub_id(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder.parent)
    assert models.resolve("model", None, silent).path_or_id == str(model_folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./nowhere", "there is no folder ./nowhere"),
        ("/nowhere/at/all", "there is no folder /nowhere"),
        ("~/no-such-model", "there is no folder ~/no-such-model"),
        ("empty", "holds no config.json"),
        ("model.gguf", "is a file"),
    ],
)
def test_a_path_to_no_model_is_refused(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=words):
        models.resolve(name, None, silent)


@pytest.mark.parametrize(
    ("name", "repo_id"),
    [
        ("llama-13b", "meta-llama/Llama-2-13b-hf"),
        ("opt-13b", "facebook/opt-13b"),
        ("org/other", "org/other"),
    ],
)
def test_short_names_stand_for_hub_ids(name, repo_id, model_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda *args: asked.append(args[0]) or model_folder)
    found = models.resolve(name, None, silent)
    assert asked == [repo_id]
    assert found == models.ResolvedModel(name, str(model_folder), served_name=name)


# The hub ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def hub_that_answers(monkeypatch):
    monkeypatch.setattr(hub, "_is_silent", lambda repo_id: False)


def hub_errors():
    """Errors of huggingface_hub and what a user must read about each."""
    from huggingface_hub import errors

    def answer(kind):
        error = kind.__new__(kind)
        Exception.__init__(error, "made by a test")
        return error

    return [
        (answer(errors.GatedRepoError), "is gated: ask for access"),
        (answer(errors.RepositoryNotFoundError), "there is no model smolm2-135m"),
        (errors.HFValidationError("made by a test"), "there is no model smolm2-135m"),
        (errors.LocalEntryNotFoundError("made by a test"), "cannot fetch smolm2-135m"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "cannot fetch smolm2-135m"),
        (errors.HfHubHTTPError.__bases__[0]("broken"), "cannot fetch smolm2-135m"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot keep smolm2-135m in"),
    ]


@pytest.mark.parametrize(("error", "words"), hub_errors())
def test_what_the_hub_says_becomes_one_line(error, words, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=words) as caught:
        models.resolve("smolm2-135m", None, silent)
    message = str(caught.value)
    assert "\n" not in message
    if "gated" not in words and "keep" not in words:
        assert message.endswith("did you mean smollm2-135m?")


def test_offline_mode_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set and facebook/opt-13b is not in"):
        models.resolve("opt-13b", None, silent)


def test_of_a_silent_hub_only_the_cache_is_asked(model_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "_is_silent", lambda repo_id: True)
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda *args, **kwargs: asked.append((args, kwargs)) or str(model_folder),
    )
    assert models.resolve("org/name", None, silent).path_or_id == str(model_folder)
    assert asked == [(("org/name",), {"local_files_only": True})]


@pytest.mark.parametrize(("weights", "num_calls"), [("model.safetensors", 1), ("pytorch.bin", 2)])
def test_pickled_weights_are_fetched_only_where_there_are_no_others(
    weights, num_calls, model_folder, monkeypatch
):
    ignored = []

    def download(repo_id, ignore_patterns):
        ignored.append("*.bin" in ignore_patterns)
        if "*.bin" not in ignore_patterns or not weights.endswith(".bin"):
            (model_folder / weights).touch()
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    models.resolve("org/name", None, silent)
    assert ignored == [True, False][:num_calls]


# The cache --------------------------------------------------------------------------------------


def write_one_file(folder: Path) -> None:
    (folder / "weights").write_bytes(b"12345")


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({"BANASERVE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/banaserve"),
        ({"XDG_CACHE_HOME": ""}, str(Path("~/.cache/banaserve").expanduser())),
        ({}, str(Path("~/.cache/banaserve").expanduser())),
    ],
)
def test_the_cache_is_where_the_environment_says(env, root):
    assert cache.cache_root(env) == Path(root)


def test_a_folder_is_built_once_and_checked_after(tmp_path):
    folder = tmp_path / "models" / "m-1"
    assert cache.obtain(folder, write_one_file, silent)
    assert not cache.obtain(folder, write_one_file, silent)
    assert (folder / "weights").read_bytes() == b"12345"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".m-1.lock", "m-1"]


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "no manifest", "bad manifest"])
def test_a_damaged_folder_is_named_with_the_remedy(damage, tmp_path):
    folder = tmp_path / "m 1"
    cache.obtain(folder, write_one_file, silent)
    match damage:
        case "changed":
            (folder / "weights").write_bytes(b"12346")
        case "shorter":
            (folder / "weights").write_bytes(b"1")
        case "gone":
            (folder / "weights").unlink()
        case "no manifest":
            (folder / cache.MANIFEST).unlink()
        case "bad manifest":
            (folder / cache.MANIFEST).write_text('{"files": 1}')
    with pytest.raises(UserError, match=r"is damaged .*: remove it with `rm -r '.*/m 1'`"):
        cache.obtain(folder, write_one_file, silent)


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_one_file(folder)
        raise UserError("no source")

    with pytest.raises(UserError, match="no source"):
        cache.obtain(tmp_path / "m", fail, silent)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_what_a_killed_builder_left_is_removed(tmp_path):
    (tmp_path / ".m.tmp-dead").mkdir()
    cache.obtain(tmp_path / "m", write_one_file, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="BANASERVE_CACHE"):
        cache.obtain(tmp_path / "file" / "m", write_one_file, silent)


def test_a_full_disk_is_named(tmp_path):
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        cache.obtain(tmp_path / "m", fill, silent)


def test_of_two_that_start_at_once_one_builds(tmp_path):
    building, waited, built = threading.Event(), threading.Event(), []

    def build(folder: Path) -> None:
        building.set()
        assert waited.wait(timeout=60)
        write_one_file(folder)
        built.append(folder)

    first = threading.Thread(target=cache.obtain, args=(tmp_path / "m", build, silent))
    first.start()
    assert building.wait(timeout=60)
    was_built = cache.obtain(tmp_path / "m", build, lambda text: waited.set())
    first.join()
    assert not was_built
    assert len(built) == 1
