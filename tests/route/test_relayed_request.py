"""A request in a relay, whose messages cross those of the balancer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.replica_connection import ReplicaConnection
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import parse_response_head
from banaserve_route.balancer.relays.link import RemoteClient
from banaserve_route.balancer.relays.messages import (
    TO_RELAY,
    AnswerBegan,
    DropAttempt,
    EndRequest,
    RelaySettings,
    SendRequest,
    WriteAnswer,
)
from banaserve_route.balancer.relays.relay import RelayProcess
from banaserve_route.balancer.relays.relayed_request import RelayedRequest
from banaserve_route.balancer.relays.server_pools import ServerPools


class Wires:
    """The connections of a relay to servers, and to one client."""

    def __init__(self):
        self.sinks, self.told, self.written, self.is_reset = [], [], b"", False
        self.can_go_on = True
        pools = SimpleNamespace(of=lambda _: self)
        self.request = RelayedRequest(1, self, ClientRequest(), pools, self.told.append, id)

    def take(self):
        return self

    def send(self, parts, sink, to_head):
        self.sinks.append(sink)

    def write(self, data):
        self.written += data

    def reset(self):
        self.is_reset = True

    evict = reset

    def ignore(self, *_):
        """Do nothing."""

    abort = pause = resume = done = ignore

    def answers(self, number, status, length=0):
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, length)
        self.sinks[number - 1].on_head(parse_response_head(head), b"")
        if not length:
            self.sinks[number - 1].on_end()


@pytest.mark.parametrize("length", [0, 5])
def test_an_error_that_the_balancer_may_take_lets_no_other_answer_pass(length):
    wires = Wires()
    for attempt in (1, 2):
        wires.request.take(SendRequest(1, attempt, "http://x", b""))
    wires.answers(1, 500, length)
    wires.answers(2, 200)
    began = [one.is_relayed for one in wires.told if isinstance(one, AnswerBegan)]
    assert (began, wires.written) == ([False, False], b"")
    wires.request.take(DropAttempt(1, 2))
    wires.request.take(WriteAnswer(1, b"the error"))
    assert (wires.written, wires.is_reset) == (b"the error", False)


def test_the_other_answer_passes_at_once_after_the_balancer_has_dropped_the_error():
    wires = Wires()
    for attempt in (1, 2):
        wires.request.take(SendRequest(1, attempt, "http://x", b""))
    wires.answers(1, 503)
    wires.request.take(DropAttempt(1, 1))
    wires.answers(2, 200)
    assert wires.told[-2].is_relayed
    assert wires.written.startswith(b"HTTP/1.1 200")


async def test_a_connection_is_broken_for_the_request_under_way_alone():
    """At a time limit the balancer breaks the connection: a whole answer may cross with that."""
    relay, wires = RelayProcess(print), Wires()
    relay.connection_made(SimpleNamespace(is_closing=lambda: False, write=wires.ignore))
    link = SimpleNamespace(send=lambda told: relay.data_received(TO_RELAY.encode(told)))
    link.send(RelaySettings(BalancerSettings()))
    wires.peer = ("client", 1)
    relay.opened(wires)
    at_balancer = RemoteClient(link, 1, wires.peer)
    for number, ends in ((1, True), (2, False)):
        assert relay.take(wires, ClientRequest()).number == number
        if ends:
            link.send(EndRequest(number, closes=False))
    for number, is_broken in ((1, False), (2, True)):
        at_balancer.request = number
        at_balancer.abort()
        assert wires.is_reset is is_broken


def test_a_relay_forgets_the_servers_that_it_has_no_connection_to():
    pools = ServerPools(print)
    gone, stays = pools.of("http://127.0.0.1:1"), pools.of("http://127.0.0.1:2")
    stays.opened(ReplicaConnection(stays))
    pools.take_settings(BalancerSettings())
    assert list(pools._pools.values()) == [stays]
    assert pools.of("http://127.0.0.1:1") is not gone
