"""The index of a converted GGUF file: where the blocks of its weights are, so that nobody parses the file again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from selfspec.model.file_weights import FileWeights
from selfspec.model.fingerprint import sample
from selfspec.model.gguf_blocks import BLOCK_SIZES, Blocks
from selfspec.model.mapped_file import MappedFile

INDEX = "selfspec-blocks.json"
FLOATS = "model.safetensors"
CHECKED_ROWS = 64  # of every weight, compared with its blocks
TOLERANCE = 1e-5  # of the largest value of a row: dequantised in another order of operations


class Place(NamedTuple):
    """Where the blocks of a weight are."""

    type: str
    offset: int  # bytes from the start of the GGUF file
    rows: int
    row_bytes: int
    heads: int  # heads whose rows llama.cpp has in another order; 0: the order is the weight's
    sample: list[float]  # for the fingerprint of the weights, which would have to read all of them

    def order(self) -> Tensor | None:
        """The file's row of each output, int64; None: the same.

        llama.cpp rotates neighbouring values of a head, transformers those half a head apart.
        """
        if not self.heads:
            return None
        return torch.arange(self.rows).view(self.heads, -1, 2).transpose(1, 2).reshape(-1)


def write(file: Path, model: nn.Module, folder: Path) -> None:
    """Write the index of a GGUF file into the folder that its model was saved in.

    It has the weights whose blocks were found to be what the saved weight was dequantised from.

    Raises:
        OSError: it cannot be written.
    """
    places = {}
    if (folder / FLOATS).is_file():  # else the weights take several files
        saved, floats = _saved(folder), MappedFile(folder / FLOATS)
        tensors = _tensors(file, model)
        for name, weight in model.named_parameters():
            offset = saved.get((name, tuple(weight.shape)))
            if offset is not None and name in tensors:
                read = floats.tensor(torch.float32, offset, tuple(weight.shape))
                place = _verified(tensors[name], weight, read, set(_heads(model)))
                if place is not None:
                    places[name] = place._asdict()
    (folder / INDEX).write_text(json.dumps(places), "utf-8")


def read(file: Path, model: nn.Module, folder: Path) -> FileWeights | None:
    """Map the weights of a converted GGUF file that its index knows, in place of those that transformers read.

    None where it knows none of them.

    Args:
        model: read from `folder`, in float32, on CPU.
    """
    places = json.loads((folder / INDEX).read_text("utf-8"))
    if not places:
        return None
    saved = _saved(folder)
    source = MappedFile(file)
    made = FileWeights(MappedFile(folder / FLOATS), source)
    parameters = dict(model.named_parameters())
    for name, given in places.items():
        place, weight = Place(**given), parameters[name]
        data = source.tensor(torch.uint8, place.offset, (place.rows, place.row_bytes))
        blocks = Blocks(place.type, data, place.order())
        made.add(weight, saved[name, tuple(weight.shape)], blocks, place.sample)
    for weight in parameters.values():
        if weight.ndim < 2:  # transformers has mapped them, and a page of the file is larger than they are
            weight.data = weight.data.clone()
    return made


def _saved(folder: Path) -> dict[tuple[str, tuple[int, ...]], int]:
    """The float32 tensors of a safetensors file: the offset in bytes of each, by name and shape."""
    with (folder / FLOATS).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        (name, tuple(one["shape"])): 8 + size + one["data_offsets"][0]
        for name, one in header.items()
        if one.get("dtype") == "F32"
    }


def _tensors(file: Path, model: nn.Module) -> dict[str, Any]:
    """The tensors of a GGUF file in blocks of a supported type, by the name of the model's parameter."""
    import gguf

    reader = gguf.GGUFReader(file)
    kind = reader.fields["general.architecture"].contents()
    kinds = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if kind not in kinds:
        return {}
    layers = int(model.config.get_text_config().num_hidden_layers)  # type: ignore[operator, union-attr]
    names = gguf.get_tensor_name_map(kinds[kind], layers)
    tensors = {one.name: one for one in reader.tensors if one.tensor_type.name in BLOCK_SIZES and one.data.ndim == 2}
    found = {}
    for name, _ in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        tensor = tensors.get(f"{names.get_name(stem)}.{suffix}")
        if tensor is not None:
            found[name] = tensor
    return found


def _heads(model: nn.Module) -> Iterator[int]:
    config: Any = model.config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config.get_text_config(), name, None)
        if isinstance(heads, int) and heads > 0:
            yield heads


def _verified(tensor: Any, weight: Tensor, saved: Tensor, heads: set[int]) -> Place | None:
    """The place of a tensor whose blocks are those of a weight, in one of the known orders; None if they are not."""
    import gguf

    rows, row_bytes = tensor.data.shape
    kind = tensor.tensor_type.name
    weight = weight.detach()
    if Blocks(kind, torch.empty(rows, row_bytes, dtype=torch.uint8, device="meta")).shape != weight.shape:
        return None
    picked = torch.from_numpy(np.unique(np.linspace(0, rows - 1, CHECKED_ROWS).astype(np.int64)))
    wanted = weight[picked]
    if not torch.equal(wanted, saved[picked]):  # saved in another form than it is used in
        return None
    for count in (0, *sorted(one for one in heads if rows % (2 * one) == 0)):
        place = Place(kind, int(tensor.data_offset), rows, row_bytes, count, sample(weight).tolist())
        order = place.order()
        index = (picked if order is None else order[picked]).numpy()
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data[index], tensor.tensor_type))
        if bool(((found - wanted).abs() <= TOLERANCE * wanted.abs().amax(1, keepdim=True)).all()):
            return place
    return None
