"""Messages between a balancer and its relays, over a pair of Unix sockets for each relay.

Clients, requests and attempts are named by numbers that are used once in the life of a relay.
Either side ignores a message about one that has ended: the two may cross.
"""

from __future__ import annotations

import msgspec

from banaserve.base.net.framing import Framing
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.response import BodyEnd

_MAX_BYTES = 2**31
"""Maximum length of a message: more than the largest body that the settings allow."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False): ...


class RelayReady(_Message, frozen=True, tag=1):
    """Message: the relay accepts clients."""


class ClientOpened(_Message, frozen=True, tag=2):
    """Message: a client has connected; ``peer`` is its address and port."""

    client: int
    peer: tuple[str | int, ...]


class ClientKnown(_Message, frozen=True, tag=3):
    """Message: a client has shown a valid key."""

    client: int


class ClientClosed(_Message, frozen=True, tag=4):
    """Message: a connection of a client has ended, and with it the request under way."""

    client: int


class RequestArrived(_Message, frozen=True, tag=5):
    """Message: a whole request of a client.

    Attributes:
        seen: Values of the header fields that the balancer reads, by lower-case name.
        can_go_on: True if the connection may carry another request.
    """

    request: int
    client: int
    method: bytes
    path: bytes
    seen: dict[bytes, bytes]
    can_go_on: bool
    body: bytes


class AnswerBegan(_Message, frozen=True, tag=6):
    """Message: the head of an answer has come, or the first event of a stream.

    Of a stream that begins with a comment, the first event is told by a second message.

    Attributes:
        is_relayed: True if the client has got the beginning already, and gets the rest; False if
            the balancer is to say what becomes of the answer.
        lines: Head of an answer that is not relayed; ``data`` is the beginning of its body, or of a
            relayed stream the comment that it begins with.
    """

    attempt: int
    status: int
    ends_by: BodyEnd
    is_events: bool
    is_relayed: bool
    lines: bytes = b""
    data: bytes = b""


class AnswerEnded(_Message, frozen=True, tag=7):
    """Message: an answer is complete.

    Attributes:
        num_reads: Number of parts relayed after the beginning.
        last: End of the answer, which may state numbers of tokens.
    """

    attempt: int
    num_reads: int
    last: bytes


class AnswerBroke(_Message, frozen=True, tag=8):
    """Message: an answer will not be complete; see ``Sink.on_broken`` and ``Body``."""

    attempt: int
    num_reads: int
    why: str
    was_reused: bool
    is_ours: bool
    at_boundary: bool


class RefusalNoted(_Message, frozen=True, tag=9):
    """Message: the relay has refused a request before it was complete."""

    status: int
    why: str


class DropNoted(_Message, frozen=True, tag=10):
    """Message: the relay has closed a connection without an answer."""

    cause: str
    why: str


class RelayAlive(_Message, frozen=True, tag=11):
    """Message: the relay's event loop runs; sent at intervals, lest a silent relay be killed."""


class RelaySettings(_Message, frozen=True, tag=20):
    """Message: settings from now on; the first one lets the relay accept clients."""

    settings: BalancerSettings


class SendRequest(_Message, frozen=True, tag=21):
    """Message: a request is to be sent to a server, with the header lines ``fields``."""

    request: int
    attempt: int
    url: str
    fields: bytes


class DropAttempt(_Message, frozen=True, tag=22):
    """Message: the answer to an attempt is of no use."""

    request: int
    attempt: int


class WriteAnswer(_Message, frozen=True, tag=23):
    """Message: bytes for the client; the rest of an answer that has begun is relayed."""

    request: int
    data: bytes


class EndRequest(_Message, frozen=True, tag=24):
    """Message: a request is answered; ``closes`` if its connection is to end."""

    request: int
    closes: bool


class CloseClient(_Message, frozen=True, tag=25):
    """Message: the connection of a client is to be broken.

    Attributes:
        request: Number of the request that must be under way; 0 if none need be.
    """

    client: int
    request: int = 0


class TurnAway(_Message, frozen=True, tag=26):
    """Message: a new client is to be refused, since too many are connected."""

    client: int


class AcceptNoMore(_Message, frozen=True, tag=27):
    """Message: no more clients are to be accepted; requests under way go on."""


class EndRelay(_Message, frozen=True, tag=28):
    """Message: the relay is to end at once."""


ToBalancer = (
    RelayReady
    | ClientOpened
    | ClientKnown
    | ClientClosed
    | RequestArrived
    | AnswerBegan
    | AnswerEnded
    | AnswerBroke
    | RefusalNoted
    | DropNoted
    | RelayAlive
)
ToRelay = (
    RelaySettings
    | SendRequest
    | DropAttempt
    | WriteAnswer
    | EndRequest
    | CloseClient
    | TurnAway
    | AcceptNoMore
    | EndRelay
)
TO_BALANCER: Framing[ToBalancer] = Framing(ToBalancer, _MAX_BYTES)
TO_RELAY: Framing[ToRelay] = Framing(ToRelay, _MAX_BYTES)
