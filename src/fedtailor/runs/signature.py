"""Signatures: who finished a run. Ed25519 over its manifest, which has the digest of every other file."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtailor.errors import BadRun, InvalidArgument
from fedtailor.runs import files
from fedtailor.runs.layout import MANIFEST, SIGNATURE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PURPOSE = b"fedtailor manifest\n"  # what is signed begins with it, so that it cannot be taken for anything else


def make_keys(path: Path) -> Path:
    """Write a private key, for its owner only, and beside it the public key, whose path is returned."""
    primitives = _primitives()
    public = path.with_suffix(".pub.pem")
    for taken in (path, public):
        if taken.exists() or taken.is_symlink():
            raise InvalidArgument(f"{taken} is there already; give another name, so that no key is lost")
    key = primitives.ed25519.Ed25519PrivateKey.generate()
    encoding, form = primitives.serialization.Encoding.PEM, primitives.serialization
    secret = key.private_bytes(encoding, form.PrivateFormat.PKCS8, form.NoEncryption())
    files.write(path, secret, files.PRIVATE)
    files.write(public, key.public_key().public_bytes(encoding, form.PublicFormat.SubjectPublicKeyInfo))
    return public


def sign(folder: Path, key: Path) -> None:
    """Write the signature of a finished run; its files should have been verified before."""
    secret: Ed25519PrivateKey = read_key(key, "private")
    signed = secret.sign(PURPOSE + files.read(folder / MANIFEST))
    files.write(folder / SIGNATURE, base64.b64encode(signed).decode() + "\n")


def is_signed(folder: Path) -> bool:
    """Return whether a run directory holds a signature, by whomever."""
    return (folder / SIGNATURE).exists()


def check(folder: Path, key: Path) -> None:
    """Refuse a run directory that was not signed with the other half of the public ``key``."""
    public: Ed25519PublicKey = read_key(key, "public")
    if not is_signed(folder):
        raise BadRun(f"{folder} is not signed; ask whoever made it to run: fedtailor sign {folder} --key KEY.pem")
    try:
        signed = base64.b64decode(files.read(folder / SIGNATURE), validate=False)
        public.verify(signed, PURPOSE + files.read(folder / MANIFEST))
    except (binascii.Error, _primitives().InvalidSignature) as error:
        raise BadRun(
            f"the signature of {folder} is not by the owner of {key}; do not trust the run, or give the right key"
        ) from error


def read_key(path: Path, half: str) -> Any:
    """Return the private or the public half of a pair, from its file."""
    primitives = _primitives()
    kind = primitives.ed25519.Ed25519PrivateKey if half == "private" else primitives.ed25519.Ed25519PublicKey
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read ({error.strerror}); make keys with: fedtailor key KEY.pem") from error
    try:
        form = primitives.serialization
        key = form.load_pem_private_key(data, None) if half == "private" else form.load_pem_public_key(data)
    except (TypeError, ValueError, primitives.UnsupportedAlgorithm):
        key = None
    if not isinstance(key, kind):
        raise InvalidArgument(f"{path} is no {half} Ed25519 key without a password; make keys with: fedtailor key KEY.pem")
    return key


def _primitives() -> Any:
    """Return what is used of the package cryptography, which need not be installed."""
    from types import SimpleNamespace

    try:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InvalidArgument("signatures need the package 'cryptography'; run: pip install 'fedtailor[sign]'") from error
    return SimpleNamespace(
        ed25519=ed25519,
        serialization=serialization,
        InvalidSignature=InvalidSignature,
        UnsupportedAlgorithm=UnsupportedAlgorithm,
    )
