"""Contexts of TLS that follow their files, without a socket."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.base.net.tls import Certificates, ClientTls, ServerTls
from certificates import write_certificate


def test_only_authenticated_encryption_with_forward_secrecy(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ServerTls(str(certificate), str(key)).context()
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    suites = context.get_ciphers()
    assert {one["protocol"] for one in suites} == {"TLSv1.2", "TLSv1.3"}
    for one in suites:
        assert one["aead"], one["name"]
        assert one["protocol"] == "TLSv1.3" or one["name"].startswith("ECDHE-")


def test_what_makes_no_context_is_said_in_one_line(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    with pytest.raises(UserError, match="names no cipher suite"):
        ServerTls(str(certificate), str(key), suites="NOTHING").context()
    with pytest.raises(UserError, match="No such file"):
        ServerTls(str(tmp_path / "nothing.pem")).context()
    with pytest.raises(UserError, match="give a certificate and its key in PEM"):
        ServerTls(str(key)).context()
    with pytest.raises(UserError, match="No such file"):
        ClientTls(str(tmp_path / "nothing.pem")).context()


def test_a_half_written_pair_changes_nothing_until_it_is_whole(tmp_path: Path) -> None:
    paths = write_certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    fresh = write_certificate(other, serial=2)
    lines: list[str] = []
    held = Certificates(ServerTls(str(paths[0]), str(paths[1])), lines.append)
    before = held.context
    held.look()
    assert (held.context, lines) == (before, [])
    paths[0].write_bytes(fresh[0].read_bytes())
    for _ in range(3):
        held.look()
    assert held.context is before
    assert len(lines) == 1
    assert "going on with the certificates as before" in lines[0]
    paths[1].write_bytes(fresh[1].read_bytes())
    held.look()
    assert held.context is not before
    assert lines[1].endswith("read again")
    paths[0].unlink()
    held.look()
    assert "No such file" in lines[2]
