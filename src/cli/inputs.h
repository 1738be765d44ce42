// The tensors of a file for `strobe run`: found by name, checked against each other and, where
// asked for, converted.
#ifndef STROBE_CLI_INPUTS_H_
#define STROBE_CLI_INPUTS_H_

#include <cstddef>
#include <cstdint>
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

// How a tensor lies in memory: it is part `part` of `parts` (3 in qkv, 2 in kv, else 1).
struct Packing {
  bool varlen = false;
  Layout layout = Layout::kSeqlenHeads;
  int64_t part = 0;
  int64_t parts = 1;

  // "[batch, seqlen, heads, head_dim]"
  [[nodiscard]] std::string Wanted() const;
  // Whether a shape has the rank, and of a packed tensor the number of parts.
  [[nodiscard]] bool Fits(const std::vector<int64_t>& shape) const;
  // Reads the extents from a shape that fits.
  void Read(const std::vector<int64_t>& shape, Tensor* t) const;
  [[nodiscard]] std::vector<int64_t> Shape(const Tensor& t) const;
  void SetStrides(Tensor* t) const;
  // Elements before the first of this part.
  [[nodiscard]] int64_t Offset(const Tensor& t) const { return part * t.heads * t.dim; }

 private:
  [[nodiscard]] size_t Rank() const { return (varlen ? 3U : 4U) + (parts > 1 ? 1U : 0U); }
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
  std::vector<float> slopes;              // empty: none
  ArraysOf<std::vector<int32_t>> arrays;  // one number a sequence; empty: not in the file
  Alibi alibi = Alibi::kNone;
  std::vector<std::string_view> unused;  // tensors of the file that mean nothing here

  // The file's tensors, to print.
  [[nodiscard]] const std::vector<const TensorInfo*>& used() const { return used_; }

  [[nodiscard]] int64_t Batch() const {
    return varlen ? static_cast<int64_t>(cu_seqlens_q.size()) - 1 : q.batch;
  }

 private:
  [[nodiscard]] const TensorInfo* Find(std::string_view name) const {
    return file_->header().Find(name);
  }
  const TensorInfo* Take(std::string_view name);
  std::vector<int32_t> TakeOffsets(const std::string& name);
  void ReadLengths();
  void ReadTensors();
  void ReadExtents(Layout layout);
  Tensor ReadPart(const char* name, const char* packed, Packing* packing);
  Tensor Read(const TensorInfo& info, const Packing& packing) const;
  void CheckLengths() const;
  std::vector<float> TakeFloats(const std::string& name, const std::vector<int64_t>& shape);
  void ReadFloats();
  void ReadNumbers();
  void ReadData(const Packing& packing, Tensor* t);

  SafetensorsFile* file_;
  const RunOptions& options_;
  DType file_dtype_ = DType::kFloat32;
  std::string lengths_q_, lengths_k_;  // names of the tensors that hold the lengths
  std::vector<const TensorInfo*> used_;
  std::map<const TensorInfo*, Buffer> converted_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_INPUTS_H_
