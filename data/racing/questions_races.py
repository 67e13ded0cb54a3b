"""Questions that one table, `races`, answers."""

from __future__ import annotations

from data.racing.templates import (
    LOST_FILTER,
    NO_DISTINCT,
    WRONG_AGGREGATE,
    WRONG_BOUND,
    WRONG_ORDER,
    template,
)

TEMPLATES = (
    template(
        "races_min_prize",
        "filter",
        (
            "How many races at {course} in {season} had a prize of at least {prize} pounds?",
            "In {season}, how many races at {course} paid {prize} pounds or more?",
            "Count the {season} races at {course} worth at least {prize} pounds.",
            "What is the number of races at {course} in {season} with a prize of {prize} or more?",
        ),
        "SELECT COUNT(*) FROM races WHERE course = '{course}' AND season = {season} AND prize >= {prize}",
        (WRONG_BOUND, "prize >=", "prize >"),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "races_min_distance",
        "filter",
        (
            "How many races on {going} going at {course} were at least {distance} furlongs long?",
            "Count the races of {distance} furlongs or more at {course} on {going} going.",
            "At {course} on {going} going, how many races were {distance} furlongs or longer?",
            "How often did {course} stage a race of at least {distance} furlongs on {going} going?",
        ),
        "SELECT COUNT(*) FROM races WHERE course = '{course}' AND going = '{going}'"
        " AND distance >= {distance}",
        (WRONG_BOUND, "distance >=", "distance >"),
        (LOST_FILTER, " AND going = '{going}'", ""),
    ),
    template(
        "mean_prize_short",
        "aggregate",
        (
            "What was the average prize at {course} in {season} for {distance} furlongs or less?",
            "Give the mean prize of the {season} races at {course} up to {distance} furlongs.",
            "How much was the average prize in {season} at {course} up to {distance} furlongs?",
            "For races of at most {distance} furlongs at {course} in {season}, what is the mean prize?",
        ),
        "SELECT AVG(prize) FROM races WHERE course = '{course}' AND season = {season}"
        " AND distance <= {distance}",
        (WRONG_AGGREGATE, "AVG(prize)", "SUM(prize)"),
        (WRONG_BOUND, "distance <=", "distance <"),
    ),
    template(
        "top_prize_since",
        "aggregate",
        (
            "What is the biggest prize at {course} since {date}?",
            "Since {date}, what was the highest prize of a race at {course}?",
            "How much did the richest race at {course} from {date} on pay?",
            "Give the largest prize {course} has offered since {date}.",
        ),
        "SELECT MAX(prize) FROM races WHERE course = '{course}' AND date >= '{date}'",
        (LOST_FILTER, "course = '{course}' AND ", ""),
        (WRONG_AGGREGATE, "MAX(prize)", "AVG(prize)"),
    ),
    template(
        "courses_of_class",
        "filter",
        (
            "Which courses staged a class {class} race of {distance} furlongs or more in {season}?",
            "Name the courses with a class {class} race of at least {distance} furlongs in {season}.",
            "In {season}, at which courses was a class {class} race {distance} furlongs or longer?",
            "List each course that held a class {class} race over at least {distance} furlongs in {season}.",
        ),
        "SELECT DISTINCT course FROM races WHERE class = {class} AND season = {season}"
        " AND distance >= {distance}",
        (NO_DISTINCT, "DISTINCT ", ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "races_per_going",
        "group",
        (
            "For each going, how many races of at least {distance} furlongs did {course} hold in {season}?",
            "Count the {season} races of {distance} furlongs or more at {course} by going.",
            "Per going, how many races at {course} in {season} were {distance} furlongs or longer?",
            "In {season} at {course}, how many races of {distance} furlongs or more fell on each going?",
        ),
        "SELECT going, COUNT(*) FROM races WHERE course = '{course}' AND season = {season}"
        " AND distance >= {distance} GROUP BY going",
        (WRONG_BOUND, "distance >=", "distance >"),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "prize_per_course",
        "group",
        (
            "For each course, what is the total prize money of class {class} races since {date}?",
            "Sum the prizes of class {class} races by course, from {date} on.",
            "Since {date}, how much prize money did each course pay in class {class} races?",
            "Give each course with the total of its class {class} prizes since {date}.",
        ),
        "SELECT course, SUM(prize) FROM races WHERE class = {class} AND date >= '{date}' GROUP BY course",
        (WRONG_AGGREGATE, "SUM(prize)", "AVG(prize)"),
        (WRONG_BOUND, "date >=", "date >"),
    ),
    template(
        "busy_courses",
        "group",
        (
            "Which courses held at least {n} races on {going} going since {date}?",
            "Name the courses with {n} or more races on {going} going from {date} on.",
            "Since {date}, which courses have raced on {going} going {n} times or more?",
            "List courses that staged at least {n} races on {going} going since {date}.",
        ),
        "SELECT course FROM races WHERE going = '{going}' AND date >= '{date}'"
        " GROUP BY course HAVING COUNT(*) >= {n}",
        (WRONG_BOUND, "COUNT(*) >=", "COUNT(*) >"),
        (LOST_FILTER, "going = '{going}' AND ", ""),
    ),
    template(
        "richest_dates",
        "top-k",
        (
            "On which dates were the {k} richest races at {course} in {season}?",
            "Give the dates of the {k} races with the biggest prizes at {course} in {season}.",
            "When did {course} stage its {k} most valuable races of {season}, richest first?",
            "Dates of the top {k} races by prize at {course} in {season}?",
        ),
        "SELECT date FROM races WHERE course = '{course}' AND season = {season}"
        " ORDER BY prize DESC LIMIT {k}",
        (WRONG_ORDER, " DESC", ""),
        (LOST_FILTER, " AND season = {season}", ""),
    ),
    template(
        "dates_by_prize",
        "order",
        (
            "List the dates of class {class} races at {course} since {date}, richest first.",
            "Since {date}, when were class {class} races run at {course}, from the biggest prize down?",
            "Give the dates of class {class} races at {course} from {date} on, highest prize first.",
            "Sort the dates of {course} class {class} races since {date} by prize, largest first.",
        ),
        "SELECT date FROM races WHERE class = {class} AND course = '{course}'"
        " AND date >= '{date}' ORDER BY prize DESC",
        (LOST_FILTER, "class = {class} AND ", ""),
        (WRONG_ORDER, " DESC", ""),
    ),
    template(
        "races_between",
        "date",
        (
            "How many races on {going} going were run from {first_date} to {last_date}?",
            "Count the races on {going} going from {first_date} to {last_date}, both days included.",
            "From {first_date} up to and including {last_date}, how many races were on {going} going?",
            "How often was the going {going} from {first_date} to {last_date} inclusive?",
        ),
        "SELECT COUNT(*) FROM races WHERE going = '{going}'"
        " AND date BETWEEN '{first_date}' AND '{last_date}'",
        (
            WRONG_BOUND,
            "date BETWEEN '{first_date}' AND '{last_date}'",
            "date > '{first_date}' AND date < '{last_date}'",
        ),
        (LOST_FILTER, "going = '{going}' AND ", ""),
    ),
    template(
        "races_before",
        "date",
        (
            "How many class {class} races were run before {date}?",
            "Count the class {class} races earlier than {date}.",
            "Before {date}, how many races of class {class} were there?",
            "What is the number of class {class} races held before {date}?",
        ),
        "SELECT COUNT(*) FROM races WHERE class = {class} AND date < '{date}'",
        (WRONG_BOUND, "date <", "date <="),
        (LOST_FILTER, "class = {class} AND ", ""),
    ),
    template(
        "richer_than",
        "filter",
        (
            "How many races at {course} had a bigger prize than the race on {date}?",
            "Count the races at {course} that paid more than the race of {date}.",
            "At {course}, how many races were worth more than the one on {date}?",
            "How many times did {course} pay a higher prize than was paid on {date}?",
        ),
        "SELECT COUNT(*) FROM races WHERE course = '{course}'"
        " AND prize > (SELECT prize FROM races WHERE date = '{date}')",
        (LOST_FILTER, "course = '{course}' AND ", ""),
        (WRONG_BOUND, "prize > (", "prize >= ("),
    ),
)
