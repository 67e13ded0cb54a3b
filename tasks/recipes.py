"""What each stage builds (its recipe) and where and how (its runtime): the fields of an experiment's YAML.

A recipe is part of the artifact's key, a runtime never is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(gt=0, lt=1)]
Engine = Literal["transformers", "vllm"]
"""Who generates inside a training job."""
SamplingEngine = Literal["transformers", "vllm", "server"]
"""Who generates for curation and benchmarks; `server` is any OpenAI-compatible vLLM server."""


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# --------------------------------------------------------------------------------------------- runtimes


class Runtime(Frozen):
    """Where and how a stage runs."""

    retries: Annotated[int, Field(ge=0, le=10)] = 0
    """How often a failed attempt is repeated; it resumes from what the failed one left."""
    timeout_s: PositiveInt | None = None
    """A job still running after this many seconds is ended and fails. None: no limit."""
    environment: dict[str, str] = {}
    """Extra environment variables of the job (never hyper-parameters)."""


HARMLESS_ARGUMENTS = {
    "block_size",
    "compilation_config",
    "cpu_offload_gb",
    "data_parallel_size",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "swap_space",
    "tensor_parallel_size",
}
"""Arguments of vLLM's `LLM` that say where and how fast, not what is generated."""


class SamplingRuntime(Runtime):
    """How completions are generated."""

    engine_arguments: dict[str, Any] = {}
    """Passed to vLLM's `LLM(...)`, for example `gpu_memory_utilization` or `tensor_parallel_size`."""
    batch_size: PositiveInt | None = None
    """Completions handed to the engine, and made safe on disk, at once; a kill loses at most these. None takes the
    engine's own: 256 for transformers, 2048 for vLLM and for a server."""
    shards: PositiveInt = 1
    """Jobs that share the prompts. More than one needs `ray_address` and a recipe without a total budget."""
    ray_address: str | None = None
    """Where the shards run: `local` starts Ray on this machine, `auto`, `host:port` or `ray://host:port` joins a cluster
    that shares this checkout, its environment and `$FURLONG_HOME`, and reaches the Prefect server. None runs without
    Ray."""
    server_urls: list[str] = []
    """Replicas of the vLLM server, such as `http://127.0.0.1:8000/v1`; each must serve this policy."""

    @model_validator(mode="after")
    def _shards_have_a_place(self) -> SamplingRuntime:
        if self.shards > 1 and self.ray_address is None:
            raise ValueError(
                f"{self.shards} shards need ray_address (`local` starts Ray on this machine), found none"
            )
        return self

    @model_validator(mode="after")
    def _nothing_that_decides_the_result(self) -> SamplingRuntime:
        deciding = sorted(self.engine_arguments.keys() - HARMLESS_ARGUMENTS)
        if deciding:
            raise ValueError(
                f"engine_arguments may not set {', '.join(deciding)}: runtime is no part of the key, so only these may stand "
                f"here: {', '.join(sorted(HARMLESS_ARGUMENTS))}. Change the model artifact or the recipe instead"
            )
        return self


class TrainingRuntime(Runtime):
    """How a training stage is spread over devices."""

    ranks: PositiveInt = 1
    """Processes started through torchrun on this machine."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """DeepSpeed ZeRO stage; None trains without DeepSpeed."""
    per_device_batch_size: PositiveInt | None = None
    """Completions (GRPO) or examples (SFT) a rank forwards at once. None: the whole batch divided by ranks."""
    gradient_checkpointing: bool = False
    save_steps: PositiveInt = 50
    """Optimizer steps between checkpoints to resume from."""


class GrpoRuntime(TrainingRuntime):
    vllm_gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of device memory for the colocated vLLM engine's weights and cache."""
    vllm_tensor_parallel_size: PositiveInt = 1


# ---------------------------------------------------------------------------------------------- recipes


class RacingSource(Frozen):
    """The built-in horse-racing Text2SQL task (`data/racing/`)."""

    kind: Literal["racing"] = "racing"
    train: PositiveInt = 5000
    """Demonstrations for SFT."""
    curation: PositiveInt = 600
    """Prompts that are sampled, scored and selected for GRPO."""
    heldout: PositiveInt = 300
    """Prompts of the benchmark; disjoint from the others by text and by gold SQL."""
    mistake_share: Share = 0.2
    """Mean share of demonstrations of a template that carry a realistic mistake."""
    flipped_share: Share = 0.62
    """The same share in the templates where the mistake is the commoner variant."""
    flipped_templates: Share = 1 / 3
    """Share of the templates where the mistake is the commoner variant."""


class TableSource(Frozen):
    """Any JSONL, Parquet or CSV file, or a Hub data set, with a folder of SQLite databases."""

    kind: Literal["table"]
    location: str
    """A file, or a Hub data set id."""
    database_root: Path
    """Folder with `<db_id>.sqlite` or `<db_id>/<db_id>.sqlite`."""
    revision: str | None = None
    """Hub revision, required for the Hub (a commit, so that the key is stable)."""
    hub_split: str = "train"
    columns: dict[str, str] = {"prompt": "question", "solution": "gold_sql", "db_id": "db_id"}
    """Our column -> the data set's column; `completion` and `split` are optional."""
    prompt_template: str = "{schema}\n\n{question}"
    train: Share = 0.4
    curation: Share = 0.3
    heldout: Share = 0.3
    licence: str | None = None
    """Licence of the data; None takes what the Hub states."""

    @model_validator(mode="after")
    def _shares_sum_to_one(self) -> TableSource:
        if abs(self.train + self.curation + self.heldout - 1) > 1e-9:
            total = self.train + self.curation + self.heldout
            raise ValueError(f"train + curation + heldout is {total:g}; the split shares must sum to 1")
        return self


class QuestionSource(Frozen):
    """Questions with a gold answer and no database, such as GSM8K: JSONL, Parquet, CSV, or a Hub data set."""

    kind: Literal["questions"]
    location: str
    """A file, or a Hub data set id."""
    heldout_location: str | None = None
    """A second file (or the Hub data set's split of this name) that is the held-out split as a whole."""
    revision: str | None = None
    """Hub revision, required for the Hub (a commit, so that the key is stable)."""
    hub_split: str = "train"
    columns: dict[str, str] = {"prompt": "question", "solution": "answer"}
    """Our column -> the data set's column; `completion` and `split` are optional."""
    prompt_template: str = "{question}"
    train: Share = 0.4
    curation: Share = 0.3
    heldout: Share = 0.3
    """Share of `location` that is held out; without effect beside a `heldout_location`."""
    limit: PositiveInt | None = None
    """Rows read from each location, the first ones; None reads all."""
    licence: str | None = None
    """Licence of the data; None takes what the Hub states."""


class HygieneRecipe(Frozen):
    """What prompts have to be before anything is sampled: no leaks, duplicates found, no personal data."""

    near_duplicate: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Questions whose Jaccard similarity of word 3-grams reaches this share one cluster; `select` can cap how many of a
    cluster are kept."""
    leak_ngram: Annotated[int, Field(ge=3)] = 13
    """A question to train on that shares this many consecutive words with a held-out question is a leak."""
    on_leak: Literal["refuse", "remove"] = "refuse"
    """`remove` drops the leaking rows from train and curation and counts them."""
    heldout_files: list[Path] = []
    """Further held-out sets (JSONL, Parquet or CSV with a `question` or `prompt` column) that nothing may leak from."""
    anonymise: bool = False
    """Replace e-mail addresses, phone numbers, card numbers and the like before anything is stored. Databases stay as
    they are, so a SQL gold that names a replaced value becomes suspect."""


class PromptsRecipe(Frozen):
    """Which prompts there are, and how they are split."""

    source: Annotated[RacingSource | TableSource | QuestionSource, Field(discriminator="kind")] = (
        RacingSource()
    )
    hygiene: HygieneRecipe = HygieneRecipe()
    data_seed: int | None = None
    """Seed of generation and splits. None: the run's seed."""
    max_suspect_gold_share: Share = 0.5
    """The stage fails when a larger share of golds does not score 1.0 against itself."""


class TinyModel(Frozen):
    """A Qwen3-architecture model and a byte-level BPE built from the training text, both from scratch."""

    kind: Literal["tiny"] = "tiny"
    vocab_size: Annotated[int, Field(ge=300)] = 800
    hidden_size: PositiveInt = 192
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    intermediate_size: PositiveInt = 576
    max_position_embeddings: PositiveInt = 512
    initializer_range: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Standard deviation of the initial weights. With Qwen3's 0.02 a model this narrow learns to copy much later."""


class PretrainedModel(Frozen):
    """A Hub id with revision, or a local folder in the transformers format."""

    kind: Literal["pretrained"]
    id: str
    revision: str | None = None


class ModelRecipe(Frozen):
    """The model before any training of ours."""

    source: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")] = TinyModel()


class SftRecipe(Frozen):
    """Warm start: completion-only cross-entropy on the demonstrations (TRL SFTTrainer)."""

    steps: PositiveInt = 400
    batch_size: PositiveInt = 32
    """Examples an optimizer step, over all ranks."""
    learning_rate: LearningRate = 2e-3
    lr_scheduler: str = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    max_length: PositiveInt | None = None
    """Longest prompt plus completion, in tokens. TRL cuts longer ones, and the stage refuses more than 1 % of
    those. None cuts nothing."""
    bf16: bool = False
    """Train in bfloat16 autocast (GPU)."""
    trl: dict[str, Any] = {}
    """Further arguments of TRL's SFTConfig, checked against its own class by `--dry-run`."""


class SampleRecipe(Frozen):
    """Completions drawn from the policy whose pass rate is wanted, a few for all prompts, more for undecided ones.

    A prompt is decided once it has both a correct and an incorrect completion (`mixed`). `first_samples` equal to
    `max_samples` draws a fixed number for every prompt.
    """

    policy: str = "sft"
    """Whose pass rate: `base` (before training), `sft` (the warm start), or the path of any checkpoint: a model
    artifact or a model folder."""
    engine: SamplingEngine = "transformers"
    first_samples: PositiveInt = 4
    """Completions of every prompt in the first phase."""
    more_samples: PositiveInt = 4
    """Completions of every prompt that is still undecided, in each later phase."""
    max_samples: PositiveInt = 16
    """Cap: an undecided prompt with so many completions is left as it is."""
    max_total_samples: PositiveInt | None = None
    """Budget of completions over all prompts; None has no limit."""
    max_total_tokens: PositiveInt | None = None
    """Budget of completion tokens over all prompts; the prompt that reaches it is finished. None has no limit."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_completion_length: PositiveInt = 80
    """Tokens."""

    @model_validator(mode="after")
    def _phases_fit(self) -> SampleRecipe:
        if self.first_samples > self.max_samples:
            raise ValueError(
                f"first_samples {self.first_samples} is above max_samples {self.max_samples}; raise the cap, or draw fewer"
            )
        if self.max_total_samples is not None and self.max_total_samples < self.first_samples:
            raise ValueError(
                f"max_total_samples {self.max_total_samples} does not cover the first_samples {self.first_samples} of one prompt"
            )
        return self


class ScoreRecipe(Frozen):
    """Scores of stored samples by the experiment's reward."""

    max_unscored_share: Share = 0.2
    """The stage fails when a larger share of samples has no score."""


class SelectRecipe(Frozen):
    """Which prompts GRPO trains on: a band of pass rates, then caps and quotas."""

    low: Share = 0.0
    high: Share = 1.0
    low_closed: bool = False
    """Whether a pass rate equal to `low` is kept; False drops unsolved prompts when `low` is 0."""
    high_closed: bool = False
    """Whether a pass rate equal to `high` is kept; False drops solved prompts when `high` is 1."""
    judge_by: Literal["rate", "interval"] = "rate"
    """`rate`: the observed pass rate must lie in the band. `interval`: a prompt is dropped only when its whole interval
    lies outside (0 of 8 is what a true rate of 0.1 shows 43 % of the time)."""
    drop_truncated: bool = True
    """Whether prompts without a correct completion, most of whose completions were cut off, are dropped whatever the
    band."""
    max_per_cluster: PositiveInt | None = None
    """Most prompts kept of one near-duplicate cluster; None keeps all."""
    max_source_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest share of the selection that one source may have; None has no quota."""
    difficulty_shares: Annotated[list[Share], Field(min_length=1)] | None = None
    """Shares of the selection by difficulty: as many equally wide strata of the estimated pass rate, hardest first, for
    example [0.5, 0.3, 0.2]. A stratum with too few prompts does not fill up from others. None has no quota."""
    target_size: PositiveInt | None = None
    """Most prompts kept in all; None keeps whatever is left."""
    weighting: Literal["none", "variance"] = "none"
    """How often GRPO sees a kept prompt: `none` evenly, `variance` in proportion to p (1 - p) of the estimated rate. A
    batch holds different prompts, so the larger its part of the selection, the more even it gets."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> SelectRecipe:
        if self.low > self.high or (self.low == self.high and not (self.low_closed and self.high_closed)):
            raise ValueError(f"the band from {self.low} to {self.high} is empty; low must be below high")
        if self.judge_by == "interval" and self.low == 0 and self.high == 1:
            raise ValueError(
                "judge_by interval with the band 0 to 1 tells no more than the rate, for no interval lies outside it; name "
                "a narrower band, such as low 0.1 and high 0.9"
            )
        return self


class GrpoRecipe(Frozen):
    """Group-relative policy optimisation (TRL GRPOTrainer)."""

    engine: Engine = "transformers"
    """Who generates: the training model itself, or a colocated vLLM engine."""
    steps: PositiveInt = 40
    batch_size: PositiveInt = 128
    """Completions an optimizer step, over all ranks."""
    num_generations: Annotated[int, Field(ge=2)] = 8
    """Group size G."""
    learning_rate: LearningRate = 2e-4
    lr_scheduler: str = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term; 0 keeps no reference model in memory."""
    epsilon: Annotated[float, Field(gt=0)] = 0.2
    epsilon_high: Annotated[float, Field(gt=0)] | None = None
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    num_iterations: PositiveInt = 1
    """Optimizer passes over each batch of completions."""
    mask_truncated_completions: bool = False
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_completion_length: PositiveInt = 80
    """Tokens."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    bf16: bool = False
    """Train in bfloat16 autocast (GPU)."""
    max_unscored_share: Share = 0.2
    """The stage fails when a larger share of its completions has no score."""
    completions_every: PositiveInt = 10
    """Steps between tables of completions with their scores."""
    keep_every: PositiveInt | None = None
    """Steps between checkpoints that stay with the artifact, as model folders `record/checkpoint-<step>`; None keeps
    the last model alone."""
    trl: dict[str, Any] = {}
    """Further arguments of TRL's GRPOConfig, checked against its own class by `--dry-run`."""

    @model_validator(mode="after")
    def _whole_groups(self) -> GrpoRecipe:
        if self.batch_size % self.num_generations:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of num_generations {self.num_generations}; "
                f"batches count completions and must hold whole groups"
            )
        return self


class BenchmarkRecipe(Frozen):
    """Held-out evaluation: one greedy completion a prompt, and k sampled ones."""

    engine: SamplingEngine = "transformers"
    k: Annotated[int, Field(ge=2)] = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_completion_length: PositiveInt = 80
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95


class StalenessRecipe(Frozen):
    """A small stratified part of the curated prompts, sampled again with another checkpoint."""

    prompts: PositiveInt = 64
    """Prompts sampled again, dealt to the classes in proportion to their size."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    max_flipped_share: Share = 0.3
    """A larger share of flipped labels, if it is also more than chance alone brings, means that the curation is stale."""
    sampling: SampleRecipe | None = None
    """How the other checkpoint is sampled; None samples as the curation was."""


class ReportRecipe(Frozen):
    """The report has nothing to choose."""


class RewardSpec(Frozen):
    """The reward version; the same object serves curation, GRPO and the benchmark."""

    name: str = "text2sql_v1"
    """A released version: `text2sql_v1` or `final_number_v1`."""
    params: dict[str, Any] = {}
    """Its parameters, such as {"weights": [0.1, 0.8, 0.1]}."""


def gradient_accumulation(batch_size: int, runtime: TrainingRuntime, stage: str) -> tuple[int, int]:
    """(per-device batch, accumulation steps) whose product with the ranks is exactly `batch_size`.

    Raises:
        ValueError: when ranks and per-device batch do not divide the batch.
    """
    per_device = runtime.per_device_batch_size or max(1, batch_size // runtime.ranks)
    at_once = per_device * runtime.ranks
    if batch_size % at_once:
        raise ValueError(
            f"{stage}: batch_size {batch_size} is not a multiple of ranks {runtime.ranks} x per_device_batch_size "
            f"{per_device} = {at_once}; change one of the three"
        )
    return per_device, batch_size // at_once
