"""The error tree of the operator.

UserError (ValueError)      something the user wrote or asked for; the command line exits with 2
├── BadFile                 a file that cannot be read as one InferenceService
└── InvalidSpec             a resource that breaks rules; carries every problem
OverBudget (RuntimeError)   a resource takes too long to work out
LaunchError (RuntimeError)  `isthmus up` could not start or keep a process; exits with 1
ApiError (RuntimeError)     the API server refused a request or did not answer; exits with 1
├── NameTaken               an object of a name that is needed belongs to somebody else
└── Refused                 objects that could not be written, each with its own error
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_TEXT = 8192
"""Characters of all problems of a resource: the API server carries them to its client and into its audit log."""


def one_line(text: str) -> str:
    """The text with what does not print, ends of lines too, as Python writes it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = 512) -> str:
    """The text without its middle where it is long."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-most // 3 :]}"


class UserError(ValueError):
    """What a user wrote is wrong; the message names the place, the value, what is allowed and the fix."""


class BadFile(UserError):
    """A file that is missing, is not YAML, or does not hold what the command needs."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken rule.

    path:    field path as in the manifest, for example `spec.roles.decode.scaling.replicas`
    message: the value found and what is wrong with it
    allowed: what would be accepted
    fix:     what to write or remove
    """

    path: str
    message: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        # Keys of users are in all of them.
        path, message, allowed, fix = map(shortened, (self.path, self.message, self.allowed, self.fix))
        return one_line(f"{path}: {message}; allowed: {allowed}; fix: {fix}")


class InvalidSpec(UserError):
    """All problems of one resource, in the order of their paths."""

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        lines = ""
        for number, problem in enumerate(self.problems):
            if len(lines) > _MOST_TEXT:
                lines += f"\n  and {len(self.problems) - number} more"
                break
            lines += f"\n  {problem}"
        super().__init__(f"InferenceService {name or '(no name)'}: {count}{lines}")


class OverBudget(RuntimeError):
    """Parsing, planning or rendering one resource takes longer than it may; the message names the limit."""


class LaunchError(RuntimeError):
    """A local process could not be started or kept; the message holds the one cause and a hint."""


class ApiError(RuntimeError):
    """A request to the Kubernetes API failed. `status`: the HTTP status, 0 when there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class NameTaken(ApiError):
    """An object of a name that a service needs is not that service's. It is left as it is."""


class Refused(ApiError):
    """Some objects could not be written. All else was done, and the status says so; the next attempt goes on."""

    def __init__(self, errors: Sequence[ApiError]) -> None:
        super().__init__(errors[0].status, "; ".join(str(error) for error in errors))
