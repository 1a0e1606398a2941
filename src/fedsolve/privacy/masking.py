"""The secure sum of Bonawitz et al. (2017): a server learns Σ x_u over those who answered.

Paper: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
figure 4. Member u sends

    y_u = x_u + PRG(b_u) + Σ_{v>u} PRG(s_uv) − Σ_{v<u} PRG(s_uv)    mod 2^32,

where s_uv is agreed by X25519 between u and v, and b_u is u's own. u's key and b_u are divided
among all members by Shamir's scheme. When the masked vectors are in, the server asks the members
for shares: of b_u where y_u arrived, of u's key where it did not. A member tells one of the two,
and answers one such question for each use. So the masks of a sum can be taken off, and no others.

| phase | a member | the server |
|---|---|---|
| 0 | `advertise`: its public key for this use | hands out all of them |
| 1 | `share`: encrypted shares for each of the others | hands them on |
| 2 | `mask`: y_u | adds up |
| 3 | `unmask`: shares, given who is in the sum | `Collector.total` |

Phases 0 and 1 do not depend on x. They can be done beforehand, for many uses in one message: then
a sum takes the two messages of phases 2 and 3, and each use has keys of its own. A member's channel
key, with which shares are encrypted, is for the whole run. Against a server that tells members
different things the threshold must be more than half of the members, which is checked.

Everything here is a function of its arguments and of what a `Member` keeps. A message that is
repeated gets the same answer; one that contradicts an earlier one is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import secrets
from collections.abc import Iterable, Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsolve.privacy.encoding import SECRET_BYTES, SHARE_BYTES, Refused, Words, check_threshold

PRIME = 2**521 - 1  # of the field of Shamir's scheme

BLOCK = 2**15  # ring elements that are masked at a time
ZEROS = memoryview(bytes(4 * BLOCK))

Sealed = dict[int, bytes]  # by member: an encrypted pair of shares
Mask = tuple[bytes, bool]  # a key, and whether its ring elements are added


# Shamir's scheme


def divide(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Divide a secret so that any `threshold` of the holders' shares give it, and fewer nothing.

    Args:
        secret: At most 65 bytes.
        holders: Numbers from 0 up.
        threshold: How many shares give the secret.

    Returns:
        A share of 66 bytes for each holder.
    """
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]

    def at(x: int) -> int:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        return value

    return {holder: at(holder + 1).to_bytes(SHARE_BYTES, "big") for holder in holders}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of some shares.

    Raises:
        Refused: If there are too few of them, or they are not of one secret.
    """
    if len(shares) < threshold:
        raise Refused(f"{len(shares)} shares are there, and {threshold} are needed.")
    used = sorted(shares)[:threshold]
    values = (int.from_bytes(shares[holder], "big") for holder in used)
    total = sum(map(operator.mul, values, _factors(tuple(used)))) % PRIME
    if total >= 1 << (8 * SECRET_BYTES):
        raise Refused("The shares are not of one secret.")
    return total.to_bytes(SECRET_BYTES, "big")


@functools.lru_cache(maxsize=16)
def _factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return what the shares of these holders are multiplied by to give the secret."""
    found: list[int] = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above, below = above * (other + 1) % PRIME, below * (other - holder) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)


# Members


@dataclasses.dataclass
class _Use:
    """What a member keeps for one sum."""

    key: X25519PrivateKey | None  # None once the sum was unmasked
    public: bytes
    own: bytes  # the seed of its self mask
    adverts: dict[int, bytes] = dataclasses.field(default_factory=dict)
    sealed: Sealed | None = None
    inbox: Sealed = dataclasses.field(default_factory=dict)
    masked: tuple[bytes, Words] | None = None  # a digest of what was given, and the answer
    told: tuple[tuple[int, ...], dict[int, bytes]] | None = None


class Member:
    """A member's end of the protocol.

    Args:
        number: The member's number, from 0 up.
        channels: The public channel keys of all members, once they are known.
        key: Its private channel key; a new one by default.
    """

    def __init__(self, number: int, key: X25519PrivateKey | None = None):
        self.number = number
        self._key = X25519PrivateKey.generate() if key is None else key
        self._uses: dict[bytes, _Use] = {}
        self._channels: dict[int, bytes] = {}
        self._ciphers: dict[int, ChaCha20Poly1305] = {}  # of channels, which do not change
        self._threshold = 0

    @property
    def channel(self) -> bytes:
        """Its public channel key, for the handshake."""
        return self._key.public_key().public_bytes_raw()

    @property
    def threshold(self) -> int:
        """How many members must answer for a sum; 0 before `join`."""
        return self._threshold

    def join(self, channels: Mapping[int, bytes], threshold: int) -> None:
        """Take part with these members.

        Args:
            channels: The public channel keys of all members.
            threshold: How many members must answer for a sum.
        """
        check_threshold(threshold, len(channels))
        if channels.get(self.number) != self.channel:
            raise Refused("The list of members has another key in this member's place.")
        if len(set(channels.values())) < len(channels):
            raise Refused("Two members have the same key.")
        if self._channels and (dict(channels), threshold) != (self._channels, self._threshold):
            raise Refused("The members of a run cannot change.")
        self._channels, self._threshold = dict(channels), threshold

    def advertise(self, use: bytes) -> bytes:
        """Return the public key of this member for a use (phase 0)."""
        if use not in self._uses:
            key = X25519PrivateKey.generate()
            public = key.public_key().public_bytes_raw()
            self._uses[use] = _Use(key, public, secrets.token_bytes(SECRET_BYTES))
        return self._uses[use].public

    def share(self, use: bytes, adverts: Mapping[int, bytes]) -> Sealed:
        """Return encrypted shares of its key and its seed for each of the others (phase 1).

        Args:
            use: The use.
            adverts: The public keys of phase 0, of those who answered.
        """
        kept = self._use(use)
        if kept.sealed is not None:
            if dict(adverts) != kept.adverts:
                raise Refused("The keys of a use cannot change.")
            return kept.sealed
        if adverts.get(self.number) != kept.public or kept.key is None:
            raise Refused("The keys of a use do not have this member's own.")
        if len(adverts) < self._threshold or not adverts.keys() <= self._channels.keys():
            raise Refused(
                f"{len(adverts)} members take part, and {self._threshold} known ones must."
            )
        if len(set(adverts.values())) < len(adverts):
            raise Refused("Two members have the same key.")
        keys = divide(kept.key.private_bytes_raw(), adverts, self._threshold)
        seeds = divide(kept.own, adverts, self._threshold)
        kept.adverts = dict(adverts)
        kept.sealed = {
            other: self._cipher(other).encrypt(
                _nonce(use, self.number, other), keys[other] + seeds[other], use
            )
            for other in adverts
        }
        return kept.sealed

    def mask(self, use: bytes, inbox: Sealed, words: Words, view: bytes = b"") -> Words:
        """Return the masked vector (phase 2).

        Args:
            use: The use.
            inbox: By sender, the encrypted shares of phase 1 for this member; masks are agreed with
                these senders.
            words: The vector as ring elements.
            view: A digest of what the vector answers. Masks of members who were told different
                things do not cancel.

        Raises:
            Refused: If this use has masked another vector: two with the same masks would tell their
                difference.
        """
        kept = self._use(use)
        digest = _digest(words, inbox, view)
        if kept.masked is not None:
            if digest != kept.masked[0]:
                raise Refused("This use has masked another vector.")
            return kept.masked[1]
        assert kept.key is not None
        others = inbox.keys() - {self.number}
        if len(inbox) < self._threshold or not inbox.keys() <= kept.adverts.keys():
            raise Refused(f"{len(inbox)} members sent shares, and {self._threshold} must.")
        if self.number not in inbox:
            raise Refused("The shares do not have this member's own.")
        masks = [(kept.own, True)]
        for other in sorted(others):
            key = agreed(kept.key, kept.adverts[other], use + view)
            masks.append((key, other > self.number))
        total = masked(words, masks)
        kept.masked, kept.inbox = (digest, total), dict(inbox)
        return total

    def unmask(self, use: bytes, there: Iterable[int]) -> dict[int, bytes]:
        """Return its shares of the seeds of those in the sum, and of the keys of the others.

        Args:
            use: The use.
            there: The members whose masked vectors are in the sum.

        Raises:
            Refused: If it has answered for another sum: seed and key of a member together would
                tell its vector.
        """
        kept, there = self._use(use), tuple(sorted(set(there)))
        if kept.told is not None:
            if kept.told[0] != there:
                raise Refused("This use has been unmasked for other members.")
            return kept.told[1]
        if kept.masked is None:
            raise Refused("This member has masked nothing for this use.")
        inbox = kept.inbox
        if len(there) < self._threshold or not set(there) <= inbox.keys():
            raise Refused(f"{len(there)} members are in the sum, and {self._threshold} must be.")
        found: dict[int, bytes] = {}
        for other, sealed in inbox.items():
            try:
                opened = self._cipher(other).decrypt(_nonce(use, other, self.number), sealed, use)
            except InvalidTag:
                raise Refused(f"The shares of member {other} were changed on their way.") from None
            parts = opened[:SHARE_BYTES], opened[SHARE_BYTES:]
            found[other] = parts[1] if other in there else parts[0]
        kept.told = there, found
        kept.key, kept.own, kept.inbox = None, b"", {}  # nobody can ask for them again
        return found

    def _use(self, use: bytes) -> _Use:
        if use not in self._uses:
            raise Refused("This member has not advertised a key for this use.")
        return self._uses[use]

    def _cipher(self, other: int) -> ChaCha20Poly1305:
        if other not in self._ciphers:
            key = agreed(self._key, self._channels[other], b"channel")
            self._ciphers[other] = ChaCha20Poly1305(key)
        return self._ciphers[other]


# The server


@dataclasses.dataclass
class Collector:
    """The server's end of one use.

    Args:
        use: The use.
        threshold: How many members must answer.
        adverts: The public keys of phase 0.
        sealed: By sender, what phase 1 gave.
        masked: By member, the masked vectors of phase 2.
        view: The digest of what they answer.
    """

    use: bytes
    threshold: int
    adverts: dict[int, bytes]
    sealed: dict[int, Sealed] = dataclasses.field(default_factory=dict)
    masked: dict[int, Words] = dataclasses.field(default_factory=dict)
    view: bytes = b""

    def inbox(self, member: int) -> Sealed:
        """Return the encrypted shares for a member."""
        return {sender: sealed[member] for sender, sealed in self.sealed.items()}

    def total(self, shares: Mapping[int, Mapping[int, bytes]]) -> Words:
        """Return the sum of the vectors that were masked (after phase 3).

        Args:
            shares: By member, what `unmask` gave.

        Raises:
            Refused: If too few members answered.
        """
        if len(shares) < self.threshold:
            raise Refused(f"{len(shares)} members unmasked, and {self.threshold} must.")
        there = self.masked.keys()
        length = len(next(iter(self.masked.values())))
        total = np.zeros(length, np.uint32)
        for vector in self.masked.values():
            total += vector
        masks: list[Mask] = []
        for member in self.sealed:
            held = {holder: told[member] for holder, told in shares.items() if member in told}
            secret = combine(held, self.threshold)
            if member in there:
                masks.append((secret, False))
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self.adverts[member]:
                raise Refused(f"The shares of member {member} do not give its key.")
            for other in there:
                # what `other` added or subtracted for this member
                shared = agreed(key, self.adverts[other], self.use + self.view)
                masks.append((shared, member < other))
        return masked(total, masks)


def agreed(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """Return the key that two members agree on for a purpose."""
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # of another length, or a point with which everyone agrees on zero
        raise Refused("A public key is not valid.") from None
    return HKDF(hashes.SHA256(), 32, None, b"fedsolve secure sum " + purpose).derive(secret)


def stream(key: bytes, length: int) -> Words:
    """Return ring elements from a key (AES-256 in counter mode)."""
    return masked(np.zeros(length, np.uint32), [(key, True)])


def masked(words: Words, masks: Iterable[Mask]) -> Words:
    """Return a vector with the ring elements of some keys added or subtracted.

    Args:
        words: The vector.
        masks: Keys, and whether their elements are added.
    """
    total = words.copy()
    streams = [(Cipher(AES(key), CTR(bytes(16))).encryptor(), adds) for key, adds in masks]
    made = np.empty(BLOCK, np.uint32)
    room = made.data.cast("B")
    for first in range(0, len(total), BLOCK):  # blocks stay in the processor's cache
        part = total[first : first + BLOCK]
        count = len(part)
        for encryptor, adds in streams:
            encryptor.update_into(ZEROS[: 4 * count], room[: 4 * count])
            if adds:
                part += made[:count]
            else:
                part -= made[:count]
    return total


def _nonce(use: bytes, sender: int, receiver: int) -> bytes:
    """Return a nonce that no other message under a channel's key has."""
    text = use + sender.to_bytes(4, "big") + receiver.to_bytes(4, "big")
    return hashlib.sha256(text).digest()[:12]


def _digest(words: Words, inbox: Sealed, view: bytes) -> bytes:
    """Return a digest of what a member was given to mask."""
    digest = hashlib.sha256(hashlib.sha256(view).digest() + words.tobytes())
    for sender, sealed in sorted(inbox.items()):
        digest.update(sender.to_bytes(4, "big") + sealed)
    return digest.digest()
