"""Defines every error a caller can meet, in one tree, with exit codes and HTTP statuses in one table.

A message says what was received, what is allowed, and what to do next, in that order and on one line.

    EPDError
    ├── InputError                    the caller must change the input; a retry cannot help
    │   ├── RequestError              a question or option that makes no sense
    │   │   ├── RequestLimitError     more bytes, messages or media than a request may have
    │   │   ├── RequestTimeoutError   a body that comes too slowly
    │   │   ├── RequestBudgetError    more work than one request may ask for
    │   │   └── UnknownUuidError      a medium by a name that is not known, or not any more
    │   ├── PoisonedRequestError      workers were lost with it, again and again
    │   ├── AuthenticationError       no key, or not the right one
    │   │   └── InvalidApiKeyError    none of the file of keys
    │   ├── MissingScopeError         an action that the client's key has no right to
    │   ├── AdminRightError           an action that needs the admin key
    │   ├── MediaError
    │   │   ├── MediaNotFoundError
    │   │   ├── MediaForbiddenError   a source that policy does not allow to be read
    │   │   ├── MediaLimitError       larger, longer or slower than the limits
    │   │   ├── UnsupportedMediaError not a video or image we can read
    │   │   └── CorruptMediaError     the right kind of file, but damaged beyond the error budget
    │   └── ModelError
    │       ├── ModelNotFoundError
    │       └── UnsupportedModelError
    ├── InfeasibleError               a plan that nothing can satisfy
    ├── OverloadedError               more work than can be done in time; retryable
    ├── UnavailableError              no worker can take it: starting, draining, or lost too often
    │   ├── StorageFullError          the disk is full; retryable
    │   └── RankLostError             a process that shares the worker's model is lost, and so is the worker
    ├── EncodeError                   frames that no encoder could turn into embeddings
    ├── InternalError                 a bug that this request has met; others continue
    │   └── WorkerFaultError          in a worker, which continues
    └── CancelledError                the consumer went away
"""

from __future__ import annotations

from pathlib import Path


class EPDError(Exception):
    """Is the root of the tree: every error that the pipeline raises on purpose."""


class InputError(EPDError):
    """The caller must change the input; a retry cannot help."""


class RequestError(InputError):
    """Reports an invalid question or option."""


class RequestLimitError(RequestError):
    """Reports more bytes, messages or media than one request may have."""


class RequestTimeoutError(RequestError):
    """Reports a request that was not complete in time."""


class RequestBudgetError(RequestError):
    """Reports more work than one request may cost: see `epd.control.admission`."""


class UnknownUuidError(RequestError):
    """Reports a medium that came by its name alone, which is not known; it can be sent again."""


class PoisonedRequestError(InputError):
    """Refuses a request with which workers were lost too often, for a while, from any client."""


class AuthenticationError(InputError):
    """Reports a missing or wrong key."""


class InvalidApiKeyError(AuthenticationError):
    """Reports a key that the file of keys does not have, or that has expired."""


class MissingScopeError(InputError):
    """Refuses an action that the client's key has no right to."""


class AdminRightError(InputError):
    """Refuses an action that needs the admin key: to overtake others, to change roles."""


class NotFoundError(InputError):
    """Reports an id that names nothing of the client's, or a feature that the server is started without."""


class MediaError(InputError):
    """Reports a video or image that cannot be used."""


class MediaNotFoundError(MediaError):
    """Reports a missing file, or no answer, at the given source."""


class MediaForbiddenError(MediaError):
    """Refuses a source that policy forbids: a private address, a path outside the media folder."""


class MediaLimitError(MediaError):
    """Reports more bytes, pixels, seconds or streams than the limits allow."""


class UnsupportedMediaError(MediaError):
    """Reports a file that is not a video or image that can be decoded here."""


class CorruptMediaError(MediaError):
    """Reports a media file that is damaged beyond the error budget."""


class ModelError(InputError):
    """Reports a model that cannot be used."""


class ModelNotFoundError(ModelError):
    """Reports a path without a model."""


class UnsupportedModelError(ModelError):
    """Reports a model whose family has no adapter, or with parts that are not implemented."""


class InfeasibleError(EPDError):
    """No plan satisfies the constraints; the message names the one that binds."""


class OverloadedError(EPDError):
    """Reports more work than can be done in time; retryable. retry_after_s: when to retry."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitExceededError(OverloadedError):
    """Refuses a client that has used what it may use in a minute."""


class UnavailableError(EPDError):
    """No worker can take the request: they are starting or draining, or too many were lost with it.

    retry_after_s: when to retry
    """

    retry_after_s = 1.0


class StorageFullError(UnavailableError):
    """The disk has no room; retryable."""

    retry_after_s = 10.0


class RankLostError(UnavailableError):
    """Reports that a process that shares a worker's model has ended or hangs, which ends the worker."""


class EncodeError(EPDError):
    """Reports frames that no encoder could turn into embeddings."""


class InternalError(EPDError):
    """Reports a bug that one request has met, which ends it alone."""

    @classmethod
    def of(cls, error: BaseException) -> EPDError:
        """Returns the error to end a request with; of a bug it names only the type."""
        if isinstance(error, EPDError):
            return error
        return cls(f"a bug ended the request: {type(error).__name__}; the server's log has the traceback")


class WorkerFaultError(InternalError):
    """A worker failed on a message by its own bug, refused the message and continues."""


class CancelledError(EPDError):
    """Reports work that was stopped because its result is not wanted any more."""


EXIT_BUG = 1

# error: (exit code, HTTP status). The nearest class in the method resolution order counts.
# Media errors are 400, as clients of OpenAI's interface expect: to them 403 means keys and 404 models.
_OUTCOMES: dict[type[EPDError], tuple[int, int]] = {
    EPDError: (EXIT_BUG, 500),
    InputError: (2, 400),
    RequestLimitError: (2, 413),
    RequestTimeoutError: (2, 408),
    PoisonedRequestError: (2, 422),
    AuthenticationError: (2, 401),
    MissingScopeError: (2, 403),
    AdminRightError: (2, 403),
    NotFoundError: (2, 404),
    ModelNotFoundError: (2, 404),
    InfeasibleError: (3, 422),
    OverloadedError: (3, 429),
    UnavailableError: (3, 503),
    CancelledError: (EXIT_BUG, 499),
}


def _outcome(error: EPDError) -> tuple[int, int]:
    return next(_OUTCOMES[cls] for cls in type(error).__mro__ if cls in _OUTCOMES)


def exit_code(error: EPDError) -> int:
    """Returns the process exit code: 1 bug, 2 usage or input, 3 infeasible."""
    return _outcome(error)[0]


def http_status(error: EPDError) -> int:
    """Returns the status of the HTTP answer."""
    return _outcome(error)[1]


def check_question(question: str) -> None:
    """Raises RequestError for an empty question."""
    if not question.strip():
        raise RequestError("the question is empty; ask something about the media")


def check_file(path: Path) -> None:
    """Raises RequestError if no file can be written there: a folder, or one in no folder."""
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"cannot write {str(path)!r}; give a file name in a folder that exists")


def require(condition: bool, message: str) -> None:
    """Raises AssertionError for a broken invariant: a bug, not an error that a caller can meet."""
    if not condition:
        raise AssertionError(message)
