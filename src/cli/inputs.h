// The tensors of a file for `strobe run`: found by name, checked against each other and, where
// asked for, converted.
#ifndef STROBE_CLI_INPUTS_H_
#define STROBE_CLI_INPUTS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/safetensors_file.h"
#include "core/options.h"

namespace strobe::cli {

// q, k, v, out or a gradient, in whatever order of dimensions and however packed it lies in memory.
struct Tensor {
  std::string name;  // of the file's tensor that it is, or is part of
  int64_t batch = 1;
  int64_t seqlen = 0;  // with cu_seqlens all rows of all sequences, and batch is 1
  int64_t heads = 0;
  int64_t dim = 0;
  Strides strides = {};
  std::byte* data = nullptr;  // inputs are only read
};

inline constexpr int64_t kMaxDim = 256;  // values of a row, at most

// How a tensor lies in memory: it is part `part` of `parts` (3 in qkv, 2 in kv, else 1).
struct Packing {
  bool varlen = false;
  Layout layout = Layout::kSeqlenHeads;
  int64_t part = 0;
  int64_t parts = 1;
  // The first two dimensions in words (with varlen there is one, "total"), and the least that each
  // may be.
  const char* entries = "batch";
  const char* rows = "seqlen";
  int64_t least_entries = 1;
  int64_t least_rows = 0;

  // "[batch, seqlen, heads, head_dim]"
  [[nodiscard]] std::string Wanted() const;
  // Whether a shape has the rank, and of a packed tensor the number of parts.
  [[nodiscard]] bool Fits(const std::vector<int64_t>& shape) const;
  // Reads the extents from a shape that fits.
  void Read(const std::vector<int64_t>& shape, Tensor* t) const;
  [[nodiscard]] std::vector<int64_t> Shape(const Tensor& t) const;
  void SetStrides(Tensor* t) const;
  [[nodiscard]] const char* RowsName() const { return varlen ? "total" : rows; }
  // Elements before the first of this part.
  [[nodiscard]] int64_t Offset(const Tensor& t) const { return part * t.heads * t.dim; }

 private:
  [[nodiscard]] size_t Rank() const { return (varlen ? 3U : 4U) + (parts > 1 ? 1U : 0U); }
};

// A KV cache in place of keys and values of the sequences' own: k and v are then the cache. Names
// and shapes are those of strobe.h's arguments.
struct CacheInputs {
  Cache kind = Cache::kNone;
  const char* because = "";          // the tensor of the file that makes k and v a cache
  std::vector<int32_t> block_table;  // [batch, pages_per_sequence]
  int64_t pages_per_sequence = 0;
  std::vector<int32_t> cache_batch_idx, leftpad, rotary_position;  // [batch]; empty: not given

  Append append = Append::kNone;
  Packing packing_new;
  Tensor k_new, v_new;
  std::vector<int32_t> cu_seqlens_k_new;  // [batch + 1]; empty: k_new is [batch, seqlen_new, ...]

  // Of k and v where they are codes, whose strides count bytes. kSame: q's dtype.
  DType k_dtype = DType::kSame, v_dtype = DType::kSame;
  KvScale scale = KvScale::kNone;
  DType scale_dtype = DType::kFloat32;
  Strides q_scale_strides = {}, k_scale_strides = {}, v_scale_strides = {};
  std::span<const std::byte> k_scale, v_scale;
  std::span<const std::byte> q_scale;  // of float8 attention, with a cache or without, as those are

  int64_t rotary_rows = 0, rotary_dim = 0;
  const void *rotary_cos = nullptr, *rotary_sin = nullptr;  // [rotary_rows, rotary_dim / 2]
};

// What a mask as data is packed from. Names and shapes are those of strobe_mask_args, with `mask_`
// before them; keep is `mask`.
struct MaskInputs {
  struct List {
    std::vector<int32_t> counts, blocks;
    int64_t columns = 0;
  };
  int64_t block = 0;
  int64_t batch = 0, heads = 0;  // of the mask; 0: the file has none
  const TensorInfo *keep = nullptr, *bits = nullptr;
  std::vector<int32_t> intervals;
  List partial, full;

  [[nodiscard]] bool there() const { return heads > 0; }
};

// An additive bias, contiguous, of a dtype of its own.
struct BiasInput {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // [batch, heads, seqlen_q, seqlen_k], each of the first three maybe
                               // 1; empty: the file has none
  std::span<const std::byte> data;
};

class Inputs {
 public:
  // Reads shapes and the lengths of sequences: what a plan needs. Throws UserError for what
  // contradicts itself, so that no extent of 0 gets to the library, which takes it for a default.
  Inputs(SafetensorsFile* file, const RunOptions& options);
  // Reads the tensors themselves.
  void ReadData();

  DType dtype = DType::kFloat32;
  bool varlen = false;
  bool has_dout = false;
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> cu_seqlens_k;
  Packing packing_q;
  Packing packing_k;
  Packing packing_v;
  Tensor q, k, v, dout;                   // dout only where the file has one
  std::vector<float> dlse;                // empty: none
  std::vector<float> slopes, sinks;       // empty: none
  ArraysOf<std::vector<int32_t>> arrays;  // one number a sequence; empty: not in the file
  Alibi alibi = Alibi::kNone;
  BiasInput bias;
  CacheInputs cache;
  MaskInputs mask;
  std::vector<std::string_view> unused;  // tensors of the file that mean nothing here

  // The file's tensors, to print.
  [[nodiscard]] const std::vector<const TensorInfo*>& used() const { return used_; }

  [[nodiscard]] bool cached() const { return cache.kind != Cache::kNone; }
  // Of k and v; and values of a row of v, whose elements are bytes in a quantised cache.
  /// Whether q is float8, and k and v with it.
  [[nodiscard]] bool float8() const { return file_dtype_ == DType::kFloat8E4M3; }
  [[nodiscard]] bool HasScaleOfQ() const { return Find("q_scale") != nullptr; }
  // Of k or v as codes; kSame: they are floats of q's dtype.
  [[nodiscard]] DType CodesOf(const Tensor& t) const {
    return &t == &k ? cache.k_dtype : &t == &v ? cache.v_dtype : DType::kSame;
  }
  [[nodiscard]] DType DTypeOf(const Tensor& t) const {
    return CodesOf(t) == DType::kSame ? dtype : CodesOf(t);
  }
  [[nodiscard]] int64_t DimV() const { return Values(v); }
  // The problem's mask, with the least capacity.
  [[nodiscard]] MaskShape MaskOf() const;
  // The mask, packed. The problem's capacities become what it needs.
  [[nodiscard]] Buffer PackMask(Problem* problem) const;
  // Rows that a sequence's keys may fill; packed: of the longest sequence.
  // Queries of a sequence, and rows that its keys may fill; packed: of the longest sequence, or as
  // many as the bias has room for.
  [[nodiscard]] int64_t SeqlenQ() const;
  [[nodiscard]] int64_t SeqlenK() const;
  [[nodiscard]] int64_t Batch() const {
    return varlen ? static_cast<int64_t>(cu_seqlens_q.size()) - 1 : q.batch;
  }

 private:
  [[nodiscard]] const TensorInfo* Find(std::string_view name) const {
    return file_->header().Find(name);
  }
  const TensorInfo* Take(std::string_view name);
  std::vector<int32_t> TakeOffsets(const std::string& name);
  std::vector<int32_t> TakeIntegers(const std::string& name, const std::vector<int64_t>& shape);
  void FindCache();
  void ReadCache(Layout layout);
  Tensor ReadNew(const TensorInfo& info, const Tensor& of) const;
  void ReadRotary();
  void CheckCacheEntries() const;
  void CheckOffsets(const std::string& name, const std::vector<int32_t>& offsets,
                    const Tensor& t) const;
  void ReadLengths();
  void ReadTensors();
  void ReadExtents(Layout layout);
  Tensor ReadPart(const char* name, const char* packed, Packing* packing);
  Tensor Read(const TensorInfo& info, const Packing& packing, bool codes = false) const;
  [[nodiscard]] int64_t Values(const Tensor& t) const;
  void FindQuantised();
  [[nodiscard]] static DType CodesIn(const TensorInfo& info, int64_t dim);
  void ReadScales(Layout layout);
  void ReadFloat8Scales();
  void CheckLengths() const;
  std::vector<float> TakeFloats(const std::string& name, const std::vector<int64_t>& shape);
  void ReadFloats();
  void ReadNumbers();
  const TensorInfo* TakeOfMask(const char* name, std::initializer_list<const char*> dtypes,
                               const std::vector<int64_t>& last);
  void ReadMask();
  void ReadBias();
  // The data of a tensor of the file in the dtype of this run.
  std::byte* ReadAll(const TensorInfo& info);
  void ReadData(const Packing& packing, Tensor* t);

  SafetensorsFile* file_;
  const RunOptions& options_;
  DType file_dtype_ = DType::kFloat32;
  std::string lengths_q_, lengths_k_;  // names of the tensors that hold the lengths
  std::vector<const TensorInfo*> used_;
  std::map<const TensorInfo*, Buffer> converted_;
};

// Offsets of packed sequences: the rows of the longest.
[[nodiscard]] int64_t Longest(const std::vector<int32_t>& offsets);

// What is wrong with a tensor's extent: throws UserError unless it is good.
void Expect(bool good, const Tensor& t, const char* extent, int64_t got, const std::string& wanted);
void ExpectSame(const Tensor& t, const char* extent, int64_t got, int64_t wanted,
                const Tensor& like);

}  // namespace strobe::cli

#endif  // STROBE_CLI_INPUTS_H_
