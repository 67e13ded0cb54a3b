"""TRL's GRPOTrainer plus what we compute ourselves from the raw rewards of whole groups.

TRL's `frac_reward_zero_std` looks at the batch's std under `scale_rewards="batch"` and then never fires; the
numbers here come from each group's rewards before any scaling, under every setting.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from rewards.base import Reward, RewardResult, Status, check_scores, reward_name
from tasks.jobs.protocol import Reporter

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Two rewards of a group that differ by no more are equal; float noise is far below, reward terms far above."""


def group_metrics(rewards: torch.Tensor, num_generations: int) -> dict[str, float]:
    """Statistics of raw rewards per group.

    Args:
        rewards: shape (groups * num_generations,), groups contiguous; NaN marks an unscored completion.

    Returns:
        `zero_variance_share`: groups whose scored rewards are all equal, or with fewer than two scored: they
        give no task gradient. `zero_variance_share/all_zero` and `/all_one` are two kinds of it.
        `within_group_std`: mean over groups of the population std. `unscored_share`: of completions.
    """
    groups = rewards.view(-1, num_generations).double()
    scored = ~torch.isnan(groups)
    highest = groups.masked_fill(~scored, -torch.inf).amax(dim=1)
    lowest = groups.masked_fill(~scored, torch.inf).amin(dim=1)
    flat = (scored.sum(dim=1) < 2) | (highest - lowest <= ZERO_VARIANCE_TOLERANCE)
    variance = torch.nanmean((groups - torch.nanmean(groups, dim=1, keepdim=True)) ** 2, dim=1)

    def share(mask: torch.Tensor) -> float:
        return mask.double().mean().item()

    return {
        "zero_variance_share": share(flat),
        "zero_variance_share/all_zero": share(flat & (highest.abs() <= ZERO_VARIANCE_TOLERANCE)),
        "zero_variance_share/all_one": share(flat & ((lowest - 1).abs() <= ZERO_VARIANCE_TOLERANCE)),
        "within_group_std": torch.nan_to_num(variance).sqrt().mean().item(),
        "unscored_share": share(~scored),
    }


class TrackedReward:
    """A reward version as TRL calls it, which remembers its typed results; scores pass unchanged."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self.__name__: str = reward_name(reward)
        self.results: list[RewardResult] = []
        """Of the newest call, on this rank."""

    def __call__(self, **columns: Any) -> list[float | None]:
        self.results = self._reward.results(**columns)
        return check_scores(
            self.__name__, [result.score for result in self.results], len(columns["completions"])
        )


def result_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """Share of every status (0 where it did not occur), and mean and population std of each reward term."""
    counts = Counter(result.status for result in results)
    metrics = {f"reward_status/{status}": counts[status] / max(len(results), 1) for status in Status}
    for term in sorted({name for result in results for name in result.terms}):
        values = [result.terms[term] for result in results if term in result.terms]
        metrics[f"reward_term/{term}/mean"] = statistics.fmean(values)
        metrics[f"reward_term/{term}/std"] = statistics.pstdev(values)
    return metrics


class GroupTrainer(GRPOTrainer):
    """GRPOTrainer that also reports group statistics and completions; training is TRL's, unchanged."""

    def __init__(
        self,
        *args: Any,
        reward: TrackedReward,
        reporter: Reporter,
        max_unscored_share: float,
        completions_every: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, reward_funcs=reward, **kwargs)
        self._reward = reward
        self._reporter = reporter
        self._max_unscored_share = max_unscored_share
        self._completions_every = completions_every
        self._tokens_since_log = 0

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        # TRL returns the rewards of all ranks here, groups contiguous: the one place where groups are whole.
        rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        training = bool(self.model and self.model.training)
        rewards = (rewards_per_func * self.reward_weights.to(rewards_per_func.device)).nansum(dim=1)
        rewards[torch.isnan(rewards_per_func).all(dim=1)] = torch.nan
        size = self.num_generations if training else self.num_generations_eval
        groups = group_metrics(rewards, int(size or 1))
        for name, value in {**groups, **result_metrics(gather_object(self._reward.results))}.items():
            self._metrics["train" if training else "eval"][name].append(value)
        self._tokens_since_log += sum(gather_object([sum(map(len, completion_ids_list))]))
        self._check_unscored(groups["unscored_share"])
        return rewards_per_func

    def _check_unscored(self, share: float) -> None:
        if share > self._max_unscored_share:
            raise RuntimeError(
                f"{share:.0%} of a batch's completions could not be scored; grpo.recipe.max_unscored_share allows "
                f"{self._max_unscored_share:.0%}. The verifier fails, not the policy: see reward_status/* and the log."
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        step = self.state.global_step
        if self._tokens_since_log:
            logs["generated_tokens"] = float(self._tokens_since_log)  # a sum; TRL would average it
            self._tokens_since_log = 0
        if self._logs["prompt"] and step % self._completions_every == 0:
            self._reporter.table(f"completions_{step:05d}", self._completion_rows())
        super().log(logs, start_time)

    def _completion_rows(self) -> list[dict[str, Any]]:
        """The newest batch: one row a completion, with its reward and advantage."""
        rewards = self._logs["rewards"]
        rows = []
        for position, (prompt, completion, advantage) in enumerate(
            zip(self._logs["prompt"], self._logs["completion"], self._logs["advantages"], strict=True)
        ):
            row = {
                "step": self.state.global_step,
                "prompt": prompt[-1]["content"],
                "completion": completion[-1]["content"],
                "advantage": round(advantage, 4),
            }
            rows.append(row | {name: list(values)[position] for name, values in rewards.items()})
        return rows
