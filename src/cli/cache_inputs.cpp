// The tensors of a file that `strobe run` reads when k and v are a KV cache.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cli/errors.h"
#include "cli/inputs.h"
#include "cli/text.h"

namespace strobe::cli {
namespace {

constexpr int64_t kMostRows = 0x7fffffff;

// Each of them makes k and v a cache.
constexpr std::array kNames = {"block_table", "cache_batch_idx", "leftpad",
                               "k_new",       "v_new",           "cu_seqlens_k_new",
                               "rotary_cos",  "rotary_sin",      "rotary_position"};

}  // namespace

void Inputs::FindCache() {
  for (const char* name : kNames) {
    if (Find(name) == nullptr) continue;
    cache.kind = Find("block_table") != nullptr ? Cache::kPaged : Cache::kContiguous;
    cache.because = name;
    break;
  }
  if (!cached()) {
    // Packed queries whose keys are not packed.
    const auto has_rank = [this](const char* name, size_t rank) {
      return Find(name) != nullptr && Find(name)->shape.size() == rank;
    };
    if (Find("cu_seqlens_q") == nullptr || Find("cu_seqlens_k") != nullptr || !has_rank("q", 3) ||
        !(has_rank("k", 4) || has_rank("kv", 5))) {
      return;
    }
    cache.kind = Cache::kContiguous;
    cache.because = "cu_seqlens_q without cu_seqlens_k";
  }
  for (const char* name : {"cu_seqlens", "cu_seqlens_k"}) {
    if (Find(name) == nullptr) continue;
    throw UserError(fmt::format(
        "{} beside {}, expected cu_seqlens_q alone: the keys of a cache are not packed, seqused_k "
        "has their lengths",
        name, cache.because));
  }
  if (Find("qkv") != nullptr) {
    throw UserError(
        fmt::format("qkv beside {}, expected q, and the cache in k and v (or kv)", cache.because));
  }
}

void Inputs::CheckCacheEntries() const {
  if (cache.kind == Cache::kPaged || !cache.cache_batch_idx.empty()) return;
  Expect(k.batch >= Batch(), k, "cache_batch", k.batch,
         fmt::format("at least {}, the sequences (or cache_batch_idx)", Batch()));
}

void Inputs::ReadCache(Layout layout) {
  if (cache.kind == Cache::kPaged) {
    const TensorInfo& info = *Find("block_table");
    if (Find("cache_batch_idx") != nullptr)
      throw UserError("cache_batch_idx beside block_table, expected one of them");
    if (info.shape.size() != 2 || info.shape[1] < 1) {
      throw UserError(fmt::format("block_table is {} {}, expected I32 [batch, pages_per_sequence]",
                                  info.dtype, ShapeText(info.shape)));
    }
    cache.pages_per_sequence = info.shape[1];
    cache.block_table = TakeIntegers("block_table", {Batch(), cache.pages_per_sequence});
  }
  cache.cache_batch_idx = TakeIntegers("cache_batch_idx", {Batch()});
  cache.leftpad = TakeIntegers("leftpad", {Batch()});
  CheckCacheEntries();

  const bool packed = Find("cu_seqlens_k_new") != nullptr;
  if (packed || Find("k_new") != nullptr || Find("v_new") != nullptr) {
    for (const char* name : {"k_new", "v_new"}) {
      if (Find(name) == nullptr)
        throw UserError(
            fmt::format("{} has no {}, expected k_new and v_new", PathText(options_.input), name));
    }
    if (arrays.seqused_k.empty()) {
      throw UserError(
          "k_new without seqused_k, expected the rows of the cache that each sequence "
          "has: the new ones follow");
    }
    cache.append = packed ? Append::kPacked : Append::kDense;
    cache.packing_new = {.varlen = packed, .layout = layout, .rows = "seqlen_new"};
    cache.k_new = Read(*Take("k_new"), cache.packing_new);
    cache.v_new = Read(*Take("v_new"), cache.packing_new);
    const Tensor &k_new = cache.k_new, &v_new = cache.v_new;
    if (!packed) ExpectSame(k_new, "batch", k_new.batch, Batch(), q);
    ExpectSame(k_new, "heads", k_new.heads, k.heads, k);
    ExpectSame(k_new, "head_dim", k_new.dim, k.dim, k);
    ExpectSame(v_new, "batch", v_new.batch, k_new.batch, k_new);
    ExpectSame(v_new, cache.packing_new.RowsName(), v_new.seqlen, k_new.seqlen, k_new);
    ExpectSame(v_new, "heads", v_new.heads, v.heads, v);
    ExpectSame(v_new, "head_dim", v_new.dim, v.dim, v);
    if (packed) {
      cache.cu_seqlens_k_new = TakeIntegers("cu_seqlens_k_new", {Batch() + 1});
      CheckOffsets("cu_seqlens_k_new", cache.cu_seqlens_k_new, k_new);
    }
  }
  ReadRotary();
}

void Inputs::ReadRotary() {
  cache.rotary_position = TakeIntegers("rotary_position", {Batch()});
  const TensorInfo* const tables[] = {Take("rotary_cos"), Take("rotary_sin")};
  if (tables[0] == nullptr && tables[1] == nullptr) {
    if (cache.rotary_position.empty()) return;
    throw UserError("rotary_position without rotary_cos and rotary_sin, expected all three");
  }
  for (const TensorInfo* table : tables) {
    if (table == nullptr)
      throw UserError("rotary_cos or rotary_sin without the other, expected both");
    const bool good = table->dtype == Find(q.name)->dtype && table->shape.size() == 2 &&
                      1 <= table->shape[1] && table->shape[1] <= q.dim / 2 &&
                      table->shape[0] <= kMostRows && table->shape == tables[0]->shape;
    if (good) continue;
    throw UserError(fmt::format(
        "{} is {} {}, expected {} [positions, rotary_dim / 2] with rotary_dim at most {}, cos and "
        "sin alike",
        table->name, table->dtype, ShapeText(table->shape), Find(q.name)->dtype, q.dim));
  }
  cache.rotary_rows = tables[0]->shape[0];
  cache.rotary_dim = 2 * tables[0]->shape[1];
}

int64_t Inputs::SeqlenQ() const {
  if (!varlen) return q.seqlen;
  const int64_t longest = Longest(cu_seqlens_q);
  return bias.shape.empty() || bias.shape[2] == 1 ? longest : bias.shape[2];
}

int64_t Inputs::SeqlenK() const {
  if (cache.kind == Cache::kPaged)
    return std::min<int64_t>(kMostRows / k.seqlen, cache.pages_per_sequence) * k.seqlen;
  if (!varlen || cached()) return k.seqlen;
  return bias.shape.empty() ? Longest(cu_seqlens_k) : bias.shape[3];
}

}  // namespace strobe::cli
