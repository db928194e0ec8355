"""Course booking with eventjet: `python -m benchmarks.subjects.book_ours <nats> <count> <tasks>`.

A booking is one atomic append on both aggregates (`transact`). Several URLs, separated by commas, are the servers of a
cluster, on which the log has three replicas.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

from benchmarks.bookings import PER_COURSE, PER_STUDENT, Booking, accepted, bookings, sizes
from benchmarks.subjects.clock import Clock
from eventjet import App, aggregate, event


class Full(Exception):
    """No more of this."""


@event("student.signed_up")
class SignedUp:
    name: str


@event("student.booked")
class Booked:
    course: str


@event("course.opened")
class CourseOpened:
    title: str


@event("course.taken")
class Taken:
    student: str


@aggregate("student")
class Student:
    courses: frozenset[str] = frozenset()

    def sign_up(self, name: str) -> SignedUp:
        return SignedUp(name=name)

    def book(self, course: str) -> Booked:
        if course in self.courses or len(self.courses) >= PER_STUDENT:
            raise Full(course)
        return Booked(course=course)

    def evolve(self, event: SignedUp | Booked) -> Student:
        match event:
            case SignedUp():
                return self
            case Booked(course=course):
                return replace(self, courses=self.courses | {course})


@aggregate("course")
class Course:
    taken: int = 0

    def open(self, title: str) -> CourseOpened:
        return CourseOpened(title=title)

    def take(self, student: str) -> Taken:
        if self.taken >= PER_COURSE:
            raise Full(student)
        return Taken(student=student)

    def evolve(self, event: CourseOpened | Taken) -> Course:
        match event:
            case CourseOpened():
                return self
            case Taken():
                return replace(self, taken=self.taken + 1)


school = App("school", aggregates=[Student, Course])


async def main(server: str, count: int, tasks: int) -> None:
    async with school.connect(servers=server, replicas=3 if "," in server else 1) as jet:
        await jet.init()
        students, courses = jet.repository(Student), jet.repository(Course)
        latencies: list[float] = []
        clock = Clock()

        async def book(task: int, requests: list[Booking]) -> int:
            """Return how many bookings stood."""
            for number in range(task, sizes(count)[0], tasks):
                await students.execute(f"s-{number}", Student.sign_up, f"Student {number}")
            for number in range(task, sizes(count)[1], tasks):
                await courses.execute(f"c-{number}", Course.open, f"Course {number}")
            stood = 0
            for student, course in requests:
                started = time.perf_counter()
                try:
                    await jet.transact(
                        students.decide(f"s-{student}", Student.book, f"c-{course}"),
                        courses.decide(f"c-{course}", Course.take, f"s-{student}"),
                    )
                    stood += 1
                except Full:
                    pass
                latencies.append(time.perf_counter() - started)
            return stood

        work = bookings(count, tasks)
        clock.start()
        stood = sum(await asyncio.gather(*(book(task, requests) for task, requests in enumerate(work))))
        clock.stop(count + sum(sizes(count)), latencies)
        booked = [len((await students.load(f"s-{number}")).courses) for number in range(sizes(count)[0])]
        due = accepted(count, tasks)
        if not stood == sum(booked) == due:
            raise RuntimeError(f"{stood} bookings stood, students hold {sum(booked)}, and {due} are due")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
