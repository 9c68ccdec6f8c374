"""A run that trains exit heads: open the model, gather texts, train, measure and write, or resume from a checkpoint."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from selfspec.errors import UnsupportedModelError
from selfspec.loading import hub
from selfspec.loading.target import Target
from selfspec.model.exit_heads import ExitHeads
from selfspec.model.fingerprint import hidden_size_of, intermediate_size_of, weights_of
from train.configuration import as_plain
from train.errors import RunFailed
from train.heads_card import Facts, table, write_card
from train.heads_config import HeadsRun
from train.heads_files import CHECKPOINT, TEXTS, read_checkpoint, write_checkpoint
from train.heads_loss import draft_subset, exit_losses, measure
from train.heads_states import Stream
from train.heads_text import gather_texts
from train.samples import count_positions
from train.written import Written


def train_heads(config: HeadsRun, command: str = "", resume: bool = False) -> Path:
    """Train exit heads for a model, which does not change; returns `exit_heads.safetensors`.

    Raises:
        ValueError: bad input, before anything is trained: no such model, an exit out of range, too little text, a
            folder that cannot be written, nothing to resume.
        RunFailed: the loss is not finite, or a file cannot be written; an earlier one is unchanged.
    """
    folder = output_folder(config)
    saved = read_checkpoint(folder, config) if resume else None
    target = open_target(config)
    exits = config.exits_of(target.split.num_layers)
    run = _Run(config, target, exits, folder)
    run.begin(saved)
    run.train()
    return run.finish(command)


def output_folder(config: HeadsRun) -> Path:
    """The output folder, which is made if it does not exist.

    Raises:
        ValueError: neither heads.output nor heads.model is a folder, or it cannot be written.
    """
    named, model = config.heads.output, Path(config.heads.model).expanduser()
    if not named and (config.heads.model == "demo" or not model.is_dir()):
        raise ValueError(f"heads.output must name a folder where heads.model is none, got model {config.heads.model!r}")
    folder = Path(named).expanduser() if named else model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"heads.output must be a folder that can be written, got {str(folder)!r}")
    return folder


def open_target(config: HeadsRun) -> Target:
    """Open the model without exit heads; none of its weights is trainable.

    Raises:
        ValueError: there is no such model, or it cannot be split.
    """
    wanted = config.heads
    try:
        target = hub.open_target(
            wanted.model, device=wanted.device or None, dtype=wanted.dtype or None, exit_heads="none"
        )
    except (OSError, UnsupportedModelError) as error:
        raise ValueError(str(error)) from error
    target.split.model.requires_grad_(False)
    return target


class _Run:
    def __init__(self, config: HeadsRun, target: Target, exits: tuple[int, ...], folder: Path) -> None:
        self.config, self.target, self.split = config, target, target.split
        self.exits, self.folder, self.weights = exits, folder, weights_of(target.split)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.training.seed)
            inner = config.heads.inner_size or intermediate_size_of(self.split)
            heads = ExitHeads(exits, hidden_size_of(self.split), inner, self.weights)
        self.heads = heads.to(self.split.device)
        decay = {"lr": config.training.lr, "weight_decay": config.training.weight_decay}
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), **decay)
        self.step, self.spent, self.curve = 0, 0.0, list[list[float]]()

    def begin(self, saved: dict[str, Any] | None) -> None:
        """Gather the texts, read the state of a checkpoint if there is one, and measure exits without heads."""
        self.begun = time.monotonic()
        if saved is not None and saved["weights"] != self.weights:
            raise ValueError(f"heads.model has other weights than the run in {self.folder / CHECKPOINT} began with")
        written = Written(self.folder / TEXTS, self.weights)
        texts, held_out = gather_texts(self.target, self.config, written)
        if saved is not None:
            self.heads.load_state_dict(saved["heads"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.spent, self.curve = saved["step"], saved["spent"], saved["curve"]
        self.held_out, self.subset = held_out, draft_subset(self.split, texts)
        self.stream = Stream(self.split, texts, self.exits, self.config.training)
        self.before = measure(self.split, None, held_out, self.exits, self.subset)
        print(
            f"text: {len(texts)} texts with {self.stream.num_positions:,} tokens to learn from, "
            f"{len(held_out)} held out, after {self.seconds:.0f} s; "
            f"{sum(each.numel() for each in self.heads.parameters()):,} parameters at exits {list(self.exits)}",
            flush=True,
        )

    @property
    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.begun

    def train(self) -> None:
        """Train to the last step, with log lines and checkpoints."""
        training, first, started = self.config.training, self.step, time.monotonic()
        if first >= training.steps:
            return
        for batch in self.stream.batches(first):
            by_kl = self.step < training.kl_share * training.steps
            losses = exit_losses(self.split, self.heads, batch, self.subset, by_kl)
            lr = self._update(torch.stack(losses))
            self.step += 1
            done = self.step == training.steps
            if self.step % training.log_steps == 0 or done:
                values = [loss.item() for loss in losses]
                self.curve.append([self.step, lr, *values])
                left = (time.monotonic() - started) / (self.step - first) * (training.steps - self.step)
                shown = "  ".join(f"{layer}: {value:.3f}" for layer, value in zip(self.exits, values, strict=True))
                print(f"step {self.step}/{training.steps}  loss by exit {shown}  {left:.0f} s left", flush=True)
            if done:
                return
            if self.step % training.save_steps == 0:
                self._save()

    def _update(self, losses: torch.Tensor) -> float:
        """One step of AdamW on the sum of the exits' losses; returns its learning rate."""
        training, total = self.config.training, losses.sum()
        value = total.item()
        if not math.isfinite(value):
            kept = self.folder / CHECKPOINT
            left = (
                f"{kept} holds an earlier step; lower training.lr and --resume"
                if kept.is_file()
                else "lower training.lr"
            )
            raise RunFailed(f"the loss is {value} at step {self.step + 1}; no heads were written; {left}")
        lr = training.lr * schedule(self.step, training.steps, training.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), training.max_grad_norm)
        self.optimizer.step()
        return lr

    def _save(self) -> None:
        state = {
            "config": as_plain(self.config),
            "weights": self.weights,
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "spent": self.seconds,
            "curve": self.curve,
        }
        write_checkpoint(self.folder, state)

    def finish(self, command: str) -> Path:
        """Write heads, card and losses, then remove the files of an unfinished run."""
        heads = self.heads.requires_grad_(False).bfloat16()  # half the bytes to read per drafted token
        after = measure(self.split, heads, self.held_out, self.exits, self.subset)
        facts = Facts(
            config=self.config,
            command=command,
            weights=self.weights,
            seconds=self.seconds,
            steps=self.step,
            inner_size=heads.inner_size,
            draft_vocab=None if self.subset is None else len(self.subset.tokens),
            parameters=sum(each.numel() for each in heads.parameters()),
            num_layers=self.split.num_layers,
            device=f"{self.split.device.type}, {torch.get_num_threads()} threads, {self.split.dtype}",
            trained_on=self.stream.num_positions,
            measured_on=count_positions(self.held_out),
            agreement={layer: (self.before[layer], after[layer]) for layer in self.exits},
            curve=self.curve,
        )
        try:
            file = heads.save(self.folder)
            write_card(self.folder, facts)
        except OSError as problem:
            raise RunFailed(
                f"cannot write the heads into {self.folder}: {problem}; free space and use --resume"
            ) from problem
        for name in (CHECKPOINT, TEXTS):
            (self.folder / name).unlink(missing_ok=True)
        print("\n".join(table(facts.agreement)))
        print(f"wrote {file} after {facts.seconds:.0f} s", flush=True)
        return file


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate at a 0-based step: linear warmup, then a cosine to nearly zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
