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
    uses = _Uses(app, durables, followers, published, received, gathered, origins, objects)
    snapshots, skipped = snapshot_bucket(app), skip_subject(app, "*")
    notices = (f"$JS.EVENT.ADVISORY.STREAM.*.{app}", notice_subject(app, "*"))
    read_snapshots = (f"{_API}.STREAM.MSG.GET.KV_{snapshots}", f"{_API}.DIRECT.GET.KV_{snapshots}.$KV.{snapshots}.>")
    write_snapshots = (f"{_API}.STREAM.INFO.KV_{snapshots}", *read_snapshots, f"$KV.{snapshots}.*.>")

    def role(name: str, publish: Sequence[str], subscribe: Sequence[str] = (), deny: Sequence[str] = ()) -> Role:
        return Role(name, tuple(publish), (f"_INBOX_{name}.>", *subscribe), tuple(deny))

    def writer(name: str, aggregate: str) -> Role:
        subjects = _writer_subjects(app, aggregate, aggregate in unique)
        return role(name, (*uses.read, *read_snapshots, *uses.write_bodies, *subjects), notices, [skipped])

    list_consumers = _requests(("CONSUMER.LIST",), [app])
    published_notices = [notice_subject(app, name) for name in _projections(durables)]
    acting = (*uses.act, *read_snapshots, *uses.write_bodies, f"{app}.*.*", f"$KV.{snapshots}.*.>")
    # Of any JetStream domain: that of the log is not known here. The server sends what a mirror gets below $JS.M.
    copy = [f"$JS.*.API.CONSUMER.CREATE.{name}" for name in uses.mirrored]
    copy += [f"$JS.FC.{name}.>" for name in uses.mirrored]
    other_streams = _requests(("STREAM.INFO",), uses.other_streams)
    return (
        role(ADMIN, list(dict.fromkeys((*uses.read, *uses.manage, *list_consumers, *uses.read_log, skipped))), notices),
        role(WORKER, (f"{_API}.INFO", *uses.look, *uses.projection_consumers, *published_notices)),
        role(READER, (*uses.read, *uses.read_cursors, *other_streams), notices),
        role(REBUILD, (*uses.look, *uses.read_bodies, *uses.read_log), (), uses.working_consumers),
        role(SNAPSHOTS, (*uses.look, *write_snapshots, *uses.read_log), (), uses.working_consumers),
        *([role(ACTOR, acting, notices, [skipped])] if followers else ()),
        *([Role(MIRROR, tuple(copy), ("$JSC.>", "$JS.M.>"))] if mirror else ()),
        writer(WRITER, "*"),
        *(writer(f"{WRITER}_{name}", name) for name in aggregates),
    )


_API = "$JS.API"
_READ = ("STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")
_CONSUME = ("CONSUMER.CREATE", "CONSUMER.MSG.NEXT", "CONSUMER.DELETE")
_OWN = (*_CONSUME, "CONSUMER.INFO")
"""Requests about a consumer of one's own. With a wildcard a reader could take over a worker's consumer, or move it."""


def _requests(verbs: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the subjects of these requests to JetStream's API about each of these streams or consumers."""
    return tuple(f"{_API}.{verb}.{name}" for verb in verbs for name in names)


@dataclass(frozen=True, slots=True)
class _Uses:
    """The subjects that each kind of work on an app uses; the parameters are those of `roles_of`."""

    app: str
    durables: Sequence[str]
    followers: Sequence[str]
    published: Sequence[tuple[str, str]]
    received: Sequence[tuple[str, str]]
    gathered: Collection[str]
    origins: Collection[tuple[str, str]]
    objects: bool

    @property
    def look(self) -> tuple[str, ...]:
        """Look at the log and read one of its events."""
        return _requests(("STREAM.INFO", "STREAM.MSG.GET"), [self.app])

    @property
    def read(self) -> tuple[str, ...]:
        """Read events and large bodies."""
        direct = f"{_API}.DIRECT.GET.{self.app}"
        return (f"{_API}.INFO", *self.look, direct, f"{direct}.>", *self.read_bodies)

    @property
    def read_bodies(self) -> tuple[str, ...]:
        return _requests(_READ, self._bodies)

    @property
    def write_bodies(self) -> tuple[str, ...]:
        return tuple(f"$O.{object_bucket(self.app)}.{part}.*" for part in "CM" if self.objects)

    @property
    def read_cursors(self) -> tuple[str, ...]:
        """Look at cursors and timers."""
        return tuple(subject for name in self._states for subject in _requests(_READ, [name]))

    @property
    def read_log(self) -> tuple[str, ...]:
        """Read the log through consumers of any name, which are denied where they are a worker's."""
        named = f"{_API}.CONSUMER.CREATE.{self.app}.*.{stream_subjects(self.app)}"
        return (*_requests(_CONSUME, [f"{self.app}.*"]), named)

    @property
    def projection_consumers(self) -> tuple[str, ...]:
        return _requests(_OWN, [f"{self.app}.{name}" for name in self.durables])

    @property
    def follower_consumers(self) -> tuple[str, ...]:
        return _requests(_OWN, [f"{self.app}.{name}" for name in self.followers])

    @property
    def working_consumers(self) -> tuple[str, ...]:
        """The consumers of workers, which no one else may touch."""
        filtered = [f"{self.app}.{name}.>" for name in (*self.durables, *self.followers)]
        return (*self.projection_consumers, *self.follower_consumers, *_requests(("CONSUMER.CREATE",), filtered))

    @property
    def other_streams(self) -> list[str]:
        """The streams of publications and inboxes."""
        return [stream for stream, _ in (*self.published, *self.received)]

    @property
    def mirrored(self) -> list[str]:
        """The streams of which a mirror has copies."""
        return [self.app, *self._states[:1], *self._bodies]

    @property
    def act(self) -> tuple[str, ...]:
        """Run reactors, processes, publications and inboxes."""
        cursor_keys = (f"$KV.{cursor_bucket(self.app)}.{key}" for key in _keys_of(self.followers))
        publish = (f"{stream}.{name}.*" for stream, name in self.published)
        inboxes = [subject for stream, durable in self.received for subject in _requests(_OWN, [f"{stream}.{durable}"])]
        return (
            *self.read,
            *self.write_bodies,
            *self.read_cursors,
            *cursor_keys,
            *self._set_timers,
            *self.follower_consumers,
            *publish,
            *inboxes,
            *self._look_at_others,
        )

    @property
    def manage(self) -> tuple[str, ...]:
        """Make and change streams, move and drop cursors, promote a mirror, and ask who answers."""
        cursors, bodies = cursor_bucket(self.app), f"OBJ_{object_bucket(self.app)}"
        streams = [self.app, f"KV_{snapshot_bucket(self.app)}", *self._states, *self._bodies]
        # Of all cursors: a new number of partitions deletes the cursors of the old one.
        all_cursors = (f"$KV.{cursors}.{key}" for key in ("c.*", "q.*.*") if self.followers)
        # Probes that ask which other subscribers answer; no entity has these subjects.
        probed = probes(self.app, ["*"], self.published, cursors=bool(self.followers), timers=False)
        return (
            *_requests(("STREAM.CREATE", "STREAM.INFO"), streams),
            # A promotion asks for cursors and large bodies even where the app has none, and changes what was mirrored.
            *_requests(("STREAM.INFO",), [f"KV_{cursors}", timer_stream(self.app), bodies]),
            *_requests(("STREAM.UPDATE",), self.mirrored),
            *self.read_cursors,
            *all_cursors,
            *self._set_timers,
            *self._look_at_others,
            *self.write_bodies,
            *_requests(("STREAM.PURGE",), self._bodies),
            *_requests(("STREAM.CREATE", "STREAM.INFO"), list(self.gathered)),
            *(f"{prefix}.STREAM.INFO.{name}" for prefix, name in self.origins),
            *(subject for _, subject in probed),
        )

    @property
    def _bodies(self) -> list[str]:
        """The stream of large bodies, where there are some."""
        return [f"OBJ_{object_bucket(self.app)}"] if self.objects else []

    @property
    def _states(self) -> list[str]:
        """The streams of cursors and of timers, where there are reactors or processes."""
        return [f"KV_{cursor_bucket(self.app)}", timer_stream(self.app)] if self.followers else []

    @property
    def _set_timers(self) -> tuple[str, ...]:
        purge = f"{_API}.STREAM.PURGE.{timer_stream(self.app)}"
        return (timer_subject(self.app, "*", "*"), purge) if self.followers else ()

    @property
    def _look_at_others(self) -> tuple[str, ...]:
        return _requests(("STREAM.INFO", "STREAM.MSG.GET"), self.other_streams)


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
