"""Every error a caller can meet, in one tree, with its exit code and HTTP status in one table.

A message says what was received, what is allowed, and what to do next, in that order and on one line.

    EPDError
    ├── InputError                    the caller can mend it
    │   ├── RequestError              a question or option that makes no sense
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
    ├── EncodeError                   frames that no encoder could turn into embeddings
    └── CancelledError                the consumer went away
"""


class EPDError(Exception):
    """Root of the tree: whatever the pipeline raises on purpose."""


class InputError(EPDError):
    """The input must change; trying again as it is cannot help."""


class RequestError(InputError):
    """A question or an option that makes no sense."""


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
    """A model whose family has no adapter."""


class InfeasibleError(EPDError):
    """No plan satisfies the constraints; the message names the one that binds."""


class EncodeError(EPDError):
    """Frames that no encoder could turn into embeddings."""


class CancelledError(EPDError):
    """Work that was stopped because nobody waits for its result any more."""


EXIT_BUG = 1

# error: (exit code, HTTP status). The nearest class in the method resolution order counts.
_OUTCOMES: dict[type[EPDError], tuple[int, int]] = {
    EPDError: (EXIT_BUG, 500),
    InputError: (2, 400),
    MediaNotFoundError: (2, 404),
    MediaForbiddenError: (2, 403),
    MediaLimitError: (2, 413),
    UnsupportedMediaError: (2, 415),
    CorruptMediaError: (2, 422),
    ModelNotFoundError: (2, 404),
    InfeasibleError: (3, 422),
    CancelledError: (EXIT_BUG, 499),
}


def _outcome(error: EPDError) -> tuple[int, int]:
    return next(_OUTCOMES[cls] for cls in type(error).__mro__ if cls in _OUTCOMES)


def exit_code(error: EPDError) -> int:
    """The process exit code: 1 bug, 2 usage or input, 3 infeasible."""
    return _outcome(error)[0]


def http_status(error: EPDError) -> int:
    """The status of the HTTP answer."""
    return _outcome(error)[1]
