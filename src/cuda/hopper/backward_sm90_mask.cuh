// Hopper backward, a mask as data: who looks for an item's steps, and which pairs of a step the
// mask and the rule allow. backward_sm90.cuh has the whole picture.
//
// One thread of the producer's warpgroup (FindSteps) goes through the lists of an item's keys
// (backward/masked_steps.cuh), a step ahead of the producer, and leaves each step in a slot of
// shared memory. It tells of it twice: at `found`, for the producer and for who keeps the order of
// additions, as soon as it knows whether another step follows; and at q.full, together with the
// bits of the step's partial blocks, which it copies into the stage that Q has. At `known` it tells
// whether an item has steps at all.
//
// A slot is written again eight steps later. FindSteps writes that of step n + 1 when all consumers
// have come to the end of step n - 3 (q.empty), hence who keeps turns to that of n - 4. `found` has
// four stages, since it has no `empty`: step n + 4 is told of when the consumers have come to the
// end of step n + 1, for which both the producer and who keeps turns have seen step n.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_MASK_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_MASK_CUH_

#include <cstdint>

#include "cuda/backward/masked_steps.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/backward_sm90_weights.cuh"
#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/packed.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Where the bits of a step's keys lie in a stage. Those of a block of queries are whole rows, of
/// one key after the other.
struct StepBitsLayout {
  int32_t row_bytes;   // of a key
  int32_t part_bytes;  // from the bits of 64 queries of the tile to those of the next 64

  template <int kTileQ, int kTileK>
  __device__ __forceinline__ static StepBitsLayout of(const MaskLayout& l) {
    const auto block_q = static_cast<int32_t>(l.block_q);
    return {block_q / 8, block_q < kTileQ ? kTileK * 64 / 8 : 64 / 8};
  }
};

/// Looks for steps. One thread.
template <typename Tr>
class FindSteps {
 public:
  __device__ __forceinline__ FindSteps(typename Tr::Shared& shared, const BackwardParams& p)
      : shared_(shared), p_(p) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++item_.count) {
      shared_.block_ring.full[item_.stage()].wait(item_.phase());
      typename Tr::Block& block = shared_.blocks[item_.stage()];
      if (block.head_kv < 0) return;
      const auto& rule = rule_interval(block.walk);
      auto& steps = shared_.finder;
      steps.start(p_, {block.list, block.list_step, block.key_begin, block.seqlen_k}, rule.begin,
                  rule.end, block.head_begin, block.head_end);
      block.steps = 0;
      bool more;
#pragma unroll 1
      do {
        // (One place for this, whose code is long: the first step of all, or the one after `now`.)
        typename Tr::StepSlot::Record& found = slot(block.steps).record;
        more = steps.next(p_, found);
        if (block.steps == 0) {
          block.steps = more;
          shared_.known[item_.stage()].arrive();
          continue;
        }
        typename Tr::StepSlot& now = slot(0);
        now.next =
            more ? NextMaskedStep::of(found, rule.is_full(found.step.tile)) : NextMaskedStep{-1};
        shared_.found[at_.count % Tr::kFoundStages].arrive();
        load_bits(now, block.key_begin);
        ++at_.count;
      } while (more);
      if (!Tr::kPersistent) return;
      // A bulk copy writes the next record where this thread has read one. (The consumers have such
      // a fence in every step, before products read their dS.)
      ptx::fence_proxy_async();
      shared_.block_ring.empty[item_.stage()].arrive();
    }
  }

 private:
  __device__ __forceinline__ typename Tr::StepSlot& slot(int32_t ahead) {
    return shared_.steps[(at_.count + static_cast<uint32_t>(ahead)) % Tr::kSlots];
  }
  /// Copies the bits of a step, and arrives at q.full.
  __device__ __forceinline__ void load_bits(const typename Tr::StepSlot& now, int32_t key_begin) {
    constexpr int kLists = Tr::StepSlot::kLists, kParts = Tr::StepSlot::kParts;
    const MaskLayout& l = p_.mask_layout;
    const auto block_q = static_cast<int32_t>(l.block_q), block_k = static_cast<int32_t>(l.block_k);
    const int parts = block_q < Tr::kTileQ ? kParts : 1;
    const int32_t half_bytes = 64 * block_q / 8;
    const int stage = at_.stage();
    ptx::Barrier& full = shared_.q_ring.full[stage];
    shared_.q_ring.empty[stage].wait(at_.free());
    uint32_t bytes = 0;
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        if (i < parts && now.record.bits[n][i] >= 0) bytes += static_cast<uint32_t>(half_bytes);
    }
    if (bytes == 0) {
      full.arrive();
      return;
    }
    full.arrive_expect(bytes);
#pragma unroll 1
    for (int n = 0; n < kLists; ++n) {
#pragma unroll 1
      for (int i = 0; i < parts; ++i) {
        const int32_t place = now.record.bits[n][i];
        if (place < 0) continue;
        const int32_t row = (key_begin + 64 * n) & (block_k - 1);
        const int32_t* const from =
            p_.mask + l.key_bits + place * l.words_of_bits() + row * (block_q / 32);
        ptx::bulk_load(shared_.bits[stage] + i * (Tr::kTileK * 64 / 8) + n * half_bytes, from,
                       static_cast<uint32_t>(half_bytes), full);
      }
    }
  }

  typename Tr::Shared& shared_;
  const BackwardParams& p_;
  RingPosition<Tr::kItemStages> item_;
  RingPosition<Tr::kStages> at_;
};

/// Which of a thread's 2 keys x 16 queries, of 64 queries of a tile, are allowed: a bit each.
struct AllowedWord {
  uint32_t bits;

  /// All ones or zeros for each of the lane's i-th pair of accumulators, of four (query_of), of
  /// queries 16 j to 16 j + 15, as first_query says: as weights are packed.
  __device__ __forceinline__ uint32_t two(int first_query, int i) const {
    const int bit = bit_of(first_query + i / 2 * 8, i % 2), byte = bit / 8, first = bit % 8;
    const auto low = static_cast<uint32_t>(8 + byte), high = static_cast<uint32_t>(12 + byte);
    // Each bit becomes the sign of its byte.
    return ptx::sign_bytes(bits << (7 - first), bits << (6 - first), high * 0x1100u | low * 0x11u);
  }
  /// The bit of a query, of a lane whose first one is 0, and of one of the two keys.
  __device__ __forceinline__ static constexpr int bit_of(int query, int row) {
    return query % 32 / 8 * 8 + query / 32 % 2 * 4 + row * 2 + query % 2;
  }
};

/// The same of all queries of a tile.
template <int kTileQ>
struct AllowedPairs {
  uint32_t bits[kTileQ / 64];

  __device__ __forceinline__ AllowedWord of(int first_query) const {
    return {bits[first_query / 64]};
  }
  __device__ __forceinline__ void store(uint32_t address) const {
#pragma unroll
    for (int i = 0; i < kTileQ / 64; ++i)
      ptx::store_shared(address + static_cast<uint32_t>(4 * i), bits[i]);
  }
  __device__ __forceinline__ static AllowedPairs load(uint32_t address) {
    AllowedPairs allowed;
#pragma unroll
    for (int i = 0; i < kTileQ / 64; ++i)
      allowed.bits[i] = ptx::load_shared(address + static_cast<uint32_t>(4 * i));
    return allowed;
  }
  /// limits: address of those of the thread's first key (SeenQueries). bits: of the stage, in
  /// shared memory; key: the thread's first one, of the item; tile: the step's.
  template <typename Slot>
  __device__ __forceinline__ static AllowedPairs make(const MaskLayout& l, const Slot& slot,
                                                      uint32_t limits, uint32_t bits, int key,
                                                      int lane) {
    constexpr int kTileK = 64 * Slot::kLists;
    const int32_t(&places)[Slot::kParts] = slot.record.bits[key / 64];
    const int32_t first = slot.record.step.tile * kTileQ;
    const auto at = StepBitsLayout::of<kTileQ, kTileK>(l);
    const uint32_t row = bits + static_cast<uint32_t>(key * at.row_bytes) +
                         static_cast<uint32_t>(first & (static_cast<int32_t>(l.block_q) - 1)) / 8;
    AllowedPairs allowed{};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int2 seen = ptx::load_shared_wide<int2>(limits + 64 * r);
#pragma unroll
      for (int part = 0; part < kTileQ / 64; ++part) {
        const uint2 words = ptx::load_shared_wide<uint2>(
            row + static_cast<uint32_t>(8 * r * at.row_bytes + part * at.part_bytes));
        // Where there are no bits, what has been read is anything.
        const uint32_t has_bits = places[part] >= 0 ? ~0u : 0u;
        const uint32_t shows_all = places[part] == Slot::Record::kFull ? ~0u : 0u;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          const int32_t query = first + 64 * part + 32 * w;
          uint32_t word = ((w == 0 ? words.x : words.y) & has_bits) | shows_all;
          word &= from_bit(seen.x - query) & ~from_bit(seen.y - query);
          // Two of each eight queries are the lane's.
          allowed.bits[part] |= (word >> (2 * (lane % 4)) & 0x03030303u)
                                << AllowedWord::bit_of(32 * w, r);
        }
      }
    }
    return allowed;
  }

 private:
  /// All bits but the first n.
  __device__ __forceinline__ static uint32_t from_bit(int32_t n) {
    return ptx::shift_left(~0u, static_cast<uint32_t>(max(n, 0)));
  }
};

/// The same where it is loaded for each 16 queries: the general kernel has no registers for it.
struct AllowedPairsAt {
  uint32_t address;

  __device__ __forceinline__ AllowedWord of(int first_query) const {
    return {ptx::load_shared(address + static_cast<uint32_t>(first_query / 64 * 4))};
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_MASK_CUH_
