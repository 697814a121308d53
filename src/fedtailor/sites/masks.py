"""Masks: the arithmetic of secure sums, as pure functions. Numbers become integers modulo a power of two, secrets become masks
and shares; ciphers, key agreement and signatures are those of the package cryptography.

The protocol that is made of them (``secure``) is that of Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal and
Seth (2017), with one mask for every pair of clients and one of each client's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.errors import InvalidArgument, InvalidData

Words = NDArray[Any]  # unsigned integers of 32 or 64 bits: sums wrap around by themselves
PRIME = 2**521 - 1  # of the field that secrets are shared in: a Mersenne prime, with room for 64 bytes
SECRET = 32  # bytes of a key, of a seed
SHARE = 66  # bytes of an element of the field
WORDS: dict[int, Any] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}


# -- numbers as integers ---------------------------------------------------------------------------------------------
def scale_of(bits: int, clients: int, largest: float) -> int:
    """Return f so that the sum of ``clients`` numbers up to ``largest`` in size, each times 2^f, cannot wrap around."""
    scale = bits - 1 - math.ceil(math.log2(clients * largest + clients))  # one more each: what is rounded may grow by a half
    if scale < 1:
        raise InvalidArgument(
            f"{clients} numbers up to {largest:g} do not fit into {bits} bits; use bits = 64, or less for largest"
        )
    return scale


def error_of(scale: int) -> float:
    """Return by how much a number may differ from what is summed for it: half a step."""
    return 2.0 ** -(scale + 1)


def encode(values: NDArray[np.float64], bits: int, scale: int, largest: float) -> Words:
    """Return numbers as integers modulo 2^bits; what is not finite, or larger than was agreed on, is refused."""
    if not np.isfinite(values).all():
        raise InvalidData("an upload that is not finite cannot be summed; use a smaller lr")
    size = float(np.abs(values).max(initial=0.0))
    if size > largest:
        raise InvalidData(
            f"an upload holds a number of size {size:.3g}, and secure sums were agreed for numbers up to {largest:g}; "
            "use a smaller lr, or agree on more (largest in [terms])"
        )
    return np.rint(np.ldexp(values, scale)).astype(np.int64).astype(WORDS[bits])


def decode(words: Words, bits: int, scale: int) -> NDArray[np.float64]:
    """Return the numbers that integers modulo 2^bits stand for."""
    signed = words.view(words.dtype.str.replace("u", "i"))
    return np.ldexp(signed.astype(np.float64), -scale)


def stream(seed: bytes, count: int, bits: int) -> Words:
    """Return the mask of a seed: AES-256 in counter mode, of which no word can be told from chance without the seed."""
    lib = library()
    cipher = lib.Cipher(lib.AES(seed), lib.CTR(bytes(16))).encryptor()  # a seed makes one stream only
    return np.frombuffer(cipher.update(bytes(count * bits // 8)), WORDS[bits])


# -- secrets in shares -----------------------------------------------------------------------------------------------
def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Return ``count`` shares, any ``threshold`` of which give the secret and fewer nothing (Shamir 1979).

    They are the values at 1, 2, ... of a random polynomial of degree ``threshold`` - 1 that is the secret at 0.
    """
    if not 1 <= threshold <= count:
        raise InvalidArgument(f"{threshold} of {count} shares cannot be asked for; let threshold be from 1 to {count}")
    coefficients = [int.from_bytes(secret), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_at(coefficients, x).to_bytes(SHARE) for x in range(1, count + 1)]


def _at(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from shares by their place (1, 2, ...): Lagrange's polynomial at 0."""
    total = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += int.from_bytes(share) * above * pow(below, -1, PRIME)
    value = total % PRIME
    if value >> (8 * SECRET):
        raise InvalidData("shares do not belong together")
    return value.to_bytes(SECRET)


# -- keys ------------------------------------------------------------------------------------------------------------
def fresh() -> bytes:
    """Return a secret that nobody has seen: a private key, or a seed."""
    return os.urandom(SECRET)


def public_of(private: bytes) -> bytes:
    """Return the public half of a private key (X25519)."""
    return library().X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def new_signer() -> tuple[bytes, bytes]:
    """Return a pair of keys to sign with (Ed25519): the private half, and the public one."""
    key = library().Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, *purpose: Any) -> bytes:
    """Return the secret that two owners of keys have in common (X25519), for one purpose (HKDF with SHA-256)."""
    lib = library()
    try:
        common = lib.X25519PrivateKey.from_private_bytes(private).exchange(lib.X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise InvalidData("a public key is none; a site or the server does not keep to the protocol") from None
    return lib.HKDF(lib.SHA256(), SECRET, salt=None, info=digest(purpose)).derive(common)


def lock(key: bytes, content: bytes, about: bytes) -> bytes:
    """Return the content for the owner of the key only, bound to what it is about (ChaCha20-Poly1305).

    A key locks one message in its life, so the nonce need not change.
    """
    return library().ChaCha20Poly1305(key).encrypt(bytes(12), content, about)


def unlock(key: bytes, content: bytes, about: bytes) -> bytes:
    """Return what was locked; what was changed on its way is refused."""
    lib = library()
    try:
        return lib.ChaCha20Poly1305(key).decrypt(bytes(12), content, about)
    except lib.InvalidTag:
        raise InvalidData("a share was changed on its way; a site or the server does not keep to the protocol") from None


def digest(content: Any) -> bytes:
    """Return a checksum of plain content (texts, numbers, lists, bytes), the same wherever it is computed."""
    text = json.dumps(content, sort_keys=True, default=lambda value: value.hex())
    return hashlib.sha256(b"fedtailor secure sums\n" + text.encode()).digest()


def library() -> Any:
    """Return what is used of the package cryptography, which need not be installed."""
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.asymmetric import ed25519, x25519
        from cryptography.hazmat.primitives.ciphers import aead, algorithms, modes
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError:
        raise InvalidArgument('secure sums need the package cryptography: pip install "fedtailor[flower]"') from None
    return SimpleNamespace(
        InvalidSignature=exceptions.InvalidSignature,
        InvalidTag=exceptions.InvalidTag,
        Cipher=ciphers.Cipher,
        SHA256=hashes.SHA256,
        Ed25519PrivateKey=ed25519.Ed25519PrivateKey,
        Ed25519PublicKey=ed25519.Ed25519PublicKey,
        X25519PrivateKey=x25519.X25519PrivateKey,
        X25519PublicKey=x25519.X25519PublicKey,
        ChaCha20Poly1305=aead.ChaCha20Poly1305,
        AES=algorithms.AES,
        CTR=modes.CTR,
        HKDF=hkdf.HKDF,
    )
