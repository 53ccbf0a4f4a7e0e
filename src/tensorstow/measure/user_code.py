"""An error that a user's own code raised, which is shown as Python shows it. Imports no torch."""

import traceback


class UserCodeError(Exception):
    """A user's module or function raised an error: its text has type, message and place."""

    def __init__(self, option: str, error: BaseException, file: str | None, hint: str = "") -> None:
        """Keep the error's type, and its last line in ``file``."""
        self.kind = type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if frame.filename == file] or frames
        place = f'  File "{inner[-1].filename}", line {inner[-1].lineno}, in {inner[-1].name}\n'
        if inner[-1].line:
            place += f"    {inner[-1].line}\n"
        # A syntax error has its own place.
        said = "".join(traceback.format_exception_only(error)).rstrip("\n")
        place = "" if isinstance(error, SyntaxError) else place
        super().__init__(f"{option} raised an error:\n{place}{said}{hint}")
