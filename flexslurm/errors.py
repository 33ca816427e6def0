"""Every error flexslurm raises on purpose, one tree; never formats a traceback for a user.

In brackets: a command's exit code, or the HTTP status of an API request.

FlexslurmError [1]
├── ConfigError [3]             a site, service, sandbox or profile file is wrong
├── ModelError [4]              the model's files are missing, damaged or cannot be staged
├── CapacityError [5]           no gear fits: which resource is short, and by how much
├── SlurmError [6]              Slurm answered, and said no
│   └── SlurmUnavailable [6]    Slurm did not answer; nothing is known
├── ServiceError [7]            the running service
│   ├── ServiceUnreachable [7]  no head answers at the published address
│   └── ServiceExists [7]       the service directory belongs to a live head
├── EnvironmentFault [8]        this machine lacks something: a package, a port, a directory
├── DeadlineExceeded [9]        a wait with a deadline reached it
├── ProtocolError [1]           a peer broke the protocol
│   └── StaleEpoch [1]          a message from an epoch that is over
└── RequestError [400]          an API request that is answered with an error
    ├── InvalidRequest [400]    malformed or unsupported parameters
    ├── ContextTooLong [400]    more tokens than the installed gear holds
    ├── UnknownModel [404]      the model is not served here
    ├── Unauthorized [401]      the API key is missing or wrong
    ├── Overloaded [429]        the admission queue is full
    ├── NotServing [503]        no gear is installed, and the wait limit is reached
    ├── RequestAborted [503]    the request was ended before it finished
    └── GenerationFailed [500]  the engine could not go on with the request
"""

from __future__ import annotations

from typing import ClassVar


def unreadable(error: Exception) -> str:
    """Why a file cannot be read, for a message that names the file itself."""
    return getattr(error, "strerror", None) or str(error)


class FlexslurmError(Exception):
    """A failure with a message for the user and, where one exists, the way out (`hint`)."""

    exit_code: ClassVar[int] = 1
    transient: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


class ConfigError(FlexslurmError):
    """A configuration file is wrong; names the file, the line and the key."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        place = ":".join(str(part) for part in (file, line) if part is not None)
        where = ": ".join(part for part in (place, key) if part)
        super().__init__(f"{where}: {message}" if where else message, hint=hint)
        self.file, self.line, self.key = file, line, key


class ModelError(FlexslurmError):
    """The model's files are missing or damaged, or its architecture cannot be staged."""

    exit_code = 4


class CapacityError(FlexslurmError):
    """No gear fits the allocation; the message says which resource is short, by how much."""

    exit_code = 5


class SlurmError(FlexslurmError):
    """Slurm answered, and said no."""

    exit_code = 6


class SlurmUnavailable(SlurmError):
    """Slurm did not answer in time; the state of its jobs is unknown, not changed."""

    transient = True


class ServiceError(FlexslurmError):
    """The running service refused, or is not in a state for what was asked."""

    exit_code = 7


class ServiceUnreachable(ServiceError):
    """No head answers at the address published in the service directory."""

    transient = True


class ServiceExists(ServiceError):
    """The service directory already belongs to a live head."""


class EnvironmentFault(FlexslurmError):
    """This machine lacks something: a package, a free port, a writable directory."""

    exit_code = 8


class DeadlineExceeded(FlexslurmError):
    """A wait with a deadline reached it."""

    exit_code = 9
    transient = True


class ProtocolError(FlexslurmError):
    """A peer sent what the protocol does not allow."""


class StaleEpoch(ProtocolError):
    """A message from an epoch that is over; it is dropped."""


class RequestError(FlexslurmError):
    """An API request that is answered with an error in OpenAI's form."""

    http_status: ClassVar[int] = 400
    error_type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class InvalidRequest(RequestError):
    """Malformed or unsupported parameters; `param` names the one at fault."""


class ContextTooLong(RequestError):
    """The prompt and the tokens asked for exceed what the installed gear holds."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The model asked for is not served here."""

    http_status = 404
    code = "model_not_found"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class Overloaded(RequestError):
    """The admission queue is full; the client may try again."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "queue_full"
    transient = True


class NotServing(RequestError):
    """No gear is installed, and the request's wait limit is reached."""

    http_status = 503
    error_type = "server_error"
    code = "no_capacity"
    transient = True


class RequestAborted(RequestError):
    """The request was ended before it finished: by its client, an operator or a shutdown."""

    http_status = 503
    error_type = "server_error"
    code = "aborted"


class GenerationFailed(RequestError):
    """The engine could not go on with the request; trying again may help."""

    http_status = 500
    error_type = "server_error"
    code = "generation_failed"
