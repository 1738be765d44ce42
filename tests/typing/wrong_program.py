"""Mistakes that type checkers find (tests/python/test_typed.py), on each line that says so."""

from __future__ import annotations

import numpy as np

import strobe

x = np.ones((1, 2, 1, 8), np.float32)

strobe.attention(x, x)  # mistake: no v
strobe.attention(x, x, x, causal="yes")  # mistake: not a bool
strobe.attention(x, x, x, casual=True)  # mistake: no such option
strobe.attention(x, x, x, window=5)  # mistake: not a pair
strobe.ArraySpec((1, 2, 1, 8), dtype=32)  # mistake: not a name
out, lse = strobe.attention(x, x, x, return_lse=True)
words: str = strobe.attention_backward(out, x, x, x, out, lse)  # mistake: three arrays
strobe.atention(x, x, x)  # mistake: no such function
strobe.attention(x, x, x, seqused_k=[3])  # mistake: not an array
text: str = strobe.attention(x, x, x)  # mistake: an array
strobe.attention(x, x, x, seqused_k=strobe.ArraySpec((1,), "int32"))  # mistake: it has no data
strobe.attention_with_kvcache(x, x, x, dropout_p=0.1)  # mistake: no such option
module = strobe.tensorflow  # mistake: no such module
