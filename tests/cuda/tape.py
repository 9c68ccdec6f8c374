"""A stand-in for CUDA graphs: it records the operations of a body, and a replay does these again and nothing else.

What a device does with a recording is what the tape does:
- Python is not run again, and every operation reads and writes the memory that it had when it was recorded.
- Memory from outside the body is held weakly. A replay that reads memory which nobody holds any longer raises.
- Memory from inside lies in one pool. Before a replay the whole pool is filled with NaN, as if others had used it.
- Operations that wait for the device, or that copy from the host, are refused by name.

It does not tell: wrong code of a kernel, races between streams, and copies from the host where all tensors are the
host's (`tests/cuda/test_host_copies.py` runs layers on the meta device for that).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from selfspec.executors.cuda.capture import CannotCapture, OperationTracer
from selfspec.kernels.suite import Kernels

WAITS = {  # the host needs an answer of the device, be it only the size of a result
    "item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique",
    "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave.Tensor", "grouped_mm_fallback",
    "argwhere", "nonzero_numpy", "where.default",
    "resolve_neg",  # what `tolist` asks first
}  # fmt: skip
FROM_HOST = {"lift_fresh", "pin_memory", "_pin_memory"}
SHORT = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
KERNELS = Kernels._fields[1:]
ON_HOST = ("pick", "accept")  # kernels whose references read numbers on the host


@cache
def names_of(func: Any) -> tuple[str, str, str]:
    """An operation's name: whole, without the namespace, and without overload and mark of changing an argument too."""
    name = (whole := str(func)).split(".", 1)[1]
    return whole, name, name.split(".")[0].rstrip("_")


def refusal(func: Any, args: Any) -> str | None:
    """Why a CUDA graph cannot hold an operation; None where it can."""
    _, name, short = names_of(func)
    if WAITS & {name, short}:
        return "operation would wait for the device, which is not permitted when stream is capturing"
    if FROM_HOST & {name, short}:
        return "operation would copy from the host, which is not permitted when stream is capturing"
    if short in ("index", "index_put") and any(one is not None and one.dtype == torch.bool for one in args[1]):
        return "operation would wait for the size of a mask, which is not permitted when stream is capturing"
    if short == "_grouped_mm" and args[0].dtype != torch.bfloat16:
        return "operation reads its offsets on the host in all but bfloat16, not permitted when stream is capturing"
    return None


class Outside(NamedTuple):
    """A tensor in memory that the recording does not hold."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        held = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if held is None:
            raise AssertionError(f"a replay reads {self.dtype} {list(self.size)} that nobody holds any longer")
        return torch.empty(0, dtype=self.dtype).set_(held, self.offset, self.size, self.stride)


class Step(NamedTuple):
    """One operation; its new results are written over those of the recording."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: bool  # whether some of the arguments are `Outside`
    made: list[tuple[int, torch.Tensor]]  # which of the flat results lie in new memory, and where


class Recorder(OperationTracer):
    """Does what a body does, and writes it down."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.pool: dict[int, torch.UntypedStorage] = {}
        self.outside: dict[int, StorageWeakRef] = {}
        self.kernels: list[str] = []  # what was launched, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.last, name, _ = names_of(func)
        reason = refusal(func, args)
        if reason is not None:
            raise RuntimeError(reason)
        return self.take(func, args, kwargs or {}, empties=name.startswith(("empty", "new_empty")))

    def launch(self, name: str, kernel: Callable[..., Any], is_opaque: bool, args: Any, kwargs: Any) -> Any:
        """A kernel: what torch does in it is written down, or where torch does not see it, the call as one."""
        self.kernels.append(f"{name}({', '.join(map(_told, (*args, *kwargs.values())))})")
        if not is_opaque:
            return kernel(*args, **kwargs)
        with _disable_current_modes():
            return self.take(kernel, args, kwargs)

    def take(self, call: Callable[..., Any], args: Any, kwargs: Any, empties: bool = False) -> Any:
        self.reads = False
        frozen = _changed((args, kwargs), torch.Tensor, self._freeze)
        reads = self.reads
        out = call(*args, **kwargs)
        leaves = [(place, one) for place, one in enumerate(_leaves(out)) if isinstance(one, torch.Tensor)]
        made = [(place, one) for place, one in leaves if _key(one) not in self.pool and _key(one) not in self.outside]
        self.pool |= {_key(one): one.untyped_storage() for _, one in made}
        schema = getattr(call, "_schema", None)
        if not empties and (made or schema is None or schema.is_mutable):  # a view needs no doing again
            self.steps.append(Step(call, *frozen, reads, made))
        return out

    def _freeze(self, tensor: torch.Tensor) -> torch.Tensor | Outside:
        key = _key(tensor)
        if key in self.pool:
            return tensor
        self.reads = True
        storage = self.outside.setdefault(key, StorageWeakRef(tensor.untyped_storage()))
        return Outside(storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())


class Tape:
    """Records bodies as `CudaCapture` does.

    Args:
        num_bytes: what every recording is said to take; None: the size of what it made.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.made: list[Taped] = []
        self.used: list[Taped] = []  # those whose pool holds numbers
        self.num_bytes = num_bytes
        self._recorder: Recorder | None = None

    def record(self, body: Callable[[], tuple[torch.Tensor, ...]]) -> Taped:
        body()  # makes what is made once, as the run before a capture does
        recorder = self._recorder = Recorder()
        try:
            with recorder:
                outputs = body()
        except Exception as problem:
            raise CannotCapture(recorder.last, str(problem)) from problem
        finally:
            self._recorder = None
        made = Taped(recorder, outputs, self)
        if self.num_bytes is not None:
            made.num_bytes = self.num_bytes
        self.made.append(made)
        self.used.append(made)
        return made

    def kernels(self, kernels: Any) -> Any:
        """The same kernels, whose launches are written down while something is recorded."""

        def seen(name: str) -> Callable[..., Any]:
            kernel, is_opaque = getattr(kernels, name), kernels.name == "triton" or name in ON_HOST

            def run(*args: Any, **kwargs: Any) -> Any:
                if self._recorder is None:
                    return kernel(*args, **kwargs)
                return self._recorder.launch(name, kernel, is_opaque, args, kwargs)

            return run

        return kernels._replace(**{name: seen(name) for name in KERNELS})


class Failing(Tape):
    """Fails in some of its recordings."""

    def __init__(self, problem, when):
        super().__init__()
        self.problem, self.when, self.num_asked = problem, when, 0

    def record(self, body):
        self.num_asked += 1
        if self.num_asked in self.when:
            raise self.problem
        return super().record(body)


class Taped:
    """A recording."""

    def __init__(self, recorder: Recorder, outputs: tuple[torch.Tensor, ...], tape: Tape) -> None:
        self.outputs, self.kernels, self._tape = outputs, recorder.kernels, tape
        self.steps, self.pool = recorder.steps, list(recorder.pool.values())
        self.reads = [*recorder.outside]  # the memory from outside, by address
        self.num_bytes = sum(storage.nbytes() for storage in self.pool)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for used in self._tape.used:
            for storage in used.pool:
                storage.fill_(255)  # NaN in every floating-point format, -1 in integers
        self._tape.used = [self]
        for call, args, kwargs, reads, made in self.steps:
            if reads:
                args, kwargs = _changed((args, kwargs), Outside, Outside.tensor)
            flat = list(_leaves(call(*args, **kwargs)))
            for place, held in made:
                held.copy_(flat[place])


def _changed(one: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with other objects for those of a kind; torch's pytrees take much longer."""
    if isinstance(one, kind):
        return change(one)
    if isinstance(one, tuple | list):
        made = [_changed(each, kind, change) for each in one]
        return type(one)(*made) if hasattr(one, "_fields") else type(one)(made)
    if isinstance(one, dict):
        return {key: _changed(each, kind, change) for key, each in one.items()}
    return one


def _leaves(one: Any) -> Iterator[Any]:
    """What tuples and lists hold."""
    if isinstance(one, tuple | list):
        for each in one:
            yield from _leaves(each)
    else:
        yield one


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _told(argument: Any) -> str:
    """An argument's dtype and shape, or itself."""
    if isinstance(argument, torch.Tensor):
        return f"{SHORT[argument.dtype]}{list(argument.shape)}".replace(" ", "")
    if isinstance(argument, float):
        return f"{argument:.4g}"
    if isinstance(argument, tuple):
        fields = getattr(argument, "_fields", None)
        inner = ", ".join(map(_told, argument))
        return f"({inner})" if fields is None else f"{type(argument).__name__}({inner})"
    return str(argument)
