"""What a user says of Mooncake, right and wrong."""

from __future__ import annotations

import pytest

from banaserve.base.errors import UserError
from banaserve_mooncake import config as mooncake_config
from banaserve_mooncake.config import parse_url
from banaserve_mooncake.tier import MooncakeTier


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h:1", "mooncake://HOST:PORT"),
        ("mooncake://h", "mooncake://HOST:PORT"),
        ("mooncake://h:99999", "99999|Port"),
        ("mooncake://[::1]:1", "IPv6"),
        ("mooncake://h:1/path", "mooncake://HOST:PORT"),
        ("mooncake://h:1?segmnt=1GiB", "did you mean segment"),
        ("mooncake://h:1?protocol=udp", "protocol"),
        ("mooncake://h:1?segment=much", "is not a size"),
        ("mooncake://h:1?depth=0", "depth=0"),
        ("mooncake://h:1?timeout=soon", "timeout=soon"),
        ("mooncake://h:1?segment", "segment"),
    ],
)
def test_bad_urls_are_refused_in_one_line(url, words):
    with pytest.raises(UserError, match=words) as caught:
        parse_url(url)
    assert "\n" not in str(caught.value)


def test_a_url_says_everything():
    config = parse_url(
        "mooncake://10.0.0.1:50051?metadata=http://10.0.0.1:8080/metadata&protocol=rdma"
        "&devices=mlx5_0,mlx5_1&host=10.0.0.2&segment=2GiB&block=5000&depth=3&timeout=0.5"
    )
    assert (config.master, config.host) == ("10.0.0.1:50051", "10.0.0.2")
    assert (config.metadata, config.protocol) == ("http://10.0.0.1:8080/metadata", "rdma")
    assert (config.devices, config.segment_bytes) == ("mlx5_0,mlx5_1", 2 * 2**30)
    assert (config.max_block_bytes, config.depth, config.timeout_s) == (8192, 3, 0.5)
    assert parse_url("mooncake://h:1?segment=0").segment_bytes == 0


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mooncake_config, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install mooncake-transfer-engine"):
        MooncakeTier.from_url("mooncake://127.0.0.1:1")
