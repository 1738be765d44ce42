// One row of attention whose keys lie in a cache, key by key: forward_pairwise.cuh says when.
#ifndef STROBE_CUDA_CACHE_CACHED_ROW_CUH_
#define STROBE_CUDA_CACHE_CACHED_ROW_CUH_

#include <cstdint>

#include "cuda/cache/cache_update.cuh"
#include "cuda/cache/coded_row.cuh"
#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// A row key by key. Not inlined: it is rare, and long.
template <typename T, typename Params>
__device__ __noinline__ void pairwise_cached_row(const Params& p, int32_t batch, int32_t head,
                                                 int32_t query) {
  const CachedSequence sequence = p.cached(batch, head);
  const auto at = [&](const Tensor& t, int64_t key) -> const T* {
    const KeyRows::Place place = sequence.keys.place(key);
    if (!place.there) return nullptr;
    return static_cast<const T*>(t.data) + t.element(place.entry, place.row, head / p.group);
  };
  const T* const q =
      static_cast<const T*>(p.q.data) + p.q.element(sequence.batch, sequence.q_row + query, head);
  const OutRow<T> to = out_row<T>(p, sequence, head, query);
  const auto write = [&](int d, float x) { to.put(d, x); };
  if constexpr (kQuantised<Params>) {
    const QuantisedCache& c = p.quantised;
    const auto coded = [&](const Tensor& t, const RowScales& scales, int32_t dtype,
                           int64_t key) -> CodedRow {
      const KeyRows::Place place = sequence.keys.place(key);
      if (!place.there) return {};
      return CodedRow::at(
          dtype,
          static_cast<const char*>(t.data) + t.element(place.entry, place.row, head / p.group),
          scales, scales.at(batch, place.entry, place.row, head / p.group));
    };
    pairwise_row_of<T, false, false>(
        p, sequence, sequence.mask, head, query, q,
        [&](int64_t key) { return coded(p.k, c.k_scale, c.k_dtype, key); },
        [&](int64_t key) { return coded(p.v, c.v_scale, c.v_dtype, key); }, write);
  } else if constexpr (kUpdates<Params>) {
    const NewKeys fresh = new_keys_of(p, sequence, head / p.group);
    const auto new_row = [&](const char* rows, const Tensor& t, int64_t key) {
      return reinterpret_cast<const T*>(rows + 2 * t.element(0, key, 0));
    };
    // A new key that has no page counts as not there, as one in the cache does.
    const auto key_at = [&](int64_t key) -> RotatedRow<T> {
      const T* const cached = at(p.k, key);
      if (key < fresh.begin || !cached) return {cached, {&p, -1}};
      return {new_row(fresh.k, p.k_new, key), Rotation<T>::at(p, fresh.position + key)};
    };
    const auto value_at = [&](int64_t key) {
      const T* const cached = at(p.v, key);
      return key < fresh.begin || !cached ? cached : new_row(fresh.v, p.v_new, key);
    };
    const RotatedRow<T> rotated{
        q, Rotation<T>::at(p, p.cache.query_rotation(sequence.rotary_start, query))};
    pairwise_row_of<T, false, false>(p, sequence, sequence.mask, head, query, rotated, key_at,
                                     value_at, write);
  } else {
    pairwise_row_of<T, false, kMasked<Params>>(
        p, sequence, sequence.mask, head, query, q, [&](int64_t key) { return at(p.k, key); },
        [&](int64_t key) { return at(p.v, key); }, write);
  }
}

/// pairwise_rows for keys in a cache.
template <typename T>
__device__ void pairwise_cached_rows(const TileParams& p, const SuspectTile& tile, int warp,
                                     int warps, int rows) {
  const CachedRows sequence = p.cache.sequence_rows(tile.batch);
  const int64_t left = (sequence.seqlen_q - tile.first) << p.pack;
  if (left < rows) rows = static_cast<int>(left);
  for_each_suspect(
      p, Suspects::kNotFinite, warp, warps, rows,
      [&](int row) {
        return out_row<T>(p, sequence, tile.head + p.head(row), tile.first + p.query(row));
      },
      [&](int row) {
        pairwise_cached_row<T>(static_cast<const CachedParams&>(p), tile.batch,
                               tile.head + p.head(row), tile.first + p.query(row));
      });
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_CACHED_ROW_CUH_
