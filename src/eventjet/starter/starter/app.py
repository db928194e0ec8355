"""The app: everything it consists of, in one list."""

from __future__ import annotations

from eventjet import App

from starter.read_models import tasks
from starter.tasks import Task

app = App("starter", aggregates=[Task], projections=[tasks])
