"""Every error a user of jaxpaged can meet.

``JaxPagedError`` is the common base. An error that a caller can mend by changing an argument is also a ``ValueError``.
Kernel errors live in ``pallas_kernels``: plain ``ValueError`` for wrong shapes or dtypes, ``KernelUnsupportedError`` for
"not on this backend".
"""


class JaxPagedError(Exception):
    """Base class of all errors raised on purpose by jaxpaged."""


class ConfigError(JaxPagedError, ValueError):
    """An engine option, a YAML key or a command-line flag is wrong. The message names it, what it got and what it wants."""


class InvalidRequestError(JaxPagedError, ValueError):
    """A request can never be served as asked. The message names the field, what it got and what it wants."""


class CheckpointError(JaxPagedError):
    """A checkpoint is missing, damaged, of an unknown architecture, or its tensors do not match its config."""


class CapacityError(JaxPagedError):
    """The machine or the pool is too small for what was asked (the message gives both numbers)."""


class InvariantError(JaxPagedError):
    """A rule the engine relies on was broken: a bug in jaxpaged, never the caller's fault."""


def shown(value: object) -> str:
    """``value`` as a message shows it: its ``repr``, or what it is where that is endless."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)
    except (RecursionError, ValueError):  # nested too deeply; a huge integer inside
        return f"a {type(value).__name__} that is too large to show"
