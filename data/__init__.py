"""Bytes at rest: tables, sources, artifacts and the store that keeps them. Imports nothing else of the project."""
