"""A policy small enough to make in every test that needs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.jobs.base_model import END, PAD, build_tokenizer


def make_policy(folder: Path, texts: Sequence[str]) -> None:
    """Write a Qwen3 of random weights, wide enough apart that tokens differ in probability."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, set_seed

    tokenizer = build_tokenizer([*texts] * 3, 300)
    vocabulary = tokenizer.get_vocab()
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
