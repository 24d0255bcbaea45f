"""What makes transformers quick at a GGUF: the file is read once, and read as plain memory.

To load a GGUF with its tokenizer, transformers has `gguf.GGUFReader` read the file three times, each time half a
million little slices of a `numpy.memmap`, which cost several times what slices of a plain array do; and it makes the
table of the architecture's tensor names again for every submodule of the model. `read_once` lends `gguf` a reader and a
table that are made once, for as long as one conversion takes. What they give is the same.
"""

import contextlib
import functools
import threading

_ALONE = threading.Lock()  # two threads at once would give back what the other one lent


@contextlib.contextmanager
def read_once():
    """While this lasts, `gguf` reads each file and makes each table of names once."""
    import gguf

    with _ALONE:
        lent = {
            "GGUFReader": functools.cache(_plain_reader()),
            "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
        }
        own = {name: getattr(gguf, name) for name in lent}
        try:
            for name, value in lent.items():
                setattr(gguf, name, value)
            yield
        finally:
            for name, value in own.items():
                setattr(gguf, name, value)


def _plain_reader():
    import gguf
    import numpy as np

    class PlainReader(gguf.GGUFReader):
        """The same bytes, still mapped from the file, without what `numpy.memmap` does at every slice."""

        @property
        def data(self):
            return self._plain

        @data.setter
        def data(self, mapped):
            self._plain = mapped.view(np.ndarray)

    return PlainReader
