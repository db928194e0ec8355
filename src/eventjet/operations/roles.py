"""The roles of an app with their permissions on the server, and the server configuration that grants them. PURE.

One account for an app keeps other apps away from its stream. Within it each role may use the subjects that its work
needs, according to what `jetstream/api.py` sends, and has its own inbox, so that no role hears the replies to another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eventjet.codec.headers import skip_subject
from eventjet.codec.subjects import (
    cursor_bucket,
    declared_name,
    notice_subject,
    object_bucket,
    probes,
    snapshot_bucket,
    stream_subjects,
    timer_stream,
    timer_subject,
    type_subjects,
    without_covered,
)
from eventjet.domain.unique import CLAIMS
from eventjet.errors import UsageError
from eventjet.nats.endpoint import CALLER_INBOX

Routed: TypeAlias = Callable[[str], str]
ADMIN = "admin"
WORKER = "worker"
READER = "reader"
REBUILD = "rebuild"
SNAPSHOTS = "snapshots"
WRITER = "writer"
SERVICE, CALLER = "service", "caller"
MIRROR = "mirror"
"""The user of the leaf node with the log's mirror: asks for a copy, and gets it. It is in the account of the log."""
ACTOR = "actor"
"""Runs reactors and processes: reads the log as a worker does, and writes to aggregates as a writer does."""

_INSIDE = (ADMIN, MIRROR)
"""Roles in the log's own account."""


@dataclass(frozen=True, slots=True)
class Role:
    """A user of the server with its permissions."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deny: tuple[str, ...] = ()
    """Subjects that are denied although `publish` allows them."""

    @property
    def inbox_prefix(self) -> str:
        """The value of `EVENTJET_INBOX_PREFIX` for this role."""
        return f"_INBOX_{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable from which nats-server takes the password of this role."""
        return f"{self.name.upper()}_PASSWORD"


def roles_of(
    app: str,
    aggregates: Sequence[str],
    durables: Sequence[str],
    followers: Sequence[str] = (),
    published: Sequence[tuple[str, str]] = (),
    received: Sequence[tuple[str, str]] = (),
    unique: Collection[str] = (),
    gathered: Collection[str] = (),
    origins: Collection[tuple[str, str]] = (),
    *,
    objects: bool = False,
    mirror: bool = False,
) -> tuple[Role, ...]:
    """Return the roles of an app with these aggregates.

    `durables` are the consumers of its projections, and `followers` those of its reactors, processes and publications.
    `published` has (stream, name) of each publication, `received` (stream, durable) of each inbox, `unique` the
    aggregates that have unique values, and `gathered` the streams of inboxes that `init` makes, and their sources.
    `origins` has (API prefix, stream) of each source in another account or domain.
    `objects` says whether its events have large bodies, and `mirror` whether a leaf node may copy the log.
    """
    api, stream, bucket = "$JS.API", app, snapshot_bucket(app)
    look = (f"{api}.STREAM.INFO.{stream}", f"{api}.STREAM.MSG.GET.{stream}")
    read = (f"{api}.INFO", *look, f"{api}.DIRECT.GET.{stream}", f"{api}.DIRECT.GET.{stream}.>")
    bodies = f"OBJ_{object_bucket(app)}"
    read_bodies = tuple(f"{api}.{verb}.{bodies}" for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET") if objects)
    write_bodies = tuple(f"$O.{object_bucket(app)}.{part}.*" for part in "CM" if objects)
    read = (*read, *read_bodies)
    notices = (f"$JS.EVENT.ADVISORY.STREAM.*.{stream}", notice_subject(app, "*"))
    verbs = ("CREATE", "MSG.NEXT", "DELETE")
    # With a wildcard a reader could take over a worker's consumer, or move it.
    own_verbs = (*verbs, "INFO")
    projection_consumers = tuple(f"{api}.CONSUMER.{verb}.{stream}.{name}" for verb in own_verbs for name in durables)
    follower_consumers = tuple(f"{api}.CONSUMER.{verb}.{stream}.{name}" for verb in own_verbs for name in followers)
    denied_consumers = (
        *projection_consumers,
        *follower_consumers,
        *(f"{api}.CONSUMER.CREATE.{stream}.{name}.>" for name in (*durables, *followers)),
    )
    cursors, timers = cursor_bucket(app), timer_stream(app)
    look_at_cursors = tuple(
        f"{api}.{verb}.{state_stream}"
        for state_stream in (f"KV_{cursors}", timers)
        for verb in ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
    )
    look_at_cursors = look_at_cursors if followers else ()
    cursor_keys = tuple(f"$KV.{cursors}.{key}" for key in _keys_of(followers))
    set_timers = (timer_subject(app, "*", "*"), f"{api}.STREAM.PURGE.{timers}") if followers else ()
    tell = tuple(f"{public}.{name}.*" for public, name in published)
    tell += tuple(
        f"{api}.CONSUMER.{verb}.{inbox_stream}.{durable}" for inbox_stream, durable in received for verb in own_verbs
    )
    other_streams = [other for other, _ in (*published, *received)]
    look_at_public = tuple(f"{api}.STREAM.{verb}.{other}" for verb in ("INFO", "MSG.GET") for other in other_streams)
    acting = (
        *read,
        *write_bodies,
        *look_at_cursors,
        *cursor_keys,
        *set_timers,
        *follower_consumers,
        *tell,
        *look_at_public,
    )
    consume = tuple(f"{api}.CONSUMER.{verb}.{stream}.*" for verb in verbs)
    consume += (f"{api}.CONSUMER.CREATE.{stream}.*.{stream_subjects(stream)}",)
    skipped = skip_subject(app, "*")
    snapshots = (f"{api}.STREAM.MSG.GET.KV_{bucket}", f"{api}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.>")

    write_snapshots = (f"{api}.STREAM.INFO.KV_{bucket}", *snapshots, f"$KV.{bucket}.*.>")

    def role(name: str, publish: Sequence[str], subscribe: Sequence[str] = (), deny: Sequence[str] = ()) -> Role:
        return Role(name, tuple(publish), (f"_INBOX_{name}.>", *subscribe), tuple(deny))

    def writer(name: str, aggregate: str) -> Role:
        return role(
            name,
            (*read, *snapshots, *write_bodies, *_writer_subjects(app, aggregate, aggregate in unique)),
            notices,
            [skipped],
        )

    streams = (stream, f"KV_{bucket}", *((f"KV_{cursors}", timers) if followers else ()), *((bodies,) * objects))
    mirrored = [name for name in (stream, f"KV_{cursors}", bodies) if name in streams]
    manage = tuple(f"{api}.STREAM.{verb}.{name}" for verb in ("CREATE", "INFO") for name in streams)
    # A promotion asks for cursors and large bodies even where the app has none, and changes what was mirrored.
    manage += tuple(f"{api}.STREAM.INFO.{name}" for name in (f"KV_{cursors}", timers, bodies))
    manage += tuple(f"{api}.STREAM.UPDATE.{name}" for name in mirrored)
    # Of all cursors: a new number of partitions deletes the cursors of the old one.
    all_cursors = (f"$KV.{cursors}.{key}" for key in ("c.*", "q.*.*") if followers)
    manage += (*look_at_cursors, *all_cursors, *set_timers, *look_at_public)
    manage += (*write_bodies, *((f"{api}.STREAM.PURGE.{bodies}",) * objects))
    manage += tuple(f"{api}.STREAM.{verb}.{name}" for verb in ("CREATE", "INFO") for name in gathered)
    manage += tuple(f"{prefix}.STREAM.INFO.{name}" for prefix, name in origins)
    # Probes that ask which other subscribers answer; no entity has these subjects.
    probed = probes(app, ["*"], published, cursors=bool(followers), timers=False)
    manage += tuple(subject for _, subject in probed)
    lists = (f"{api}.CONSUMER.LIST.{stream}",)
    # Of any JetStream domain: that of the log is not known here. The server sends what a mirror gets below $JS.M.
    copy = [f"$JS.*.API.CONSUMER.CREATE.{name}" for name in mirrored] + [f"$JS.FC.{name}.>" for name in mirrored]
    return (
        role(ADMIN, list(dict.fromkeys((*read, *manage, *lists, *consume, skipped))), notices),
        role(
            WORKER,
            (
                f"{api}.INFO",
                *look,
                *projection_consumers,
                *(notice_subject(app, name) for name in _projections(durables)),
            ),
        ),
        role(READER, (*read, *look_at_cursors, *(f"{api}.STREAM.INFO.{other}" for other in other_streams)), notices),
        role(REBUILD, (*look, *read_bodies, *consume), (), denied_consumers),
        role(SNAPSHOTS, (*look, *write_snapshots, *consume), (), denied_consumers),
        *(
            [role(ACTOR, (*acting, *snapshots, *write_bodies, f"{app}.*.*", f"$KV.{bucket}.*.>"), notices, [skipped])]
            if followers
            else ()
        ),
        *([Role(MIRROR, tuple(copy), ("$JSC.>", "$JS.M.>"))] if mirror else ()),
        writer(WRITER, "*"),
        *(writer(f"{WRITER}_{name}", name) for name in aggregates),
    )


def _writer_subjects(app: str, aggregate: str, has_unique: bool) -> tuple[str, ...]:
    """Return the subjects to which a writer of an aggregate publishes.

    With `has_unique`, which says that the aggregate has unique values, the writer may claim values of other types too,
    since a subject cannot have a wildcard within a token.
    """
    subjects = (type_subjects(app, aggregate), f"$KV.{snapshot_bucket(app)}.{aggregate}.>")
    return (*subjects, type_subjects(app, CLAIMS)) if has_unique else subjects


def _keys_of(followers: Sequence[str]) -> list[str]:
    """Return the keys that workers of these subscriptions write in the bucket of cursors."""
    partitioned = dict.fromkeys(declared_name(name) for name in followers if declared_name(name) != name)
    keys = [key for name in followers for key in (f"c.{name}", f"q.{name}.*")]
    return [*keys, *(f"w.{name}.*" for name in partitioned)]


def serving_roles(app: str, roles: Sequence[Role], inboxes: Sequence[str] = (CALLER_INBOX,)) -> tuple[Role, ...]:
    """Return two more roles for an app that serves commands: `service` executes them, and `caller` sends them.

    A caller chooses the reply subject, so the service may publish only to `inboxes`, to which callers subscribe: with
    `allow_responses` a caller could make it publish anywhere. The reply subjects of callers in other accounts are below
    `_R_.`, where the server maps them. Raises `UsageError` for inboxes of other roles.
    """
    (writer,) = [role for role in roles if role.name == WRITER]
    for prefix in inboxes:
        for name in (*(role.name for role in roles), SERVICE):
            if f"_INBOX_{name}.".startswith(f"{prefix}.") or prefix.startswith(f"_INBOX_{name}."):
                what = f"EVENTJET_CALLER_INBOXES names {prefix}, and {name} hears its answers below _INBOX_{name}"
                raise UsageError(f"{what}. Name another prefix.")
    _, *notices = writer.subscribe
    command_subject = f"cmd.{app}.>"
    verbs = (f"$SRV.{verb}{whose}" for whose in ("", f".{app}", f".{app}.*") for verb in ("PING", "INFO", "STATS"))
    services = (command_subject, *verbs)
    hears = tuple(f"{prefix}.>" for prefix in inboxes)
    return (
        Role(SERVICE, (*writer.publish, *hears, "_R_.>"), (f"_INBOX_{SERVICE}.>", *notices, *services), writer.deny),
        Role(CALLER, services, hears),
    )


def _projections(durables: Sequence[str]) -> list[str]:
    """Return the projections of these durables: `balances` for `balances-r2`."""
    return list(dict.fromkeys(name.rpartition("-r")[0] for name in durables))


def accounts(app: str, roles: Sequence[Role], routed: Routed = str) -> str:
    """Return the accounts block of a server's configuration; passwords come from the server's environment.

    The log has its own account, which all roles but `admin` and `mirror` reach through imports. The server sends the
    answer to a JetStream request to any reply subject, and no permission limits it: within the log's account a reader
    could have an answer stored as an event, or taken for a request to delete the log. Through an import the answer
    stays in the account that asked, which has no stream and no JetStream.

    `routed` maps a subject of JetStream's API to the one that these roles use, where they have a prefix for the API;
    roles in the log's account use none.
    """
    log, clients = app.upper(), f"{app.upper()}_CLIENTS"
    inside = "\n".join(user_lines(role) for role in roles if role.name in _INSIDE)
    outside = "\n".join(user_lines(role, routed) for role in roles if role.name not in _INSIDE)
    subjects = _log_subjects(app, [role for role in roles if role.name not in _INSIDE])
    advisories = f"$JS.EVENT.ADVISORY.STREAM.*.{app}"
    kinds = [", response_type: stream" if _SEVERAL_ANSWERS.fullmatch(subject) else "" for subject in subjects]
    exports = [f"{{ service: {json.dumps(subject)}{kind} }}" for subject, kind in zip(subjects, kinds, strict=True)]
    imports = [
        f"{{ service: {{ account: {log}, subject: {json.dumps(subject)} }}{_to_clause(subject, routed)} }}"
        for subject in subjects
    ]
    exports.append(f"{{ stream: {json.dumps(advisories)} }}")
    imports.append(f"{{ stream: {{ account: {log}, subject: {json.dumps(advisories)} }} }}")
    return f"""accounts {{
  # The log, and who may change its settings.
  {log} {{
    jetstream: enabled
    users: [
{inside}
    ]
    exports: [{_lines(exports)} ]
  }}
  # Everybody else: what the server answers them cannot get into a stream.
  {clients} {{
    users: [
{outside}
    ]
    imports: [{_lines(imports)} ]
  }}
  SYS {{ users: [ {{ user: sys, password: $SYS_PASSWORD }} ] }}
}}
system_account: SYS
"""


def leaf_accounts(app: str, roles: Sequence[Role], routed: Routed, domain: str) -> str:
    """Return `accounts` for a leaf node, where a JetStream domain of the hub has the log, under the same names."""
    log, clients = app.upper(), f"{app.upper()}_CLIENTS"
    inside = "\n".join(user_lines(role, routed) for role in roles if role.name == ADMIN)
    outside = "\n".join(user_lines(role, routed) for role in roles if role.name not in _INSIDE)
    return f"""# For a leaf node. The log is in the JetStream domain {domain} of its hub, where the accounts of the same
# names are those of `eventjet nats-config` without EVENTJET_JETSTREAM_DOMAIN. Link each of the two with a remote,
#   leafnodes {{ remotes: [ {{ url: "nats-leaf://USER:PASSWORD@HUB:7422", account: {clients} }}, … ] }}
# as a user that the hub has for that account,
#   leafnodes {{ authorization {{ users: [ {{ user: USER, password: PASSWORD, account: {clients} }}, … ] }} }}

accounts {{
  # The log's own account.
  {log} {{
    users: [
{inside}
    ]
  }}
  # Everybody else.
  {clients} {{
    users: [
{outside}
    ]
  }}
  SYS {{ users: [ {{ user: sys, password: $SYS_PASSWORD }} ] }}
}}
system_account: SYS
"""


def _to_clause(subject: str, routed: Routed) -> str:
    return f", to: {json.dumps(routed(subject))}" if routed(subject) != subject else ""


_SEVERAL_ANSWERS = re.compile(r"\$JS\.API\.(CONSUMER\.MSG\.NEXT\..+|DIRECT\.GET\.[^.]+)")
"""Subjects of requests with several answers: pulls of a consumer, and pages of direct gets."""


def _log_subjects(app: str, roles: Sequence[Role]) -> list[str]:
    """Return what roles publish to the log's account, without overlap: each import that matches delivers once."""
    between_clients = ("_INBOX", "_R_.", "cmd.", "$SRV.", notice_subject(app, ""))
    return without_covered(
        subject for role in roles for subject in role.publish if not subject.startswith(between_clients)
    )


def server_config(app: str, roles: Sequence[Role], routed: Routed = str) -> str:
    """Return the whole configuration of one server; `routed` as in `accounts`."""
    return f"""# Who may do what for the app {app}. Passwords and paths come from the server's environment.

listen: 0.0.0.0:4222
# Of this machine only: it shows all subjects.
http: 127.0.0.1:8222

# eventjet keeps its messages below 900 kB, headers included.
max_payload: 1MB

jetstream {{
  store_dir: $NATS_STORE
  # What is acknowledged is on disk.
  sync_interval: always
}}

tls {{
  cert_file: $NATS_TLS_CERT
  key_file: $NATS_TLS_KEY
}}

{accounts(app, roles, routed)}"""


def user_lines(role: Role, routed: Routed = str) -> str:
    """Return the lines of one user in a configuration, with its permissions; `routed` as in `accounts`."""
    deny = f", deny: {_listed([*map(routed, role.deny)])}" if role.deny else ""
    return f"""      {{ user: {role.name}, password: ${role.variable}, permissions: {{
          publish: {{ allow: {_listed([*map(routed, role.publish)])}{deny} }}
          subscribe: {{ allow: {_listed(role.subscribe)} }}
      }} }}"""


def _listed(subjects: Sequence[str]) -> str:
    return f"[{_lines(map(json.dumps, subjects), 12)} ]"


def _lines(items: Iterable[str], indent: int = 6) -> str:
    return "".join(f"\n{' ' * indent}{item}" for item in items)
