"""``banaserve route --config``: what a file means, and how a mistake in it is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.cli import main as cli
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.config import (
    BalancerSettings,
    PolicySettings,
    ReplicaSettings,
    parse_endpoint,
)
from banaserve_route.balancer.config_file import follow, read_settings
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.targets.target import Target
from banaserve_route.policies.interface import ReplicaId, ReplicaView

TOML = """
region = "eu"
peer_key = "between-us"

[policy]
name = "round_robin"
preset = "plain"

[[replicas]]
url = "http://127.0.0.1:9"
models = ["m"]

[[peers]]
region = "us"
url = "http://127.0.0.1:8"
distance_ms = 90

[[tenants]]
key = "k"
regions = ["eu"]

[limits]
max_body = "1MiB"
"""

YAML = """
region: eu
peer_key: between-us
policy: {name: round_robin, preset: plain}
replicas:
  - url: http://127.0.0.1:9
    models: [m]
peers:
  - {region: us, url: "http://127.0.0.1:8", distance_ms: 90}
tenants:
  - {key: k, regions: [eu]}
limits: {max_body: 1MiB}
"""


def write(folder, text, name="route.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_toml_and_yaml_mean_the_same(tmp_path):
    settings = read_settings(write(tmp_path, TOML))
    assert settings == read_settings(write(tmp_path, YAML, "route.yaml"))
    assert settings.replicas == (ReplicaSettings(url="http://127.0.0.1:9", models=("m",)),)
    assert settings.peers[0].distance_ms == 90
    assert settings.policy == PolicySettings(name="round_robin", preset="plain")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no replica: give replicas"),
        ("regoin = 'eu'", "unknown key regoin; did you mean region?"),
        ("[limits]\nmax_bdy = '1MiB'", "unknown key limits.max_bdy; did you mean max_body?"),
        ("[[replicas]]\nuri = 'http://a:1'", "unknown key replicas[0].uri; did you mean url?"),
        ("[[replicas]]\nid = 'a'", "replicas[0]: Object missing required field `url`"),
        ("port = 'x'", "port: Expected `int`, got `str`"),
        ("port = 1\nport = 2", "Cannot overwrite a value"),
        ("port = ", "Invalid value"),
        ("[limits]\nmax_queue = -1", "limits.max_queue is -1: give more than 0"),
        ("[health]\npath = 'health'", "health.path is 'health': give a path"),
        ("[[replicas]]\nurl = 'ftp://a:1'", "'ftp://a:1' is no address"),
        ("[[replicas]]\nurl='http://a:1'\n[[replicas]]\nurl='http://A:1/'", "is there twice"),
        (
            "[[replicas]]\nurl='http://a:1'\nid='x'\n[[replicas]]\nurl='http://a:2'\nid='x'",
            "the id x is there twice",
        ),
        ("[[peers]]\nregion='us'\nurl='http://a:1'", "peers need a peer_key"),
        (
            "region='us'\npeer_key='k'\n[[peers]]\nregion='us'\nurl='http://a:1'",
            "region us is there twice",
        ),
        ("forward_to = ['us']", "unknown region in forward_to: us"),
        ("api_keys = ['k', 'k']", "an API key is there twice"),
        ("api_keys = ['k']\npeer_key = 'k'", "peer_key is one of the API keys"),
        ("api_keys = ['k']\nadmin_key = 'k'", "admin_key is one of the other keys"),
        ("host = '0.0.0.0'", "lets other machines in"),
        ("processes = 0", "processes is 0: give 1 to 64"),
        ("processes = 2\n[limits]\nmax_body = '2GiB'", "max_body is 2GiB: give 1GiB at most"),
        (
            "processes = 2\n[limits]\nmax_buffered = '64MiB'",
            "max_buffered is 64MiB, of which each of 2 processes has a part",
        ),
        (
            "[health]\noutlier_latency_factor = 0.5",
            "outlier_latency_factor is 0.5: give more than 1",
        ),
        ("[health]\noutlier_max_ejection_fraction = 50", "fraction is 50.0: give 0 to 1"),
        ("[health]\noutlier_request_volume = 0", "outlier_request_volume is 0: give more than 0"),
        ("[health]\noutlier_request_volume = 999", "outlier_request_volume is 999: give 32"),
        (
            "[health]\noutlier_max_ejection_s = 1",
            "outlier_base_ejection_s is 30.0: give outlier_max",
        ),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, text, line, capfd):
    path = write(tmp_path, text)
    assert cli.main(["route", "--config", str(path)]) == cli.EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert line in error
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port: 1\nport: 2", "the key port is there twice"),
        ("limits:\n  max_queue: 1\n  max_queue: 2", "the key max_queue is there twice"),
        ("1: 2", "the key 1 is no word"),
        ("a: [", "while parsing"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("[]", "Expected `object`, got `array`"),
        ("", "Expected `object`, got `null`"),
    ],
)
def test_a_mistake_in_yaml_is_named_too(tmp_path, text, line):
    path = write(tmp_path, text, "route.yml")
    with pytest.raises(UserError, match=str(path)) as caught:
        read_settings(path)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['api_keys: ["secret"\nport: 1', "api_keys: secret: 1"])
def test_a_mistake_in_yaml_quotes_no_key(tmp_path, text):
    with pytest.raises(UserError, match=r"\(at line \d, column \d+\)$") as caught:
        read_settings(write(tmp_path, text, "route.yaml"))
    assert "secret" not in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        read_settings(tmp_path / "none.toml")
    with pytest.raises(UserError, match="write TOML to a"):
        read_settings(write(tmp_path, "{}", "route.json"))


def test_the_file_goes_alone(tmp_path, capfd):
    path = write(tmp_path, TOML)
    assert cli.main(["route", "--config", str(path), "--port", "1"]) == cli.EXIT_USER_ERROR
    assert "--config goes alone" in capfd.readouterr().err


def settings_of(*ports, **others):
    replicas = tuple(ReplicaSettings(url=f"http://127.0.0.1:{port}") for port in ports)
    return BalancerSettings(replicas=replicas, **others)


async def test_a_change_touches_only_what_changes():
    balancer = Balancer(settings_of(1, 2), lambda line: None)
    kept = balancer.targets["127.0.0.1:2"]
    balancer.change(settings_of(2, 3))
    assert set(balancer.targets) == {"127.0.0.1:2", "127.0.0.1:3"}
    assert balancer.targets["127.0.0.1:2"] is kept
    with pytest.raises(UserError, match="port, policy cannot change"):
        balancer.change(settings_of(2, port=1, policy=PolicySettings(name="random")))
    assert set(balancer.targets) == {"127.0.0.1:2", "127.0.0.1:3"}
    balancer.close()


async def test_a_file_is_followed_and_a_mistake_in_it_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("banaserve_route.balancer.config_file._LOOK_S", 0.005)
    path = write(tmp_path, "[[replicas]]\nurl = 'http://127.0.0.1:1'")
    said = asyncio.Queue()
    balancer = Balancer(read_settings(path), said.put_nowait)
    following = asyncio.create_task(follow(path, balancer, Discovery(BalancerSettings(), print)))
    await asyncio.sleep(0)
    write(tmp_path, "[[replicas]]\nurl = 'http://127.0.0.1:1'\nuri = 1")
    assert "unknown key replicas[0].uri" in await asyncio.wait_for(said.get(), 60)
    assert set(balancer.targets) == {"127.0.0.1:1"}
    write(tmp_path, "[[replicas]]\nurl = 'http://127.0.0.1:22'")
    assert "has been read again" in await asyncio.wait_for(said.get(), 60)
    assert set(balancer.targets) == {"127.0.0.1:22"}
    following.cancel()
    balancer.close()


def gorgo(path):
    policy = PolicySettings(name="gorgo", preset="as-coded", state_file=str(path))
    return settings_of(1, policy=policy)


def test_what_a_policy_has_learned_survives_a_restart(tmp_path):
    path, said = tmp_path / "state.json", []
    balancer = Balancer(gorgo(path), said.append)
    learned = balancer.fleet.policy.state()
    assert learned
    balancer.close()
    again = Balancer(gorgo(path), said.append)
    assert again.fleet.policy.state() == learned
    assert said == []
    path.write_bytes(b'{"policy": "gorgo", "state": {"weights": "heavy"}}')
    Balancer(gorgo(path), said.append)
    path.write_bytes(b"garbage")
    Balancer(gorgo(path), said.append)
    assert len(said) == 2
    assert all("it learns afresh" in line for line in said)


def test_the_file_in_the_documents_is_one(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "balancer.md").read_text()
    block = next(one for one in page.split("```toml\n")[1:] if "peer_key" in one)
    settings = read_settings(write(tmp_path, block.partition("```")[0]))
    assert [peer.region for peer in settings.peers] == ["us"]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://vllm.example.com", "vllm.example.com"),
        ("https://vllm.example.com:443/", "vllm.example.com"),
        ("http://[::1]:80", "[::1]"),
        ("http://vllm.example.com:443", "vllm.example.com:443"),
        ("http://a:8080", "a:8080"),
    ],
)
def test_a_server_is_asked_by_its_name_without_a_default_port(url, host):
    view = ReplicaView(ReplicaId("a"))
    target = Target(view, parse_endpoint(url), BalancerSettings(), tls=object())
    assert target.fields == f"Host: {host}\r\n".encode()
