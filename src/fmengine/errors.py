"""The one exception for a user's mistake: a line that says what, where, and what to do.

The command line prints the text of a `UserError` with no traceback and exits with 2; every
other exception is ours and keeps its full traceback.
"""

from collections.abc import Sequence


class UserError(Exception):
    """A mistake the user can mend; `str(error)` is one line for each problem.

    Args:
        problems: one line, or several that were found together. Each says what is wrong, where
            (`file:line` or the config key), and what to do about it.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class PeerLostError(Exception):
    """Another rank's process ended while this one waited for it: that rank's line says why, no traceback here does."""
