// The tensors of a file that `strobe run` reads when k and v are a KV cache.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "cli/errors.h"
#include "cli/inputs.h"
#include "cli/text.h"
#include "core/element.h"

namespace strobe::cli {
namespace {

constexpr int64_t kMostRows = 0x7fffffff;

// Each of them makes k and v a cache.
constexpr std::array kNames = {"block_table",     "cache_batch_idx",  "leftpad",    "k_new",
                               "v_new",           "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
                               "rotary_position", "k_scale",          "v_scale"};

}  // namespace

void Inputs::FindCache() {
  for (const char* name : kNames) {
    // (Scales of float8 attention are no cache's.)
    if (Find(name) == nullptr || (float8() && std::string_view(name).ends_with("_scale"))) continue;
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

// Whether k and v are codes, of which kind their dtype and q's head_dim say.
void Inputs::FindQuantised() {
  if (float8()) {  // its keys and values are of q's dtype, or both of the other one
    const TensorInfo* const keys = Find("kv") != nullptr ? Find("kv") : Find("k");
    if (keys != nullptr && keys->dtype == "F8_E5M2")
      cache.k_dtype = cache.v_dtype = DType::kFloat8E5M2;
    const TensorInfo* const values = Find("v");
    if (keys != nullptr && values != nullptr && values->dtype != keys->dtype) {
      throw UserError(
          fmt::format("v is {}, expected {} like {}", values->dtype, keys->dtype, keys->name));
    }
    return;
  }
  const TensorInfo* const queries = Find("q");
  const TensorInfo *const keys = Find("k"), *const values = Find("v");
  if (keys == nullptr || values == nullptr) return;
  for (const TensorInfo* info : {keys, values}) {
    if (cached() || (info->dtype != "I8" && info->dtype != "U8")) continue;
    cache.kind = Cache::kContiguous;
    cache.because = info == keys ? "k" : "v";
  }
  if (!cached()) return;
  const int64_t dim = queries == nullptr || queries->shape.empty() ? 0 : queries->shape.back();
  cache.k_dtype = CodesIn(*keys, dim);
  cache.v_dtype = CodesIn(*values, 0);
}

// What the rows of a cache's k or v are, floats (kSame) or codes. dim: values of a row; 0: as its
// bytes say.
DType Inputs::CodesIn(const TensorInfo& info, int64_t dim) {
  if (info.dtype == "I8") return DType::kInt8;
  if (info.dtype == "F8_E4M3") return DType::kFloat8E4M3;
  if (info.dtype != "U8" || info.shape.empty()) return DType::kSame;
  const int64_t row = info.shape.back();
  for (const DType form : {DType::kQ8_0, DType::kQ4_0}) {
    // No number of bytes is rows of both, up to the most values.
    const int64_t block = row_elements(static_cast<int32_t>(form), kBlockValues);
    const int64_t found = row % block == 0 ? row / block * kBlockValues : 0;
    if (0 < found && found <= kMaxDim && (dim == 0 || found == dim)) return form;
  }
  throw UserError(fmt::format(
      "{} is U8 with rows of {} bytes, expected head_dim / 32 * 34 (q8_0) or * 18 (q4_0) of {}, a "
      "multiple of 32",
      info.name, row,
      dim > 0 ? fmt::format("q's head_dim = {}", dim)
              : "a head_dim up to " + std::to_string(kMaxDim)));
}

int64_t Inputs::Values(const Tensor& t) const {
  const auto codes = static_cast<int32_t>(CodesOf(t));
  return has_blocks(codes) ? t.dim / row_elements(codes, kBlockValues) * kBlockValues : t.dim;
}

// k_scale and v_scale: for each row, in the order of k's dimensions, for each head, or one.
void Inputs::ReadScales(Layout layout) {
  if (float8()) return;
  cache.k_scale_strides = cache.v_scale_strides = {};
  const bool rows_first = layout == Layout::kSeqlenHeads;
  const std::vector<int64_t> of_rows = rows_first
                                           ? std::vector<int64_t>{k.batch, k.seqlen, k.heads}
                                           : std::vector<int64_t>{k.batch, k.heads, k.seqlen};
  const TensorInfo* first = nullptr;  // which the other one is like
  for (const Tensor* t : {&k, &v}) {
    const std::string name = t->name + "_scale";
    const TensorInfo* const scale = Take(name);
    if (!has_scales(static_cast<int32_t>(CodesOf(*t)))) {
      if (scale == nullptr) continue;
      throw UserError(fmt::format("{} with {} of {}, expected I8 or F8_E4M3", name, t->name,
                                  Find(t->name)->dtype));
    }
    if (scale == nullptr)
      throw UserError(fmt::format("{} without its scale, expected {}", t->name, name));
    if (first == nullptr) first = scale;
    const bool good = (scale->dtype == "F32" || scale->dtype == "F16") &&
                      scale->dtype == first->dtype && scale->shape == first->shape &&
                      (scale->shape == of_rows || scale->shape == std::vector{k.heads} ||
                       scale->shape == std::vector{int64_t{1}});
    if (good) continue;
    throw UserError(fmt::format("{} is {} {}, expected F32 or F16 {}, [{}] or [1], both alike",
                                scale->name, scale->dtype, ShapeText(scale->shape),
                                ShapeText(of_rows), k.heads));
  }
  if (first == nullptr) return;
  cache.scale_dtype = first->dtype == "F16" ? DType::kFloat16 : DType::kFloat32;
  if (first->shape.size() == 1) {
    cache.scale = first->shape[0] == 1 ? KvScale::kTensor : KvScale::kHead;
    return;
  }
  cache.scale = KvScale::kRow;
  if (!rows_first) {
    cache.k_scale_strides = {.batch = k.heads * k.seqlen, .seqlen = 1, .head = k.seqlen, .dim = 0};
    cache.v_scale_strides = cache.k_scale_strides;
  }
}

// q_scale, k_scale and v_scale of each sequence's key heads, or of the key heads of all sequences.
void Inputs::ReadFloat8Scales() {
  const std::vector<int64_t> wanted = {Batch(), k.heads}, shared = {1, k.heads};
  const auto read = [&](const char* name, Strides* strides) {
    const TensorInfo* const scale = Take(name);
    if (scale == nullptr) return false;
    if (scale->dtype != "F32" || (scale->shape != wanted && scale->shape != shared)) {
      throw UserError(fmt::format("{} is {} {}, expected F32 {}: [batch or 1, heads_kv]", name,
                                  scale->dtype, ShapeText(scale->shape), ShapeText(wanted)));
    }
    *strides = {.batch = scale->shape == shared ? 0 : k.heads, .seqlen = 0, .head = 1, .dim = 1};
    return true;
  };
  read("q_scale", &cache.q_scale_strides);
  const bool of_k = read("k_scale", &cache.k_scale_strides);
  if (of_k != read("v_scale", &cache.v_scale_strides))
    throw UserError("k or v without its scale, expected k_scale and v_scale, or neither");
  if (of_k) cache.scale = KvScale::kBatchHead;
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
  ReadScales(layout);

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
    cache.k_new = ReadNew(*Take("k_new"), k);
    cache.v_new = ReadNew(*Take("v_new"), v);
    const Tensor &k_new = cache.k_new, &v_new = cache.v_new;
    if (!packed) ExpectSame(k_new, "batch", k_new.batch, Batch(), q);
    ExpectSame(k_new, "heads", k_new.heads, k.heads, k);
    ExpectSame(k_new, "head_dim", k_new.dim, Values(k), k);
    ExpectSame(v_new, "batch", v_new.batch, k_new.batch, k_new);
    ExpectSame(v_new, cache.packing_new.RowsName(), v_new.seqlen, k_new.seqlen, k_new);
    ExpectSame(v_new, "heads", v_new.heads, v.heads, v);
    ExpectSame(v_new, "head_dim", v_new.dim, DimV(), v);
    if (packed) {
      cache.cu_seqlens_k_new = TakeIntegers("cu_seqlens_k_new", {Batch() + 1});
      CheckOffsets("cu_seqlens_k_new", cache.cu_seqlens_k_new, k_new);
    }
  }
  ReadRotary();
}

// New rows of k or v: floats, or for a cache that float8 queries read codes as it has them.
Tensor Inputs::ReadNew(const TensorInfo& info, const Tensor& of) const {
  const TensorInfo& cached = *Find(of.name);
  if (float8() && info.dtype != cached.dtype) {
    throw UserError(fmt::format("{} is {}, expected {} like {}", info.name, info.dtype,
                                cached.dtype, cached.name));
  }
  return Read(info, cache.packing_new, float8());
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
