"""Questions about horses: `results` joined with `horses`, and with `races` where a race matters."""

from __future__ import annotations

from data.racing.templates import (
    LOST_FILTER,
    LOST_NULLS,
    LOST_WIN,
    WINNERS,
    WRONG_AGGREGATE,
    WRONG_BOUND,
    WRONG_ORDER,
    template,
)

TEMPLATES = (
    template(
        "horse_wins_course",
        "join",
        (
            "How many races has {horse} won at {course}?",
            "How often did {horse} win at {course}?",
            "Count the wins of {horse} at {course}.",
            "At {course}, how many times did {horse} come first?",
        ),
        "SELECT COUNT(*) FROM [horses races] WHERE horse = '{horse}' AND course = '{course}'"
        " AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (LOST_FILTER, " AND course = '{course}'", ""),
    ),
    template(
        "horse_first_places",
        "filter",
        (
            "How many times did {horse} finish in the first {n}?",
            "Count the runs in which {horse} came in position {n} or better.",
            "How often was {horse} among the first {n}?",
            "In how many races did {horse} make the top {n}?",
        ),
        "SELECT COUNT(*) FROM [horses] WHERE horse = '{horse}' AND position <= {n}",
        (WRONG_BOUND, "position <=", "position <"),
    ),
    template(
        "horse_min_weight",
        "filter",
        (
            "How often did {horse} carry at least {weight} pounds?",
            "Count the runs of {horse} under {weight} pounds or more.",
            "In how many races did {horse} carry {weight} pounds or more?",
            "How many times has {horse} run with a weight of at least {weight}?",
        ),
        "SELECT COUNT(*) FROM [horses] WHERE horse = '{horse}' AND weight >= {weight}",
        (WRONG_BOUND, "weight >=", "weight >"),
    ),
    template(
        "horse_best_position",
        "aggregate",
        (
            "What is the best finishing position of {horse} at {course}?",
            "What was the best place {horse} ever got at {course}?",
            "How high did {horse} finish at {course} at best?",
            "Give the best position of {horse} in a race at {course}.",
        ),
        "SELECT MIN(position) FROM [horses races] WHERE horse = '{horse}' AND course = '{course}'",
        (WRONG_AGGREGATE, "MIN(", "MAX("),
    ),
    template(
        "horse_not_finished",
        "null",
        (
            "How many times did {horse} fail to finish at {course}?",
            "In how many races at {course} has {horse} not finished?",
            "Count the runs at {course} that {horse} did not complete.",
            "How often has {horse} been without a finishing position at {course}?",
        ),
        "SELECT COUNT(*) FROM [horses races] WHERE horse = '{horse}' AND course = '{course}'"
        " AND position IS NULL",
        (LOST_NULLS, "IS NULL", "= NULL"),
        (LOST_FILTER, " AND position IS NULL", ""),
    ),
    template(
        "horse_out_of_first",
        "null",
        (
            "How often was {horse} not in the first {n}, races it did not finish included?",
            "Count the runs of {horse} outside the first {n}, unfinished ones included.",
            "How many times did {horse} miss the top {n}, counting the races it did not finish?",
            "In how many races did {horse} finish behind position {n} or not at all?",
        ),
        "SELECT COUNT(*) FROM [horses] WHERE horse = '{horse}' AND (position > {n} OR position IS NULL)",
        (LOST_NULLS, "(position > {n} OR position IS NULL)", "position > {n}"),
        (WRONG_BOUND, "position >", "position >="),
    ),
    template(
        "horse_last_run",
        "date",
        (
            "When did {horse} last run at {course}?",
            "What is the date of the latest race of {horse} at {course}?",
            "On which day was {horse} most recently at {course}?",
            "Give the date of the last start of {horse} at {course}.",
        ),
        "SELECT MAX(date) FROM [horses races] WHERE horse = '{horse}' AND course = '{course}'",
        (LOST_FILTER, " AND course = '{course}'", ""),
        (WRONG_AGGREGATE, "MAX(date)", "MIN(date)"),
    ),
    template(
        "horse_prize_money",
        "aggregate",
        (
            "How much prize money did {horse} win in {season}?",
            "What was the total prize money of the wins of {horse} in {season}?",
            "In {season}, how many pounds did {horse} earn by winning?",
            "Sum the prizes of the races {horse} won in {season}.",
        ),
        "SELECT SUM(prize) FROM [horses races] WHERE horse = '{horse}' AND season = {season}"
        " AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "horse_place_range",
        "filter",
        (
            "How many times did {horse} finish from position {low} to position {high}?",
            "Count the runs of {horse} in places {low} to {high}.",
            "How often was {horse} placed from {low} to {high} inclusive?",
            "In how many races did {horse} come {low} at best and {high} at worst?",
        ),
        "SELECT COUNT(*) FROM [horses] WHERE horse = '{horse}' AND position BETWEEN {low} AND {high}",
        (
            WRONG_BOUND,
            "position BETWEEN {low} AND {high}",
            "position > {low} AND position < {high}",
        ),
    ),
    template(
        "horse_going_places",
        "group",
        (
            "For each going, how many times did {horse} finish in the first {n}?",
            "Count the runs of {horse} in position {n} or better by going.",
            "Per going, how often was {horse} among the first {n}?",
            "How many times did {horse} make the top {n} on each going?",
        ),
        "SELECT going, COUNT(*) FROM [horses races] WHERE horse = '{horse}'"
        " AND position <= {n} GROUP BY going",
        (WRONG_BOUND, "position <=", "position <"),
    ),
    template(
        "horse_runs_since",
        "date",
        (
            "How many times has {horse} run since {date}?",
            "Count the starts of {horse} from {date} on.",
            "Since {date}, in how many races has {horse} started?",
            "What is the number of runs of {horse} since {date}, that day included?",
        ),
        "SELECT COUNT(*) FROM [horses races] WHERE horse = '{horse}' AND date >= '{date}'",
        (WRONG_BOUND, "date >=", "date >"),
        (LOST_FILTER, " AND date >= '{date}'", ""),
    ),
    template(
        "horse_form",
        "order",
        (
            "List the finishing positions of {horse} at {course}, latest race first.",
            "What were the positions of {horse} at {course}, from the latest race back?",
            "Give the places of {horse} at {course}, most recent first.",
            "Show the form of {horse} at {course} as positions, newest to oldest.",
        ),
        "SELECT position FROM [horses races] WHERE horse = '{horse}' AND course = '{course}'"
        " ORDER BY date DESC",
        (WRONG_ORDER, " DESC", ""),
        (LOST_FILTER, " AND course = '{course}'", ""),
    ),
    template(
        "sex_wins_at_odds",
        "join",
        (
            "How many wins has a {sex} had at odds of {odds} or more?",
            "Count the races won by a {sex} at odds of at least {odds}.",
            "How often did a {sex} win at {odds} or longer?",
            "At odds of {odds} or more, how many races were won by a {sex}?",
        ),
        "SELECT COUNT(*) FROM [horses] WHERE sex = '{sex}' AND odds >= {odds} AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (LOST_FILTER, "sex = '{sex}' AND ", ""),
    ),
)
