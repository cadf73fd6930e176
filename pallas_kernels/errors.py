"""The one error of the kernel library that is not a plain ``ValueError``."""


class KernelUnsupportedError(NotImplementedError):
    """The operation exists, but not for this backend, dtype or shape. The message says what would work instead."""
