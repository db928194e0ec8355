"""`@inbox`: messages of another stream taken into commands here. Declarations only. PURE."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, Protocol

from typing_extensions import TypeVar

from eventjet.domain.reactor import Reaction, Retry, Start, retry_faults, start_faults
from eventjet.domain.subscription import resolved_hint, shown_name
from eventjet.errors import DefinitionError

T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)
T = TypeVar("T")
D = TypeVar("D")
D_contra = TypeVar("D_contra", contravariant=True, default=object)
_PARAMETERS = 2


@dataclass(frozen=True, slots=True)
class Incoming(Generic[T_co]):
    """A message of another stream, validated: what the handler of an `inbox` is given."""

    data: T_co
    id: str
    """The CloudEvent's, or the stream's time of creation and the sequence."""
    source: str
    """The CloudEvent's; empty for a message that is none."""
    subject: str
    """NATS's: where it was published."""
    position: int
    """Its sequence in that stream."""
    recorded_at: datetime
    """When that stream stored it, by its server's clock."""


@dataclass(frozen=True, slots=True)
class Inbox(Generic[T_contra, D_contra]):
    """What `@inbox` makes of a handler."""

    name: str
    handle: Callable[[Incoming[T_contra], Reaction[D_contra]], Coroutine[Any, Any, None]]
    stream: str
    subject: str
    start: Start = "new"
    retry: Retry = field(default_factory=Retry)
    on_error: Literal["quarantine", "stop"] = "quarantine"
    revision: int = 1

    @property
    def type(self) -> Any:
        """What its messages are validated as; raises `DefinitionError` for a handler that does not say it."""
        hint = resolved_hint(self.handle, next(iter(inspect.signature(self.handle).parameters), "message"))
        if typing.get_origin(hint) is not Incoming:
            raise DefinitionError(
                [f"{shown_name(self.handle)}: write what it takes, as in `message: Incoming[PaymentCaptured]`"]
            )
        return typing.get_args(hint)[0]

    def faults(self) -> list[str]:
        """What is wrong with it."""
        faults = [*start_faults(self.start), *retry_faults(self.retry, self.on_error)]
        if not inspect.iscoroutinefunction(self.handle):
            faults.append(f"{shown_name(self.handle)} is not an `async def`")
        if len(inspect.signature(self.handle).parameters) != _PARAMETERS:
            faults.append(f"{shown_name(self.handle)} does not take (message, reaction)")
        if not self.stream or not self.subject or any(char.isspace() for char in self.stream + self.subject):
            faults.append(f"it takes {self.subject!r} of the stream {self.stream!r}; name both without blanks")
        try:
            _ = self.type
        except DefinitionError as error:
            faults += error.faults
        return faults


class Receiving(Protocol):
    """Declares an inbox."""

    def __call__(self, handle: Callable[[Incoming[T], Reaction[D]], Coroutine[Any, Any, None]], /) -> Inbox[T, D]: ...


def inbox(
    name: str,
    /,
    *,
    stream: str,
    subject: str,
    start: Start = "new",
    retry: Retry | None = None,
    on_error: Literal["quarantine", "stop"] = "quarantine",
) -> Receiving:
    """Declare an async handler of another stream's messages, `(message, reaction)`: a reactor to what others tell.

    A message is JSON, perhaps a CloudEvent in structured mode, validated as what the handler is annotated with. Each is
    handled at least once, those of one subject one after the other; commands are recorded once.

    ```python
    @inbox("payments", stream="payments", subject="payments.captured.*")
    async def payments(message: Incoming[Deposited], reaction: Reaction) -> None:
        await reaction.repository(Account).execute(message.id, Account.deposit, message.data.amount)

    assert App("bank", aggregates=[Account], reactors=[payments], upcasters=[withdrawn_has_a_reason]).inboxes
    ```
    """

    def declare(handle: Any, /) -> Inbox[Any, Any]:
        return Inbox(name, handle, stream, subject, start, retry or Retry(), on_error)

    return declare
