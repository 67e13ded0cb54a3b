"""Child programs, `python -m tasks.jobs.<name> request.json`: the only modules that import torch, TRL or vLLM."""
