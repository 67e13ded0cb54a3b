"""Job: supervised fine-tuning on the demonstrations (TRL SFTTrainer, loss on the completion only)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from tasks.configs import SftRecipe, TrainingRuntime
from tasks.jobs.callbacks import ReportToParent
from tasks.jobs.prompt_rows import conversational, read_prompts
from tasks.jobs.protocol import Reporter, Request
from tasks.jobs.training_setup import (
    check_world,
    common_arguments,
    last_checkpoint,
    load_model,
    merge_arguments,
    prepare_devices,
)


def sft_arguments(request: Request) -> SFTConfig:
    """TRL's own argument object for a request; raises TypeError or ValueError on what TRL does not take."""
    recipe = SftRecipe.model_validate(request.recipe)
    runtime = TrainingRuntime.model_validate(request.runtime)
    ours = {
        **common_arguments(request, runtime, recipe.batch_size, "sft"),
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
    model, tokenizer = load_model(request.inputs["model"])
    rows = conversational(read_prompts(request.inputs["prompts"], "train"), with_completion=True)
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
    outcome = trainer.train(resume_from_checkpoint=last_checkpoint(request))
    trainer.save_model(request.payload)
    tokenizer.save_pretrained(request.payload)
    if trainer.is_world_process_zero():
        write_resolved(arguments, Path(request.channel))
        reporter.result({"train_loss": outcome.training_loss, "examples": len(rows), "generated_tokens": 0})


def write_resolved(arguments: Any, folder: Path) -> None:
    """Keep the arguments as TRL resolved them; the parent logs the file."""
    text = json.dumps(arguments.to_dict(), indent=2, sort_keys=True, default=str)
    (folder / "resolved_arguments.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Request.read(sys.argv[1]))
