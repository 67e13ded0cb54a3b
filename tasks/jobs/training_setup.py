"""What the training jobs share: devices, DeepSpeed, checkpoints, and the arguments common to all trainers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.trainer_callback import TrainerState

from tasks.jobs.protocol import RESOLVED, Request
from tasks.recipes import TrainingRuntime, gradient_accumulation


def prepare_devices(runtime: TrainingRuntime) -> None:
    """Choose the accelerator and join the process group; call before building any trainer arguments.

    ZeRO-3 needs the group first: TRL otherwise computes its batch for a world of one.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if runtime.zero_stage is not None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")


def keep_vllm_weights_loadable() -> None:
    """Let a colocated vLLM engine on a CPU take new weights at every step.

    On CPUs with AVX-512 or AMX, vLLM packs each linear weight once and drops the original parameter, so the
    first weight sync of training fails ("'Parameter' object has no attribute 'weight_loader'"); with AVX2
    alone it does not. Seen with vLLM 0.31. Call before the engine is made; GPUs are not concerned.
    """
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers import utils as vllm_layers

    def use_plain_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    vllm_layers.dispatch_cpu_unquantized_gemm = use_plain_weight


def check_world(trainer: Any, runtime: TrainingRuntime) -> None:
    """Refuse a launcher that silently started fewer ranks or no DeepSpeed."""
    accelerator = trainer.accelerator
    if accelerator.num_processes != runtime.ranks:
        raise RuntimeError(
            f"{accelerator.num_processes} rank(s) are running, runtime.ranks asks for {runtime.ranks}"
        )
    kind = str(accelerator.distributed_type.value)
    if (runtime.zero_stage is not None) != (kind == "DEEPSPEED"):
        raise RuntimeError(f"the trainer runs as {kind} although runtime.zero_stage is {runtime.zero_stage}")


def deepspeed_config(runtime: TrainingRuntime, bf16: bool) -> dict[str, Any] | None:
    """The DeepSpeed document of a ZeRO stage, or None; batch fields are filled from the trainer's arguments."""
    if runtime.zero_stage is None:
        return None
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": runtime.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def common_arguments(
    request: Request, runtime: TrainingRuntime, batch_size: int, stage: str, bf16: bool
) -> dict[str, Any]:
    """Arguments that mean the same in every TRL trainer, from the runtime."""
    per_device, accumulation = gradient_accumulation(batch_size, runtime, stage)
    on_cpu = not torch.cuda.is_available()
    return {
        "output_dir": str(Path(request.work) / "checkpoints"),
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": runtime.gradient_checkpointing,
        "bf16": bf16,
        "use_cpu": on_cpu,
        "deepspeed": deepspeed_config(runtime, bf16),
        "save_steps": runtime.save_steps,
        "save_total_limit": 2,  # the newest may be cut short by a kill
        "seed": request.seed,
        "data_seed": request.seed,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": not on_cpu,
    }


def merge_arguments(ours: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Our arguments plus the recipe's `trl` mapping.

    Raises:
        ValueError: the mapping repeats a named field; one thing must be said in one place.
    """
    repeated = sorted(ours.keys() & extra.keys())
    if repeated:
        raise ValueError(
            f"recipe.trl sets {', '.join(repeated)}, which Furlong sets from named fields; use those"
        )
    return {**ours, **extra}


def load_model(folder: str) -> Any:
    """The model (float32) of a model artifact's payload."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def train_and_save(
    trainer: Any, request: Request, steps: int, choices: Mapping[str, Any] | None = None
) -> None:
    """Train from the newest whole checkpoint to the end, save into the payload, and keep the resolved arguments.

    An earlier attempt may have finished training and failed after it; one more `train()` would add a step, so
    its last checkpoint is taken as it is. `choices` are recorded beside the arguments: what was in force without
    being an argument.
    """
    checkpoint = last_checkpoint(Path(request.work) / "checkpoints")
    if checkpoint is not None and _step_of(checkpoint) >= steps:
        trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if trainer.is_world_process_zero():
            load_model(str(checkpoint)).save_pretrained(request.payload)
            trainer.processing_class.save_pretrained(request.payload)
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.save_model(request.payload)
    if trainer.is_world_process_zero():
        # Paths and ranks of this run; the payload's digest is to depend on the weights alone.
        (Path(request.payload) / "training_args.bin").unlink(missing_ok=True)
        resolved = trainer.args.to_dict() | dict(choices or {})
        text = json.dumps(resolved, indent=2, sort_keys=True, default=str)
        (Path(request.channel) / RESOLVED).write_text(text + "\n")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; one that a kill cut short is passed over.

    transformers writes weights, optimizer and scheduler first and `trainer_state.json` last.
    """
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True):
        try:
            json.loads((checkpoint / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return checkpoint
    return None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rsplit("-", 1)[1])
