"""The page of a balancer: who may read what, and what its status says."""

from __future__ import annotations

import asyncio
import re
from time import monotonic

import pytest

from banaserve_route.balancer.config import HealthSettings, PolicySettings
from banaserve_route.balancer.page.files import balancer_files
from banaserve_route.balancer.targets.outliers import OutlierReason
from browsing import browser, check_accessible

KEY = "Authorization: Bearer of-the-admin\r\n"
CALM = HealthSettings(interval_s=60)


async def get(house, path, fields=""):
    return await house.ask(path, method="GET", body=b"", fields=fields)


async def test_files_need_no_key_and_let_a_browser_load_nothing_else(house):
    await house.balance(await house.replica(), admin_key="of-the-admin", api_keys=("k",))
    for path in balancer_files():
        reply = await get(house, path.decode())
        assert (reply.status, reply.body) == (200, balancer_files()[path].body)
        assert "default-src 'none'" in reply.fields["content-security-policy"]
        assert reply.fields["x-content-type-options"] == "nosniff"
    reply = await house.ask("/ui/", method="POST", fields="Authorization: Bearer k\r\n")
    assert reply.status == 405
    assert (await house.ask("/ui/", method="HEAD", body=b"")).status == 200


@pytest.mark.parametrize("fields", ["", "Authorization: Bearer k\r\n", "Authorization: k\r\n"])
async def test_the_status_needs_the_admin_key(house, fields):
    await house.balance(await house.replica(), admin_key="of-the-admin", api_keys=("k",))
    assert (await get(house, "/admin/status", fields)).status == 401
    reply = await get(house, "/admin/status", KEY)
    assert (reply.status, reply.fields["cache-control"]) == (200, "no-store")
    # The admin key is none of the API.
    assert (await house.ask(fields=KEY)).status == 401


async def test_without_an_admin_key_there_is_no_page(house):
    replica = await house.replica()
    await house.balance(replica)
    for path in ("/ui/", "/ui/index.html", "/admin/status"):
        assert (await get(house, path)).status == 404
    assert replica.asked == []


async def test_the_status_says_what_happens(house):
    async def stream(asked):
        if asked.body == b"hold":
            await asked.until_gone()
            return
        await asked.begin_stream()
        await asked.event("one")
        await asked.end_stream()

    async def fail(asked):
        await asked.answer(500)

    well, bad = await house.replica(stream), await house.replica(fail)
    balancer = await house.balance(
        well, bad, admin_key="of-the-admin", health=CALM,
        policy=PolicySettings(name="least_requests"),
    )  # fmt: skip
    balancer.targets[bad.id].eject(OutlierReason.FAILURES, monotonic(), CALM)
    body = b'{"prompt": "a prompt of some words", "stream": true}'
    assert (await house.ask(body=body)).status == 200
    caller = await house.caller()
    await caller.send(b"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Length: 4\r\n\r\nhold")
    await house.until(lambda: len(well.asked) == 2)
    status = (await get(house, "/admin/status", KEY)).json
    assert (status["policy"], status["region"]) == ("least_requests", "local")
    assert (status["num_answers"], status["num_failures"]) == (1, 0)
    assert status["figures"]["num_under_way"] == 1
    first, second = sorted(status["targets"], key=lambda one: one["state"])
    assert (first["id"], first["state"], first["ejections"]) == (bad.id, "ejected", {"failures": 1})
    assert 0 < first["ejected_s"] <= 30
    assert (second["id"], second["state"], second["num_outstanding"]) == (well.id, "ready", 1)
    # Less the way to the replica, which may be all of it here.
    assert second["first_token_s"] == status["figures"]["ttft_p50_s"] >= 0
    assert (second["hit_fraction"], second["num_answers"], second["cache"]) == (0.0, 1, "")
    assert b"some words" not in (await get(house, "/admin/status", KEY)).body


def test_the_page_has_all_that_it_names():
    files = {
        path.removeprefix(b"/ui/").decode(): one.body for path, one in balancer_files().items()
    }
    html, script = files["index.html"].decode(), files["balancer.js"].decode()
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    named += [name for body in files.values() for name in re.findall(rb'from "\./([^"]+)"', body)]
    assert {name if isinstance(name, str) else name.decode() for name in named} <= set(files)
    ids = set(re.findall(r'id="([^"]+)"', html))
    assert set(re.findall(r'by\("([^"]+)"\)', script)) <= ids


@pytest.mark.deep
async def test_a_browser_shows_the_replicas(house):
    replica = await house.replica()
    await house.balance(replica, admin_key="of-the-admin", health=CALM)

    def look():
        with browser() as chrome, chrome.page(f"http://127.0.0.1:{house.port}/ui/") as page:
            page.fill("#key", "wrong")
            page.click("text=Open")
            page.wait_for_function("() => document.querySelector('#login-error').textContent")
            page.fill("#key", "of-the-admin")
            page.click("text=Open")
            page.wait_for_selector("#replicas td >> text=ready")
            check_accessible(page)
            assert chrome.problems == []
            return page.inner_text("#replicas")

    assert replica.url in await asyncio.to_thread(look)
