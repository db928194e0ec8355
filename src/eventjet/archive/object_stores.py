"""What a fault of an object store means, in words that name the setting, whichever library met it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from eventjet.urls import parse

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def is_s3(url: str) -> bool:
    """Return whether a URL names an S3 store."""
    return url.startswith(("s3://", "s3a://"))


def s3_settings() -> dict[str, str]:
    """Return endpoint and region of an S3 store that is not Amazon's own, as the environment names them; else nothing.

    Where no region is named, the libraries of Apache ask Amazon in which one the bucket is, whoever has it.
    """
    endpoint = next((value for name in _ENDPOINTS if (value := os.environ.get(name))), None)
    if endpoint is None:
        return {}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return {"endpoint": endpoint, "region": region}


def endpoint_of(url: str) -> str | None:
    """Return the setting of the server at which an S3 URL is looked for; None for Amazon's own, and other schemes."""
    if not is_s3(url):
        return None
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None:
        return None
    server = parse(os.environ[variable].rstrip("/"))
    return f"{variable}={'***' if server is None else server.shown}"


def storage_fault(url: str, message: str) -> tuple[str, str] | None:
    """Return the reason and the remedy of an S3 store's fault by a library's message; None for a fault of another kind.

    The messages of the libraries have parts of requests in them, and are not shown.
    """
    if not is_s3(url):
        return None
    where = endpoint_of(url) or "Amazon S3"
    return next((fault(where, found[0]) for pattern, fault in _FAULTS if (found := pattern.search(message))), None)


def _bucket(where: str, _: str) -> tuple[str, str]:
    return f"{where} has no such bucket", "Create the bucket, or name another one, or another AWS_ENDPOINT_URL."


def _refused(where: str, code: str) -> tuple[str, str]:
    remedy = f"Set {_KEYS} (and AWS_SESSION_TOKEN for temporary ones) of somebody who may list, read and write there."
    return f"{where} refuses the credentials ({code})", remedy


def _missing(where: str, _: str) -> tuple[str, str]:
    return f"there are no credentials for {where}", f"Set {_KEYS}."


def _plain(where: str, _: str) -> tuple[str, str]:
    return f"{where} is not encrypted", "Write https://, or set AWS_ALLOW_HTTP=true where nobody else listens."


def _region(where: str, _: str) -> tuple[str, str]:
    return f"the bucket is in another region of {where}", "Set AWS_REGION to the bucket's."


def _unconditional(where: str, _: str) -> tuple[str, str]:
    return (
        f"{where} does not know conditional writes, or they are turned off, and each commit rests on them",
        "Unset AWS_CONDITIONAL_PUT, or take another store.",
    )


def _silent(where: str, _: str) -> tuple[str, str]:
    remedy = "See that AWS_ENDPOINT_URL and AWS_REGION are right and the server runs; what was committed stays."
    return f"{where} does not answer", remedy


_FAULTS: tuple[tuple[re.Pattern[str], Callable[[str, str], tuple[str, str]]], ...] = tuple(
    (re.compile(pattern), fault)
    for pattern, fault in (
        (r"NoSuchBucket|NO_SUCH_BUCKET", _bucket),
        (
            r"(?i)Invalid_?Access_?Key_?Id|Signature_?Does_?Not_?Match|Access[_ ]?Denied|(Invalid|Expired)_?Token",
            _refused,
        ),
        (r"169\.254\.169\.254|loading credentials", _missing),
        (r"URL scheme is not allowed", _plain),
        (r"PermanentRedirect|AuthorizationHeaderMalformed|PERMANENT_REDIRECT|301 Moved", _region),
        (r"NotImplemented|not yet implemented|501 Not Implemented", _unconditional),
        (r"error sending request|NETWORK_CONNECTION|curlCode|timed out|dns error|50[234] ", _silent),
    )
)
