"""One of two processes that share a model; what it decoded goes into a JSON file. Started by `test_tensor_parallel`."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from selfspec.calibrate import profile
from selfspec.calibrate.measure import measure
from selfspec.control.plan import Policy
from selfspec.control.published.layerskip import Fixed
from selfspec.core import Plan
from selfspec.errors import UnsupportedModelError
from selfspec.model.tensor_parallel import ranks_of
from tests.target import Target

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [40] * 20]
OPTIONS = {"max_tokens": 20, "seed": [1, 2, 3]}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


class Dice(Policy):
    """Plans that differ from rank to rank, unless one of them leads; the leader's clock decides, as it were."""

    def __init__(self, seed: int) -> None:
        self.random, self.seen = random.Random(seed), 0

    def plan(self, rows):
        lengths = tuple(self.random.randint(0, min(4, row.num_remaining - 1)) for row in rows)
        return Plan(self.random.randint(1, 3), lengths, self.random.choice([0.0, 0.3]))

    def observe(self, plan, rounds):
        self.seen += len(rounds)


class Broken(Dice):
    def plan(self, rows):
        raise KeyError("no plan today")


def decode(target: Target, rank: int) -> dict[str, object]:
    """Tokens of every way to decode, and who was asked."""
    dice = Dice(rank)
    told = {
        "plain": target.generate(PROMPTS, policy="plain", **OPTIONS),
        "fixed": target.generate(PROMPTS, exit_layer=1, num_speculative_tokens=3, **OPTIONS),
        "endless": target.generate(PROMPTS, policy=Fixed(1, 3), **OPTIONS),
        "dice": target.generate(PROMPTS, policy=dice, **OPTIONS),
        "adaptive": target.generate(PROMPTS, policy="adaptive", max_num_seqs=2, **OPTIONS),
        "sampled": target.generate(PROMPTS, exit_layer=2, **OPTIONS, **SAMPLED),
        "responses": [target.generate(PROMPTS, policy="pld", reuse_responses=True, **OPTIONS) for _ in range(2)][1],
    }
    again = sum(one.stats.num_accepted_draft_tokens for one in told["responses"])
    return {name: [one.token_ids for one in done] for name, done in told.items()} | {"asked": dice.seen, "again": again}


def refusals(target: Target) -> dict[str, str]:
    """What cannot be had, in the sentences that say so."""
    told = {}
    asked = {"learn": {"learn": True}, "broken": {"policy": Broken(0)}, "exact": {"exact": True}}
    for name, options in asked.items():
        try:
            target.generate(PROMPTS, **options)
        except (ValueError, RuntimeError, KeyError) as problem:
            told[name] = f"{type(problem).__name__}: {problem}"
    other = torch.nn.Linear(4, 4)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    weight = dist.tensor.distribute_tensor(other.weight.detach(), mesh)
    other.weight = torch.nn.Parameter(weight, requires_grad=False)
    try:
        ranks_of(other)
    except UnsupportedModelError as problem:
        told["fsdp"] = str(problem)
    return told


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    profile.measure = lambda split, sizes: measure(split, sizes, repeats=1, widths=(1, 4), within=None)
    config = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, distributed_config=config)
    target = Target(model)
    record = decode(target, rank)
    costs = target.costs(2)
    record |= {"ranks": target.split.ranks.count, "costs": costs.as_dict(), "refused": refusals(target)}
    (folder / f"rank{rank}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
