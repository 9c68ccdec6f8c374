"""`selfspec cache`: what lies in the cache folder, and its removal."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from typer import Argument

from selfspec import cached
from selfspec.cli.failure import RUN, Failure
from selfspec.cli.options import Json
from selfspec.kernels.machine import cache_folder

Kind = Annotated[cached.Kind | None, Argument(help="Only what is of this kind.", show_default=False)]


def show(*, kind: Kind = None, as_json: Json = False) -> None:
    """Print the cache folder and what is in it."""
    found = cached.entries(kind)
    if as_json:
        rows = [{"kind": one.kind, "path": str(one.path), "bytes": one.size, "changed": one.changed} for one in found]
        typer.echo(json.dumps({"folder": str(cache_folder()), "entries": rows}))
        return
    typer.echo(str(cache_folder()))
    for name in cached.KINDS:
        own = [one for one in found if one.kind == name]
        if own:
            typer.echo(f"{name}: {cached.KINDS[name]}")
        for one in own:
            days = max(0.0, time.time() - one.changed) / cached.DAY
            typer.echo(f"  {one.size / 1e6:8.1f} MB  {days:5.1f} days old  {one.path.name}")


def clear(*, kind: Kind = None) -> None:
    """Remove what is in the cache folder, and say what was removed."""
    found = cached.entries(kind)
    for one in found:
        try:
            one.remove()
        except OSError as problem:
            raise Failure(f"{one.path} cannot be removed ({problem.strerror or problem})", RUN) from None
    typer.echo(f"removed {len(found)} entries, {sum(one.size for one in found) / 1e6:.1f} MB, from {cache_folder()}")
