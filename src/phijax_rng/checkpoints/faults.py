"""Which errors are the file system's, and which say that files are missing or wrong.

Python raises an `OSError` with the code of the system. TensorStore, which reads the arrays, raises a
`ValueError` whose text has that code, or the status that an object store answered; Orbax wraps it in its own.
"""

import errno
import re

# What says that a file is missing or is none; every other error of the system is the file system's.
MISSING = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)

_CODE = re.compile(r"os_error_code='(\d+)'")
_STATUS = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|PERMISSION_DENIED|UNAUTHENTICATED): ")


def system_error(error: BaseException | None) -> int | None:
    """The code of the file system's error behind an error; `None` where files are missing or wrong."""
    while error is not None:
        if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError)):
            return None  # Orbax raises these without a code
        code = error.errno if isinstance(error, OSError) else None
        named = _CODE.search(str(error))
        if named:
            code = int(named[1])
        if code is None and (isinstance(error, (OSError, TimeoutError)) or _STATUS.match(str(error))):
            code = errno.EIO
        if code is not None:
            return None if code in MISSING else code
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
