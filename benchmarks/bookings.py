"""The workload "course booking": two kinds of aggregate, many short commands, each on one of both.

Students sign up, courses open, then students book courses: at most five a student, at most thirty a course. The same
commands for every subject, and the same bookings must stand at the end.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

PER_STUDENT = 5
PER_COURSE = 30

Booking: TypeAlias = tuple[int, int]
"""(number of the student, number of the course)."""


def sizes(count: int) -> tuple[int, int]:
    """(students, courses) for so many bookings asked for."""
    return max(2, count // 4), max(2, count // 20)


def bookings(count: int, seed: int = 42) -> Iterator[Booking]:
    """What is asked for; about one in eight is refused."""
    chance = random.Random(seed)
    students, courses = sizes(count)
    for _ in range(count):
        yield chance.randrange(students), chance.randrange(courses)


def accepted(count: int) -> int:
    """How many of them must be accepted when they come one after the other."""
    of_student: Counter[int] = Counter()
    of_course: Counter[int] = Counter()
    known: set[Booking] = set()
    for student, course in bookings(count):
        if (student, course) in known or of_student[student] >= PER_STUDENT or of_course[course] >= PER_COURSE:
            continue
        known.add((student, course))
        of_student[student] += 1
        of_course[course] += 1
    return len(known)
