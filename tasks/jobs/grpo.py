"""Job: group-relative policy optimisation (TRL GRPOTrainer), on any number of ranks, ZeRO stage and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from rewards.registry import get_reward
from tasks.jobs.callbacks import GenerationLedger, KeepCheckpoints, ReportToParent
from tasks.jobs.group_trainer import GroupTrainer, TrackedReward
from tasks.jobs.prompt_rows import conversational, longest_prompt, read_prompts, read_weights, weighted_order
from tasks.jobs.protocol import Reporter, Request, run
from tasks.jobs.training_setup import (
    check_world,
    common_arguments,
    keep_vllm_weights_loadable,
    load_model,
    merge_arguments,
    prepare_devices,
    train_and_save,
)
from tasks.recipes import GrpoRecipe, GrpoRuntime


def grpo_arguments(request: Request, longest_prompt: int = 512, *, in_order: bool = False) -> GRPOConfig:
    """TRL's own argument object for a request; raises TypeError or ValueError on what TRL does not take.

    Args:
        longest_prompt: tokens of the longest prompt; sizes vLLM's context.
        in_order: the rows are in the order of training already.
    """
    recipe = GrpoRecipe.model_validate(request.recipe)
    runtime = GrpoRuntime.model_validate(request.runtime)
    ours = {
        **common_arguments(request, runtime, recipe.batch_size, "grpo", recipe.bf16),
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
    if in_order:
        ours |= {"shuffle_dataset": False}
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
    prompts = read_prompts(request.inputs["prompts"], "curation")
    tokenizer = AutoTokenizer.from_pretrained(request.inputs["model"])
    # Before the model: with ZeRO-3, loading shards the weights only once the arguments exist.
    weights = read_weights(request.inputs["prompts"], prompts)
    longest = longest_prompt(tokenizer, prompts["prompt"].to_list())
    arguments = grpo_arguments(request, longest, in_order=weights is not None)
    model = load_model(request.inputs["model"])
    rows = conversational(prompts, with_completion=False)
    if weights is not None:
        per_batch = (arguments.generation_batch_size or recipe.batch_size) // recipe.num_generations
        rows = [rows[place] for place in weighted_order(weights, per_batch, recipe.steps, request.seed)]
    reward = get_reward(**request.options["reward"])
    reporter = Reporter(request)
    trainer = GroupTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[ReportToParent(reporter, ("reward", "zero_variance_share", "kl")), GenerationLedger()],
        reward=TrackedReward(reward),
        reporter=reporter,
        max_unscored_share=recipe.max_unscored_share,
        completions_every=recipe.completions_every,
    )
    trainer.remove_callback(PrinterCallback)
    if recipe.keep_every is not None:
        keeper = KeepCheckpoints(recipe.keep_every, Path(request.work) / "kept")
        keeper.trainer = trainer
        trainer.add_callback(keeper)
    check_world(trainer, runtime)
    train_and_save(trainer, request, recipe.steps, choices(arguments))
    reporter.result({**ledger_of(trainer).facts(), "prompts": len(prompts)})


def choices(arguments: GRPOConfig) -> dict[str, Any]:
    """What GRPO implementations differ in and TRL 1.16 decides without an argument; read in its source."""
    scaled = arguments.scale_rewards != "none"
    reference = "synced" if arguments.sync_ref_model else "fixed"
    return {
        "advantage_std": f"sample (n - 1), over each {arguments.scale_rewards}" if scaled else "not divided",
        "advantage_epsilon": 1e-4 if scaled else None,
        "kl_estimator": "k3" if arguments.beta else None,
        "reference_model": reference if arguments.beta else "none",
    }


def ledger_of(trainer: Any) -> GenerationLedger:
    """The ledger of the whole training; the trainer's state holds it across resumes."""
    saved = trainer.state.stateful_callbacks[GenerationLedger.__name__]
    return GenerationLedger(**(saved[0] if isinstance(saved, list) else saved)["args"])


if __name__ == "__main__":
    run(main, __doc__)
