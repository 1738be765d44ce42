#include "cli/inputs.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/text.h"
#include "core/element.h"

namespace strobe::cli {
namespace {

constexpr int64_t kMaxCount = 0x7fffffff;  // of batch, heads and tokens

DType FileDType(const TensorInfo& info) {
  for (const DType dtype : kDTypes) {
    if (info.dtype == FileName(dtype)) return dtype;
  }
  const char* why = info.dtype == "F8_E5M2" ? " (of k and v alone, beside q of F8_E4M3)" : "";
  throw UserError(fmt::format("{} is {}{}, expected F32, BF16 or F16", info.name, info.dtype, why));
}

void ExpectRange(const Tensor& t, const char* extent, int64_t got, int64_t low, int64_t high) {
  Expect(low <= got && got <= high, t, extent, got, fmt::format("{} to {}", low, high));
}

}  // namespace

void Expect(bool good, const Tensor& t, const char* extent, int64_t got,
            const std::string& wanted) {
  if (!good) throw UserError(fmt::format("{}: {} = {}, expected {}", t.name, extent, got, wanted));
}

void ExpectSame(const Tensor& t, const char* extent, int64_t got, int64_t wanted,
                const Tensor& like) {
  Expect(got == wanted, t, extent, got, fmt::format("{} like {}'s", wanted, like.name));
}

int64_t Longest(const std::vector<int32_t>& offsets) {
  int64_t longest = 0;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    longest = std::max<int64_t>(longest, offsets[b + 1] - offsets[b]);
  }
  return longest;
}

bool Packing::Fits(const std::vector<int64_t>& shape) const {
  return shape.size() == Rank() && (parts == 1 || shape[Rank() - 3] == parts);
}

std::string Packing::Wanted() const {
  const std::string first = varlen ? "total" : fmt::format("{}, {}", entries, rows);
  if (parts > 1) return fmt::format("[{}, {}, heads, head_dim]", first, parts);
  if (layout == Layout::kSeqlenHeads) return fmt::format("[{}, heads, head_dim]", first);
  return varlen ? "[heads, total, head_dim]"
                : fmt::format("[{}, heads, {}, head_dim]", entries, rows);
}

void Packing::Read(const std::vector<int64_t>& shape, Tensor* t) const {
  auto at = shape.begin();
  t->batch = varlen ? 1 : *at++;
  if (layout == Layout::kHeadsSeqlen) t->heads = *at++;
  t->seqlen = *at++;
  if (parts > 1) ++at;
  if (layout == Layout::kSeqlenHeads) t->heads = *at++;
  t->dim = *at;
}

std::vector<int64_t> Packing::Shape(const Tensor& t) const {
  std::vector<int64_t> shape;
  if (!varlen) shape.push_back(t.batch);
  if (layout == Layout::kHeadsSeqlen) shape.push_back(t.heads);
  shape.push_back(t.seqlen);
  if (parts > 1) shape.push_back(parts);
  if (layout == Layout::kSeqlenHeads) shape.push_back(t.heads);
  shape.push_back(t.dim);
  return shape;
}

void Packing::SetStrides(Tensor* t) const {
  if (layout == Layout::kSeqlenHeads) {
    const int64_t row = parts * t->heads * t->dim;
    t->strides = {.batch = t->seqlen * row, .seqlen = row, .head = t->dim, .dim = 1};
  } else {
    const int64_t head = t->seqlen * t->dim;
    t->strides = {.batch = t->heads * head, .seqlen = t->dim, .head = head, .dim = 1};
  }
}

Inputs::Inputs(SafetensorsFile* file, const RunOptions& options) : file_(file), options_(options) {
  const TensorInfo* first = Find("qkv") != nullptr ? Find("qkv") : Find("q");
  if (first == nullptr) {
    std::vector<std::string_view> names;
    for (const TensorInfo& t : file->header().tensors) names.push_back(t.name);
    throw UserError(fmt::format("{} has {}, expected q, k and v, or qkv, or q and kv",
                                PathText(options.input),
                                names.empty() ? "no tensor" : NamesText(names)));
  }
  const bool codes = first->dtype == FileName(DType::kFloat8E4M3);
  file_dtype_ = codes ? DType::kFloat8E4M3 : FileDType(*first);
  if (codes && options.dtype) {
    throw UserError(fmt::format(
        "--dtype with {} of F8_E4M3, expected none: codes stay what they are", first->name));
  }
  dtype = options.dtype.value_or(file_dtype_);
  FindCache();
  FindQuantised();
  ReadLengths();
  ReadTensors();
  for (const TensorInfo& t : file->header().tensors) {
    if (std::find(used_.begin(), used_.end(), &t) == used_.end()) unused.push_back(t.name);
  }
}

const TensorInfo* Inputs::Take(std::string_view name) {
  const TensorInfo* info = Find(name);
  if (info != nullptr && std::find(used_.begin(), used_.end(), info) == used_.end())
    used_.push_back(info);
  return info;
}

std::vector<int32_t> Inputs::TakeOffsets(const std::string& name) {
  const TensorInfo* info = Take(name);
  if (info == nullptr) return {};
  if (info->dtype != "I32" || info->shape.size() != 1 || info->shape[0] < 2) {
    throw UserError(fmt::format("{} is {} {}, expected I32 [batch + 1]", name, info->dtype,
                                ShapeText(info->shape)));
  }
  return TakeIntegers(name, info->shape);
}

// I32 of that shape, or empty when the file has none.
std::vector<int32_t> Inputs::TakeIntegers(const std::string& name,
                                          const std::vector<int64_t>& shape) {
  const TensorInfo* info = Take(name);
  if (info == nullptr) return {};
  if (info->dtype != "I32" || info->shape != shape) {
    throw UserError(fmt::format("{} is {} {}, expected I32 {}", name, info->dtype,
                                ShapeText(info->shape), ShapeText(shape)));
  }
  std::vector<int32_t> values(info->bytes() / sizeof(int32_t));
  if (!values.empty()) std::memcpy(values.data(), file_->Read(*info).data(), info->bytes());
  return values;
}

void Inputs::ReadLengths() {
  const bool one = !cached() && Find("cu_seqlens") != nullptr;
  lengths_q_ = one ? "cu_seqlens" : "cu_seqlens_q";
  lengths_k_ = one ? "cu_seqlens" : "cu_seqlens_k";
  cu_seqlens_q = TakeOffsets(lengths_q_);
  varlen = !cu_seqlens_q.empty();
  if (cached()) return;
  cu_seqlens_k = one ? cu_seqlens_q : TakeOffsets(lengths_k_);
  if (cu_seqlens_q.size() != cu_seqlens_k.size()) {
    throw UserError(
        fmt::format("cu_seqlens_q has {} numbers and cu_seqlens_k {}, expected batch + 1 of each",
                    cu_seqlens_q.size(), cu_seqlens_k.size()));
  }
}

Tensor Inputs::Read(const TensorInfo& info, const Packing& packing, bool codes) const {
  const bool same = info.dtype == FileName(file_dtype_);
  if (!codes && !same && (float8() || FileDType(info) != file_dtype_)) {
    throw UserError(fmt::format("{} is {}, expected {} like the others", info.name, info.dtype,
                                FileName(file_dtype_)));
  }
  if (!packing.Fits(info.shape)) {
    throw UserError(fmt::format("{} has the shape {}, expected {}{}", info.name,
                                ShapeText(info.shape), packing.Wanted(),
                                packing.varlen ? " because the file has cu_seqlens" : ""));
  }
  Tensor t;
  t.name = info.name;
  packing.Read(info.shape, &t);
  ExpectRange(t, packing.entries, t.batch, packing.least_entries, kMaxCount);
  ExpectRange(t, packing.RowsName(), t.seqlen, packing.least_rows, kMaxCount);
  ExpectRange(t, "heads", t.heads, 1, kMaxCount);
  ExpectRange(t, "head_dim", t.dim, 1, codes ? row_elements(STROBE_Q8_0, kMaxDim) : kMaxDim);
  // Beside an extent of 0 the others can be anything; strides are products of them.
  double product = 1;
  for (const int64_t extent : info.shape)
    product *= static_cast<double>(std::max<int64_t>(extent, 1));
  if (product > 0x1p56) {
    throw UserError(fmt::format("{} has the shape {}, expected extents whose product is below 2^56",
                                info.name, ShapeText(info.shape)));
  }
  packing.SetStrides(&t);
  return t;
}

// Tensor `name`, or its part of the packed one.
Tensor Inputs::ReadPart(const char* name, const char* packed, Packing* packing) {
  const TensorInfo* info = packing->parts > 1 ? Take(packed) : Take(name);
  if (info == nullptr) {
    throw UserError(
        fmt::format("{} has no {}, expected q, k and v", PathText(options_.input), name));
  }
  const DType codes = name == std::string_view("k")   ? cache.k_dtype
                      : name == std::string_view("v") ? cache.v_dtype
                                                      : DType::kSame;
  return Read(*info, *packing, codes != DType::kSame);
}

// Throws where the shapes contradict each other, read in that order of dimensions.
void Inputs::ReadExtents(Layout layout) {
  const bool qkv = Find("qkv") != nullptr;
  const bool kv = !qkv && Find("kv") != nullptr;
  const Packing plain = {.varlen = varlen, .layout = layout};
  packing_q = packing_k = plain;
  if (cache.kind == Cache::kContiguous) {
    packing_k = {.layout = layout, .entries = "cache_batch"};
  } else if (cache.kind == Cache::kPaged) {
    packing_k = {.layout = layout,
                 .entries = "pages",
                 .rows = "page_size",
                 .least_entries = 0,
                 .least_rows = 1};
  }
  packing_v = packing_k;
  packing_q.parts = qkv ? 3 : 1;
  packing_k.parts = packing_v.parts = qkv ? 3 : kv ? 2 : 1;
  packing_k.part = qkv ? 1 : 0;
  packing_v.part = packing_v.parts - 1;
  q = ReadPart("q", "qkv", &packing_q);
  k = ReadPart("k", qkv ? "qkv" : "kv", &packing_k);
  v = ReadPart("v", qkv ? "qkv" : "kv", &packing_v);
  if (!cached()) ExpectSame(k, "batch", k.batch, q.batch, q);
  ExpectSame(k, "head_dim", Values(k), q.dim, q);
  ExpectSame(v, packing_v.entries, v.batch, k.batch, k);
  ExpectSame(v, packing_v.RowsName(), v.seqlen, k.seqlen, k);
  ExpectSame(v, "heads", v.heads, k.heads, k);
  Expect(q.heads % k.heads == 0, q, "heads", q.heads,
         fmt::format("a multiple of {}, {}'s", k.heads, k.name));
  Expect(Batch() <= kMaxCount / q.heads, q, "heads", q.heads,
         fmt::format("at most 2^31 - 1 in all {} sequences", Batch()));

  if (const TensorInfo* info = Take("dout")) {
    has_dout = true;
    dout = Read(*info, plain);
    ExpectSame(dout, "batch", dout.batch, q.batch, q);
    ExpectSame(dout, plain.RowsName(), dout.seqlen, q.seqlen, q);
    ExpectSame(dout, "heads", dout.heads, q.heads, q);
    ExpectSame(dout, "head_dim", dout.dim, DimV(), v);
  }
  if (varlen) CheckLengths();
  ReadFloats();
  ReadNumbers();
  if (cached()) ReadCache(layout);
  if (float8()) ReadFloat8Scales();
  ReadMask();
  ReadBias();
}

void Inputs::ReadTensors() {
  for (const char* packed : {"qkv", "kv"}) {
    if (Find(packed) != nullptr && options_.layout != Layout::kSeqlenHeads)
      throw UserError(fmt::format("{} is packed, expected --layout bshd", packed));
  }
  std::string contradiction;
  try {
    return ReadExtents(options_.layout);
  } catch (const UserError& error) {
    contradiction = error.what();
  }
  // Do they make sense in the other order?
  const bool seqlen_first = options_.layout == Layout::kSeqlenHeads;
  try {
    ReadExtents(seqlen_first ? Layout::kHeadsSeqlen : Layout::kSeqlenHeads);
  } catch (const UserError&) {
    throw UserError(contradiction);
  }
  throw UserError(
      fmt::format("{}: did you mean --layout {}?", contradiction, seqlen_first ? "bhsd" : "bshd"));
}

void Inputs::CheckOffsets(const std::string& name, const std::vector<int32_t>& offsets,
                          const Tensor& t) const {
  if (offsets.front() != 0)
    throw UserError(fmt::format("{}[0] = {}, expected 0", name, offsets.front()));
  for (size_t b = 1; b < offsets.size(); ++b) {
    if (offsets[b] < offsets[b - 1]) {
      throw UserError(fmt::format("{}[{}] = {} after {}, expected not to decrease", name, b,
                                  offsets[b], offsets[b - 1]));
    }
  }
  // Rows past the last sequence belong to none: zeros in the results, and new keys that are not
  // written.
  if (offsets.back() > t.seqlen) {
    throw UserError(fmt::format("{} ends with {}, expected at most {}, the rows of {}", name,
                                offsets.back(), t.seqlen, t.name));
  }
}

void Inputs::CheckLengths() const {
  CheckOffsets(lengths_q_, cu_seqlens_q, q);
  if (!cached()) CheckOffsets(lengths_k_, cu_seqlens_k, k);
}

// F32 of that shape, or empty when the file has none.
std::vector<float> Inputs::TakeFloats(const std::string& name, const std::vector<int64_t>& shape) {
  const TensorInfo* info = Take(name);
  if (info == nullptr) return {};
  if (info->dtype != "F32" || info->shape != shape) {
    throw UserError(fmt::format("{} is {} {}, expected F32 {}", name, info->dtype,
                                ShapeText(info->shape), ShapeText(shape)));
  }
  std::vector<float> values(info->bytes() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), file_->Read(*info).data(), info->bytes());
  return values;
}

void Inputs::ReadFloats() {
  dlse = TakeFloats("dlse", varlen ? std::vector<int64_t>{q.heads, q.seqlen}
                                   : std::vector<int64_t>{q.batch, q.heads, q.seqlen});
  sinks = TakeFloats("sinks", {q.heads});
  const TensorInfo* info = Find("alibi_slopes");
  if (info != nullptr) {
    const bool per_batch = info->shape.size() == 2;
    slopes = TakeFloats("alibi_slopes", per_batch ? std::vector<int64_t>{Batch(), q.heads}
                                                  : std::vector<int64_t>{q.heads});
    alibi = per_batch ? Alibi::kPerBatchHead : Alibi::kPerHead;
  } else if (options_.alibi && q.seqlen > 0) {
    // Heads without rows may be billions, in a file of a hundred bytes.
    for (int64_t h = 0; h < q.heads; ++h) {
      slopes.push_back(static_cast<float>(
          std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(q.heads))));
    }
    alibi = Alibi::kPerHead;
  }
}

void Inputs::ReadBias() {
  bias = {};
  const TensorInfo* info = Take("bias");
  if (info == nullptr) return;
  const std::vector<int64_t>& shape = info->shape;
  const int64_t least_q = SeqlenQ(), least_k = SeqlenK();
  const auto fits = [&](size_t axis, int64_t full, bool bound) {
    return shape[axis] == full || (axis < 3 && shape[axis] == 1) || (bound && shape[axis] > full);
  };
  const bool good = shape.size() == 4 && fits(0, Batch(), false) && fits(1, q.heads, false) &&
                    fits(2, least_q, varlen) && fits(3, least_k, varlen && !cached());
  if (!good) {
    const char* const bound = varlen ? " or more" : "";
    throw UserError(fmt::format(
        "bias has the shape {}, expected [{}, {}, {}{}, {}{}], each of the "
        "first three or 1",
        ShapeText(shape), Batch(), q.heads, least_q, bound, least_k, cached() ? "" : bound));
  }
  bias.dtype = FileDType(*info);
  bias.shape = shape;
}

void Inputs::ReadNumbers() {
  Options has;
  for_each_array(has, arrays, [&](const OptionArray& row, bool, std::vector<int32_t>& values) {
    values = TakeIntegers(row.name, {Batch()});
    // What they may be with a cache depends on its other numbers: the library looks at all of them.
    if (cached()) return;
    for (size_t b = 0; b < values.size(); ++b) {
      const auto rows = [&](const std::vector<int32_t>& offsets, const Tensor& t) {
        return varlen ? int64_t{offsets[b + 1]} - offsets[b] : t.seqlen;
      };
      const int64_t most = row.most == OptionMost::kRowsQ   ? rows(cu_seqlens_q, q)
                           : row.most == OptionMost::kRowsK ? rows(cu_seqlens_k, k)
                                                            : Sequences::kFurthestPosition;
      if (row.least <= values[b] && values[b] <= most) continue;
      throw UserError(
          fmt::format("{}[{}] = {}, expected {} to {}", row.name, b, values[b], row.least, most));
    }
  });
}

// Tensors that share a tensor of the file share its data.
std::byte* Inputs::ReadAll(const TensorInfo& info) {
  const std::span<const std::byte> data = file_->Read(info);
  if (dtype == file_dtype_) return const_cast<std::byte*>(data.data());
  auto known = converted_.find(&info);
  if (known == converted_.end()) {
    const size_t count = data.size() / Bytes(file_dtype_);
    Buffer copy(count * Bytes(dtype));
    for (size_t i = 0; i < count; ++i)
      Store(dtype, copy.data(), i, Load(file_dtype_, data.data(), i));
    known = converted_.emplace(&info, std::move(copy)).first;
  }
  return known->second.data();
}

void Inputs::ReadData(const Packing& packing, Tensor* t) {
  const TensorInfo& info = *Find(t->name);
  if (CodesOf(*t) != DType::kSame) {
    t->data = const_cast<std::byte*>(file_->Read(info).data());
    return;
  }
  t->data = ReadAll(info);
  if (info.bytes() > 0) t->data += packing.Offset(*t) * static_cast<int64_t>(Bytes(dtype));
}

void Inputs::ReadData() {
  if (!bias.shape.empty()) bias.data = file_->Read(*Find("bias"));
  ReadData(packing_q, &q);
  ReadData(packing_k, &k);
  ReadData(packing_v, &v);
  if (has_dout) ReadData({.varlen = varlen, .layout = options_.layout}, &dout);
  if (cache.append != Append::kNone) {
    ReadData(cache.packing_new, &cache.k_new);
    ReadData(cache.packing_new, &cache.v_new);
  }
  if (float8() && Find("q_scale") != nullptr) cache.q_scale = file_->Read(*Find("q_scale"));
  if (cache.scale != KvScale::kNone) {
    if (const TensorInfo* info = Find("k_scale")) cache.k_scale = file_->Read(*info);
    if (const TensorInfo* info = Find("v_scale")) cache.v_scale = file_->Read(*info);
  }
  if (cache.rotary_dim > 0) {
    cache.rotary_cos = ReadAll(*Find("rotary_cos"));
    cache.rotary_sin = ReadAll(*Find("rotary_sin"));
  }
}

}  // namespace strobe::cli
