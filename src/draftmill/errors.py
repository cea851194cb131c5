"""The errors a user can act on. Everything else that is raised is a bug, and shows its traceback."""


class InputError(ValueError):
    """The user's input can't be used: an option, a path, a file, a value or a model.

    The message is one line that names what was got, what was wanted and what to do. The command line prints it
    without a traceback and ends with exit code 2.
    """
