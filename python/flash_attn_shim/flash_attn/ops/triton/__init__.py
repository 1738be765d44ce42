"""Where programs look for `apply_rotary`; nothing here needs Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import _absent

if not TYPE_CHECKING:
    __getattr__ = _absent.attribute(__name__, ("rotary",))
