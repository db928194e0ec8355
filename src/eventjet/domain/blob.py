"""`Blob`: a reference to a large body, which is stored beside the log under its digest (ADR 0070).

An event, a state or an argument has a `Blob` as a field. The reference is small, and code that folds sees nothing else;
the content is read through `Jet.blobs`.
"""

from __future__ import annotations

import io
import mimetypes
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias, cast

from pydantic import Field
from pydantic.dataclasses import dataclass

from eventjet.domain.state import field_names
from eventjet.errors import DefinitionError, UsageError

DIGEST = re.compile(rb"sha256:([0-9a-f]{64})")
"""A digest as the body of an event has it; whatever looks like one counts as a reference."""
CHUNK_BYTES = 512 * 1024
"""Bytes that are read, sent and stored at a time."""
OCTETS = "application/octet-stream"

ContentOpener: TypeAlias = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens the content at its beginning; it may be called again."""


class _WithSource:
    """The place of a blob's content before it is stored; neither copied nor pickled with the blob."""

    __slots__ = ("_source",)

    _source: ContentOpener


@dataclass(
    frozen=True,
    kw_only=True,
    slots=True,
    config={
        "strict": True,
        "extra": "forbid",
        "hide_input_in_errors": True,
        "json_schema_extra": {"description": "A reference to a large body, which is stored beside the log."},
    },
)
class Blob(_WithSource):
    """A reference to a large body: its digest, size in bytes, media type and name.

    `Blob.of` and `Blob.from_file` make one of content that is not stored yet; recording an event with it stores the
    content first. `Jet.blobs` stores, reads and saves content. Two blobs are equal if these four values are.

    ```python
    blob = Blob.of(b"%PDF-1.7", media_type="application/pdf", name="contract.pdf")
    assert (blob.size, blob.digest[:15]) == (8, "sha256:86edbaa2")
    ```
    """

    digest: Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
    """SHA-256 of the content, as `sha256:` and 64 hexadecimal digits."""
    size: Annotated[int, Field(ge=0)]
    """Bytes of the content."""
    media_type: str = OCTETS
    """What the content is said to be, such as `application/pdf`; nothing checks it."""
    name: str = ""
    """The name of the file, for people."""

    def __init_subclass__(cls) -> None:
        """Raises `DefinitionError`: a field of such a class would not be seen when content is stored."""
        fault = (
            f"{cls.__name__}: `Blob` has no subclasses. Declare a field of type `Blob` beside those that it would add"
        )
        raise DefinitionError([fault])

    @staticmethod
    def of(content: bytes, /, *, media_type: str = OCTETS, name: str = "") -> Blob:
        """Return the blob of content in memory, which it keeps until the blob is gone."""
        blob = Blob(digest=f"sha256:{sha256(content).hexdigest()}", size=len(content), media_type=media_type, name=name)
        return with_source(blob, lambda: io.BytesIO(content))

    @staticmethod
    def from_file(
        file: str | os.PathLike[str] | BinaryIO, /, *, media_type: str | None = None, name: str | None = None
    ) -> Blob:
        """Return the blob of a file, given by its path or as an open binary file.

        The file is read once now, for its digest, and again when it is stored; until then it must stay as it is. An
        open file is read from where it is to its end, and has to be seekable. It blocks: in an event loop, call it by
        `asyncio.to_thread`. Without `name` it is the file's own, and without `media_type` what that name suggests.
        Raises `UsageError` for a file that is no binary file or cannot be read twice, and `OSError`.
        """
        open_content: ContentOpener
        if isinstance(file, str | os.PathLike):
            path = Path(file)
            open_content = lambda: path.open("rb")  # noqa: E731  a def would need the name twice
        else:
            if isinstance(file, io.TextIOBase) or not file.seekable():
                raise UsageError(
                    "A blob is made of a binary file that can be read twice. Open the file with mode 'rb'; for what "
                    "arrives only once, such as an upload, take `await jet.blobs.put(…)`."
                )
            start = file.tell()

            def again() -> AbstractContextManager[BinaryIO]:
                file.seek(start)
                return nullcontext(file)

            open_content = again
        if name is None:
            source: Any = file if isinstance(file, str | os.PathLike) else getattr(file, "name", "")
            name = Path(source).name if isinstance(source, str | os.PathLike) else ""  # pyright: ignore[reportUnknownArgumentType]
        hashed, size = sha256(), 0
        with open_content() as content:
            while chunk := content.read(CHUNK_BYTES):
                hashed.update(chunk)
                size += len(chunk)
        guessed = media_type or mimetypes.guess_type(name)[0] or OCTETS
        blob = Blob(digest=f"sha256:{hashed.hexdigest()}", size=size, media_type=guessed, name=name)
        return with_source(blob, open_content)


def with_source(blob: Blob, source: ContentOpener) -> Blob:
    """Return the blob after telling it where its content is."""
    object.__setattr__(blob, "_source", source)
    return blob


def source_of(blob: Blob) -> ContentOpener | None:
    """Return where the content of a blob is that may not be stored yet; None for a mere reference."""
    return getattr(blob, "_source", None)


def blobs_in(value: Any, path: str = "") -> Iterator[tuple[str, Blob]]:
    """Yield the blobs in a value at any depth, each with the path of its field, such as `pages[2].scan`."""
    names = field_names(type(value))
    if isinstance(value, Blob):
        yield path, value
    elif names:
        for name in names:
            yield from blobs_in(getattr(value, name, None), f"{path}.{name}" if path else name)
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from blobs_in(item, f"{path}[…]")  # a key may be personal
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(cast("tuple[Any, ...]", value)):
            yield from blobs_in(item, f"{path}[{index}]")


def holds_blobs(schema: Any) -> bool:
    """Return whether a core schema of pydantic has a `Blob` at any depth."""
    if isinstance(schema, dict):
        node = cast("dict[str, Any]", schema)
        return node.get("cls") is Blob or any(map(holds_blobs, node.values()))
    return isinstance(schema, list | tuple) and any(map(holds_blobs, cast("list[Any]", schema)))
