"""Becomes the extension module, whichever import statement names it, once that may be opened."""

import sys

from tessera import _native

sys.modules[__name__] = _native.opened()
