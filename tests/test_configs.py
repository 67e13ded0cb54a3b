"""Experiments are parsed once, checked whole, and every fault is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tasks.configs import CONFIG_FOLDER, ConfigError, Experiment, load_experiment
from tasks.recipes import TrainingRuntime, gradient_accumulation

SHIPPED = sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_parses_and_names_its_flow(name: str) -> None:
    import flows.sft_grpo as sft_grpo_module

    experiment = load_experiment(name)
    assert experiment.name == name
    assert hasattr(sft_grpo_module, experiment.flow)


def test_overrides_win_over_yaml_and_yaml_over_defaults() -> None:
    plain = load_experiment("nano")
    assert (plain.grpo.recipe.beta, plain.grpo.recipe.steps) == (0.0, 2)
    changed = load_experiment(
        "nano",
        [
            "grpo.recipe.beta=4e-2",
            "grpo.recipe.steps=3",
            "grpo.recipe.trl.delta=2.0",
            "grpo.recipe.bf16=true",
        ],
    )
    assert (changed.grpo.recipe.beta, changed.grpo.recipe.steps) == (0.04, 3)
    assert changed.grpo.recipe.trl == {"delta": 2.0}
    assert changed.grpo.recipe.bf16 is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.recipe.betta=0.1", r"grpo\.recipe\.betta: Extra inputs"),
        ("grpo.recipe.beta=-1", r"grpo\.recipe\.beta: .*greater than or equal to 0"),
        ("grpo.recipe.beta=nan", r"grpo\.recipe\.beta"),
        ("grpo.recipe.batch_size=18", "not a multiple of num_generations 4"),
        ("grpo.runtime.ranks=3", "not a multiple of ranks 3"),
        ("select.recipe={low: 0.9, high: 0.1}", "the band from 0.9 to 0.1 is empty"),
        ("grpo.recipe.beta", "not of the form"),
        ("name.x=1", "has no keys below it"),
        ("sample.runtime.engine_arguments={dtype: half}", "runtime is no part of the key"),
        ("sample.runtime.shards=4", "4 shards need ray_address"),
        (
            "sample={recipe: {max_total_samples: 90}, runtime: {shards: 2, ray_address: local}}",
            "sample: max_total_samples bounds all prompts together, which 2 shards",
        ),
        ("grpo.recipe.loss_type=dapoo", "'dapo'"),
        ("grpo.recipe.engine=llamacpp", "'transformers' or 'vllm'"),
        ("prompts.recipe.source.kind=horse", "racing"),
    ],
)
def test_a_wrong_override_is_refused_with_its_place(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_experiment("nano", [override])


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_experiment("nano", ["sft.recipe.steps=0", "grpo.recipe.steps=0", "sample.recipe.top_p=2"])
    assert "3 fault(s)" in str(caught.value)


def test_a_missing_config_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="nano, text2sql_racing"):
        load_experiment("no_such_config")


def test_broken_yaml_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("name: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not valid YAML"):
        load_experiment(str(file))
    file.write_text("- a list")
    with pytest.raises(ConfigError, match="holds a list"):
        load_experiment(str(file))


def test_split_shares_must_sum_to_one() -> None:
    source = {
        "kind": "table",
        "location": "x.jsonl",
        "database_root": ".",
        "train": 0.9,
        "curation": 0.9,
        "heldout": 0.9,
    }
    with pytest.raises(ValidationError, match="sum to 1"):
        Experiment.model_validate({"name": "x", "prompts": {"recipe": {"source": source}}})


def test_the_batch_is_split_exactly() -> None:
    assert gradient_accumulation(32, TrainingRuntime(ranks=2), "sft") == (16, 1)
    assert gradient_accumulation(32, TrainingRuntime(ranks=2, per_device_batch_size=4), "sft") == (4, 4)


def test_recipes_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_experiment("nano").grpo.recipe.beta = 1.0  # type: ignore[misc]


def test_the_configs_in_the_readme_parse() -> None:
    readme = (CONFIG_FOLDER.parents[1] / "README.md").read_text()
    snippets = re.findall(r"```yaml\n(.*?)```", readme, flags=re.DOTALL)
    sql, questions = (Experiment.model_validate(yaml.safe_load(snippet)) for snippet in snippets)
    assert sql.grpo.recipe.engine == "vllm" and sql.grpo.runtime.zero_stage == 2
    assert questions.prompts.recipe.source.kind == "questions" and questions.reward.name == "final_number_v1"
