"""`restore`: an archive published again into an empty stream, so that all that stands on its log can go on."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from eventjet.archive import republish
from eventjet.archive.batches import Past
from eventjet.archive.reading import archived_records, check_files, folder_of, read_manifest
from eventjet.archive.republish import Progress, Restored
from eventjet.codec.envelope import MSG_ID, header
from eventjet.errors import ArchiveBroken, UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.settings import Settings
from eventjet.spark.session import Started, spark_session


def restore(
    stream: str,
    url: str,
    settings: Settings,
    *,
    master: str | None = None,
    progress: Progress = republish.silent,
) -> Restored:
    """Publish the archive at `url` into the stream of an app, and compare what it holds then. Blocks.

    `master` names the Spark that reaches an archive outside this machine's folders; no other one needs it.
    It may be interrupted or killed at any moment; the next run goes on where it ended. `progress` is told (phase,
    events done, events in all). Raises `ArchiveBroken` before anything is written, `UsageError` for an archive of
    another app, and what `eventjet.archive.republish.restore` raises.
    """
    with ExitStack() as stack:
        started = None if folder_of(url) is not None else stack.enter_context(spark_session(master, bulk_only=True))
        past = _checked(stream, url, started, progress)
        endpoint = Endpoint.of(settings).with_name("eventjet-restore")
        timeout_s = settings.request_timeout_s
        return republish.restore(endpoint, past, replicas=settings.replicas, progress=progress, timeout_s=timeout_s)


def _checked(stream: str, url: str, started: Started | None, progress: Progress) -> Past:
    """The archive as a past, once it is known to be what was sealed."""
    spark = None if started is None else started.spark
    archive = read_manifest(url, spark)
    if not archive.segments:
        raise ArchiveBroken(url, "nothing is in it")
    newest = archive.segments[-1]
    if newest.stream != stream:
        raise UsageError(
            f"The archive {url} is of {newest.stream!r}, and the app is {stream!r}. Name the app it is of."
        )
    progress("check", 0, archive.events)
    check_files(archive, archive.first, archive.last, spark)
    records = partial(archived_records, archive, spark=spark)
    past = Past(url, stream, newest.log, archive.first, archive.last, records)
    if (header(past.record(past.last)[3], MSG_ID) or "") != newest.last_id:
        raise ArchiveBroken(url, f"its last event is not {newest.last_id}, which its manifest names")
    progress("check", archive.events, archive.events)
    return past
