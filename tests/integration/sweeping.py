"""`python -m tests.integration.sweeping APP URL` runs a sweep that a test kills."""

from __future__ import annotations

import sys

from eventjet.jetstream.connection import NatsConnection
from eventjet.log.sweep import sweep_objects
from eventjet.nats.endpoint import Endpoint

if __name__ == "__main__":
    endpoint = Endpoint((sys.argv[2],))
    with NatsConnection.open(endpoint) as link:
        print("begins", flush=True)  # noqa: T201
        sweep_objects(link, endpoint, sys.argv[1], age_s=0, removes=True)
