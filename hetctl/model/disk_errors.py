"""Errors of operations on files by their consequences: a full disk, and errors that pass by themselves."""

from __future__ import annotations

import errno

# EDQUOT: the quota is used up. EFBIG: the limit of a file's size is reached (write(2), RLIMIT_FSIZE).
DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

SERVER_ERRORS = frozenset({errno.EIO, errno.ESTALE, errno.ESHUTDOWN})
"""Errors of an operation on a file while Lustre evicts a client, or a server of Lustre or NFS fails over."""

# Those of sockets, too: a server that does not answer. Then: a node without free descriptors for a moment.
# EROFS: a file system that was remounted after an error, until it is repaired.
TRANSIENT_ERRORS = SERVER_ERRORS | {
    *(errno.ENOTCONN, errno.ETIMEDOUT),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
    errno.EROFS,
}
"""Errors of any operation on a file that say nothing about the file: the same operation may succeed later."""


def is_transient(error: BaseException) -> bool:
    """Return true for an error of the file system that may pass by itself."""
    return isinstance(error, OSError) and error.errno in TRANSIENT_ERRORS
