"""Exit heads: small blocks between an early layer and the model's own norm and head.

They make a layer's hidden states more like those after the last layer, so that more drafts are accepted. The model does
not change, and verification does not use them. A head reads two states: the exit layer's at a token, and the model's
final state at the token before, which verification has computed and which sums up the text so far (as in EAGLE, arXiv
2401.15077). Within a draft the head's own output at the token before stands for it; where nothing is known, zeros.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from selfspec.files import write_whole

FILE = "exit_heads.safetensors"  # in the model's folder or in another one
FORMAT, OLD_FORMATS = "selfspec exit heads 3", ("selfspec exit heads 1", "selfspec exit heads 2")
EPS = 1e-6
NUM_WEIGHTS = 4  # tensors of a head
COUNTS = "token_counts"  # int32 [tokens, 2]: tokens and how often they occurred


class ExitHead(nn.Module):
    """A SwiGLU block, x + down(silu(gate(z)) * up(z)) with z = [norm(x), norm(last)].

    It is initially the identity, since `down` is 0.
    """

    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        width = 2 * hidden_size
        self.norm = nn.Parameter(torch.ones(width))
        self.gate = nn.Parameter(torch.randn(inner_size, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(inner_size, width) / width**0.5)
        self.down = nn.Parameter(torch.zeros(hidden_size, inner_size))

    def forward(self, hidden: Tensor, last: Tensor | None = None) -> Tensor:
        """Change hidden states `[..., hidden_size]`. `last`: final states one token before; None: zeros."""
        size = hidden.shape[-1:]
        before = torch.zeros_like(hidden) if last is None else F.rms_norm(last, size, self.norm[size[0] :], EPS)
        z = torch.cat((F.rms_norm(hidden, size, self.norm[: size[0]], EPS), before), -1)
        return hidden + F.linear(F.silu(F.linear(z, self.gate)) * F.linear(z, self.up), self.down)


class ExitHeads(nn.Module):
    """One `ExitHead` for each of some exit layers of a model.

    Args:
        layers: exit layers, each from 1 to the model's number of layers - 1.
        hidden_size: the model's hidden size.
        inner_size: inner width of the heads.
        weights: fingerprint of the model's weights (`selfspec.model.fingerprint.weights_of`); empty: unknown.
    """

    def __init__(self, layers: Iterable[int], hidden_size: int, inner_size: int, weights: str = "") -> None:
        super().__init__()
        self.layers = tuple(sorted(set(layers)))
        sizes = (*self.layers, hidden_size, inner_size)
        if not self.layers or {*map(type, sizes)} != {int} or min(sizes) < 1:
            raise ValueError(
                f"exit heads need layers of at least 1, a hidden size and an inner size, "
                f"got {list(self.layers)}, {hidden_size} and {inner_size}"
            )
        self.hidden_size, self.inner_size, self.weights = hidden_size, inner_size, weights
        self.counts: dict[int, int] = {}
        """How often each token was in the texts that the heads were trained on; empty: unknown."""
        self.heads = nn.ModuleDict({str(layer): ExitHead(hidden_size, inner_size) for layer in self.layers})

    def forward(self, hidden: Tensor, layer: int, last: Tensor | None = None) -> Tensor:
        """Change hidden states `[..., hidden_size]` after `layer` for the norm and head; as they are without a head.

        Args:
            last: of the same shape, the model's final states, after its norm, one token before; None: unknown.
        """
        if layer not in self.layers:
            return hidden
        head = self.heads[str(layer)]
        dtype: Any = head.norm.dtype
        adapted: Tensor = head(hidden.to(dtype), None if last is None else last.to(dtype))
        return adapted.to(hidden.dtype)

    def of_layers(self, hidden: Tensor, layers: Sequence[int], last: Tensor | None = None) -> Tensor:
        """The same for several layers, `[layers, N, hidden_size]`. `last`: `[N, hidden_size]`."""
        return torch.stack([self(one, layer, last) for one, layer in zip(hidden, layers, strict=True)])

    def save(self, folder: str | Path) -> Path:
        """Write `exit_heads.safetensors` into a folder, whole or not at all; returns the file.

        Raises:
            OSError: the folder or the file cannot be written; what was there before is still there.
        """
        file = Path(folder) / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {"layers": list(self.layers), "hidden_size": self.hidden_size, "inner_size": self.inner_size}
        metadata = {"format": FORMAT, "about": json.dumps(about), "weights": self.weights}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        if self.counts:
            tensors[COUNTS] = torch.tensor(sorted(self.counts.items()), dtype=torch.int32)
        write_whole(file, lambda stream: stream.write(as_bytes(tensors, metadata)))
        return file

    @classmethod
    def load(cls, path: str | Path) -> ExitHeads:
        """Read what `save` wrote, from its folder or file, in float32 on the CPU.

        Raises:
            FileNotFoundError: there is no such folder or file.
            OSError: the file is damaged, of an earlier format, or holds something else.
        """
        file = Path(path).expanduser()
        file = file / FILE if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(f"exit heads {path}: no {FILE} there; give the folder that training wrote it into")
        try:
            with safe_open(file, "pt") as opened:
                metadata: dict[str, Any] = opened.metadata() or {}
                saved = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if metadata.get("format") in OLD_FORMATS:
                raise OSError(
                    f"exit heads {path}: {file.name} holds heads of an earlier version, which do not read the model's "
                    "final states; train them again, or open the model with exit_heads='none'"
                )
            if metadata.get("format") != FORMAT:
                raise OSError(f"exit heads {path}: {file.name} is no file of exit heads; train them again")
            about = json.loads(metadata["about"])
            counts = saved.pop(COUNTS, torch.empty(0, 2, dtype=torch.int32)).tolist()
            is_whole = len(saved) == NUM_WEIGHTS * len(about["layers"])
            if not is_whole or not all(t.is_floating_point() for t in saved.values()):
                raise ValueError("its tensors do not match its metadata")
            with torch.device("meta"):  # sizes in the metadata allocate no memory
                heads = cls(**about, weights=metadata.get("weights", ""))
            heads.load_state_dict(saved, assign=True)
            heads.counts = {token: count for token, count in counts if token >= 0}
        except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as problem:
            raise OSError(
                f"exit heads {path}: {file.name} is truncated or damaged; copy it or train them again"
            ) from problem
        return heads.float().requires_grad_(False)

    def check(self, num_layers: int, hidden_size: int) -> None:
        """Raise ValueError where they do not fit a model of this shape."""
        if self.hidden_size != hidden_size or self.layers[-1] >= num_layers:
            raise ValueError(
                f"exit_heads are of a model of width {self.hidden_size} with more than {self.layers[-1]} layers, and "
                f"this one has width {hidden_size} and {num_layers} layers; train heads for it"
            )
