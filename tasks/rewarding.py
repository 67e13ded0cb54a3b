"""The experiment's reward as the stages use it: one object for curation, GRPO and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.artifacts import ArtifactRef
from rewards.base import Reward, RewardIdentity
from tasks.configs import ConfigError
from tasks.recipes import RewardSpec


def reward_arguments(spec: RewardSpec, prompts: ArtifactRef) -> dict[str, Any]:
    """Arguments of `rewards.registry.get_reward` for the databases of a prompts artifact."""
    return {"name": spec.name, "database_root": str(prompts.payload / "databases"), **spec.params}


def open_reward(spec: RewardSpec, prompts: ArtifactRef) -> Reward:
    from rewards.registry import get_reward

    return get_reward(**reward_arguments(spec, prompts))


def reward_identity(spec: RewardSpec) -> RewardIdentity:
    """The identity that enters keys and MLflow tags; where the databases lie is no part of it.

    Raises:
        ConfigError: unknown reward, or parameters that it does not take.
    """
    from rewards.registry import get_reward

    try:
        return get_reward(spec.name, database_root=Path("."), **spec.params).identity
    except (ValueError, TypeError) as error:
        raise ConfigError(f"reward: {error}") from error
