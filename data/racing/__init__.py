"""The built-in Text2SQL task: questions about a small, generated horse-racing database.

`build_database` writes the SQLite file, `make_racing` asks questions about it and returns a prompt
table, `describe_mistakes` says how many of the demonstrations are wrong, template by template.
Everything follows from one integer seed; nothing is downloaded.
"""

from data.racing.database import build_database
from data.racing.demonstrations import describe_mistakes, flipped_template_names, make_racing

__all__ = ["build_database", "describe_mistakes", "flipped_template_names", "make_racing"]
