"""A training file, checked while it streams: at most one line is held. Raises InvalidFile. Must not know where the
bytes come from or go."""

from server.errors import InvalidFile
from server.files.examples import Form, NotAnExample, read_example
from server.files.formats import HEAD_BYTES, named_format

MAX_LINE_BYTES = 4 * 2**20
MAX_EXAMPLES = 1_000_000


class TrainingFileCheck:
    """Feed it the file piece by piece, then `finish`. It must not be used after it raised."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES, max_examples: int = MAX_EXAMPLES) -> None:
        self.form: Form | None = None
        self.examples = 0
        self._max_line_bytes = max_line_bytes
        self._max_examples = max_examples
        self._format_known = False
        self._open_line = b""  # until the format is known: all that came

    def feed(self, data: bytes) -> None:
        self._open_line += data
        if not self._format_known:
            if len(self._open_line) < HEAD_BYTES:
                return
            self._check_format()
        self._take_lines()

    def finish(self) -> None:
        """The end of the file; its last line needs no newline."""
        if not self._format_known:
            self._check_format()
            self._take_lines()
        if self._open_line:
            self._take(self._open_line)
        if not self.examples:
            raise InvalidFile("The file is empty.", param="file")

    def _check_format(self) -> None:
        name = named_format(self._open_line[:HEAD_BYTES])
        if name is not None:
            raise InvalidFile(f"The file is {name}. Upload plain JSONL in UTF-8, without compression.", param="file")
        self._format_known = True

    def _take_lines(self) -> None:
        *lines, self._open_line = self._open_line.split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._open_line) > self._max_line_bytes:
            raise self._too_long()

    def _take(self, line: bytes) -> None:
        if len(line) > self._max_line_bytes:
            raise self._too_long()
        if self.examples >= self._max_examples:
            raise InvalidFile(f"The file has more than {self._max_examples} examples.", param="file")
        number = self.examples + 1
        try:
            form = read_example(line)
        except NotAnExample as verdict:
            raise InvalidFile(f"Line {number}: {verdict}.", param="file") from None
        if self.form not in (None, form):
            raise InvalidFile(
                f"Line {number}: it is a {form} example, and line 1 is a {self.form} example. A file has one form.",
                param="file",
            )
        self.form = form
        self.examples = number

    def _too_long(self) -> InvalidFile:
        return InvalidFile(f"Line {self.examples + 1}: it is longer than {self._max_line_bytes} bytes.", param="file")
