"""What a model's name means: files, folders and repositories of the hub, with nobody asked more than once."""

from __future__ import annotations

import logging
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError

from selfspec.loading.gguf.file import part_names
from selfspec.loading.hub import open_target
from selfspec.loading.names import PATIENCE, SHORT_PATIENCE, file_beside, find, gguf_models

SPLIT = ("big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf")


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


# ------------------------------------------------------------------------------------------------- files and folders


def test_a_file_may_end_in_capitals(tmp_path):
    file = touch(tmp_path, "TINY.GGUF") / "TINY.GGUF"
    assert find(str(file)) == str(file)


@pytest.mark.parametrize(
    ("files", "model"),
    [
        (["tiny.gguf"], "tiny.gguf"),
        (["TINY.GGUF", "README.md", "mmproj-tiny-F16.gguf", "tiny.imatrix.gguf"], "TINY.GGUF"),
        (SPLIT, SPLIT[0]),
        (["tiny.gguf", "config.json", "tokenizer.json"], "tiny.gguf"),
        (["tiny.gguf", "config.json", "model.safetensors"], ""),
        (["a.gguf", "b.gguf", "config.json", "pytorch_model.bin"], ""),
        (["tiny.gguf", "adapter_config.json", "adapter_model.safetensors"], ""),
        (["config.json"], ""),
    ],
)
def test_a_folder_with_no_other_weights_than_one_gguf_model_stands_for_it(tmp_path, files, model):
    assert find(str(touch(tmp_path, *files))) == str(tmp_path / model)


def test_a_folder_of_several_gguf_models_is_refused_with_their_names(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"several \.gguf files; .* one of them: a\.gguf, big-Q8_0-00001-of"):
        find(str(touch(tmp_path, "a.gguf", *SPLIT)))


@pytest.mark.parametrize("name", SPLIT)
def test_a_part_tells_the_names_of_all(name):
    assert part_names(name) == SPLIT
    assert gguf_models(SPLIT[::-1]) == [SPLIT[0]]


@pytest.mark.parametrize("name", ["a.gguf", "a-00001-of-00000.gguf", "a-1-of-2.gguf", "a-00001-of-00002.bin"])
def test_other_names_are_those_of_one_file(name):
    assert part_names(name) == (name,)


def test_nothing_is_looked_for_beside_a_gguf_file_or_a_model_object(tmp_path):
    touch(tmp_path, "a.GGUF", "some.json")
    assert file_beside(str(tmp_path), "some.json") == tmp_path / "some.json"
    assert file_beside(str(tmp_path / "a.GGUF"), "some.json") is None
    assert file_beside(None, "some.json") is None


# ------------------------------------------------------------------------------------------------------------ the hub


class Hub:
    """A stand-in for the hub: its repositories by name, None while nobody answers, and what it was asked."""

    def __init__(self, cache):
        self.cache, self.repositories, self.asked, self.downloaded = cache, {}, [], []

    def model_info(self, name, timeout):
        self.asked.append((name, timeout))
        if self.repositories is None:
            raise ConnectionError("nobody answers")
        if name not in self.repositories:
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.repositories[name]])

    def hf_hub_download(self, name, file):
        if file not in self.repositories[name]:
            raise OSError("a proxy said no")
        self.downloaded.append(file)
        return str(self.keep(name, file) / file)

    def keep(self, name, *files):
        """Put files into the cache, as a download does; returns their folder."""
        place = self.cache / f"models--{name.replace('/', '--')}"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text("abc")
        return touch(place / "snapshots" / "abc", *files)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    made = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.model_info", made.model_info)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", made.hf_hub_download)
    return made


def test_a_hub_id_stays_one_where_the_hub_answers_and_is_what_was_downloaded_where_not(hub):
    hub.repositories = {"org/name": ["config.json", "model.safetensors", "name-Q8_0.gguf"]}
    assert find("org/name") == "org/name"
    folder, hub.repositories = hub.keep("org/name", "config.json", "model.safetensors"), None
    assert find("org/name") == str(folder)
    assert hub.asked == [("org/name", PATIENCE), ("org/name", SHORT_PATIENCE)]


@pytest.mark.parametrize("name", ["org/name", "org/name:Q8_0", "name"])
def test_what_neither_the_hub_nor_this_machine_has_is_refused(hub, name):
    with pytest.raises(FileNotFoundError, match=f"neither a folder {name} nor such a model"):
        find(name)
    hub.repositories = None
    hub.keep(name.partition(":")[0], "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=f"no folder {name}, no such model on this machine and .* hub cannot"):
        find(name)


QUANTISED = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf", "m.f16.gguf", "m-BF16.gguf", *SPLIT, "config.json"]


@pytest.mark.parametrize(
    ("tag", "files"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k_s", ["m-Q4_K_S.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("F16", ["m.f16.gguf"]),
        ("m-BF16", ["m-BF16.gguf"]),
        ("m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        ("Q8_0", [*SPLIT]),
    ],
)
def test_a_type_names_a_file_of_a_repository_and_nothing_else_is_downloaded(hub, tag, files):
    hub.repositories = {"org/m-GGUF": QUANTISED}
    found = find(f"org/m-GGUF:{tag}")
    assert hub.downloaded == files
    assert (Path(found).name, Path(found).is_file()) == (files[0], True)
    assert find(f"org/m-GGUF:{tag}") == found  # by now from the cache
    assert (len(hub.asked), hub.downloaded) == (1, files)


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("", "holds several .gguf files; give one of these, such as org/m-GGUF:big-Q8_0-00001-of-00002.gguf: "),
        (":Q4_K", "holds no .gguf file of the type Q4_K; give one of these"),
        (":m", "holds several .gguf files of the type m; give one of these"),
    ],
)
@pytest.mark.parametrize("answers", [True, False])
def test_a_choice_that_is_none_is_refused_with_the_files_that_there_are(hub, tag, words, answers):
    hub.repositories = {"org/m-GGUF": QUANTISED}
    if not answers:
        hub.keep("org/m-GGUF", *QUANTISED)
        hub.repositories = None
    with pytest.raises(FileNotFoundError, match=r"m-Q4_K_S\.gguf, m-UD-Q4_K_XL\.gguf") as refused:
        find("org/m-GGUF" + tag)
    assert words.removeprefix("holds ") in str(refused.value)
    assert hub.downloaded == []


def test_a_repository_of_one_gguf_model_needs_no_type(hub):
    hub.repositories = {"org/one": ["config.json", "one-Q8_0.gguf", "mmproj-F16.gguf"], "org/none": ["config.json"]}
    found = find("org/one")
    assert Path(found).name == "one-Q8_0.gguf"
    with pytest.raises(FileNotFoundError, match=r"org/none holds no \.gguf file; leave out :Q8_0"):
        find("org/none:Q8_0")
    hub.repositories = None
    assert find("org/one") == found


def test_a_split_file_of_which_a_part_is_missing_is_downloaded_again(hub):
    hub.keep("org/big", SPLIT[0])
    hub.repositories = {"org/big": [*SPLIT]}
    assert Path(find("org/big:Q8_0")).name == SPLIT[0]
    assert hub.downloaded == [*SPLIT]


def test_a_download_that_fails_is_reported_in_one_sentence(hub, monkeypatch):
    hub.repositories = {"org/one": ["one-Q8_0.gguf"]}
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: hub.hf_hub_download(name, "other"))
    with pytest.raises(OSError, match=r"org/one: one-Q8_0\.gguf cannot be downloaded \(a proxy said no\); try again"):
        find("org/one")


def test_files_beside_the_weights_are_asked_for_and_that_may_fail_in_any_way(hub):
    hub.repositories = {"org/name": ["some.json"]}
    assert file_beside("org/name", "other.json") is None
    assert file_beside("org/name", "some.json").is_file()


def test_without_a_network_a_model_that_was_downloaded_opens_with_one_question(hub, model_folder, monkeypatch, caplog):
    shutil.copytree(model_folder, hub.keep("org/name"), dirs_exist_ok=True)
    hub.repositories, reached = None, []

    def unreachable(*address, **options):
        reached.append(address)
        raise socket.gaierror("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with caplog.at_level(logging.WARNING):
        target = open_target("org/name", device="cpu")
    assert target.split.dtype == torch.float32
    assert target.tokenizer.decode(target.tokenizer("abc")["input_ids"]) == "abc"
    assert (len(hub.asked), reached, caplog.messages) == (1, [], [])
