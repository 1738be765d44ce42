"""Arrays that JAX is given, as it takes them: those that would not fit are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import Error, InvalidArgument
from ._arrays import check_not_masked, check_readable, how_to_make_mask, is_tensor
from ._errors import shown
from ._mask_sources import from_bool
from ._packed_mask import Mask
from ._values import seed


def array_of(name: str, value: Any) -> Any:
    try:
        if is_tensor(value):  # JAX reads PyTorch's, even at the address of a storage that was freed
            check_readable(name, value)
        return jnp.asarray(value)
    except Error:
        raise
    except Exception:
        raise InvalidArgument(f"{name} = {shown(value)}, expected an array") from None


def wide_integers(name: str, value: Any) -> Any:
    """Integers of 64 bits, as a NumPy array, which need not fit 32; else None. JAX's own are left
    where they are, if it has such: a GPU would have to be waited for.
    """
    if isinstance(value, jax.Array) and (
        jax.config.jax_enable_x64 or value.dtype not in (np.int64, np.uint64)
    ):
        return None
    if is_tensor(value):
        check_readable(name, value)
        if value.dtype.itemsize < 8:  # nothing to cut, and a GPU would have to be waited for
            return None
    try:
        host = np.asarray(value.detach().cpu() if is_tensor(value) else value)
    except Exception:  # a list with something traced in it, or nothing to make an array of
        return None
    return host if host.dtype in (np.int64, np.uint64) else None


def lengths_of(name: str, value: Any) -> Any:
    """An array of lengths: one that is too long for an int32 is as good as the longest."""
    wide = wide_integers(name, value)
    if wide is None or wide.dtype == np.uint64:
        return _narrow(array_of(name, value))
    most = np.iinfo(np.int32)
    return jnp.asarray(np.clip(wide, most.min, most.max).astype(np.int32))


def _narrow(x: Any) -> Any:
    """Integers of 64 bits, which JAX has with jax_enable_x64, as near in 32 as may be."""
    if x.dtype != np.int64:
        return x
    most = np.iinfo(np.int32)
    return jnp.clip(x, most.min, most.max).astype(np.int32)


def numbers_of(name: str, value: Any, dtype: Any, wanted: str) -> Any:
    """An array of integers, refused where one of them does not fit `dtype`."""
    wide, most = wide_integers(name, value), np.iinfo(dtype)
    if wide is not None:
        for at in np.argwhere((wide < most.min) | (wide > most.max)):
            index = "".join(f"[{n}]" for n in at)
            raise InvalidArgument(f"{name}{index} = {wide[tuple(at)]}, expected {wanted}")
    return _narrow(array_of(name, value))


def mask_of_bools(value: Any, wanted: tuple[int, int, int, int]) -> Mask:
    """jax.nn's mask as one as data. wanted: sequences, heads, queries and keys of the call."""
    if isinstance(value, jax.core.Tracer):
        raise InvalidArgument(
            "mask is traced, expected a strobe.masks.Mask, or bools whose values are known: make "
            "one outside of jit by strobe.masks.from_bool(keep), and pass it in as an argument"
        )
    if not isinstance(value, jax.Array | np.ndarray) or value.dtype != np.bool_:
        what = f"{value.dtype} {shown(value)}" if hasattr(value, "dtype") else shown(value)
        raise InvalidArgument(
            f"mask is {what}, expected a strobe.masks.Mask, or bools of NumPy or JAX: "
            f"{how_to_make_mask(value)}"
        )
    check_not_masked("mask", value)
    keep = np.asarray(value)
    shape = (1,) * (4 - keep.ndim) + keep.shape
    if not 2 <= keep.ndim <= 4 or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise InvalidArgument(
            f"mask.shape = {keep.shape}, expected {wanted}, each of them 1 where all share it"
        )
    return from_bool(np.broadcast_to(keep, (*shape[:2], *wanted[2:])))


def seed_words(value: Any) -> Any:
    """uint32 (2,): the high and the low half of a seed."""
    if isinstance(value, int | np.integer):
        number = seed("dropout_seed", value)
        return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)
    data = numbers_of("dropout_seed", value, np.uint32, "32 bits: half of a seed")
    if jax.dtypes.issubdtype(data.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(data)
    if data.dtype != jnp.uint32 or data.shape not in ((2,), (4,)):
        raise InvalidArgument(
            f"dropout_seed has dtype {data.dtype} and shape {data.shape}, expected one key of "
            "jax.random, or an integer from 0 to 2**64 - 1"
        )
    return data if data.shape == (2,) else data[:2] ^ data[2:]  # the latter: keys of rbg
