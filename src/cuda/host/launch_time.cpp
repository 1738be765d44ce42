#include "cuda/host/launch_time.h"

#include "core/arithmetic.h"
#include "core/mask.h"
#include "cuda/host/fill_params.h"

namespace strobe::cuda {

namespace {

// Constants are microseconds, or kilobytes of K and V that a multiprocessor gets in a microsecond
// where all of them read. They follow from an H100's times of 222 random shapes and of forced rows,
// and above 128 columns from an H200's (docs/log/2026-11.md). Other devices are taken to have
// multiprocessors like these: where theirs are slower, they are so for either side of the
// comparison. Their memory is taken as they say that it is.

// What the kernels that divide keys read of memory, for each multiprocessor: of the memory's own
// rate an H100 gives them 0.89, and an H200 0.80 to 0.85.
double reading_rate(const DeviceProperties& device) {
  constexpr double kOfH100 = 22.5, kShare = 0.87;
  return device.memory_rate > 0 ? kShare * device.memory_rate / device.multiprocessors : kOfH100;
}

// Tiles of `rows` rows, of which each query has `rows_of_query`. Of packed sequences the sum is
// known and not how it is made up: at most one tile of each is not full.
int64_t count_tiles(const AttentionProblem& p, int64_t rows_of_query, int64_t rows) {
  const int64_t most = p.batch * ceil_div(p.seqlen_q * rows_of_query, rows);
  return p.varlen ? min64(most, p.total_q * rows_of_query / rows + p.batch) : most;
}

// Of a sequence, on average.
int64_t mean_keys(const AttentionProblem& p) {
  return p.varlen ? ceil_div(p.total_k, max64(1, p.batch)) : p.seqlen_k;
}

// Those of them that some query sees.
int64_t keys_of_all_queries(const AttentionProblem& p) {
  return MaskRule::of(p).most_seen(max64(1, p.seqlen_q), mean_keys(p));
}

double kilobytes_of_key(const AttentionProblem& p) {
  return static_cast<double>(2 * (p.head_dim + p.head_dim_v)) * 1e-3;
}

// K and V, as far as queries see them.
double kilobytes_of_keys(const AttentionProblem& p) {
  return static_cast<double>(p.batch * p.heads_kv) * static_cast<double>(keys_of_all_queries(p)) *
         kilobytes_of_key(p);
}

}  // namespace

WholeTiles whole_tiles(const AttentionProblem& p, const ForwardConfig& c,
                       const DeviceProperties& device) {
  // A tile takes so long for itself, and so long for each 128 keys: a part whatever the width is,
  // and a part for each column. Tensor cores that mma.sync feeds have half the rate of wgmma's, at
  // the best. TMA reads rows the more slowly that begin within a sector of 32 bytes, as those of 72
  // columns do.
  constexpr double kBegin = 7, kTile = 1.1, kKeys = 128, kBlock = 0.55, kColumn = 0.0045,
                   kOfReadingRate = 0.93, kOfSectors = 0.6;
  const double slower = c.arch == 90 ? 1 : 2;
  const double columns = static_cast<double>(p.head_dim + p.head_dim_v) / 2;
  const auto time_of_tile = [&](int64_t keys) {
    const auto blocks = static_cast<double>(ceil_div(keys, c.tile_k) * c.tile_k) / kKeys;
    return kTile + blocks * (kBlock + kColumn * columns) * slower;
  };
  const MaskRule rule = MaskRule::of(p);
  const int64_t queries = max64(1, min64(p.seqlen_q, c.tile_q)), mean = mean_keys(p);
  const int64_t hidden = p.causal ? min64(p.seqlen_q, mean) / 2 : 0;  // from a query, on average
  const double longest = time_of_tile(rule.most_seen(queries, p.seqlen_k));
  const double usual = time_of_tile(max64(1, rule.most_seen(queries, mean) - hidden));
  const int64_t tiles = p.heads * count_tiles(p, 1, c.tile_q);
  const bool in_sectors = p.head_dim * 2 % 32 == 0 && p.head_dim_v * 2 % 32 == 0;
  const double rate = kOfReadingRate * reading_rate(device) * device.multiprocessors *
                      (c.arch == 90 && !in_sectors ? kOfSectors : 1);
  // Tiles come in rounds of one a multiprocessor, each of which reads its part of the keys; the
  // last round may be a few tiles, which read and compute alone.
  const double reading = kilobytes_of_keys(p) / rate / static_cast<double>(max64(1, tiles));
  const auto time_of_round = [&](int64_t of_round) {
    const double read = reading * static_cast<double>(of_round);
    return of_round == 0 ? 0 : usual > read ? usual : read;
  };
  const double rounds =
      static_cast<double>(tiles / device.multiprocessors) * time_of_round(device.multiprocessors) +
      time_of_round(tiles % device.multiprocessors);
  return {tiles, kBegin + (longest > rounds ? longest : rounds)};
}

int64_t pieces_of_span(int64_t units, int64_t share, int64_t own) {
  if (own > 0) return min64(units, own);
  // Shares begin where they do; but where spans are made of shares, or shares of spans, they meet.
  if (share % units == 0) return 1;
  return units % share == 0 ? units / share : min64(units, ceil_div(units, share) + 1);
}

double merging_time(const CachedConfig& c, int64_t rows, int64_t pieces, bool apart) {
  // The thread block that merges has some rows for each warp. The first costs a warp so much, in
  // the shade of what every launch begins with, and those after it more, since they wait for the
  // instructions of the merge; each piece adds to that, 128 columns of it. A kernel of its own
  // begins when the last thread block has ended.
  constexpr double kFirstRow = 0.8, kNextRow = 3, kPiece = 0.05, kColumns = 128, kApart = 5;
  const double reading = kPiece * static_cast<double>(pieces) * c.width / kColumns;
  if (apart) return kApart + reading;
  if (pieces == 1) return 0;
  const auto rows_of_warp = static_cast<double>(ceil_div(rows, c.warps));
  return kFirstRow + kNextRow * (rows_of_warp - 1) + reading * rows_of_warp;
}

DividedKeys divided_keys(const AttentionProblem& p, const CachedInstance& instance,
                         const DeviceProperties& device) {
  // A multiprocessor reads, or multiplies so long for each 128 keys of a tile of 64 rows, whichever
  // takes longer; with one warp for each of its schedulers nobody goes on while that waits. Keys
  // that another tile of the head has read lie in L2, if they are not too many. What ends a tile
  // and begins the next one within a thread block is not hidden, and the first time it is cold
  // code, unless another thread block of the multiprocessor goes on meanwhile.
  constexpr double kBegin = 9, kReadAgainRate = 45, kKilobytesOfL2 = 64e3, kKeys = 128, kRows = 64,
                   kBlock = 0.9, kColumn = 0.015, kOneTeam = 1.3, kNextTile = 2.5,
                   kFirstNextTile = 6;
  const CachedConfig& c = instance.config;
  CachedUpdateParams params{};
  fill_params(p, ForwardArgs{}, params);
  const CachedGrid grid = instance.carve(params, device.multiprocessors, device.shared_bytes);
  const int64_t group = p.heads / p.heads_kv;
  const int64_t tiles = max64(1, count_tiles(p, group, c.tile_q));
  // All tiles of a sequence walk through the keys that some query sees (shares.h).
  const int64_t units = max64(1, ceil_div(keys_of_all_queries(p), grid.unit));
  const int64_t share = grid.of_span > 0
                            ? ceil_div(units, grid.of_span)
                            : ceil_div(tiles * ceil_div(p.heads_kv, grid.x) * units, grid.y);

  // The first tile of a sequence reads memory.
  const double again = 1 - static_cast<double>(min64(p.batch, tiles)) / static_cast<double>(tiles);
  const bool stay = kilobytes_of_keys(p) <= kKilobytesOfL2;
  const double rate = reading_rate(device);
  const double again_rate = stay && kReadAgainRate > rate ? kReadAgainRate : rate;
  const double blocks = static_cast<double>(grid.x * grid.y) / device.multiprocessors;
  const double keys = static_cast<double>(share * grid.unit) * (blocks > 1 ? blocks : 1);
  const double reading = keys * kilobytes_of_key(p) * ((1 - again) / rate + again / again_rate);
  const double columns = static_cast<double>(p.head_dim + p.head_dim_v) / 2;
  const bool one_team =
      c.tile_q == 16 * c.warps && 2 * instance.shape.shared_bytes > device.shared_bytes;
  const double slower = one_team ? kOneTeam : 1;
  const double multiplying =
      keys / kKeys * c.tile_q / kRows * (kBlock + kColumn * columns) * slower;

  const int64_t pieces = grid.most_chunks > 0 ? min64(units, grid.most_chunks)
                                              : pieces_of_span(units, share, grid.of_span);
  const int64_t rows = min64(c.tile_q, p.seqlen_q * group);
  const double merging = merging_time(c, rows, pieces, grid.merges_apart);

  // Tiles that a thread block has after its first.
  double next_tiles = 0;
  if (share > units)
    next_tiles = kNextTile * static_cast<double>(share - units) / static_cast<double>(units);
  const int64_t line = tiles * ceil_div(p.heads_kv, grid.x) * units;  // of a track
  const bool meet = line == share * grid.y && (share % units == 0 || units % share == 0);
  const bool has_cut_shares = grid.most_chunks == 0 && grid.of_span == 0 && line > units && !meet;
  if (has_cut_shares) next_tiles += blocks > 1 ? kNextTile : kFirstNextTile;
  return {tiles * p.heads_kv, pieces, grid.merges_apart,
          kBegin + (reading > multiplying ? reading : multiplying) + merging + next_tiles};
}

}  // namespace strobe::cuda
