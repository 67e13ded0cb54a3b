"""Verifiers: a completion and its data row in, a `RewardResult` out.

Importing this package is cheap on purpose (standard library only): training jobs,
the orchestrator and the worker processes all import it. Start at
`rewards.registry.get_reward`.
"""
