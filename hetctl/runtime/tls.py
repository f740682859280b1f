"""TLS between the nodes of a job: each side shows the job's certificate, and accepts no other one.

Python's TLS sockets are not safe if one thread reads while another writes. Here the caller moves the bytes,
and a lock guards only the cipher.
"""

from __future__ import annotations

import os
import ssl
import threading
from datetime import datetime
from functools import cache
from typing import Any

FOREVER = datetime(2000, 1, 1), datetime(9999, 12, 31)
"""Validity of certificates: they end with their jobs, and the clocks of nodes may differ."""
CURVE = "prime256v1"


def new_certificate() -> str:
    """Return a new private key (EC, P-256) and its self-signed certificate, in PEM."""
    # Only the driver needs this import, which takes 0.1 s.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *FOREVER)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (private + certificate).decode()


class TlsSession:
    """One end of a connection, whose bytes the caller moves; for use in several threads.

    Parameters
    ----------
    certificate : str
        Certificate of the job, with its private key.
    encrypts_data : bool
        As in `JobIdentity`.

    Attributes
    ----------
    is_proven : bool
        True once the other end has shown that it has the private key.
    """

    def __init__(self, certificate: str, *, is_server: bool, encrypts_data: bool = True) -> None:
        self.encrypts_data = encrypts_data
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _context(certificate, is_server=is_server)
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_server)
        self._using = threading.Lock()
        self.is_proven = False

    def advance(self, data: bytes = b"") -> bytes:
        """Continue the handshake with bytes that have arrived; return the bytes to send.

        Raises
        ------
        ConnectionAbortedError
            If the other end is no process of the job.
        """
        self._in.write(data)
        try:
            self._tls.do_handshake()
            self.is_proven = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ConnectionAbortedError(
                f"the process there does not show the certificate of this job ({error.reason})"
            ) from None
        return self._out.read()

    def encrypted(self, data: memoryview) -> bytes:
        """Return the bytes to send for some data."""
        with self._using:
            sent = 0
            while sent < len(data):
                sent += self._tls.write(data[sent:])
            return self._out.read()

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived."""
        with self._using:
            self._in.write(data)

    def read_into(self, buffer: memoryview) -> int:
        """Store data of the next record, and return their length; 0 if no record is complete.

        Raises
        ------
        ConnectionAbortedError
            If anything was changed on the way.
        """
        with self._using:
            try:
                # With a buffer it returns a number (ssl.SSLObject.read).
                count: Any = self._tls.read(len(buffer), buffer)
                return int(count)
            except ssl.SSLWantReadError:
                return 0
            except ssl.SSLError as error:
                raise ConnectionAbortedError(f"the connection was tampered with ({error.reason})") from None

    def read_clear(self, most: int) -> bytes:
        """Return bytes that have arrived in clear text after the last record."""
        return self._in.read(most)


@cache
def _context(certificate: str, *, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # One curve for all nodes, and a small hello: newer versions of OpenSSL send keys of a kilobyte.
    context.set_ecdh_curve(CURVE)
    if is_server:
        context.num_tickets = 0
    context.load_verify_locations(cadata=certificate)
    # Python reads private keys from files alone.
    file = os.memfd_create("certificate")
    try:
        os.write(file, certificate.encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
