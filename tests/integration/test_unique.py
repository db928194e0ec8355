"""Unique values work behind a service, and with the roles of a server's configuration."""

from __future__ import annotations

import pytest

from eventjet import App, NotUnique, served
from eventjet.commands.unique import check_claims
from eventjet.dev.nats import NatsServer
from eventjet.domain.unique import CLAIMS
from eventjet.errors import Forbidden
from eventjet.operations.roles import ADMIN, WRITER, accounts, roles_of
from eventjet.settings import Settings
from tests.contracts.unique_contract import User
from tests.logs import fresh_name


async def test_a_caller_of_a_service_is_refused_without_the_holder_of_the_value(eventjet_nats: NatsServer) -> None:
    settings = Settings(servers=(eventjet_nats.url,), request_timeout_s=30.0)
    app = App(fresh_name(), aggregates=[User], served=[served(User, User.call)])
    async with app.connect(settings) as jet:
        await jet.init()
        async with jet.service(), app.client(settings) as remote:
            users = remote.repository(User)
            assert (await users.execute("ada", User.call, "ada@bank")).events == 1
            with pytest.raises(NotUnique) as caught:
                await users.execute("eve", User.call, "ada@bank")
    error = caught.value
    assert (error.aggregate, error.constraint, error.aggregate_id) == ("user", "email", "eve")
    assert error.holder is None
    assert "'ada'" not in str(error)


async def test_only_writers_of_an_aggregate_may_claim_its_unique_values() -> None:
    roles = roles_of("bank", ("user", "box"), (), unique=("user",))
    passwords = "".join(f"{role.variable}: {role.name}\n" for role in roles)
    config = f"{passwords}SYS_PASSWORD: sys\n{accounts('bank', roles)}"
    app = App("bank", aggregates=[User])
    assert {role.name for role in roles if f"bank.{CLAIMS}.*" in role.publish} == {f"{WRITER}_user"}
    with NatsServer(sync_interval="1m", config=config) as server:

        def as_role(name: str) -> Settings:
            return Settings(servers=(server.url,), user=name, password=name, inbox_prefix=f"_INBOX_{name}")

        async with app.connect(as_role(ADMIN)) as jet:
            await jet.init()
        async with app.connect(as_role(f"{WRITER}_user")) as jet:
            users = jet.repository(User)
            await users.execute("ada", User.call, "ada@bank")
            with pytest.raises(NotUnique):
                await users.execute("eve", User.call, "ada@bank")
            assert (await check_claims(users.unique, "email", repairs=True)).sound
        async with app.connect(as_role(f"{WRITER}_box")) as jet:
            with pytest.raises(Forbidden):
                await jet.repository(User).execute("eve", User.call, "eve@bank")
        async with app.connect(as_role("reader")) as jet:
            assert (await check_claims(jet.repository(User).unique, "email")).sound
