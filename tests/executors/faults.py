"""The compiled library with a switch for each of several faults, built from a copy of the sources that has them.

An edit replaces one expression of a source, which must be found there once: `FAULT` in the new one is whether that
fault is switched on. The sources of the product hold none of it.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from selfspec.kernels import compiled_call, compiler
from tests.compiling import COMPILED


class Edit(NamedTuple):
    """What stands in a source, and what stands there instead."""

    file: str
    honest: str
    faulty: str


FAULTS = {
    "noise of the position before": Edit(
        "round.cpp",
        "all.positions[at] + 1, nullptr, kept}",
        "all.positions[at] + !FAULT, nullptr, FAULT ? nullptr : kept}",
    ),
    "temperatures of other rows": Edit(
        "round.cpp", "pick_row(one, d.params[row],", "pick_row(one, d.params[(row + FAULT) % d.num_rows],"
    ),
    "tokens after a rejected one are kept": Edit(
        "round.cpp", "drafted[place] == out[place];", "(FAULT || drafted[place] == out[place]);"
    ),
    "drafts by lookup are not judged": Edit(
        "round.cpp",
        "if (v.num_likely && v.num_likely[r] >= 0)",
        "if (FAULT && !v.exit_layer && place < v.counts[r]) out[place] = drafted[place];\n"
        "if (v.num_likely && v.num_likely[r] >= 0)",
    ),
    "a layer is left out after the draft": Edit(
        "round.cpp", "run(all, is_read ? v.exit_layer : 0,", "run(all, is_read ? v.exit_layer + FAULT : 0,"
    ),
    "the last draft is not read by early layers": Edit(
        "round.cpp",
        "run(unread, 0, v.exit_layer, nullptr, states.get(), nullptr);",
        "if (!FAULT) run(unread, 0, v.exit_layer, nullptr, states.get(), nullptr);\n"
        "else std::fill_n(states.get(), unread.size() * m.hidden, 0.f);",
    ),
    "a token more is drafted than a row may emit": Edit(
        "program.cpp",
        "std::min({p.lengths[at], p.capacities[r], v.most})",
        "std::min({p.lengths[at], p.capacities[r] + FAULT, v.most})",
    ),
    "rounds go on after the end of a row": Edit(
        "program.cpp", "!ends(r, picks, count);", "(FAULT || !ends(r, picks, count));"
    ),
    "rows stay where they were": Edit(
        "program.cpp", "last[r] = picks[count - 1],", "last[r] = picks[FAULT ? 0 : count - 1],"
    ),
    "indices do not get new tokens": Edit("program.cpp", "if (p.indices && !", "if (p.indices && !FAULT && !"),
    "penalties leave out drafted tokens": Edit("round.cpp", "place, nullptr}", "FAULT ? 0 : place, nullptr}"),
    "penalties leave out what rounds before have written": Edit(
        "program.cpp", "if (p.texts && histories[r])", "if (p.texts && !FAULT && histories[r])"
    ),
    "the prompt is output to penalties": Edit("program.cpp", "p.num_prompts[r],\n", "FAULT ? 0 : p.num_prompts[r],\n"),
    "repeated tokens are found by those before the last": Edit(
        "penalties.h", "at(end - same) == at(total - same)", "at(end - same) == at(total - same - FAULT)"
    ),
    "penalties come after the temperature": Edit(
        "penalties.h", "float logit = logits[place];", "float logit = logits[place] / (FAULT ? temperature : 1);"
    ),
    "a bias is left out": Edit("penalties.h", "-1, row.bias.added[i]);", "-1, row.bias.added[i] * !FAULT);"),
    "a bias holds for one position less": Edit("penalties.h", ">= row.bias.until[i])", ">= row.bias.until[i] - FAULT)"),
    "masks of the position before": Edit(
        "round.cpp",
        "at - all.firsts[r]).mask",
        "at - all.firsts[r] - (FAULT && at > all.firsts[r])).mask",
    ),
    "drafts are not told to grammars": Edit(
        "grammars.h", "path.num_taken + count];", "path.num_taken + count * !FAULT];"
    ),
    "any lookup is worth it": Edit("program.cpp", "return total && gain >= ", "return total && gain + 99 * FAULT >= "),
}
NAMES = list(FAULTS)


def faulty_sources(folder: Path) -> None:
    """The sources, with every fault, each behind a number of its own."""
    shutil.copytree(compiler.SOURCES, folder, dirs_exist_ok=True)
    for number, edit in enumerate(FAULTS.values(), 1):
        file = folder / edit.file
        text = file.read_text("utf-8")
        assert text.count(edit.honest) == 1, f"{edit.honest!r} stands {text.count(edit.honest)} times in {edit.file}"
        file.write_text(
            text.replace(edit.honest, edit.faulty.replace("FAULT", f"(selfspec_fault == {number})")), "utf-8"
        )
    for file in {edit.file for edit in FAULTS.values()}:
        text = (folder / file).read_text("utf-8")
        start = text.index("\n", text.rindex("#include")) + 1
        switch = "{ int64_t selfspec_fault = 0; }" if file == "round.cpp" else "int64_t selfspec_fault;"
        (folder / file).write_text(f'{text[:start]}extern "C" {switch}\n{text[start:]}', "utf-8")


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The faulty library, kept where the other one is."""
    sources = tmp_path_factory.mktemp("faulty")
    faulty_sources(sources)
    with pytest.MonkeyPatch.context() as patch, FileLock(COMPILED / ".lock"):
        patch.setattr(compiler, "SOURCES", sources)
        return compiler.library.__wrapped__()


@contextmanager
def compiled_by(library: ctypes.CDLL, name: str | None) -> Iterator[None]:
    """Engines that are made meanwhile run that library, with one fault or none."""
    switch = ctypes.c_int64.in_dll(library, "selfspec_fault")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_call, "library", lambda: library)
        compiled_call.functions.cache_clear()
        switch.value = 0 if name is None else 1 + NAMES.index(name)
        try:
            yield
        finally:
            switch.value = 0
            compiled_call.functions.cache_clear()
