// What one warp of the mma.sync forward kernel does (forward_sm80.cuh): its products, its softmax,
// its results.
#ifndef STROBE_CUDA_MMA_SYNC_FORWARD_WARP_CUH_
#define STROBE_CUDA_MMA_SYNC_FORWARD_WARP_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/bias.cuh"
#include "cuda/common/dropout.cuh"
#include "cuda/common/element.h"
#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/mask_visits.cuh"
#include "cuda/common/params.h"
#include "cuda/common/quad.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/common/walks.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// Of TileInfo, which has to be known before.
inline constexpr int kTileInfoBytes = (108 + sizeof(BlocksOf<int32_t>) + 15) / 16 * 16;

/// The kernel's template argument: a configuration and its tuning.
template <int kDtype, int kWidth_, int kTileQ_, int kTileK_, int kStages, int kWarps, int kStep_,
          int kKept_, int kSplit_, int kMinBlocks_, bool kScaled_ = false>
struct ForwardShape {
  using T = Element<kDtype>;
  static constexpr int kWidth = kWidth_, kTileQ = kTileQ_, kTileK = kTileK_, kStep = kStep_;
  static constexpr int kKept = kKept_, kSplit = kSplit_, kMinBlocks = kMinBlocks_;
  static constexpr bool kScaled = kScaled_;  // scores have ForwardParams::score_factor
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTeams = kWarps / kSplit;  // of warps that share rows
  static constexpr int kRows = kTileQ / kTeams;
  static constexpr int kWarpStep = kStep / kSplit;  // keys of a step whose scores a warp has
  using QTile = SharedTile<kTileQ, kWidth>;
  using KTile = SharedTile<kTileK, kWidth>;
  static constexpr int kStageBytes = 2 * KTile::kBytes;
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr bool kKeepAll = kKept == kWidth / 16;
  static constexpr int kQOffset = kKeepAll ? kRing - QTile::kBytes : kRing;
  static constexpr int kWeightsOffset = kKeepAll ? kRing : kRing + QTile::kBytes;
  // A warp's weights of a step, as 16-byte fragments by lane; two sets, used in turn.
  static constexpr int kWeightsBytes = kSplit == 1 ? 0 : kRows * kWarpStep * 2;
  static constexpr int kLimitsOffset = kWeightsOffset + 2 * kWarps * kWeightsBytes;
  static constexpr int kTeamWalksOffset = kLimitsOffset + kTileQ * 8;
  static constexpr int kInfoOffset = kTeamWalksOffset + kTeams * 16;
  static constexpr int kVisitsOffset = kInfoOffset + kTileInfoBytes;
  using Visits = MaskVisits<kTileQ, kTileK>;
  // kBias: of the kernel that takes a mask as data too.
  template <bool kBias>
  static constexpr int kSharedBytes = kVisitsOffset + (kBias ? sizeof(Visits) : 0);
  static_assert(kRows % 16 == 0 && kTileK % kStep == 0 && kWarpStep % 16 == 0);
  static_assert(kStages == 2 && (kSplit == 1 || kSplit == 2));
  static_assert(!kKeepAll || QTile::kBytes <= kRing - kStageBytes);
  static_assert(kSharedBytes<true> <= 227 * 1024, "the most that any device has");
};

/// Where a team's queries have steps of keys in the blocks that the tile visits, in rows
/// (IntervalWalk::in_rows): what the mask alone says, whichever blocks these are. What a team adds
/// to it, that its first steps have no reference yet, only the team knows (StepKind).
struct alignas(16) TeamWalk : IntervalWalk<int32_t> {};
/// Where a tile's keys, values and results are.
struct alignas(16) TileInfo {
  RowsView k, v, out;
  float* lse;  // of the tile's first row; null: not wanted
  int32_t batch, head, begin;
  BlocksOf<int32_t> walk;  // the tile's, through blocks of kTileK keys
  int32_t position;        // of row `begin` among the keys
  float slope_log2;        // ALiBi
  int32_t v_nonfinite;     // V has infs or NaNs, which the second attempt has left out
  uint32_t dropout_head;   // Dropout::batch_head
};
static_assert(sizeof(TileInfo) == kTileInfoBytes);

enum class StepKind { kFull, kMasked, kOnline };

/// What a warp holds and does: kRows rows of O, their softmax, and their queries.
template <typename Shape, bool kGeneral, bool kBias>
struct Warp {
  using T = typename Shape::T;
  using KTile = typename Shape::KTile;
  using QTile = typename Shape::QTile;
  static constexpr int kM = Shape::kRows / 16;                  // row blocks
  static constexpr int kKSteps = Shape::kWidth / 16;            // of Q K^T
  static constexpr int kN = Shape::kWidth / 8 / Shape::kSplit;  // column blocks of O
  static constexpr int kStep = Shape::kWarpStep;
  static constexpr int kKept = Shape::kKept, kSplit = Shape::kSplit;
  using Scores = float[kM][kStep / 8][4];

  const ForwardParams& p;
  const TileInfo& info;
  const int2* all_limits;  // keys [x, y) that the tile's rows see, in shared memory
  uint32_t ring;           // address of all shared memory
  int lane, team, part;    // part: which of the warps that share rows
  const int2* limits;      // of the warp's rows
  uint32_t q_tile;         // shared address of the warp's rows of Q
  uint32_t weights;        // shared address of the team's weights: [set][part]
  uint32_t q_fragment[kM][kKept ? kKept : 1][4];
  float scale_log2;

  float o[kM][kN][4];
  float reference[kM][2], sum[kM][2];  // of rows lane / 4 and + 8; sums are this lane's part

  /// Works out which warp this is.
  __device__ __forceinline__ void stand_at(int thread) {
    lane = thread % 32;
    // The shuffle tells the compiler that the number is the same for a whole warp.
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);
    team = warp % Shape::kTeams;
    part = kSplit == 1 ? 0 : warp / Shape::kTeams;
    scale_log2 = p.scale * kLog2e;
    limits = all_limits + team * Shape::kRows;
    q_tile = ring + static_cast<uint32_t>(Shape::kQOffset + team * Shape::kRows * QTile::kRowBytes);
    weights = ring + static_cast<uint32_t>(Shape::kWeightsOffset +
                                           team * 2 * kSplit * Shape::kWeightsBytes);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      reference[m][0] = reference[m][1] = -infinity();
      sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
      for (int n = 0; n < kN; ++n) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.f;
    }
  }

  __device__ __forceinline__ void load_q(uint32_t (&a)[4], int m, int step) const {
    const uint32_t at = q_tile + static_cast<uint32_t>(QTile::fragment_offset(lane, 0));
    ptx::ldmatrix(a, (at ^ 32 * QTile::block_k(16 * step)) +
                         static_cast<uint32_t>(QTile::block_offset(16 * m, 16 * step)));
  }
  __device__ __forceinline__ void keep_q() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int step = 0; step < kKept; ++step) load_q(q_fragment[m][step], m, step);
    }
  }

  /// s = Q K^T of kStep keys. k: shared address of their rows of the K tile.
  __device__ __forceinline__ void scores(Scores& s, uint32_t k) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
    }
    const uint32_t at = k + static_cast<uint32_t>(KTile::fragment_offset_b(lane, 0));
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (step < kKept) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = q_fragment[m][step < kKept ? step : 0][i];
        } else {
          load_q(a[m], m, step);
        }
      }
#pragma unroll
      for (int n = 0; n < kStep / 16; ++n) {
        uint32_t b[4];
        ptx::ldmatrix(b, (at ^ 32 * KTile::block_k(16 * step)) +
                             static_cast<uint32_t>(KTile::block_offset(16 * n, 16 * step)));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma<T>(s[m][2 * n], a[m], b[0], b[1]);
          ptx::mma<T>(s[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// O += P V of 16 keys, P as A operands. v: shared address of their rows of the V tile.
  __device__ __forceinline__ void multiply(const uint32_t (&a)[kM][4], uint32_t v) {
    // Of each 16 * kSplit columns, the part's 16.
    const uint32_t at = (v + static_cast<uint32_t>(KTile::fragment_offset(lane, 0))) ^ 32 * part;
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      constexpr int kApart = 16 * kSplit;
      uint32_t b[4];
      ptx::ldmatrix_trans(b, (at ^ 32 * KTile::block_k(kApart * n)) +
                                 static_cast<uint32_t>(KTile::block_offset(0, kApart * n)));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        ptx::mma<T>(o[m][2 * n], a[m], b[0], b[1]);
        ptx::mma<T>(o[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }

  /// O += P V, s being the weights. v: shared address of the step's rows of the V tile. set: which
  /// of the two sets of exchanged weights is this step's.
  __device__ __forceinline__ void accumulate(const Scores& s, uint32_t v, int set) {
    constexpr int kRowsBytes = 16 * KTile::kRowBytes, kBlocks = kStep / 16;
    const uint32_t exchanged =
        weights + static_cast<uint32_t>(set * kSplit * Shape::kWeightsBytes + 16 * lane);
    const uint32_t mine = exchanged + static_cast<uint32_t>(part * Shape::kWeightsBytes);
    const uint32_t own_v = v + static_cast<uint32_t>(part * kBlocks * kRowsBytes);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        a[m][0] = ptx::pack<T>(s[m][2 * j][0], s[m][2 * j][1]);
        a[m][1] = ptx::pack<T>(s[m][2 * j][2], s[m][2 * j][3]);
        a[m][2] = ptx::pack<T>(s[m][2 * j + 1][0], s[m][2 * j + 1][1]);
        a[m][3] = ptx::pack<T>(s[m][2 * j + 1][2], s[m][2 * j + 1][3]);
        if constexpr (kSplit == 2) {
          ptx::store_shared_words(mine + static_cast<uint32_t>((j * kM + m) * 512), a[m]);
        }
      }
      multiply(a, own_v + static_cast<uint32_t>(j * kRowsBytes));
    }
    if constexpr (kSplit == 2) {
      team_barrier();
      const uint32_t other = exchanged + static_cast<uint32_t>((part ^ 1) * Shape::kWeightsBytes);
      const uint32_t other_v = v + static_cast<uint32_t>((part ^ 1) * kBlocks * kRowsBytes);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        uint32_t a[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::load_shared_words(other + static_cast<uint32_t>((j * kM + m) * 512), a[m]);
        }
        multiply(a, other_v + static_cast<uint32_t>(j * kRowsBytes));
      }
    }
  }

  __device__ __forceinline__ void team_barrier() const { ptx::named_barrier_sync<64>(1 + team); }
  /// How two warps that share rows exchange a value for each row: each writes its own to a set of
  /// the weights that is not being read, and reads the other's after a barrier.
  __device__ __forceinline__ uint32_t row_value(int set, int from, int m, int h) const {
    return weights + static_cast<uint32_t>((set * kSplit + from) * Shape::kWeightsBytes +
                                           4 * (16 * m + lane / 4 + 8 * h));
  }
  __device__ __forceinline__ void send_row(int set, int m, int h, float x) const {
    if (lane % 4 == 0) ptx::store_shared_float(row_value(set, part, m, h), x);
  }
  __device__ __forceinline__ float received_row(int set, int m, int h) const {
    return ptx::load_shared_float(row_value(set, part ^ 1, m, h));
  }

  /// Softcap and ALiBi: q.k -> score in log 2 units.
  __device__ __forceinline__ void apply_features(Scores& s, int32_t key0) const {
    // A tile of 128 x 64 at width 128 leaves no register. To avoid a spill, the position has to be
    // in a variable on 9.0, and computed again at each use before 9.0, and of codes.
#if __CUDA_ARCH__ >= 900
    const int32_t kept_position = info.position + team * Shape::kRows;
#endif
    // (Of codes, their scales: read each time, from a cache.)
    const auto of_head = [&] {
      const Score score = Score::of(p, info.slope_log2);
      if constexpr (Shape::kScaled) return score.times(p.score_factor(info.batch, info.head));
      return score;
    };
    of_head().template choose<false>([&](auto cap, auto slopes) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Score score = of_head();
#if __CUDA_ARCH__ < 900
          const int32_t position = info.position + team * Shape::kRows;
#else
          const int32_t position =
              Shape::kScaled ? info.position + team * Shape::kRows : kept_position;
#endif
          const Score::Row row =
              score.row(position + 16 * m + lane / 4 + 8 * h, key0 + 2 * (lane % 4));
          for_row(s[m], h, [&](int column, float& x) {
            x = row.template value<decltype(cap)::value, decltype(slopes)::value>(x, column);
          });
        }
      }
    });
  }
  /// Adds the bias to scores, in log 2 units. Rows past the last query take its bias: nothing of
  /// them is written. Keys past the last are not read.
  __device__ __forceinline__ void apply_bias(Scores& s, int32_t key0) const {
    const BiasPlane bias = BiasPlane::of(p.bias, info.batch, info.head);
    const int32_t key = key0 + 2 * (lane % 4);
    // pair(row, key): the bias of the key and the next.
    const auto add = [&](const auto& pair) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int32_t query = info.begin + team * Shape::kRows + 16 * m + lane / 4 + 8 * h;
          const char* const row = bias.row(min(query, info.out.rows - 1));
#pragma unroll
          for (int n = 0; n < kStep / 8; ++n) {
            const float2 b = pair(row, key + 8 * n);
            s[m][n][2 * h] = add_bias(s[m][n][2 * h], b.x);
            s[m][n][2 * h + 1] = add_bias(s[m][n][2 * h + 1], b.y);
          }
        }
      }
    };
    const int32_t keys = info.k.rows;
    if (!bias.pairs || key0 + kStep > keys) {
      add([&](const char* row, int32_t first) {
        return make_float2(first < keys ? bias.value(row, first) : 0.f,
                           first + 1 < keys ? bias.value(row, first + 1) : 0.f);
      });
    } else {
      bias.of_type([&](auto type) {
        constexpr int32_t kType = decltype(type)::value;
        add([](const char* row, int32_t first) { return BiasPlane::two<kType>(row, first); });
      });
    }
  }
  /// Has L2 fetch the bias of the keys from key0 on, by all threads: of the block after this one.
  __device__ __forceinline__ void prefetch_bias(int32_t key0) const {
    BiasPlane::of(p.bias, info.batch, info.head)
        .prefetch(info.begin, Shape::kTileQ, info.out.rows - 1, key0, Shape::kTileK,
                  info.k.rows - 1, static_cast<int>(threadIdx.x), Shape::kThreads);
  }
  /// Sets weights that dropout drops to zero. That is done after they are summed, since dropout
  /// comes after the softmax.
  __device__ __forceinline__ void drop(Scores& s, int32_t key0) const {
    const auto first_row = static_cast<uint32_t>(info.begin + team * Shape::kRows);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kStep / 8; n += 2) {
        uint32_t word[4];
        dropout_words(p.dropout, info.dropout_head, first_row + 16 * m,
                      static_cast<uint32_t>(key0) / 8 + n, lane, word);
#pragma unroll
        for (int b = 0; b < 4; ++b) {  // dropout_words: rows b / 2, columns b % 2
          float(&x)[4] = s[m][n + b % 2];
          x[b / 2 * 2] = keep_low(p.dropout, word[b]) ? x[b / 2 * 2] : 0.f;
          x[b / 2 * 2 + 1] = keep_high(p.dropout, word[b]) ? x[b / 2 * 2 + 1] : 0.f;
        }
      }
    }
  }

  /// A row's limits, relative to this lane's first column of the keys from key0.
  __device__ __forceinline__ int2 limits_from(int32_t key0, int m, int h) const {
    const int2 limit = limits[16 * m + lane / 4 + 8 * h];
    return make_int2(limit.x - key0 - 2 * (lane % 4), limit.y - key0 - 2 * (lane % 4));
  }

  // Which of a step's keys, from this lane's first column on, the lane's rows see.
  using Seen = uint32_t[kM][2];
  /// By the rule and, where it has bits for the step, by the mask as data. part: what its lists
  /// say.
  __device__ __forceinline__ void look(Seen& seen, int32_t key0, int32_t listed) const {
    static_assert(kStep <= 32);
    // Of the step's keys, from the first row of a block of queries on; blocks are powers of two.
    const uint32_t* bits = nullptr;
    int32_t block_q = 0, words = 0;
    if (listed >= 0) {
      const MaskLayout& l = p.mask_layout;
      const auto block_k = static_cast<int32_t>(l.block_k);
      block_q = static_cast<int32_t>(l.block_q);
      words = block_k / 32;
      bits = reinterpret_cast<const uint32_t*>(p.mask) + l.bits + listed * l.words_of_bits() +
             (key0 & (block_k - 1)) / 32;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + lane / 4 + 8 * h;
        const int2 limit = limits[row];
        uint32_t keys = bits_below(limit.y - key0) & ~bits_below(limit.x - key0);
        if (listed >= 0) {
          // Rows past the last query see what it sees: nothing of them is written.
          const int32_t query = min(info.begin + team * Shape::kRows + row, info.out.rows - 1);
          keys &= bits[(query & (block_q - 1)) * words] >> (key0 % 32);
        }
        seen[m][h] = keys >> 2 * (lane % 4);
      }
    }
  }

  /// Sets scores of keys that a row does not see to -inf, takes the new maxima, and rescales O and
  /// the sums by them. all: every row sees every key; else seen, where there may be a mask as data.
  __device__ __forceinline__ void raise_references(Scores& s, int32_t key0, bool all,
                                                   const Seen& seen, int set) {
    float max[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (kBias && !all) {
          for_row(s[m], h, [&](int column, float& x) {
            x = (seen[m][h] >> column & 1) != 0 ? x : -infinity();
          });
        } else if (!all) {
          const int2 limit = limits_from(key0, m, h);
          for_row(s[m], h, [&](int column, float& x) {
            x = column >= limit.x && column < limit.y ? x : -infinity();
          });
        }
        max[m][h] = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kStep / 8; ++n) {
          max[m][h] = fmaxf(max[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
        // The scale is positive here, or 1 because the scores have it already.
        const float scale = kGeneral ? 1.f : scale_log2;
        max[m][h] = fmaxf(quad_max(max[m][h]) * scale, reference[m][h]);
        if constexpr (kSplit == 2) send_row(set, m, h, max[m][h]);
      }
    }
    if constexpr (kSplit == 2) {
      team_barrier();
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) max[m][h] = fmaxf(max[m][h], received_row(set, m, h));
      }
      team_barrier();  // before the weights overwrite these values
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float old = reference[m][h];
        reference[m][h] = max[m][h];
        if (__any_sync(0xffffffffu, max[m][h] != old && old > -infinity())) {
          const float alpha = exp2_fast(old - reference_of(max[m][h]));
          sum[m][h] *= alpha;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            o[m][n][2 * h] *= alpha;
            o[m][n][2 * h + 1] *= alpha;
          }
        }
      }
    }
  }

  /// The keys of a step from key0; k, v: shared addresses of their rows; all: as above; listed:
  /// what the lists of a mask as data say of the step, where there may be one.
  template <StepKind kKind>
  __device__ __forceinline__ void step(uint32_t k, uint32_t v, int32_t key0, bool all,
                                       int32_t listed) {
    Scores s;
    const int set = key0 / Shape::kStep % 2;
    if constexpr (kSplit == 2) {
      k += static_cast<uint32_t>(part * kStep * KTile::kRowBytes);
      key0 += part * kStep;
    }
    scores(s, k);
    if constexpr (kGeneral) apply_features(s, key0);
    if constexpr (kBias) {
      if (p.bias.data) apply_bias(s, key0);
    }
    Seen seen = {};
    if constexpr (kBias && kKind != StepKind::kFull) {
      if (!all) look(seen, key0, listed);
    }
    if constexpr (kKind == StepKind::kOnline) raise_references(s, key0, all, seen, set);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int2 limit = make_int2(0, kStep);
        if constexpr (kKind == StepKind::kMasked && !kBias) limit = limits_from(key0, m, h);
        const float subtract =
            kKind == StepKind::kOnline ? reference_of(reference[m][h]) : reference[m][h];
        for_row(s[m], h, [&](int column, float& x) {
          x = exp2_fast(kGeneral ? x - subtract : fmaf(x, scale_log2, -subtract));
          if constexpr (kKind == StepKind::kMasked && kBias) {
            x = (seen[m][h] >> column & 1) != 0 ? x : 0.f;
          } else if constexpr (kKind == StepKind::kMasked) {
            x = column >= limit.x && column < limit.y ? x : 0.f;
          }
          sum[m][h] += x;
        });
      }
    }
    if constexpr (kGeneral) {
      if (p.dropout.enabled()) drop(s, key0);
    }
    accumulate(s, v, set);
  }

  /// Whether every row of the warp has a reference, so that no step needs a maximum any more.
  __device__ __forceinline__ bool have_references() const {
    bool all = true;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      all &= reference[m][0] > -infinity() && reference[m][1] > -infinity();
    }
    return __all_sync(0xffffffffu, all) != 0;
  }

  /// Whether this lane's part of O is finite, and its sums are with room to spare.
  __device__ __forceinline__ bool all_finite() const {
    float zero[4] = {};  // four sums, so that one addition need not wait for another
    bool fine = true;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      fine &= sum[m][0] < 0x1p100f && sum[m][1] < 0x1p100f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) zero[i] = fmaf(o[m][n][i], 0.f, zero[i]);
      }
    }
    return fine && zero[0] + zero[1] + zero[2] + zero[3] == 0.f;
  }

  /// Sums up the lanes of a row. Where two warps share rows, each sends its part to the other, and
  /// a barrier must follow before it is read.
  __device__ __forceinline__ void sum_lanes() {
    if constexpr (kSplit == 2) team_barrier();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[m][h] = quad_sum(sum[m][h]);
        if constexpr (kSplit == 2) send_row(0, m, h, sum[m][h]);
      }
    }
  }

  /// Whether the mask as data leaves a row some of the keys that the rule lets it see; and whether
  /// it has no room for the row, of which it says nothing then.
  __device__ __forceinline__ void look_at_row(int32_t query, int2 limit, bool& sees,
                                              bool& lacks_room) const {
    const SequenceRows rows = p.sequence_rows(info.batch);
    const HeadMask mask = p.head_mask(rows, info.head);
    lacks_room = mask.lacks_room(query);
    sees = sees && mask.sees_some(query, {limit.x, limit.y});
  }

  /// O / sum to the rows of `out` from `first` on, and lse to `lse` on, where wanted. Out: T, in
  /// which case a lane has eight columns in a row after transposes within each quad; or float, of
  /// which a quad has eight columns, a sector, as they are. Returns whether something of O is not
  /// finite, but for rows with a NaN among their scores, or must not be used: what pairwise_rows
  /// then does again.
  template <typename Out>
  __device__ __forceinline__ bool finish(const RowsView& out, int32_t first, float* lse) const {
    const bool aligned = !kGeneral || out.aligned();
    const int column = lane / 2 % 2 * 16 * kSplit + lane % 2 * 8 + 16 * part;
    bool suspect = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + lane / 4 + 8 * h;
        const bool there = first + row < out.rows;
        char* const to = out.row(first + row);
        const int2 limit = limits[row];
        const float total = kSplit == 2 ? sum[m][h] + received_row(0, m, h) : sum[m][h];
        bool sees = limit.x < limit.y, lacks_room = false;
        if constexpr (kBias) {
          if (p.mask && there && total == 0.f) look_at_row(first + row, limit, sees, lacks_room);
        }
        RowResult result =
            finish_row(p, info.head, sees, reference[m][h], total, p.dropout.keep_scale);
        if (!kGeneral && is_coarse(reference[m][h])) result.factor = infinity();
        if (kBias && sees && total == 0.f) result.factor = infinity();
        if (kBias && lacks_room) result.factor = result.lse = __int_as_float(0x7fffffff);
        if (lse && lane % 4 == 0 && part == 0 && there) lse[row] = result.lse;
        bool is_finite = true;
        if constexpr (std::is_same_v<Out, float>) {
          const int32_t dim = out.dim;
          float zero = 0.f;  // 0 * x is NaN where x is not finite
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            const float x = o[m][n][2 * h] * result.factor;
            const float y = o[m][n][2 * h + 1] * result.factor;
            zero = fmaf(x, 0.f, fmaf(y, 0.f, zero));
            const int begin = n / 2 * 16 * kSplit + 16 * part + n % 2 * 8;
            if (there) store_floats(to, begin + lane % 4 * 2, dim, aligned, x, y);
          }
          is_finite = zero == 0.f;
        } else {
          uint32_t marks = 0;
#pragma unroll
          for (int n = 0; n < kN; n += 4) {
            uint32_t w[4];
#pragma unroll
            for (int d = 0; d < 4; ++d) {
              w[d] = ptx::pack<T>(o[m][n + d][2 * h] * result.factor,
                                  o[m][n + d][2 * h + 1] * result.factor);
              marks = mark_not_finite<T>(marks, w[d]);
            }
            quad_transpose(w, lane);
            if (there) store_words(to, column + 8 * kSplit * n, out.dim, aligned, w);
          }
          is_finite = !marked(marks);
        }
        suspect |= there && !is_finite && result.factor == result.factor;
      }
    }
    return suspect;
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FORWARD_WARP_CUH_
