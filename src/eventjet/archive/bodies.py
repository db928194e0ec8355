"""The large bodies of an archive: one file for each digest, `objects/<two digits>/<digest>` below its folder.

A file appears under its name once it is whole. Its name is its checksum (`sha256sum` compares it), so nothing else
describes it, and an archive of any age is completed by copying what is missing. Everything here blocks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from eventjet.archive.object_stores import is_s3, storage_fault
from eventjet.archive.reading import folder_of, import_arrow
from eventjet.domain.blob import CHUNK_BYTES, Blob
from eventjet.errors import ArchiveBroken, BlobDamaged, BlobMissing
from eventjet.jetstream.connection import NatsConnection
from eventjet.log.objects import Bucket, ContentReader, ContentWriter, patiently
from eventjet.log.sweep import Reference

OBJECTS = "objects"
_REQUEST_S = 30.0


@dataclass(frozen=True, slots=True)
class CopiedBodies:
    """The bodies that were copied between an object store and an archive."""

    copied: int = 0
    bytes: int = 0
    present: int = 0
    """How many bodies were there already."""
    missing: tuple[Reference, ...] = ()
    """Bodies that events refer to and the source does not have, or not whole."""


NO_BODIES = CopiedBodies()


class ArchivedBodies:
    """The bodies of the archive at a URL: a folder, or what Arrow can reach (`s3://`, `gs://`, `hdfs://` …).

    It may be pickled, so that a function of Spark reads bodies where it runs.

    ```python
    bodies = ArchivedBodies("/var/archives/documents")
    pages = events.rdd.map(lambda event: len(bodies.read(event.scan.digest)))
    ```
    """

    def __init__(self, url: str) -> None:
        """Raises `UsageError` for a URL that no archive can have."""
        folder_of(url)
        self.url = url

    def read(self, blob: Blob | str) -> bytes:
        """Return a body by its blob or its digest (`sha256:…`); raises `BlobMissing` and `BlobDamaged`."""
        return b"".join(self.chunks(blob))

    def chunks(self, blob: Blob | str) -> Iterator[bytes]:
        """Yield a body in chunks, the last once all of them have the digest; raises `BlobMissing` and `BlobDamaged`."""
        digest = blob if isinstance(blob, str) else blob.digest
        files, path = self._file(digest)
        try:
            stream = files.open_input_stream(path)
        except FileNotFoundError:
            if is_s3(self.url) and not self._has_bucket(files, path):
                raise self._broken(f"the body {digest} cannot be read", "NoSuchBucket") from None
            raise BlobMissing(digest, self.url) from None
        except OSError as error:
            raise self._broken(f"the body {digest} cannot be read", str(error)) from error
        hashed, size, ready = sha256(), 0, b""
        with stream:
            while chunk := stream.read(CHUNK_BYTES):
                if ready:
                    yield ready
                hashed.update(chunk)
                size, ready = size + len(chunk), chunk
        if f"sha256:{hashed.hexdigest()}" != digest:
            raise BlobDamaged(digest, self.url, size, size)
        if ready:
            yield ready

    def has(self, digest: str) -> bool:
        """Return whether a body is in the archive; raises `ArchiveBroken` where Arrow cannot look."""
        files, path = self._file(digest)
        try:
            return bool(files.get_file_info(path).is_file)
        except OSError as error:
            raise self._broken(f"the body {digest} cannot be looked for", str(error)) from error

    def write(self, digest: str, chunks: Iterable[bytes]) -> int:
        """Write a body unless its chunks raise an error, and return its size; raises `ArchiveBroken`."""
        files, path = self._file(digest)
        partial, size = f"{path}.{secrets.token_hex(4)}.part", 0
        try:
            if not is_s3(self.url):  # which has no folders
                files.create_dir(path.rpartition("/")[0], recursive=True)
            try:
                with files.open_output_stream(partial) as stream:
                    for chunk in chunks:
                        stream.write(chunk)
                        size += len(chunk)
                if folder_of(self.url) is not None:
                    with Path(partial).open("rb") as file:
                        os.fsync(file.fileno())
                files.move(partial, path)
            except BaseException:
                if files.get_file_info(partial).is_file:
                    files.delete_file(partial)
                raise
        except OSError as error:
            raise self._broken(f"the body {digest} cannot be written", str(error)) from error
        return size

    def exist(self) -> bool:
        """Return whether the archive has bodies; raises `ArchiveBroken` where Arrow cannot look."""
        files, path = self._file("")
        try:
            return bool(files.get_file_info(path.rstrip("/")).type.value)
        except OSError as error:
            raise self._broken("its bodies cannot be looked for", str(error)) from error

    def _has_bucket(self, files: Any, path: str) -> bool:
        """Return whether the bucket of a path exists, or may not be looked for."""
        try:
            return bool(files.get_file_info(path.partition("/")[0]).type.value)
        except OSError:
            return True

    def _broken(self, what: str, message: str) -> ArchiveBroken:
        reason, remedy = storage_fault(self.url, message) or (message, "")
        return ArchiveBroken(self.url, f"{what}: {reason}", remedy)

    def _file(self, digest: str) -> tuple[Any, str]:
        folder = folder_of(self.url)
        arrow = import_arrow("pyarrow.fs")
        if folder is None:
            url = self.url.replace("s3a://", "s3://", 1).rstrip("/")
            try:
                files, base = arrow.FileSystem.from_uri(url)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                if fault := storage_fault(self.url, reason):
                    raise ArchiveBroken(self.url, *fault) from error
                raise ArchiveBroken(
                    self.url,
                    f"its large bodies are read and written by Arrow, and Arrow cannot use its file system ({reason})",
                    "Archive events with large bodies in a folder, or in a file system that `pyarrow.fs` opens here.",
                ) from error
        else:
            files, base = arrow.LocalFileSystem(), folder.as_posix()
        name = digest.removeprefix("sha256:")
        return files, f"{base}/{OBJECTS}/{name[:2]}/{name}"


def archive_bodies(
    link: NatsConnection,
    app: str,
    bodies: ArchivedBodies,
    references: Iterable[Reference],
    progress: Callable[[int], object] = lambda _: None,
) -> CopiedBodies:
    """Copy bodies that an archive lacks from the object store of an app; `progress` gets the number looked at."""
    bucket = Bucket(app)

    def copy(reference: Reference) -> int | None:
        return None if bodies.has(reference.digest) else bodies.write(reference.digest, stored(reference.digest))

    def stored(digest: str) -> Iterator[bytes]:
        reader = ContentReader(bucket, digest)
        while (chunk := link.run(patiently(reader.next(), bucket, _REQUEST_S), _REQUEST_S)) is not None:
            yield chunk

    return _copied(copy, references, progress)


def restore_bodies(
    link: NatsConnection,
    app: str,
    bodies: ArchivedBodies,
    references: Iterable[Reference],
    progress: Callable[[int], object] = lambda _: None,
) -> CopiedBodies:
    """Store bodies that the object store of an app lacks, or has not whole, from an archive, and claim the others."""
    bucket = Bucket(app)

    def run(conversation: Any) -> Any:
        return link.run(patiently(conversation, bucket, _REQUEST_S), _REQUEST_S, writes=True)

    def copy(reference: Reference) -> int | None:
        if _is_stored(reference.digest):
            return None
        writer = ContentWriter(bucket, replaces=True)
        for chunk in bodies.chunks(reference.digest):
            run(writer.write(chunk))
        return run(writer.finish(reference.digest))[1]

    def _is_stored(digest: str) -> bool:
        reader = ContentReader(bucket, digest)
        try:
            while run(reader.next()) is not None:
                pass
        except (BlobMissing, BlobDamaged):
            return False
        return run(bucket.claiming(digest)) is not None

    return _copied(copy, references, progress)


def _copied(
    copy: Callable[[Reference], int | None], references: Iterable[Reference], progress: Callable[[int], object]
) -> CopiedBodies:
    copied = size = present = 0
    missing: list[Reference] = []
    for number, reference in enumerate(references, 1):
        try:
            copied_bytes = copy(reference)
        except (BlobMissing, BlobDamaged):
            missing.append(reference)
        else:
            if copied_bytes is None:
                present += 1
            else:
                copied, size = copied + 1, size + copied_bytes
        progress(number)
    return CopiedBodies(copied, size, present, tuple(missing))
