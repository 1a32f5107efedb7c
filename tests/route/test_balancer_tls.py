"""TLS of the balancer, towards its clients and towards replicas, with certificates that change."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from msgspec import structs

from banaserve.base.errors import UserError
from banaserve.base.net.tls import ServerTls
from banaserve_route.balancer.config import BalancerSettings, HealthSettings, LimitSettings
from certificates import serial_of, write_certificate
from connection_invariants import check_connections
from counters import counted


def certified(folder, serial=1):
    certificate, key = write_certificate(folder, serial)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


async def https(house, folder):
    """A caller behind its handshake."""
    context = ssl.create_default_context(cafile=str(folder / "cert.pem"))
    return await asyncio.wait_for(house.caller(ssl=context), 60)


async def test_clients_are_served_over_tls(house, tmp_path):
    await house.balance(await house.replica(), **certified(tmp_path))
    caller = await https(house, tmp_path)
    for _ in range(2):
        assert (await caller.ask()).status == 200
    name, version, _ = caller.writer.get_extra_info("cipher")
    assert version == "TLSv1.3", name
    plain = await house.caller()
    await plain.send(b"GET /health HTTP/1.1\r\nHost: b\r\n\r\n")
    assert await plain.reader.read() == b""


@pytest.mark.one_process
async def test_changed_certificates_are_read_again(house, tmp_path):
    balancer = await house.balance(await house.replica(), **certified(tmp_path))
    kept = await https(house, tmp_path)
    assert (await kept.ask()).status == 200
    before = balancer.certificates.context
    write_certificate(tmp_path, serial=2)
    await house.until(lambda: balancer.certificates.context is not before)
    fresh = await https(house, tmp_path)
    assert serial_of(fresh.writer.get_extra_info("ssl_object").getpeercert(True)) == 2
    for one in (kept, fresh):
        assert (await one.ask()).status == 200


@pytest.mark.one_process
async def test_handshakes_that_do_not_end_keep_nobody_out(house, tmp_path):
    limits = LimitSettings(max_connections=8, max_connections_per_address=8)
    balancer = await house.balance(
        await house.replica(), api_keys=("good",), limits=limits, **certified(tmp_path)
    )
    known = await https(house, tmp_path)
    key = "Authorization: Bearer good\r\n"
    assert (await known.ask(fields=key)).status == 200
    silent = [await house.caller() for _ in range(30)]
    await house.until(lambda: counted(balancer, "dropped", cause="connections") >= 23)
    assert await silent[0].reader.read() == b""
    assert len(balancer.connections) <= 8
    assert (await known.ask(fields=key)).status == 200
    assert (await (await https(house, tmp_path)).ask(fields=key)).status == 200
    check_connections(balancer.connections)
    for one in silent:
        one.hang_up()


async def test_replicas_are_reached_over_tls_and_their_authority_may_change(house, tmp_path):
    certificate, key = write_certificate(tmp_path)
    context = ServerTls(str(certificate), str(key)).context()
    replica = await house.replica(ssl=context)
    health = HealthSettings(interval_s=0.05, breaker_pause_s=0.05)
    balancer = await house.balance(replica, replica_ca=str(certificate), health=health)
    assert (await house.ask(body=b"{}")).status == 200
    [target] = balancer.targets.values()
    other = tmp_path / "other"
    other.mkdir()
    stranger, _ = write_certificate(other, serial=2)
    before = balancer.registry.tls.context
    own = certificate.read_bytes()
    certificate.write_bytes(stranger.read_bytes())
    await house.until(lambda: balancer.registry.tls.context is not before)

    def is_refused():
        target.pool.drop_idle()  # a connection that a probe holds just now is idle later
        return not target.is_healthy

    await house.until(is_refused)
    certificate.write_bytes(own)
    await house.until(lambda: target.is_healthy)
    assert (await house.ask()).status == 200


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ssl_keyfile": "k.pem"}, "ssl_keyfile alone: give its certificate too"),
        ({"ssl_certfile": "/nothing.pem"}, "ssl_certfile: /nothing.pem: No such file"),
        ({"replica_ca": "/nothing.pem"}, "replica_ca: /nothing.pem: No such file"),
    ],
)
def test_files_that_are_none_are_a_mistake(settings, says):
    with pytest.raises(UserError, match=says):
        structs.replace(BalancerSettings(), **settings).check()


async def test_files_of_another_name_need_a_restart(house, tmp_path):
    balancer = await house.balance(await house.replica(), **certified(tmp_path))
    with pytest.raises(UserError, match="ssl_certfile"):
        balancer.change(structs.replace(balancer.settings, ssl_certfile="", ssl_keyfile=""))
