"""Rewards by name: one explicit look-up, no registration by import.

A name stands for one released version and never changes what it does.
"""

from __future__ import annotations

import inspect
from typing import Any

from rewards.base import Reward
from rewards.final_number import FinalNumberV1
from rewards.text2sql import Text2SqlV1

REWARDS: dict[str, type[Any]] = {
    "final_number_v1": FinalNumberV1,
    "text2sql_v1": Text2SqlV1,
}


def get_reward(name: str, **params: Any) -> Reward:
    """The reward `name`, built with `params`.

    Raises ValueError for an unknown name or for parameters that it does not take,
    listing what there is.
    """
    reward = _reward_class(name)
    accepted = inspect.signature(reward).parameters
    unknown = [param for param in params if param not in accepted]
    missing = [
        param for param, about in accepted.items() if about.default is about.empty and param not in params
    ]
    for what, names in (("does not know", unknown), ("needs", missing)):
        if names:
            raise ValueError(f"Reward {name} {what} {', '.join(names)}. It takes {', '.join(accepted)}.")
    return reward(**params)


def needs_databases(name: str) -> bool:
    """Whether the reward `name` takes `database_root`. Raises ValueError for an unknown name."""
    return _reward_class(name).needs_databases


def required_columns(name: str) -> tuple[str, ...]:
    """The columns that the reward `name` needs. Raises ValueError for an unknown name."""
    return _reward_class(name).required_columns


def _reward_class(name: str) -> type[Any]:
    if name not in REWARDS:
        raise ValueError(f"No reward is called {name!r}. Known: {', '.join(sorted(REWARDS))}.")
    return REWARDS[name]
