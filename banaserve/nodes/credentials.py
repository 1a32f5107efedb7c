"""TLS between the nodes of a cluster: only processes that know the cluster's key can connect.

The key is the certificate authority. Both sides derive the authority's Ed25519 key from it, sign a
certificate of their own that lives as long as their process, and present it. Nothing is written to
a disk, and recorded traffic is useless (TLS 1.3 draws new keys for each connection).
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from banaserve.base.errors import UserError

_MIN_KEY_BYTES = 16
_SEED_BYTES = 32
_PURPOSE = b"banaserve cluster authority 1"
# The clocks of the nodes need not agree: a certificate's private key ends with its process.
_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
_AUTHORITY, _MEMBER = "banaserve cluster", "banaserve node"


def check_key(key: str) -> None:
    """Raise UserError if a cluster's key is missing or too short."""
    if len(key.encode()) < _MIN_KEY_BYTES:
        raise UserError(
            f"nodes need a key of {_MIN_KEY_BYTES} characters or more, the same as their agents "
            f"have: give --cluster-key-file or set {CLUSTER_KEY_VARIABLE} "
            "(`openssl rand -hex 32` makes a key)"
        )


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """TLS contexts of this process, with its certificate and the authority that it trusts.

    Attributes:
        server: Context for connections that this process accepts.
        client: Context for connections that this process opens.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def of(cls, key: str) -> ClusterCredentials:
        """Return the credentials derived from a cluster's key.

        Raises:
            UserError: The key is too short.
        """
        check_key(key)
        seed = HKDF(hashes.SHA256(), _SEED_BYTES, salt=None, info=_PURPOSE).derive(key.encode())
        authority = Ed25519PrivateKey.from_private_bytes(seed)
        own = Ed25519PrivateKey.generate()
        vouched = _certificate(_AUTHORITY, authority, authority, is_authority=True)
        shown = _certificate(_MEMBER, own, authority, is_authority=False)
        made = [
            _context(protocol, vouched, shown, own)
            for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
        ]
        return cls(*made)


def _context(
    protocol: int, authority: x509.Certificate, own: x509.Certificate, key: Ed25519PrivateKey
) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # a node is identified by the key, not by its address
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=_pem(authority).decode())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    # OpenSSL reads only files: this file is in memory, and private to this process.
    with os.fdopen(os.memfd_create("certificate"), "wb") as file:
        file.write(_pem(own) + private)
        file.flush()
        made.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return made


def _certificate(
    name: str, key: Ed25519PrivateKey, authority: Ed25519PrivateKey, *, is_authority: bool
) -> x509.Certificate:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(_AUTHORITY))
        .public_key(key.public_key())
        .serial_number(1 if is_authority else x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(_usage(is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority, None)
    )


def _usage(is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
