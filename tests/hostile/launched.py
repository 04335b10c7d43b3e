"""`isthmus-runtime serve ...` as it is, which writes into a file what its books say that requests hold.
While FILE.trim exists, free memory goes back to the system, so that what is left is held by somebody.

`python launched.py FILE PROCESSORS serve --role router ...`."""

from __future__ import annotations

import os
import sys

import isthmus_runtime.threads

_processors = int(sys.argv.pop(2))
if _processors:
    isthmus_runtime.threads.processors = lambda *_: _processors  # before anybody takes it from there

from isthmus_runtime.__main__ import main  # noqa: E402
from isthmus_runtime.heap import give_back  # noqa: E402
from isthmus_runtime.serving.port import PortState  # noqa: E402

if __name__ == "__main__":
    _name = sys.argv.pop(1)
    _file = os.open(_name, os.O_WRONLY)
    _relieve = PortState.relieve

    def _relieve_and_tell(self: PortState) -> None:
        _relieve(self)
        if os.path.exists(f"{_name}.trim"):
            give_back()
        beside = self.memory.beside()
        os.pwrite(_file, b"%-20d" % sum(one.held(beside) for one in self._all), 0)

    PortState.relieve = _relieve_and_tell  # type: ignore[method-assign]
    sys.exit(main())
