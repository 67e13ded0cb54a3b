"""The experiment's reward as the stages use it: one object for curation, GRPO and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.artifacts import ArtifactRef
from rewards.base import Reward, RewardIdentity
from tasks.configs import ConfigError
from tasks.recipes import RewardSpec


def reward_arguments(spec: RewardSpec, prompts: ArtifactRef) -> dict[str, Any]:
    """Arguments of `rewards.registry.get_reward`: with the databases of a prompts artifact where it runs on them."""
    return reward_on(spec, prompts.payload / "databases")


def reward_on(spec: RewardSpec, databases: Path) -> dict[str, Any]:
    """The same for a folder of databases that is no artifact yet; a reward without databases does not look at it.

    Raises:
        ValueError: unknown reward.
    """
    place = {"database_root": str(databases)} if needs_databases(spec) else {}
    return {"name": spec.name, **place, **spec.params}


def needs_databases(spec: RewardSpec) -> bool:
    """Whether the reward runs on the databases of the prompts."""
    from rewards.registry import needs_databases as asks

    return asks(spec.name)


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
        return get_reward(**reward_on(spec, Path("."))).identity
    except (ValueError, TypeError) as error:
        raise ConfigError(f"reward: {error}") from error
