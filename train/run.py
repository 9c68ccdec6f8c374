"""A training run, from a configuration to a model folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from train import attention
from train.agreement import held_out_windows
from train.callbacks import HeldOutLoss, Progress
from train.config import TrainConfig
from train.corpus import Corpus, SourceFile, read_corpus
from train.data import Windows, encode_files, pack
from train.tokenizer import train_tokenizer
from train.trainer import EarlyExitTrainer


def build_model(config: TrainConfig, end_of_text: int) -> LlamaForCausalLM:
    """Make an untrained Llama of the configured shape, its weights drawn from `run.seed`."""
    set_seed(config.run.seed)
    shape = config.model
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=None,
        )
    )


def weighted(files: tuple[SourceFile, ...], library_repeat: int) -> list[SourceFile]:
    """Repeat what is not test code, so that ordinary code is not drowned by it."""
    return [file for file in files for _ in range(1 if file.is_test else library_repeat)]


def make_tokenizer(config: TrainConfig, corpus: Corpus) -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the files to train on."""
    texts = [file.text for file in weighted(corpus.train, config.corpus.library_repeat)]
    return train_tokenizer(texts, config.model.vocab_size, config.model.max_position_embeddings)


def make_windows(config: TrainConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> Windows:
    """Cut the files to train on into the batches of the whole run."""
    run = config.run
    documents = encode_files(tokenizer, weighted(corpus.train, config.corpus.library_repeat))
    num_batches = run.max_steps * run.gradient_accumulation_steps
    stream = pack(documents, run.seed)
    print(f"corpus: {corpus.origin}, {len(corpus.train)} files, {len(stream):,} tokens an epoch", flush=True)
    return Windows(stream, run.windows, run.tokens_per_batch, num_batches, run.gradient_accumulation_steps, run.seed)


def make_trainer(config: TrainConfig, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> EarlyExitTrainer:
    """Put model, data and recipe together."""
    run = config.run
    windows = make_windows(config, corpus, tokenizer)
    model = build_model(config, tokenizer.eos_token_id)
    print(f"model: {model.num_parameters():,} parameters", flush=True)
    held_out = encode_files(tokenizer, corpus.held_out)
    callbacks = [
        Progress(run.tokens_per_batch * run.gradient_accumulation_steps),
        HeldOutLoss(held_out_windows(held_out, config.eval.window, config.eval.num_windows), config.eval.every_steps),
    ]
    model.set_attn_implementation(attention.register())
    if run.compile:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)  # one compilation serves all layers
    return EarlyExitTrainer(model, config, windows, processing_class=tokenizer, callbacks=callbacks)


def train(config: TrainConfig, resume: bool = False) -> EarlyExitTrainer:
    """Run a training to its end; its checkpoints lie in `run.output`, the last one being the result."""
    corpus = read_corpus(config.corpus)
    tokenizer = make_tokenizer(config, corpus)
    Path(config.run.output).mkdir(parents=True, exist_ok=True)
    trainer = make_trainer(config, corpus, tokenizer)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer
