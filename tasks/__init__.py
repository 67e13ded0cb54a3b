"""Stages: each turns input artifacts and a recipe into one output artifact."""
