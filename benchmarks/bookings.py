"""The workload "course booking": two kinds of aggregate, many short commands, each on one of both.

Students sign up, courses open, then students book courses: at most five a student, at most thirty a course. The same
commands for every subject, and the same bookings must stand at the end. Several tasks have students and courses of
their own each, so that what stands does not depend on who is quicker.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from typing import TypeAlias

PER_STUDENT = 5
PER_COURSE = 30
TASKS_MAX = 16

Booking: TypeAlias = tuple[int, int]
"""(number of the student, number of the course)."""


def sizes(count: int) -> tuple[int, int]:
    """(students, courses) for so many bookings asked for; no fewer courses than there may be tasks."""
    return max(TASKS_MAX, count // 4), max(TASKS_MAX, count // 20)


def bookings(count: int, tasks: int = 1, seed: int = 42) -> list[list[Booking]]:
    """What each task asks for; about one in eight is refused."""
    chance = random.Random(seed)
    students, courses = sizes(count)
    by_task: list[list[Booking]] = [[] for _ in range(tasks)]
    for _ in range(count):
        student, course = chance.randrange(students), chance.randrange(courses)
        task = student % tasks
        course += task - course % tasks
        by_task[task].append((student, course if course < courses else course - tasks))
    return by_task


def accepted(count: int, tasks: int = 1) -> int:
    """How many of them must be accepted when those of a task come one after the other."""
    of_student: Counter[int] = Counter()
    of_course: Counter[int] = Counter()
    stood: set[Booking] = set()
    for student, course in chain.from_iterable(bookings(count, tasks)):
        if (student, course) in stood or of_student[student] >= PER_STUDENT or of_course[course] >= PER_COURSE:
            continue
        stood.add((student, course))
        of_student[student] += 1
        of_course[course] += 1
    return len(stood)
