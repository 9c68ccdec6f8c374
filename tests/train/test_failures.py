"""What goes wrong on the way: one sentence, the right exit code, and every earlier checkpoint whole."""

from __future__ import annotations

import errno

import pytest
import torch
import yaml
from safetensors.torch import load_file

from train.__main__ import main
from train.checkpoints import checkpoint_folder, find_newest
from train.config import parse_config
from train.errors import RunFailed
from train.run import train
from train.trainer import EarlyExitTrainer


@pytest.fixture
def command(small_settings, tmp_path):
    """Run the command on the small settings; return its exit code."""

    def run(*options: str) -> int:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(small_settings))
        return main([str(path), *options])

    return run


@pytest.fixture
def texts(small_settings, tmp_path):
    """Let the small settings train on a file of these contents."""

    def use(content: str, **data: object) -> None:
        (tmp_path / "texts.txt").write_text(content)
        small_settings.pop("corpus", None)
        small_settings["data"] = {"path": str(tmp_path / "texts.txt"), **data}

    return use


def test_a_loss_that_is_no_number_ends_the_run(small_settings, command, tmp_path, monkeypatch, capsys):
    plain = EarlyExitTrainer.compute_loss

    def broken(self, *args, **kwargs):
        loss = plain(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 2 else loss

    monkeypatch.setattr(EarlyExitTrainer, "compute_loss", broken)
    assert command() == 1
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("train: the loss is nan at step 3; checkpoint-2 is whole, continue from it with --resume")
    checkpoint = find_newest(small_settings["run"]["output"])
    assert checkpoint is not None and checkpoint.name == "checkpoint-2"
    assert all(bool(each.isfinite().all()) for each in load_file(checkpoint / "model.safetensors").values())


def test_weights_that_are_no_numbers_are_not_saved(small_settings, monkeypatch):
    plain = EarlyExitTrainer.training_step

    def broken(self, model, *args, **kwargs):
        loss = plain(self, model, *args, **kwargs)
        if self.state.global_step == 3:
            next(model.parameters()).grad.fill_(float("inf"))  # a loss may be finite where its gradient is not
        return loss

    monkeypatch.setattr(EarlyExitTrainer, "training_step", broken)
    with pytest.raises(
        RunFailed, match=r"weight .* is not finite after step 4, which is not saved; checkpoint-2 is whole"
    ):
        train(parse_config(small_settings))


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(small_settings, command, monkeypatch, capsys):
    error = OSError(errno.ENOSPC, "No space left on device")
    plain = EarlyExitTrainer._save_optimizer_and_scheduler

    def full(self, folder):
        if self.state.global_step == 4:
            raise error
        plain(self, folder)

    monkeypatch.setattr(EarlyExitTrainer, "_save_optimizer_and_scheduler", full)
    assert command() == 1
    err = capsys.readouterr().err
    assert "train: the checkpoint of step 4 could not be written to" in err and str(error) in err
    assert "checkpoint-2 is whole, continue from it with --resume" in err
    output = find_newest(small_settings["run"]["output"]).parent
    assert [each.name for each in output.iterdir() if each.is_dir()] == ["checkpoint-2"]
    monkeypatch.undo()
    assert command("--resume") == 0
    assert find_newest(output).name == "checkpoint-4"


def test_a_run_killed_while_saving_is_resumed_from_the_checkpoint_before(small_settings):
    config = parse_config(small_settings)
    whole = train(config).model.state_dict()
    output = find_newest(config.run.output).parent
    aside = output / "unfinished"
    aside.mkdir()
    (output / "checkpoint-4").rename(aside / "checkpoint-4")  # as if killed just before the last step of saving
    resumed = train(config, resume=True).model.state_dict()
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert not aside.exists()


def test_only_the_last_checkpoints_are_kept(small_settings, tmp_path):
    config = parse_config(small_settings)
    for step in (2, 4, 10, 12):
        with checkpoint_folder(config, step) as aside:
            (aside / f"checkpoint-{step}").mkdir(parents=True)
            (aside / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    found = sorted(each.name for each in (tmp_path / "run").iterdir())
    assert found == ["checkpoint-10", "checkpoint-12", "checkpoint-4"]


def test_resuming_with_another_configuration_names_the_keys(small_settings, command, capsys):
    assert command() == 0
    small_settings["exits"]["scale"] = 0.9
    small_settings["run"]["seed"] = 7
    assert command("--resume") == 2
    assert "made with another configuration, which differs in exits.scale, run.seed" in capsys.readouterr().err
    small_settings["run"]["output"] += "-none"
    assert command("--resume") == 2
    assert "holds no checkpoint; train first" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "\n\n", "only = 1\n"])
def test_a_data_set_with_nothing_to_hold_out_is_refused(texts, command, capsys, content):
    texts(content)
    assert command() == 2
    err = capsys.readouterr().err
    assert "train: data.path needs at least two different texts, one to train on and one to hold out" in err


def test_too_little_text_is_refused(texts, command, capsys):
    texts("a = 1\n\nb = 2\n")
    assert command() == 2
    assert "fewer than two windows of 32; shorten run.windows or add text" in capsys.readouterr().err
    texts("\n\n".join(f"def f{n}(x): return x + {n}" for n in range(40)), held_out_percent=0.1)
    assert command() == 2
    assert "no held-out text has 32 tokens; raise held_out_percent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("corpus", {"root": "/none/at/all"}, "corpus.root must be a folder, got '/none/at/all'"),
    ],
)
def test_bad_settings_end_with_one_sentence(small_settings, command, capsys, section, values, message):
    small_settings[section] |= values
    assert command() == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("train: ") and message in err
