"""Keys of a network: an authority of its own, the server's certificate, and a pair of keys for every site.

A site is who has its private key: the server registers the public ones, and knows by them who is who.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedtailor.errors import InvalidArgument
from fedtailor.runs import files

AUTHORITY, AUTHORITY_KEY, CERTIFICATE, CERTIFICATE_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
YEARS = 2  # until a certificate ends
PUBLIC = ".pub"


def make_certificates(folder: Path, name: str, hosts: Sequence[str]) -> None:
    """Write the authority (``ca.pem``, which sites need, and ``ca.key``) and the server's certificate for ``hosts``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)

    def built(subject: str, key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named(f"{name} authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=365 * YEARS))
        )

    mine, server = _new_key(), _new_key()
    own_id = x509.SubjectKeyIdentifier.from_public_key(mine.public_key())
    authority = (
        built(f"{name} authority", mine)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(own_id, critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(mine, hashes.SHA256())
    )
    alternatives = [_alternative(host) for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"])]
    certificate = (
        built(hosts[0] if hosts else "localhost", server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own_id), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(mine, hashes.SHA256())
    )
    encoding = _formats().Encoding.PEM
    files.write(folder / AUTHORITY, authority.public_bytes(encoding))
    files.write(folder / AUTHORITY_KEY, _private(mine), files.PRIVATE)
    files.write(folder / CERTIFICATE, certificate.public_bytes(encoding))
    files.write(folder / CERTIFICATE_KEY, _private(server), files.PRIVATE)


def make_pair(path: Path) -> Path:
    """Write a site's private key to ``path`` and return the file of the public one."""
    key, formats = _new_key(), _formats()
    private = key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.OpenSSH, formats.NoEncryption())
    files.write(path, private, files.PRIVATE)
    public = path.with_name(path.name + PUBLIC)
    files.write(public, key.public_key().public_bytes(formats.Encoding.OpenSSH, formats.PublicFormat.OpenSSH) + b"\n")
    return public


def _new_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec

    _formats()
    return ec.generate_private_key(ec.SECP384R1())


def _private(key: Any) -> bytes:
    formats = _formats()
    return key.private_bytes(formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption())


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _formats() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError:
        raise InvalidArgument('keys need the package cryptography: pip install "fedtailor[flower]"') from None
    return serialization
