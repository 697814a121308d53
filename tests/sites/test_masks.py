"""The arithmetic of secure sums against its definitions: fixed point, shares, masks, keys."""

from __future__ import annotations

import hmac
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from fedtailor.errors import InvalidArgument, InvalidData
from fedtailor.sites import masks


def test_the_field_is_one_by_the_test_of_lucas_and_lehmer():
    power = masks.PRIME.bit_length()
    assert 2**power - 1 == masks.PRIME
    s = 4
    for _ in range(power - 2):
        s = (s * s - 2) % masks.PRIME
    assert s == 0


def test_any_threshold_of_shares_give_the_secret():
    secret = masks.fresh()
    shares = masks.split(secret, 5, 3)
    for places in combinations(range(5), 3):
        assert masks.join({place + 1: shares[place] for place in places}) == secret
    assert masks.join({place + 1: share for place, share in enumerate(shares)}) == secret


def test_shares_are_the_values_of_a_polynomial_and_fewer_fit_every_secret(monkeypatch):
    drawn = iter([7, 11])
    monkeypatch.setattr(masks.secrets, "randbelow", lambda bound: next(drawn))
    shares = [int.from_bytes(share) for share in masks.split((5).to_bytes(32), 4, 3)]
    assert shares == [5 + 7 * x + 11 * x * x for x in (1, 2, 3, 4)]
    # two of them and any other secret have a polynomial through them, so two say nothing
    for other in (0, 1, 2**255):
        third = _through({0: other, 1: shares[0], 2: shares[1]}, 3)
        assert masks.join({1: shares[0].to_bytes(66), 2: shares[1].to_bytes(66), 3: third.to_bytes(66)}) == other.to_bytes(32)


def _through(points, x):
    total = 0
    for a, value in points.items():
        term = value
        for b in points:
            if b != a:
                term = term * (x - b) * pow(a - b, -1, masks.PRIME)
        total += term
    return total % masks.PRIME


def test_wrong_shares_are_noticed_or_give_something_else():
    secret = masks.fresh()
    shares = {place + 1: share for place, share in enumerate(masks.split(secret, 3, 2))}
    with pytest.raises(InvalidData, match="do not belong together"):
        masks.join({1: shares[1], 2: masks.split(masks.fresh(), 3, 2)[1]})
    with pytest.raises(InvalidArgument, match="3 of 2 shares"):
        masks.split(secret, 2, 3)


@pytest.mark.parametrize(("bits", "largest"), [(32, 16.0), (64, 2.0**20), (64, 3.7)])
@pytest.mark.parametrize("clients", [2, 7, 300])
def test_fixed_point_keeps_its_bound_up_to_the_largest_sum(bits, largest, clients):
    scale = masks.scale_of(bits, clients, largest)
    draw = np.random.default_rng(0)
    values = draw.uniform(-largest, largest, (clients, 200))
    values[:, 0], values[:, 1] = largest, -largest  # the ends, where a sum would wrap around first
    total = np.sum([masks.encode(row, bits, scale, largest) for row in values], axis=0, dtype=masks.WORDS[bits])
    exact = np.array([float(sum(map(Fraction, column.tolist()))) for column in values.T])
    bound = clients * masks.error_of(scale) + np.abs(exact) * 2.0**-52
    assert (np.abs(masks.decode(total, bits, scale) - exact) <= bound).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidData, match=r"size 17, .* up to 16"):
        masks.encode(np.array([1.0, -17.0]), 32, 20, 16.0)
    for bad in (np.nan, np.inf):
        with pytest.raises(InvalidData, match="not finite"):
            masks.encode(np.array([bad]), 64, 20, 16.0)
    with pytest.raises(InvalidArgument, match="do not fit into 32 bits"):
        masks.scale_of(32, 1000, 1e9)


def test_the_stream_is_aes_in_counter_mode():
    # FIPS 197, appendix C.3: this block under this key
    key = bytes.fromhex("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f")
    lib = masks.library()
    block = lib.Cipher(lib.AES(key), lib.CTR(bytes.fromhex("00112233445566778899aabbccddeeff"))).encryptor().update(bytes(16))
    assert block.hex() == "8ea2b7ca516745bfeafc49904b496089"
    assert (masks.stream(key, 40, 32).view("<u8") == masks.stream(key, 20, 64)).all()
    assert len(masks.stream(key, 0, 64)) == 0


def test_two_owners_of_keys_have_one_secret_for_one_purpose():
    # RFC 7748, section 6.1: Bob's keys, and what he has in common with Alice
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    alice = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert masks.public_of(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    common = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert masks.agree(bob, alice, "a") == _hkdf(common, masks.digest(("a",)))
    other = masks.fresh()
    assert masks.agree(bob, masks.public_of(other), "a", 1) == masks.agree(other, masks.public_of(bob), "a", 1)
    assert masks.agree(bob, masks.public_of(other), "a", 1) != masks.agree(other, masks.public_of(bob), "a", 2)
    with pytest.raises(InvalidData, match="public key is none"):
        masks.agree(bob, bytes(32), "a")  # a point of low order, with which everybody has the same in common


def _hkdf(common, info):
    """RFC 5869 with SHA-256, for 32 bytes."""
    extracted = hmac.digest(bytes(32), common, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_what_is_locked_opens_for_its_key_and_unchanged_only():
    key, about = masks.fresh(), b"about"
    locked = masks.lock(key, b"content", about)
    assert masks.unlock(key, locked, about) == b"content"
    for wrong in ((masks.fresh(), locked, about), (key, locked[:-1] + bytes([locked[-1] ^ 1]), about), (key, locked, b"other")):
        with pytest.raises(InvalidData, match="changed on its way"):
            masks.unlock(*wrong)
