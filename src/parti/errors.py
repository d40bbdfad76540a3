"""Every error that parti raises, in one tree.

PartiError
 ├── ConfigError             settings contradict each other or the stream; exit code 2
 │    ├── StreamNotFound     the stream does not exist on the server
 │    ├── SubjectMismatch    a subject or template lies outside the stream
 │    ├── TooManySubjects    more subjects than one consumer may carry
 │    ├── OverlappingSubjects two subjects of one consumer match the same message
 │    ├── ForeignConsumer    a consumer of the worker's name belongs to another fleet
 │    ├── HandlerMissing     the app has no handler, or cannot be imported
 │    ├── WorkerIdTaken      another process holds the worker id that was asked for
 │    └── NoFreeWorkerId     every id of the range is held
 ├── ConnectionFailed        the server could not be reached in time
 │    ├── AuthenticationFailed the server refused the credentials
 │    └── JetStreamUnavailable the server answers, but JetStream is off for this account
 ├── PermissionDenied        the account may not publish to or subscribe on a subject
 ├── RequestTimeout          no answer in time: the outcome is unknown, not "no"
 ├── NoResponders            nobody listens on the subject: the outcome is "no"
 ├── ApiError                JetStream answered with an error; `.code` is its number
 │    ├── NotFound           consumer, stream, key or message does not exist
 │    ├── PriorityRefused    a priority group is not as the server wants it; `.name` says which rule
 │    └── WrongRevision      a compare-and-set lost against another writer
 ├── LeaseLost               a lease has ended, or somebody else holds it: the outcome is "no"
 ├── ControlPlaneReset       the control bucket was deleted or made anew under a running worker
 ├── SourceFailed            the list of partitions could not be read
 ├── DecodeError             what lies under a key is not the record that belongs there
 ├── LedgerCorrupt           a message of a ledger stream is no batch of rows
 ├── DataLost                messages that were to be read are gone from the stream
 ├── ReplayFailed            a replay ended before its bound; what it had finished stays finished
 ├── PipelineFailed          a step of the pipeline ended with an error after it had begun
 ├── ConsoleEnded            the console cannot be reached any more: its HTTP server has ended
 ├── ServerTooOld            the server lacks a feature that parti needs
 └── EmbeddedServerError     the nats-server child process did not start or stop

`retryable` says that the same call may succeed later; `fatal` that it cannot without a change by a person.
Messages follow one form: what was wrong, what was expected, what to do next. They never contain secrets.
"""

from __future__ import annotations

from typing import ClassVar


class PartiError(Exception):
    """Root of all errors raised by parti."""

    retryable: ClassVar[bool] = False
    fatal: ClassVar[bool] = False


class ConfigError(PartiError):
    """Settings, subjects or the stream contradict each other; a person must change something."""

    fatal = True


class StreamNotFound(ConfigError):
    """The named stream does not exist on the server."""


class SubjectMismatch(ConfigError):
    """A subject or template lies outside the stream, or a key does not fit the template."""


class TooManySubjects(ConfigError):
    """More subjects than one consumer may carry; nothing was changed."""


class OverlappingSubjects(ConfigError):
    """Two subjects of one consumer would match the same message."""


class ForeignConsumer(ConfigError):
    """A consumer with the name of a worker's own belongs to another fleet, or is of another kind."""


class HandlerMissing(ConfigError):
    """The app has no handler, or the app itself cannot be imported."""


class WorkerIdTaken(ConfigError):
    """Another live process holds the worker id that was asked for."""


class NoFreeWorkerId(ConfigError):
    """Every worker id of the range is held by a live process."""


class ConnectionFailed(PartiError):
    """No server could be reached within the allowed time."""

    retryable = True


class AuthenticationFailed(ConnectionFailed):
    """The server refused the credentials."""

    retryable = False
    fatal = True


class JetStreamUnavailable(ConnectionFailed):
    """The server answers, but JetStream is not enabled for this account."""

    retryable = False
    fatal = True


class PermissionDenied(PartiError):
    """The server does not allow this account to use a subject."""

    fatal = True

    def __init__(self, operation: str, subject: str) -> None:
        # Whoever has an inbox of its own and does not say so asks for the one that everybody has.
        hint = "set inbox_prefix to that of this user, or " if "_INBOX" in subject else ""
        if ".CONSUMER.CREATE." in subject:
            hint = "set read_by=requests if this user is in an account of its own, or "
        super().__init__(
            f"permission denied: this account may not {operation} {subject!r}; {hint}"
            f"grant it on the server ('parti perms' prints what each role needs), or use other credentials"
        )
        self.operation = operation
        self.subject = subject


class RequestTimeout(PartiError):
    """No answer in time. The request may or may not have taken effect."""

    retryable = True


class NoResponders(PartiError):
    """Nobody listens on the subject; the request had no effect."""

    retryable = True


class ApiError(PartiError):
    """JetStream answered with an error."""

    def __init__(self, code: int, description: str, *, status: int = 0) -> None:
        super().__init__(f"{description} (JetStream error {code})")
        self.code = code
        self.description = description
        self.status = status


class NotFound(ApiError):
    """A consumer, stream, key or message does not exist."""


class WrongRevision(ApiError):
    """A compare-and-set write lost: somebody else wrote first."""


class PriorityRefused(ApiError):
    """The server refused something about a consumer's priority group; nothing was changed."""

    fatal = True

    def __init__(self, name: str, meaning: str, error: ApiError) -> None:
        super().__init__(error.code, f"{meaning} ({name}: {error.description})", status=error.status)
        self.name = name


class LeaseLost(PartiError):
    """A lease has ended, or somebody else holds it now."""


class SteppedDown(PartiError):
    """The worker id was given to a process that stood by."""


class StateError(PartiError):
    """Something is wrong with the state of a stateful handler's partition."""


class StateCorrupt(StateError):
    """What is stored is not what was saved: count, size or digest differ."""


class StateRemoved(StateError):
    """A chunk is not there: the snapshot was replaced by a newer one, or somebody deleted it."""

    retryable = True


class StateFailed(StateError):
    """A handler's `snapshot` or `restore` raised, or gave what is no state."""


class StateFenced(StateError):
    """A newer owner has the state of the partition: this one has been replaced."""


class StateUnavailable(StateError):
    """The state store or the bucket could not be reached, or refused."""

    retryable = True


class ControlPlaneReset(PartiError):
    """The control bucket was deleted or made anew while the fleet ran."""

    retryable = True


class SourceFailed(PartiError):
    """The list of partitions could not be read; the last one that could is still good."""

    retryable = True


class DecodeError(PartiError):
    """What lies under a key is not the record that belongs there; its reader leaves it out and goes on."""


class LedgerCorrupt(PartiError):
    """A message of a ledger stream is no batch of rows, or a damaged one."""


class DataLost(PartiError):
    """Messages that were to be read are gone from the stream: purged, deleted or expired."""

    fatal = True


class ReplayFailed(PartiError):
    """A replay ended before its bound; what it had finished stays so, and the same command goes on from there."""


class PipelineFailed(PartiError):
    """A step of the pipeline ended with an error; what is committed stays, and the next run goes on from there."""


class ConsoleEnded(PartiError):
    """The HTTP server of the console has ended although nobody told it to."""


class ServerTooOld(PartiError):
    """The server lacks a feature that parti needs."""

    fatal = True


class EmbeddedServerError(PartiError):
    """The nats-server child process did not start, or died."""
