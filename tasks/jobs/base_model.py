"""Job: the model before any training of ours, as a folder that every later job can load.

Tiny: a Qwen3-architecture model with random weights and a byte-level BPE built from the training split.
Pretrained: a Hub id or local folder, saved again in the transformers format.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    set_seed,
)

from tasks.jobs.prompt_rows import read_prompts
from tasks.jobs.protocol import Reporter, Request, run
from tasks.recipes import ModelRecipe, PretrainedModel, TinyModel

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(request: Request) -> None:
    recipe = ModelRecipe.model_validate(request.recipe)
    set_seed(request.seed)
    if isinstance(recipe.source, TinyModel):
        model, tokenizer = _tiny(recipe.source, request)
    else:
        model, tokenizer = _pretrained(recipe.source)
    model.save_pretrained(request.payload)
    tokenizer.save_pretrained(request.payload)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    Reporter(request).result({"parameters": parameters, "vocab_size": len(tokenizer)})


def _tiny(source: TinyModel, request: Request) -> tuple[Any, Any]:
    rows = read_prompts(request.inputs["prompts"], "train")
    texts = [text for column in ("prompt", "completion") for text in rows[column].drop_nulls()]
    tokenizer = build_tokenizer(texts, source.vocab_size)
    vocabulary = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.layers,
        num_attention_heads=source.heads,
        num_key_value_heads=source.kv_heads,
        head_dim=source.hidden_size // source.heads,
        max_position_embeddings=source.max_position_embeddings,
        initializer_range=source.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    return Qwen3ForCausalLM(config), tokenizer


def build_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over `texts` that spells numbers digit by digit, with a chat template, EOS and PAD.

    Digits stand alone because a tiny model copies `1800` digit by digit, but not as one rare token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT, "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def _pretrained(source: PretrainedModel) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(source.id, revision=source.revision, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.id, revision=source.revision)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{source.id} has no chat template; choose an instruction-tuned model or add a template"
        )
    if tokenizer.pad_token is None:
        raise ValueError(
            f"{source.id} has no PAD token; save a copy of its tokenizer with one (not EOS) first"
        )
    return model, tokenizer


if __name__ == "__main__":
    run(main, __doc__)
