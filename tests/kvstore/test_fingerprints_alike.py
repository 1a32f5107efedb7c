"""Engines of one server whose KV blocks are alike, or not."""

from __future__ import annotations

import msgspec
import pytest

from banaserve.base.errors import FingerprintError
from banaserve.kvstore.fingerprint import check_alike
from fingerprints import FINGERPRINT


def test_engines_that_are_alike_may_serve() -> None:
    check_alike([FINGERPRINT])
    check_alike([FINGERPRINT, msgspec.structs.replace(FINGERPRINT)])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"layout": "NHD"}, r"\(layout: LBHNC and NHD\)"),
        ({"isa": "amx", "dtype": "bfloat16"}, r"dtype: float32 and bfloat16, isa:  and amx"),
    ],
)
def test_a_server_whose_engines_differ_is_refused(changed: dict[str, str], words: str) -> None:
    other = msgspec.structs.replace(FINGERPRINT, **changed)
    for found in ([FINGERPRINT, FINGERPRINT, other], [FINGERPRINT, other, FINGERPRINT]):
        with pytest.raises(FingerprintError, match=words):
            check_alike(found)
