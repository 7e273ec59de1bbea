"""What goes wrong, by kind. Each is raised before anything changes, and says what was expected and what was got."""


class ShapeError(ValueError):
    """An array's shape does not fit the layer or its neighbours."""


class DtypeError(TypeError):
    """An array's element type can't be used here."""


class NotFiniteError(ValueError):
    """NaN or inf where `check_finite` is on."""


class StateMismatchError(ValueError):
    """A state, or a file that holds one, belongs to another layer configuration."""


class StreamError(ValueError):
    """A stream of a pool can't be used: its id names none, is given twice, or another thread is at work on it.

    row: of the call's ids, where it is one of them.
    """

    row: int | None = None


class StaleStreamError(StreamError):
    """An id names no open stream of this pool: it was closed, or never was one."""


class PoolFullError(StreamError):
    """A pool has as many streams as it may."""


class SnapshotError(ValueError):
    """A file of streams is damaged, cut short, or of another layer, model or format."""


class DeviceError(ValueError):
    """The GPU can't be used, refused something, or has not enough memory."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, incomplete, or of a kind that is not supported."""


def one_line(error: BaseException) -> str:
    """An error for people: what it says, and its kind where that is none of the usual ones."""
    text = " ".join(str(error).split())
    if isinstance(error, (ValueError, TypeError, OSError, NotImplementedError)) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
