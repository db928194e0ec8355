"""`restore`: an archive published again into an empty stream, so that all that stands on its log can go on."""

from __future__ import annotations

from eventjet.archive import republish
from eventjet.archive.reading import ArchiveReader
from eventjet.archive.republish import Restored
from eventjet.codec.envelope import MSG_ID, header
from eventjet.errors import ArchiveBroken, UsageError
from eventjet.nats.endpoint import Endpoint
from eventjet.projections.app_ref import AppRef, loaded
from eventjet.projections.application import Application
from eventjet.rebuild.engine import EngineOptions, open_engine
from eventjet.rebuild.job import in_thread
from eventjet.rebuild.plan import EngineName
from eventjet.rebuild.progress import Report, Watch
from eventjet.settings import Settings


async def restore(
    app: Application | AppRef,
    url: str,
    settings: Settings,
    *,
    engine: EngineName | EngineOptions = "spark",
    progress: Report | None = None,
) -> Restored:
    """Publish the archive at `url` into the stream of an app, and compare what it holds then.

    Spark is started only for an archive outside this machine's folders. It may be cancelled or killed at any moment;
    the next run goes on where it ended. `progress` is called from another thread. Raises `ArchiveBroken` before
    anything is written, `UsageError` for an archive of another app, and what `eventjet.archive.republish` raises.
    """

    def work(watch: Watch) -> Restored:
        stream = loaded(app).name
        with open_engine(engine, watch) as chosen:
            archive = ArchiveReader(chosen.archive_files(url))
            _check(stream, archive, watch)
            restoring = republish.Restore(
                Endpoint.of(settings).with_name("eventjet-restore"),
                archive,
                replicas=settings.replicas,
                progress=watch.tell,
                wait=watch.wait,
                timeout_s=settings.request_timeout_s,
            )
            return restoring.run()

    return await in_thread(settings, progress, work)


def _check(stream: str, archive: ArchiveReader, watch: Watch) -> None:
    """Raise unless the archive is what was sealed, and of this stream."""
    manifest = archive.manifest
    if not manifest.segments:
        raise ArchiveBroken(manifest.url, "nothing is in it")
    if manifest.stream != stream:
        raise UsageError(
            f"The archive {manifest.url} is of {manifest.stream!r}, and the app is {stream!r}. Name the app it is of."
        )
    watch.tell("check", 0, manifest.events)
    archive.check(manifest.first, manifest.last)
    if (header(archive.record(manifest.last)[3], MSG_ID) or "") != (last_id := manifest.segments[-1].last_id):
        raise ArchiveBroken(manifest.url, f"its last event is not {last_id}, which its manifest names")
    watch.tell("check", manifest.events, manifest.events)
