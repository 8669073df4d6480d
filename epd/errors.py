"""Every error a caller can meet, in one tree, with its exit code and HTTP status in one table.

A message says what was received, what is allowed, and what to do next, in that order and on one line.

    EPDError
    ├── InputError                    the caller can mend it
    │   ├── RequestError              a question or option that makes no sense
    │   │   ├── RequestLimitError     more bytes, messages or media than a request may have
    │   │   ├── RequestTimeoutError   a body that comes too slowly
    │   │   └── RequestBudgetError    more work than one request may ask for
    │   ├── PoisonedRequestError      workers were lost with it, again and again
    │   ├── AuthenticationError       no key, or not the right one
    │   ├── AdminRightError          what the admin key alone allows
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
    ├── OverloadedError               more work than can be done in time; trying again later may help
    ├── UnavailableError              no worker can take it: starting, draining, or lost too often
    │   └── StorageFullError          the disk is full; retrying later may help
    ├── EncodeError                   frames that no encoder could turn into embeddings
    ├── InternalError                 a bug that this request has met; others go on
    │   └── WorkerFaultError          in a worker, which goes on
    └── CancelledError                the consumer went away
"""


class EPDError(Exception):
    """Root of the tree: whatever the pipeline raises on purpose."""


class InputError(EPDError):
    """The input must change; trying again as it is cannot help."""


class RequestError(InputError):
    """A question or an option that makes no sense."""


class RequestLimitError(RequestError):
    """More bytes, messages or media than one request may have."""


class RequestTimeoutError(RequestError):
    """A request that was not complete in time."""


class RequestBudgetError(RequestError):
    """More work than one request may ask for: see `epd.control.request_budget`."""


class PoisonedRequestError(InputError):
    """A request with which workers were lost too often; it is refused for a while, wherever it comes from."""


class AuthenticationError(InputError):
    """No key, or not the right one."""


class AdminRightError(InputError):
    """What only the admin key allows: to come before others, to change roles."""


class MediaError(InputError):
    """A video or image that cannot be used."""


class MediaNotFoundError(MediaError):
    """No file, or no answer, at the given source."""


class MediaForbiddenError(MediaError):
    """A source that policy does not allow to be read: a private address, a path outside the media folder."""


class MediaLimitError(MediaError):
    """More bytes, pixels, seconds or streams than the limits allow."""


class UnsupportedMediaError(MediaError):
    """Not a video or image that can be decoded here."""


class CorruptMediaError(MediaError):
    """A media file that is damaged beyond the error budget."""


class ModelError(InputError):
    """A model that cannot be used."""


class ModelNotFoundError(ModelError):
    """No model at the given path."""


class UnsupportedModelError(ModelError):
    """A model whose family has no adapter, or with parts that nothing here computes."""


class InfeasibleError(EPDError):
    """No plan satisfies the constraints; the message names the one that binds."""


class OverloadedError(EPDError):
    """More work than can be done in time. retry_after_s: seconds after which trying again makes sense."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(EPDError):
    """No worker can take the request: they are starting or draining, or too many were lost with it."""


class StorageFullError(UnavailableError):
    """The disk has no room. retry_after_s: seconds after which trying again makes sense."""

    def __init__(self, message: str, retry_after_s: float = 10.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EncodeError(EPDError):
    """Frames that no encoder could turn into embeddings."""


class InternalError(EPDError):
    """A bug that one request has met, which ends it alone."""

    @classmethod
    def of(cls, error: BaseException) -> EPDError:
        """Returns the error to end a request with; says no more of a bug than its type."""
        if isinstance(error, EPDError):
            return error
        return cls(f"a bug ended the request: {type(error).__name__}; the server's log has the traceback")


class WorkerFaultError(InternalError):
    """A worker failed on a message by a bug of its own, refused the message and goes on."""


class CancelledError(EPDError):
    """Work that was stopped because nobody waits for its result any more."""


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
    AdminRightError: (2, 403),
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
