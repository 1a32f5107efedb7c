"""Clients, replicas and settings that do anything: answers are their requests', nothing stays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter

import pytest
from msgspec import structs

from banaserve_route.balancer.config import (
    HealthSettings,
    HedgeSettings,
    LimitSettings,
    ReplicaSettings,
    TenantSettings,
)
from banaserve_route.balancer.requests.hedging import HedgeEvent
from counters import counted
from depth import says_seed, seeds
from waiting import thinks

KEY = "Authorization: Bearer k\r\n"
MAX_BODY = 100_000
HONEST = ("answer", "stream", "until_close", "close", "close_later", "busy")
OTHERS = (
    *HONEST,
    "refuse",
    "fail",
    "kill",
    "kill_in_head",
    "kill_in_body",
    "kill_stream",
    "garbage",
)
STATUSES = {200, 413, 429, 500, 502, 503}


class Anything:
    """A replica; what it answers is the target of the request. A broken one may break its word."""

    def __init__(self, draws, steps):
        self.draws, self.steps = draws, steps

    async def __call__(self, asked):
        step, tag = self.draws.choice(self.steps), asked.line.split()[1].encode()
        await self._thinks()
        if asked.line.startswith("HEAD "):
            await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
        elif step in ("stream", "kill_stream"):
            await asked.begin_stream()
            for number in range(3):
                await self._thinks()
                if step == "kill_stream" and number == self.draws.randrange(3):
                    asked.kill()
                await asked.event(tag.decode())
            await asked.end_stream()
        else:
            await getattr(self, f"_{step}")(asked, tag)

    async def _thinks(self):
        await thinks(self.draws.choice((0.0, 0.004, 0.02)) * self.draws.random())

    async def _answer(self, asked, tag):
        await asked.answer(200, tag)

    async def _busy(self, asked, tag):
        await asked.answer(self.draws.choice((429, 503)), tag)

    async def _refuse(self, asked, tag):
        await asked.answer(500, tag)

    async def _fail(self, asked, tag):
        await asked.answer(502, tag)

    async def _until_close(self, asked, tag):
        await asked.send(b"HTTP/1.1 200 OK\r\n\r\n" + tag)
        asked.writer.close()

    async def _close(self, asked, tag):
        await asked.answer(200, tag, "Connection: close\r\n")
        asked.writer.close()

    async def _close_later(self, asked, tag):
        await asked.answer(200, tag)
        await self._thinks()
        asked.writer.close()

    async def _kill(self, asked, tag):
        asked.kill()

    async def _kill_in_head(self, asked, tag):
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Le")
        asked.kill()

    async def _kill_in_body(self, asked, tag):
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + tag)
        asked.kill()

    async def _garbage(self, asked, tag):
        await asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")


class Visitor:
    """A client that does one thing after another, on a connection while it lasts."""

    def __init__(self, house, draws, number):
        self.house, self.draws = house, draws
        self.number, self.num_asked = number, 0
        self.statuses = Counter()
        self.caller = None

    async def visit(self, num_times):
        things = [getattr(self, name) for name in dir(self) if name.startswith("do_")]
        for _ in range(num_times):
            if self.caller is None:
                self.caller = await self.house.caller()
            try:
                goes_on = await self.draws.choice(things)()
            except (OSError, asyncio.IncompleteReadError):
                self.statuses["broken"] += 1
                goes_on = False
            if not goes_on:
                self.leave()
        if self.caller is not None:
            # Nothing of an earlier answer is left.
            assert (await self.caller.ask("/health", body=b"", method="GET")).body == b"{}"
            self.leave()

    def leave(self):
        self.caller.hang_up()
        self.caller = None

    def request(self, method="POST", version="1.1", size=None, fields=""):
        """Returns the bytes of a request, its body, and what the answer to it is to hold."""
        self.num_asked += 1
        tag = f"/v1/completions?n={self.number}-{self.num_asked}"
        body = bytes(self.draws.choice((0, 10, 50_000)) if size is None else size)
        head = f"{method} {tag} HTTP/{version}\r\nHost: b\r\nContent-Length: {len(body)}\r\n"
        return (head + KEY + fields + "\r\n").encode(), body, tag.encode()

    async def answered(self, tag, to_head=False):
        """Returns whether another request may follow on the connection."""
        reply = await self.caller.reply(to_head)
        self.statuses[reply.status] += 1
        assert reply.status in STATUSES, reply.body
        if not reply.is_whole:
            return False
        if reply.status == 200 and not to_head:
            event = b"data: %b\n\n" % tag
            if reply.body not in (tag, 3 * event):
                error = reply.body.replace(event, b"")
                assert error.startswith(b"data: {")
                assert b"server_error" in error
                return False
        return reply.fields.get("connection") != "close"

    async def do_ask(self):
        head, body, tag = self.request()
        await self.caller.send(head + body)
        return await self.answered(tag)

    async def do_ask_in_parts(self):
        head, body, tag = self.request(size=1000)
        for part in (head[:30], head[30:], body[:1], body[1:]):
            await self.caller.send(part)
            await thinks(0)
        return await self.answered(tag)

    async def do_ask_many_at_once(self):
        asked = [self.request(size=10) for _ in range(self.draws.randint(2, 5))]
        await self.caller.send(b"".join(head + body for head, body, _ in asked))
        return all([await self.answered(tag) for _, _, tag in asked])

    async def do_ask_before_the_body(self):
        first, second = (
            self.request(size=0),
            self.request(size=10, fields="Expect: 100-continue\r\n"),
        )
        is_behind = self.draws.random() < 0.5
        await self.caller.send(first[0] * is_behind + second[0])
        if is_behind and not await self.answered(first[2]):
            return False
        status, _ = await self.caller.head()
        if status != 100:
            self.statuses[status] += 1
            assert status in STATUSES
            return False
        await self.caller.send(second[1])
        return await self.answered(second[2])

    async def do_ask_for_the_head(self):
        head, _, tag = self.request("HEAD", size=0)
        await self.caller.send(head)
        return await self.answered(tag, to_head=True)

    async def do_ask_in_an_old_version(self):
        head, body, tag = self.request(version="1.0")
        await self.caller.send(head + body)
        await self.answered(tag)
        # There is one answer, and nothing follows.
        assert await asyncio.wait_for(self.caller.reader.read(), 60) == b""
        return False

    async def do_send_too_much_behind_another(self):
        first, second = self.request(), self.request(size=MAX_BODY + 1)
        await self.caller.send(first[0] + first[1] + second[0])
        if await self.answered(first[2]):
            before = self.statuses[413]
            assert not await self.answered(second[2])
            assert self.statuses[413] == before + 1
        return False

    async def do_leave_at_once(self):
        head, body, _ = self.request()
        await self.caller.send(head + body)
        await thinks(0.01 * self.draws.random())
        return False

    async def do_leave_within_an_answer(self):
        head, body, _ = self.request()
        await self.caller.send((head + body) * 2)
        await self.caller.head()
        return False

    async def do_leave_within_a_body(self):
        head, body, _ = self.request(size=100)
        await self.caller.send(head + body[:50])
        return False


@pytest.mark.deep
@pytest.mark.parametrize("seed", seeds(64, otherwise=2))
async def test_each_answer_is_its_request_s_whatever_happens(house, seed):
    draws = random.Random(seed)
    replicas = [
        await house.replica(Anything(draws, HONEST if number < 2 else OTHERS))
        for number in range(6)
    ]
    told = [ReplicaSettings(url=one.url, max_outstanding=3) for one in replicas]
    balancer = await house.balance(
        *told,
        hedge=HedgeSettings(after="2ms", max_fraction=1.0),
        limits=LimitSettings(max_body=str(MAX_BODY)),
        tenants=(TenantSettings(key="k", max_requests=1000),),
        health=HealthSettings(interval_s=0.05, breaker_failures=4, breaker_pause_s=0.01),
    )
    # Those of the honest ones must not be told as theirs.
    honest = [balancer.targets[one.id] for one in replicas[:2]]
    is_over = False

    async def change():
        while not is_over:
            await thinks(0.1 * draws.random())
            kept = [*told[:2], *(one for one in told[2:] if draws.random() < 0.7)]
            hedge = HedgeSettings(after=draws.choice(("1ms", "4ms", "")), max_fraction=1.0)
            limits = structs.replace(
                balancer.settings.limits,
                max_attempts=draws.randint(1, 4),
                max_queue=draws.choice((1, 99)),
            )
            balancer.change(
                structs.replace(balancer.settings, replicas=tuple(kept), hedge=hedge, limits=limits)
            )
            # One relay dies too.
            for relays in house.relays:
                one = draws.choice(relays._all)
                if balancer.metrics.num_relay_ends < 1 and draws.random() < 0.3:
                    os.kill(one.pid, signal.SIGKILL)
                    await house.until(lambda: balancer.metrics.num_relay_ends == 1)

    with says_seed(seed):
        changing = asyncio.create_task(change())
        visitors = [Visitor(house, draws, number) for number in range(8)]
        await asyncio.gather(*(one.visit(30) for one in visitors))
        is_over = True
        await changing
        statuses = sum((one.statuses for one in visitors), Counter())
        assert statuses[200] > 100
        await house.until(lambda: not balancer._under_way)
        assert not balancer.queue
        [tenant] = balancer._tenants._by_digest.values()
        assert tenant.quota.num_requests == 0
        names = tuple(one.name for one in honest)
        assert [line for line in house.log if line.startswith(names)] == []
        assert not any(one.breaker._trial for one in balancer.targets.values())
        hedges = {one: counted(balancer, "hedges", outcome=one) for one in HedgeEvent}
        assert hedges[HedgeEvent.SENT] >= hedges[HedgeEvent.WON] > 0
        for relays in house.relays:
            assert not any(one._link._exchanges for one in relays._all)
