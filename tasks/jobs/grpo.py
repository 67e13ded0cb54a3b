"""Job: group-relative policy optimisation (TRL GRPOTrainer), on any number of ranks, ZeRO stage and engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from rewards.registry import get_reward
from tasks.configs import GrpoRecipe, GrpoRuntime
from tasks.jobs.callbacks import GenerationLedger, ReportToParent
from tasks.jobs.group_trainer import GroupTrainer, TrackedReward
from tasks.jobs.prompt_rows import conversational, read_prompts
from tasks.jobs.protocol import Reporter, Request
from tasks.jobs.sft import write_resolved
from tasks.jobs.training_setup import (
    check_world,
    common_arguments,
    keep_vllm_weights_loadable,
    last_checkpoint,
    load_model,
    merge_arguments,
    prepare_devices,
)


def grpo_arguments(request: Request, longest_prompt: int = 512) -> GRPOConfig:
    """TRL's own argument object for a request; raises TypeError or ValueError on what TRL does not take.

    Args:
        longest_prompt: tokens of the longest prompt; sizes vLLM's context.
    """
    recipe = GrpoRecipe.model_validate(request.recipe)
    runtime = GrpoRuntime.model_validate(request.runtime)
    ours = {
        **common_arguments(request, runtime, recipe.batch_size, "grpo"),
        "max_steps": recipe.steps,
        "num_generations": recipe.num_generations,
        "learning_rate": recipe.learning_rate,
        "lr_scheduler_type": recipe.lr_scheduler,
        "warmup_steps": recipe.warmup_steps,
        "beta": recipe.beta,
        "epsilon": recipe.epsilon,
        "epsilon_high": recipe.epsilon_high,
        "loss_type": recipe.loss_type,
        "scale_rewards": recipe.scale_rewards,
        "num_iterations": recipe.num_iterations,
        "mask_truncated_completions": recipe.mask_truncated_completions,
        "temperature": recipe.temperature,
        "top_p": recipe.top_p,
        "max_completion_length": recipe.max_completion_length,
        "max_grad_norm": recipe.max_grad_norm,
        "restore_callback_states_from_checkpoint": True,
    }
    if recipe.engine == "vllm":
        ours |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": runtime.vllm_gpu_memory_utilization,
            "vllm_tensor_parallel_size": runtime.vllm_tensor_parallel_size,
            "vllm_max_model_length": longest_prompt + recipe.max_completion_length,
        }
    return GRPOConfig(**merge_arguments(ours, recipe.trl))


def main(request: Request) -> None:
    recipe = GrpoRecipe.model_validate(request.recipe)
    runtime = GrpoRuntime.model_validate(request.runtime)
    prepare_devices(runtime)
    if recipe.engine == "vllm":
        keep_vllm_weights_loadable()
    model, tokenizer = load_model(request.inputs["model"])
    rows = conversational(read_prompts(request.inputs["prompts"], "curation"), with_completion=False)
    arguments = grpo_arguments(request, _longest_prompt(tokenizer, rows))
    reward = get_reward(**request.options["reward"])
    reporter, ledger = Reporter(request), GenerationLedger()
    trainer = GroupTrainer(
        model=model,
        reward_funcs=TrackedReward(reward),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[ReportToParent(reporter, ("reward", "zero_variance_share", "kl")), ledger],
        reporter=reporter,
        max_unscored_share=recipe.max_unscored_share,
        completions_every=recipe.completions_every,
    )
    trainer.remove_callback(PrinterCallback)
    check_world(trainer, runtime)
    trainer.train(resume_from_checkpoint=last_checkpoint(request))
    trainer.save_model(request.payload)
    tokenizer.save_pretrained(request.payload)
    if trainer.is_world_process_zero():
        write_resolved(arguments, Path(request.channel))
        reporter.result({**restored(trainer, ledger).facts(), "prompts": len(rows)})


def restored(trainer: Any, ledger: GenerationLedger) -> GenerationLedger:
    """The ledger in use: on resume the trainer replaces ours by the one of the checkpoint."""
    used = [
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, GenerationLedger)
    ]
    return used[0] if used else ledger


def _longest_prompt(tokenizer: Any, rows: list[dict[str, Any]]) -> int:
    encoded = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return max(len(ids) for ids in encoded["input_ids"])


if __name__ == "__main__":
    main(Request.read(sys.argv[1]))
