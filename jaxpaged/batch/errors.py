"""What can stop a job."""

from jaxpaged.errors import JaxPagedError


class JobError(JaxPagedError):
    """The job cannot go on: its output cannot be written, or what lies there does not belong to it. Says what to do next."""
