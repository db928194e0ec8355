"""What a fault of an object store means, in words that name the setting, whichever library met it."""

from __future__ import annotations

import os
import re

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
    """Return (reason, remedy) of an S3 store's fault by a library's message, which is not shown; None for others."""
    if not is_s3(url):
        return None
    where = endpoint_of(url) or "Amazon S3"
    for pattern, reason, remedy in _FAULTS:
        if match := re.search(pattern, message):
            return reason.format(where=where, code=match[0]), remedy
    return None


_FAULTS = (
    (
        r"NoSuchBucket|NO_SUCH_BUCKET",
        "{where} has no such bucket",
        "Create the bucket, or name another one, or another AWS_ENDPOINT_URL.",
    ),
    (
        r"(?i)Invalid_?Access_?Key_?Id|Signature_?Does_?Not_?Match|Access[_ ]?Denied|(Invalid|Expired)_?Token",
        "{where} refuses the credentials ({code})",
        f"Set {_KEYS} (and AWS_SESSION_TOKEN for temporary ones) of somebody who may list, read and write there.",
    ),
    (r"169\.254\.169\.254|loading credentials", "there are no credentials for {where}", f"Set {_KEYS}."),
    (
        r"URL scheme is not allowed",
        "{where} is not encrypted",
        "Write https://, or set AWS_ALLOW_HTTP=true where nobody else listens.",
    ),
    (
        r"PermanentRedirect|AuthorizationHeaderMalformed|PERMANENT_REDIRECT|301 Moved",
        "the bucket is in another region of {where}",
        "Set AWS_REGION to the bucket's.",
    ),
    (
        r"NotImplemented|not yet implemented|501 Not Implemented",
        "{where} does not know conditional writes, or they are turned off, and each commit rests on them",
        "Unset AWS_CONDITIONAL_PUT, or take another store.",
    ),
    (
        r"error sending request|NETWORK_CONNECTION|curlCode|timed out|dns error|50[234] ",
        "{where} does not answer",
        "See that AWS_ENDPOINT_URL and AWS_REGION are right and the server runs; what was committed stays.",
    ),
)
"""(pattern of a library's message, reason, remedy)."""
