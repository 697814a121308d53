"""What the server's process does beside Flower's own: it says in its log which connections were refused before anything was read.

TLS ends them, and Flower's server is silent about it: without this, an operator whose site uses another network's certificate, or
none, would see nothing at all.
"""

from __future__ import annotations

import ssl
import sys

REFUSED = "refused a connection: "
PLAIN = "it is plain, and only TLS is spoken here"
STRANGER = "the other side does not trust our certificate; is its ca.pem from another network, or an older one?"
REASONS = {
    "HTTP_REQUEST": PLAIN,
    "HTTPS_PROXY_REQUEST": PLAIN,
    "WRONG_VERSION_NUMBER": PLAIN,
    "TLSV1_ALERT_UNKNOWN_CA": STRANGER,
    "SSLV3_ALERT_BAD_CERTIFICATE": STRANGER,
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": STRANGER,
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the other side finds that our certificate has expired; renew it",
}


class ReportingSocket(ssl.SSLObject):
    """A connection that says why it could not be made."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # not yet
        except ssl.SSLError as error:
            reason = REASONS.get(error.reason or "", f"TLS failed ({(error.reason or 'no reason').lower().replace('_', ' ')})")
            sys.stderr.write(f"{REFUSED}{reason}\n")
            sys.stderr.flush()
            raise


def listen() -> None:
    """Do what Flower's own command does at the server."""
    from flwr.superlink.cli import flower_superlink

    ssl.SSLContext.sslobject_class = ReportingSocket  # type: ignore[misc, assignment, unused-ignore]
    flower_superlink()


def refusals(log: str) -> list[str]:
    """Return, in order, what a server's log says of connections that were refused."""
    unregistered = "No SuperNode found with the given public key"  # Flower's own words
    said = []
    for line in log.splitlines():
        if unregistered in line:
            said.append("refused a site whose key is not registered")
        elif line.startswith(REFUSED):
            said.append(line)
    return said
