"""Course booking with pyeventsourcing: `python -m benchmarks.subjects.book_pyeventsourcing <store> <count> <tasks>`.

A booking saves both aggregates in one transaction, as its documentation has it. Several tasks are threads, with a
connection for each.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

from benchmarks.bookings import PER_COURSE, PER_STUDENT, Booking, accepted, bookings, sizes
from benchmarks.subjects.clock import Clock
from benchmarks.subjects.peer_pyeventsourcing import POOL, environment


class FullError(Exception):
    """No more of this."""


class Student(Aggregate):
    @event("SignedUp")
    def __init__(self, number: int, name: str) -> None:  # noqa: ARG002 - kept in the event
        self._id = student_id(number)
        self.courses: list[str] = []

    @staticmethod
    def create_id(number: int, **_: object) -> UUID:
        return student_id(number)

    def book(self, course: str) -> None:
        if course in self.courses or len(self.courses) >= PER_STUDENT:
            raise FullError(course)
        self._booked(course)

    @event("Booked")
    def _booked(self, course: str) -> None:
        self.courses.append(course)


class Course(Aggregate):
    @event("Opened")
    def __init__(self, number: int, title: str) -> None:  # noqa: ARG002 - kept in the event
        self._id = course_id(number)
        self.taken = 0

    @staticmethod
    def create_id(number: int, **_: object) -> UUID:
        return course_id(number)

    def take(self, student: str) -> None:
        if self.taken >= PER_COURSE:
            raise FullError(student)
        self._taken(student)

    @event("Taken")
    def _taken(self, student: str) -> None:  # noqa: ARG002 - kept in the event
        self.taken += 1


class School(Application[UUID]):
    name = "school"

    def sign_up(self, number: int) -> None:
        self.save(Student(number, f"Student {number}"))

    def open(self, number: int) -> None:
        self.save(Course(number, f"Course {number}"))

    def book(self, student_number: int, course_number: int) -> None:
        student: Student = self.repository.get(student_id(student_number))
        course: Course = self.repository.get(course_id(course_number))
        student.book(f"c-{course_number}")
        course.take(f"s-{student_number}")
        self.save(student, course)


def student_id(number: int) -> UUID:
    return uuid5(NAMESPACE_URL, f"student/{number}")


def course_id(number: int) -> UUID:
    return uuid5(NAMESPACE_URL, f"course/{number}")


def main(store: str, count: int, tasks: int) -> None:
    school = School({**environment(store), **(POOL if tasks > 1 else {})})
    latencies: list[float] = []

    def book(task: int, requests: list[Booking]) -> int:
        for number in range(task, sizes(count)[0], tasks):
            school.sign_up(number)
        for number in range(task, sizes(count)[1], tasks):
            school.open(number)
        stood = 0
        for student, course in requests:
            started = time.perf_counter()
            try:
                school.book(student, course)
                stood += 1
            except FullError:
                pass
            latencies.append(time.perf_counter() - started)
        return stood

    work = bookings(count, tasks)
    clock = Clock()
    with ThreadPoolExecutor(tasks) as threads:
        clock.start()
        stood = sum(threads.map(book, range(tasks), work))
        clock.stop(count + sum(sizes(count)), latencies)
    booked = 0
    for number in range(sizes(count)[0]):
        signed_up: Student = school.repository.get(student_id(number))
        booked += len(signed_up.courses)
    due = accepted(count, tasks)
    if not stood == booked == due:
        raise RuntimeError(f"{stood} bookings stood, students hold {booked}, and {due} are due")
    school.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
