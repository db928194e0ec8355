"""`eventjet nats-config`: the server's configuration and the database's grants, by role."""

from __future__ import annotations

from typing import Annotated

import typer

from eventjet.cli.target import AppTarget, on_app


@on_app(servers=False, database=False)
def nats_config(
    at: AppTarget,
    accounts: Annotated[
        bool, typer.Option("--accounts", help="Only the accounts, for a configuration of your own to include.")
    ] = False,
    postgres: Annotated[bool, typer.Option("--postgres", help="The GRANTs of PostgreSQL instead.")] = False,
) -> None:
    """Print a nats-server configuration with a user for each role of the app, or PostgreSQL's GRANTs.

    It holds no password: the server takes them from its environment. Make it again when the app has a new aggregate,
    projection or revision. With EVENTJET_JETSTREAM_DOMAIN it is the accounts of a leaf node, whose hub has the log.
    """
    from eventjet.nats.endpoint import CALLER_INBOX, Endpoint
    from eventjet.operations.roles import accounts as only_accounts
    from eventjet.operations.roles import leaf_accounts, roles_of, server_config, serving_roles
    from eventjet.sql.database import grants
    from eventjet.subscriptions.declarations import declarations_of

    app = at.app()
    if postgres:
        tables = [table for one in app.projections.values() for table in one.tables]
        print(grants((table.schema, table.name) for table in tables), end="")
        return
    # The next revision too, so that a deploy need not wait for the server's configuration.
    durables = [f"{one.name}-r{one.revision + more}" for one in app.projections.values() for more in (0, 1)]
    aggregates = [info.name for info in app.aggregates.values()]
    received = [(one.stream, f"{app.name}-{one.name}") for one in app.inboxes.values()]
    published = [(one.stream, one.name) for one in app.publications.values()]
    unique = [info.name for info in app.aggregates.values() if info.unique]
    roles = roles_of(app.name, aggregates, durables, list(declarations_of(app)), published, received, unique)
    if app.served:
        roles += serving_roles(app.name, roles, at.settings.caller_inboxes or (CALLER_INBOX,))
    routed, domain = Endpoint.of(at.settings).routed, at.settings.jetstream_domain
    if domain is not None:
        print(leaf_accounts(app.name, roles, routed, domain), end="")
    else:
        print((only_accounts if accounts else server_config)(app.name, roles, routed), end="")
