"""Job: supervised fine-tuning on the demonstrations (TRL SFTTrainer, loss on the completion only)."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from tasks.jobs.callbacks import ReportToParent
from tasks.jobs.prompt_rows import conversational, read_prompts
from tasks.jobs.protocol import Reporter, Request, run
from tasks.jobs.training_setup import (
    check_world,
    common_arguments,
    load_model,
    merge_arguments,
    prepare_devices,
    train_and_save,
)
from tasks.recipes import SftRecipe, TrainingRuntime

MAX_CUT_SHARE = 0.01


def sft_arguments(request: Request) -> SFTConfig:
    """TRL's own argument object for a request; raises TypeError or ValueError on what TRL does not take."""
    recipe = SftRecipe.model_validate(request.recipe)
    runtime = TrainingRuntime.model_validate(request.runtime)
    ours = {
        **common_arguments(request, runtime, recipe.batch_size, "sft", recipe.bf16),
        "max_steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler,
        "warmup_steps": recipe.warmup_steps,
        "weight_decay": recipe.weight_decay,
        "max_length": recipe.max_length,
        "completion_only_loss": True,
        "logging_steps": 5,
    }
    return SFTConfig(**merge_arguments(ours, recipe.trl))


def main(request: Request) -> None:
    runtime = TrainingRuntime.model_validate(request.runtime)
    prepare_devices(runtime)
    arguments = sft_arguments(request)
    model = load_model(request.inputs["model"])
    tokenizer = AutoTokenizer.from_pretrained(request.inputs["model"])
    rows = conversational(read_prompts(request.inputs["prompts"], "train"), with_completion=True)
    longest = _longest_example(tokenizer, rows, arguments.max_length)
    reporter = Reporter(request)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[ReportToParent(reporter, ("loss", "mean_token_accuracy"))],
    )
    trainer.remove_callback(PrinterCallback)
    check_world(trainer, runtime)
    train_and_save(trainer, request, arguments.max_steps)
    reporter.result({"examples": len(rows), "longest_example": longest, "generated_tokens": 0})


def _longest_example(tokenizer: Any, rows: list[dict[str, Any]], limit: int | None) -> int:
    """Tokens of the longest example.

    Raises:
        ValueError: more than 1 % of the examples would be cut by `limit`, and lose the end that they teach.
    """
    texts = [row["prompt"] + row["completion"] for row in rows]
    lengths = [len(ids) for ids in tokenizer.apply_chat_template(texts, return_dict=True)["input_ids"]]
    cut = sum(length > limit for length in lengths) if limit else 0
    if cut > MAX_CUT_SHARE * len(lengths):
        raise ValueError(
            f"train_sft: {cut} of {len(lengths)} examples are longer than sft.recipe.max_length {limit} and would lose "
            f"their end; the longest has {max(lengths)} tokens. Raise max_length to that, or leave it out."
        )
    return max(lengths)


if __name__ == "__main__":
    run(main, __doc__)
