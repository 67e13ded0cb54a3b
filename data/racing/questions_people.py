"""Questions about jockeys, trainers and the field of one race."""

from __future__ import annotations

from data.racing.templates import (
    LOST_FILTER,
    LOST_NULLS,
    LOST_WIN,
    NO_DISTINCT,
    WINNERS,
    WRONG_AGGREGATE,
    WRONG_BOUND,
    WRONG_ORDER,
    template,
)

TEMPLATES = (
    template(
        "jockey_wins",
        "join",
        (
            "How many races did {jockey} win at {course} in {season}?",
            "Count the wins {jockey} rode at {course} in {season}.",
            "In {season}, how often did {jockey} win at {course}?",
            "How many winners did {jockey} have at {course} in {season}?",
        ),
        "SELECT COUNT(*) FROM [jockeys races] WHERE jockey = '{jockey}' AND course = '{course}'"
        " AND season = {season} AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "jockey_distinct_horses",
        "join",
        (
            "How many different horses did {jockey} ride in class {class} races in {season}?",
            "Count the different horses {jockey} rode in class {class} in {season}.",
            "In {season}, how many different horses had {jockey} up in a class {class} race?",
            "On how many different horses did {jockey} sit in class {class} during {season}?",
        ),
        "SELECT COUNT(DISTINCT horse_id) FROM [jockeys races] WHERE jockey = '{jockey}'"
        " AND class = {class} AND season = {season}",
        (NO_DISTINCT, "DISTINCT ", ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "jockey_winning_horses",
        "join",
        (
            "Which horses did {jockey} win on with {weight} pounds or more?",
            "Name the horses {jockey} rode to a win under at least {weight} pounds.",
            "On which horses has {jockey} won carrying {weight} pounds or more?",
            "List each horse that won for {jockey} with a weight of at least {weight}.",
        ),
        "SELECT DISTINCT horse FROM [horses jockeys] WHERE jockey = '{jockey}'"
        " AND weight >= {weight} AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (WRONG_BOUND, "weight >=", "weight >"),
    ),
    template(
        "jockey_mean_position",
        "aggregate",
        (
            "What is the average finishing position of {jockey} at {course} in {season}?",
            "Give the mean position of {jockey} at {course} in {season}.",
            "In {season}, where did {jockey} finish at {course} on average?",
            "What was the mean finishing position of {jockey} in {season} at {course}?",
        ),
        "SELECT AVG(position) FROM [jockeys races] WHERE jockey = '{jockey}'"
        " AND course = '{course}' AND season = {season}",
        (WRONG_AGGREGATE, "AVG(position)", "SUM(position) / COUNT(*)"),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "jockeys_best_mean",
        "top-k",
        (
            "Which {k} jockeys have the best average position at odds of {odds} or more?",
            "Name the top {k} jockeys by mean position at odds of at least {odds}, best first.",
            "At odds of {odds} or longer, which {k} jockeys finish best on average?",
            "Who are the {k} jockeys with the best mean position at odds of {odds} or more?",
        ),
        "SELECT jockey FROM [jockeys] WHERE odds >= {odds} GROUP BY jockey ORDER BY AVG(position) LIMIT {k}",
        (WRONG_ORDER, " LIMIT", " DESC LIMIT"),
        (LOST_FILTER, " WHERE odds >= {odds}", ""),
    ),
    template(
        "shortest_odds",
        "null",
        (
            "Which {k} horses had the shortest odds in the race on {date}?",
            "Name the {k} horses at the lowest known odds on {date}, shortest first.",
            "In the race on {date}, which {k} horses started at the shortest odds?",
            "Who were the first {k} in the betting on {date}, shortest odds first?",
        ),
        "SELECT horse FROM [horses races] WHERE date = '{date}' AND odds IS NOT NULL ORDER BY odds LIMIT {k}",
        (LOST_NULLS, " AND odds IS NOT NULL", ""),
    ),
    template(
        "longest_priced_winners",
        "top-k",
        (
            "Which {k} winners at {course} in {season} had the longest odds?",
            "Name the {k} winners at the longest odds at {course} in {season}, longest first.",
            "In {season}, which {k} horses won at {course} at the longest odds?",
            "List the {k} longest priced winners of {season} at {course}.",
        ),
        "SELECT horse FROM [horses races] WHERE course = '{course}' AND season = {season}"
        " AND position = 1 ORDER BY odds DESC LIMIT {k}",
        (WRONG_ORDER, " DESC", ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "finish_order",
        "order",
        (
            "List the horses that finished the race on {date}, first to last.",
            "In what order did the horses finish on {date}?",
            "Name the finishers of the race on {date} from the winner down.",
            "Give the finishing order of the race on {date}, without horses that did not finish.",
        ),
        "SELECT horse FROM [horses races] WHERE date = '{date}' AND position IS NOT NULL ORDER BY position",
        (LOST_NULLS, " AND position IS NOT NULL", ""),
    ),
    template(
        "trainer_min_weight",
        "join",
        (
            "How often have horses trained by {trainer} carried {weight} pounds or more?",
            "Count the runs of horses of trainer {trainer} with at least {weight} pounds.",
            "How many starts did {trainer} horses have under a weight of {weight} or more?",
            "In how many runs did a horse from {trainer} carry at least {weight} pounds?",
        ),
        "SELECT COUNT(*) FROM [horses trainers] WHERE trainer = '{trainer}' AND weight >= {weight}",
        (WRONG_BOUND, "weight >=", "weight >"),
        (LOST_FILTER, "trainer = '{trainer}' AND ", ""),
    ),
    template(
        "trainer_longest_odds",
        "aggregate",
        (
            "What are the longest odds of a {trainer} winner with {weight} pounds or more?",
            "Give the highest odds at which trainer {trainer} won with at least {weight} pounds.",
            "Carrying {weight} pounds or more, what were the longest odds of a winner of {trainer}?",
            "At what odds did the longest priced {trainer} winner under {weight} pounds or more start?",
        ),
        "SELECT MAX(odds) FROM [horses trainers] WHERE trainer = '{trainer}'"
        " AND weight >= {weight} AND position = 1",
        (LOST_WIN, WINNERS, ""),
        (WRONG_AGGREGATE, "MAX(odds)", "AVG(odds)"),
    ),
    template(
        "winning_jockey",
        "date",
        (
            "Who rode the winner on {date}?",
            "Which jockey won the race on {date}?",
            "Name the jockey of the winning horse on {date}.",
            "On {date}, which jockey came first?",
        ),
        "SELECT jockey FROM [jockeys races] WHERE date = '{date}' AND position = 1",
        (LOST_WIN, WINNERS, ""),
    ),
    template(
        "horse_at_position",
        "date",
        (
            "Which horse finished in position {n} on {date}?",
            "Name the horse that came in position {n} in the race on {date}.",
            "On {date}, which horse took place {n}?",
            "Who was number {n} past the post on {date}?",
        ),
        "SELECT horse FROM [horses races] WHERE date = '{date}' AND position = {n}",
        (WRONG_BOUND, "position =", "position <="),
        (LOST_FILTER, " AND position = {n}", ""),
    ),
    template(
        "rides_without_owner",
        "null",
        (
            "How often did {jockey} ride a horse without an owner with {weight} pounds or more?",
            "Count the rides of {jockey} on ownerless horses under at least {weight} pounds.",
            "How many rides with {weight} pounds or more had {jockey} on horses with no owner?",
            "On horses with no owner, how many times did {jockey} carry at least {weight} pounds?",
        ),
        "SELECT COUNT(*) FROM [horses jockeys] WHERE jockey = '{jockey}'"
        " AND weight >= {weight} AND owner IS NULL",
        (LOST_FILTER, " AND owner IS NULL", ""),
        (LOST_NULLS, "IS NULL", "= NULL"),
    ),
    template(
        "winners_in_odds_range",
        "filter",
        (
            "How many winners started at odds from {low_odds} to {high_odds}?",
            "Count the wins at odds from {low_odds} to {high_odds}.",
            "How often did a horse win at {low_odds} to {high_odds}?",
            "At odds of {low_odds} up to {high_odds}, how many races were won?",
        ),
        "SELECT COUNT(*) FROM results WHERE odds BETWEEN {low_odds} AND {high_odds} AND position = 1",
        (LOST_WIN, WINNERS, ""),
    ),
)
