"""Generates the racing database: 48 horses, 15 jockeys, 12 trainers, 480 races of ten starters.

The numbers are chosen for a model of two million parameters that has to learn to copy names: few
words, each of them frequent, and horse names put together from twelve first and twelve second words.
Column names are unique but for the keys, so that `JOIN ... USING (...)` is all a query needs.

NULL means what it means in a real form book: no `position` for a horse that did not finish, no
`weight` or `odds` where the record is missing, no `owner` for a horse without a registered one.
One race a day at most, so a date names a race.

Not covered: dead heats, reserves, non-runners, horses that age out. All names are invented.
"""

from __future__ import annotations

import os
import random
import sqlite3
from datetime import date, timedelta
from pathlib import Path

FIRST_WORDS = (
    "Silver", "Golden", "Royal", "Dark", "Wild", "Lucky",
    "Quiet", "Bold", "Storm", "River", "Iron", "Summer",
)  # fmt: skip
SECOND_WORDS = (
    "Arrow", "Star", "Dancer", "Lad", "Song", "Prince",
    "Rose", "Fox", "Flame", "Echo", "Crown", "Mist",
)  # fmt: skip
JOCKEYS = (
    "Abbott", "Barlow", "Carver", "Dunne", "Ellis", "Farrow", "Gibbs", "Hollis",
    "Irwin", "Jarvis", "Keane", "Lowe", "Marsh", "Nolan", "Orton",
)  # fmt: skip
TRAINERS = (
    "Pryce", "Quinn", "Rourke", "Sutton", "Tate", "Upton",
    "Vance", "Wells", "Yates", "Ames", "Boyd", "Cole",
)  # fmt: skip
COURSES = (
    "Ashford", "Brampton", "Coldwell", "Danebury", "Eastmoor",
    "Fairholt", "Glenmere", "Hexley", "Kingsdown", "Langdale",
)  # fmt: skip
OWNERS = ("Harcourt", "Lindley", "Mercer", "Oakes", "Penrose", "Redfern", "Stanhope", "Thorne")
GOINGS = ("firm", "good", "soft", "heavy")
SEXES = ("mare", "gelding", "stallion")
SEASONS = (2020, 2021, 2022, 2023, 2024)

HORSE_COUNT = 48
RACE_COUNT = 480
STARTERS = 10

NOT_FINISHED = 0.10  # with about 10 starts a horse and course, two pairs in three have one
NO_WEIGHT = 0.08
NO_ODDS = 0.06
NO_OWNER = 0.20

SCHEMA = """\
CREATE TABLE trainers (
    trainer_id INTEGER PRIMARY KEY,
    trainer TEXT NOT NULL UNIQUE
);
CREATE TABLE jockeys (
    jockey_id INTEGER PRIMARY KEY,
    jockey TEXT NOT NULL UNIQUE
);
CREATE TABLE horses (
    horse_id INTEGER PRIMARY KEY,
    horse TEXT NOT NULL UNIQUE,
    sex TEXT NOT NULL, -- mare, gelding or stallion
    foaled INTEGER NOT NULL, -- year of birth
    owner TEXT, -- NULL: none registered
    trainer_id INTEGER NOT NULL REFERENCES trainers (trainer_id)
);
CREATE TABLE races (
    race_id INTEGER PRIMARY KEY,
    date TEXT NOT NULL, -- ISO, one race a day at most
    season INTEGER NOT NULL, -- the year of the date
    course TEXT NOT NULL,
    class INTEGER NOT NULL, -- 1 (best) to 6
    going TEXT NOT NULL, -- firm, good, soft or heavy
    distance INTEGER NOT NULL, -- furlongs
    prize INTEGER NOT NULL -- pounds, all to the winner
);
CREATE TABLE results (
    race_id INTEGER NOT NULL REFERENCES races (race_id),
    horse_id INTEGER NOT NULL REFERENCES horses (horse_id),
    jockey_id INTEGER NOT NULL REFERENCES jockeys (jockey_id),
    position INTEGER, -- NULL: did not finish
    weight INTEGER, -- pounds carried, NULL: not recorded
    odds REAL, -- decimal, NULL: not recorded
    PRIMARY KEY (race_id, horse_id)
);
CREATE INDEX results_horse ON results (horse_id);
CREATE INDEX results_jockey ON results (jockey_id);
CREATE INDEX races_date ON races (date);
"""


def build_database(path: str | os.PathLike[str], seed: int) -> Path:
    """Write the racing database for `seed` to `path` and return the path.

    The same seed gives the same bytes (under one version of SQLite). The file is built beside its
    place and moved there in one step, so a reader sees the old file, the new one or none.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    rng = random.Random(f"racing database {seed}")
    connection = sqlite3.connect(partial)
    try:
        connection.executescript(SCHEMA)
        ability = _fill_people_and_horses(connection, rng)
        _fill_races(connection, rng, ability)
        connection.commit()
        connection.execute("VACUUM")
        connection.close()
        os.replace(partial, target)
    finally:
        connection.close()
        partial.unlink(missing_ok=True)
    return target


def _fill_people_and_horses(connection: sqlite3.Connection, rng: random.Random) -> list[float]:
    """Insert trainers, jockeys and horses; return each horse's ability (its index is its id - 1)."""
    connection.executemany("INSERT INTO trainers VALUES (?, ?)", enumerate(TRAINERS, start=1))
    connection.executemany("INSERT INTO jockeys VALUES (?, ?)", enumerate(JOCKEYS, start=1))
    names = [f"{first} {second}" for first in FIRST_WORDS for second in SECOND_WORDS]
    for horse_id, name in enumerate(rng.sample(names, HORSE_COUNT), start=1):
        owner = None if rng.random() < NO_OWNER else rng.choice(OWNERS)
        trainer_id = (horse_id - 1) % len(TRAINERS) + 1  # four horses each
        row = (horse_id, name, rng.choice(SEXES), rng.randint(2012, 2018), owner, trainer_id)
        connection.execute("INSERT INTO horses VALUES (?, ?, ?, ?, ?, ?)", row)
    return [rng.gauss(0, 0.45) for _ in range(HORSE_COUNT)]


def _fill_races(connection: sqlite3.Connection, rng: random.Random, ability: list[float]) -> None:
    """Insert 480 races on as many days, 96 a season, and ten results for each."""
    days: list[date] = []
    for season in SEASONS:
        opening = date(season, 1, 2)
        offsets = rng.sample(range(362), RACE_COUNT // len(SEASONS))
        days += [opening + timedelta(days=offset) for offset in sorted(offsets)]
    for race_id, day in enumerate(days, start=1):
        race_class = rng.randint(1, 6)
        prize = 50 * rng.randint(40, 120) * (7 - race_class)  # 2,000 to 36,000 pounds
        distance = rng.randint(5, 16)
        race = (race_id, day.isoformat(), day.year, rng.choice(COURSES), race_class)
        race += (rng.choice(GOINGS), distance, prize)
        connection.execute("INSERT INTO races VALUES (?, ?, ?, ?, ?, ?, ?, ?)", race)
        connection.executemany(
            "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?)",
            [(race_id, *result) for result in _run_race(rng, ability)],
        )


def _run_race(
    rng: random.Random, ability: list[float]
) -> list[tuple[int, int, int | None, int | None, float | None]]:
    """One race: rows of (horse_id, jockey_id, position, weight, odds), ordered by horse_id."""
    horses = sorted(rng.sample(range(HORSE_COUNT), STARTERS))
    jockeys = rng.sample(range(1, len(JOCKEYS) + 1), STARTERS)
    form = [ability[horse] + rng.gauss(0, 1) for horse in horses]
    order = sorted(range(STARTERS), key=lambda starter: -form[starter])
    finishers = [s for s in order if s == order[0] or rng.random() >= NOT_FINISHED]
    position = {starter: place for place, starter in enumerate(finishers, start=1)}
    rows = []
    for starter, horse in enumerate(horses):
        weight = None if rng.random() < NO_WEIGHT else rng.randint(112, 140)
        strength = ability[horse] + rng.gauss(0, 0.7)
        price = round(min(40.0, max(1.2, 8.0 * 2.0 ** (-1.2 * strength))), 1)
        odds = None if rng.random() < NO_ODDS else price
        rows.append((horse + 1, jockeys[starter], position.get(starter), weight, odds))
    return rows
