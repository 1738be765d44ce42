// Strobe: exact attention, forward and backward, in O(seqlen) memory. C++20 wrapper over strobe.h,
// header only.
//
//   std::vector<float> q(1024 * 8 * 64), k(q), v(q), out(q);  // [batch, seqlen, heads, head_dim]
//   strobe::Plan plan({.seqlen_q = 1024, .seqlen_k = 1024, .heads = 8, .head_dim = 64});
//   plan.forward({.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data()});
//
// A Problem says what is wanted, a Plan how it will be done; Plan::forward and Plan::backward do
// it, as often as you like. A layer that is trained has one Problem and two plans, Plan(problem)
// and Plan(problem.backward()). What can fail comes in two forms: the plain one throws
// strobe::Error; the try_ form returns a Status, never throws, and leaves the text in last_error().
// strobe.h has the exact rules of every field: they are the same here.
#ifndef STROBE_STROBE_HPP_
#define STROBE_STROBE_HPP_

// One error that says what to do, in place of hundreds. Compilers that had most of C++20 before it
// was published say a number between those of C++17 and C++20.
#if __cplusplus <= 201703L
#error "strobe.hpp needs C++20 (-std=c++20, CMAKE_CXX_STANDARD 20); strobe.h serves older C++ and C"
#else

#include <strobe/strobe.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace strobe {
// Names the interface in the linker's symbols, so that nothing here can be mistaken for the
// library's own insides.
inline namespace v0 {

// What a function answers.
enum class Status : int {
  kOk = STROBE_OK,                             // done
  kInvalidArgument = STROBE_INVALID_ARGUMENT,  // contradicts itself or breaks a documented rule
  kUnsupported = STROBE_UNSUPPORTED,  // well-formed, but no kernel takes it: why() has the reasons
  kOutOfMemory = STROBE_OUT_OF_MEMORY,     // the library's own workspace could not be allocated
  kDeviceError = STROBE_DEVICE_ERROR,      // the device or its driver reported a failure
  kInternalError = STROBE_INTERNAL_ERROR,  // a fault in Strobe: please report it
  kInterrupted = STROBE_INTERRUPTED,       // stopped by args.interrupt: the outputs are incomplete
};
// Which pass.
enum class Direction : int32_t {
  kForward = STROBE_FORWARD,   // out and lse from q, k and v
  kBackward = STROBE_BACKWARD  // dq, dk and dv from these, out, lse and dout
};
// What the elements of tensors are.
enum class DType : int32_t {
  kFloat32 = STROBE_FLOAT32,         // IEEE binary32
  kBFloat16 = STROBE_BFLOAT16,       // the upper half of a float32
  kFloat16 = STROBE_FLOAT16,         // IEEE binary16
  kFloat8E4M3 = STROBE_FLOAT8_E4M3,  // of a forward problem, or of a cache's keys and values
  kFloat8E5M2 = STROBE_FLOAT8_E5M2,  // of k and v beside q of e4m3, or of a cache's on CPUs
  kInt8 = STROBE_INT8,               // of a cache's keys and values alone, with scales
  kQ8_0 = STROBE_Q8_0,               // the same: blocks of 32 values, 34 bytes, scales among them
  kQ4_0 = STROBE_Q4_0,               // the same: blocks of 32 values, 18 bytes
  kSame = STROBE_SAME_DTYPE,         // default of other fields of a dtype: the problem's
};
// Where the tensors are and the work is done.
enum class Device : int32_t {
  kCpu = STROBE_CPU,   // pointers into the host's memory
  kCuda = STROBE_CUDA  // pointers into the memory of an NVIDIA GPU
};
// Where the keys and values of a forward problem are.
enum class Cache : int32_t {
  kNone = STROBE_CACHE_NONE,              // k and v are tensors of the batch's own
  kContiguous = STROBE_CACHE_CONTIGUOUS,  // [cache_batch, seqlen_k, heads_kv, head_dim]
  kPaged = STROBE_CACHE_PAGED             // [pages, page_size, heads_kv, head_dim], block_table
};
// New keys and values that a launch writes to the cache before it attends to them.
enum class Append : int32_t {
  kNone = STROBE_APPEND_NONE,     // the cache stays as it is
  kDense = STROBE_APPEND_DENSE,   // [batch, seqlen_new, heads_kv, head_dim]
  kPacked = STROBE_APPEND_PACKED  // [total_new, heads_kv, head_dim], cu_seqlens_k_new
};
// The scales of keys and values of int8 or float8.
enum class KvScale : int32_t {
  kNone = STROBE_KV_SCALE_NONE,            // there are none, or blocks have them
  kTensor = STROBE_KV_SCALE_TENSOR,        // one for all keys, one for all values
  kHead = STROBE_KV_SCALE_HEAD,            // [heads_kv]
  kRow = STROBE_KV_SCALE_ROW,              // of each row of each head; an append makes them
  kBatchHead = STROBE_KV_SCALE_BATCH_HEAD  // [batch, heads_kv], where q is float8 too
};
// Which ALiBi slopes the launch arguments carry.
enum class Alibi : int32_t {
  kNone = STROBE_ALIBI_NONE,                   // no ALiBi
  kPerHead = STROBE_ALIBI_PER_HEAD,            // slopes [heads]
  kPerBatchHead = STROBE_ALIBI_PER_BATCH_HEAD  // slopes [batch, heads]
};

// {batch, seqlen, head, dim} in elements; dim must be 1. All zero: contiguous [batch, seqlen,
// heads, head_dim]. [batch, heads, seqlen, head_dim] is {heads * seqlen * head_dim, head_dim,
// seqlen * head_dim, 1}.
using Strides = strobe_strides;
// What a mask as data is: strobe.h has the rules.
struct MaskShape {
  int32_t kind = STROBE_MASK_NONE;   // STROBE_MASK_PACKED: launches carry what pack_mask wrote
  int32_t reserved = 0;              // 0
  int32_t block_q = 0, block_k = 0;  // sides of a block: 64, 128 or 256
  int64_t batch = 0;                 // 1: one mask for all sequences; or the problem's batch
  int64_t heads = 0;                 // 1: one mask for all query heads; or the problem's heads
  int64_t capacity = 0;              // entries that there is room for; 0: as many as there may be
  int64_t partial_capacity = 0;      // of these, in part; 0: as capacity

  // The same for the C interface.
  [[nodiscard]] strobe_mask c() const noexcept {
    return {kind, reserved, block_q, block_k, batch, heads, capacity, partial_capacity};
  }
};

// A status in words: "STROBE_UNSUPPORTED".
[[nodiscard]] inline const char* name(Status status) noexcept {
  return strobe_status_name(static_cast<strobe_status>(status));
}

// Text of the calling thread's latest failure: the argument, what was got and what was wanted.
[[nodiscard]] inline std::string last_error() { return strobe_last_error(); }

// Version of the library at work: "0.2.0".
[[nodiscard]] inline std::string version() { return strobe_version(); }

// What the throwing forms throw. what() is the library's text.
class Error : public std::runtime_error {
 public:
  // text: the library's.
  Error(Status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  // What the try_ form would have returned.
  [[nodiscard]] Status status() const noexcept { return status_; }

 private:
  Status status_;
};

// What the caller wants. Set what differs from the default, in this order:
//   strobe::Problem{.dtype = strobe::DType::kBFloat16, .batch = 2, .seqlen_q = 4096, ...}
struct Problem {
  Direction direction = Direction::kForward;  // which pass the plan is for
  DType dtype = DType::kFloat32;  // of q, k, v, out and their gradients; sums are float32
  Device device = Device::kCpu;   // where the tensors are
  int32_t device_index = 0;       // CUDA: which GPU

  int64_t batch = 1;       // sequences
  int64_t seqlen_q = 0;    // tokens; with varlen the longest query sequence
  int64_t seqlen_k = 0;    // tokens; with varlen the longest key sequence; with a cache the most
                           // rows that a sequence may reach, those of this launch included
  int64_t heads = 1;       // query heads
  int64_t heads_kv = 0;    // key and value heads, divides heads; 0: as many as heads
  int64_t head_dim = 0;    // of q and k, 1 to 256
  int64_t head_dim_v = 0;  // of v and out, 1 to 256; 0: head_dim

  bool varlen = false;  // packed end to end; the arguments carry cu_seqlens_q and cu_seqlens_k
  bool causal = false;  // query i sees keys up to i + seqlen_k - seqlen_q
  int64_t total_q = 0;  // varlen: rows of q
  int64_t total_k = 0;  // varlen: rows of k and v

  // Query i sees keys i + seqlen_k - seqlen_q + [-window_left, window_right]; -1 and
  // STROBE_NO_LIMIT: no limit. window_signed below makes -1 a limit.
  int64_t window_left = -1, window_right = -1;

  float scale = std::numeric_limits<float>::quiet_NaN();  // of q.k; NaN: 1 / sqrt(head_dim)
  float softcap = 0;                                      // c > 0: score s becomes c * tanh(s / c)
  float dropout_p = 0;                                    // probability, in [0, 1)
  Alibi alibi = Alibi::kNone;  // adds -slope * |i + seqlen_k - seqlen_q - j| to the score

  bool deterministic = false;    // backward: the same bits for every number of threads
  bool batch_invariant = false;  // bits of a row do not depend on what it is computed with
  bool has_dlse = false;         // backward: the arguments carry a gradient of lse
  int32_t threads = 0;           // at most; 0: OpenMP's number

  // Strides of the tensor of the same name; all zero: contiguous.
  Strides q = {}, k = {}, v = {}, out = {};
  // Backward: strides of the tensor of the same name; all zero: contiguous.
  Strides dout = {}, dq = {}, dk = {}, dv = {};

  int64_t attention_chunk = 0;  // c > 0: a query sees keys of its own chunk of c positions only
  // Whether the arguments carry the array of that name. Without it they must not.
  bool has_seqused_q = false, has_seqused_k = false, has_q_position = false, has_prefix = false;

  // Of k and v (v_dtype: of v alone); with a cache also kInt8, kFloat8E4M3, kFloat8E5M2, kQ8_0,
  // kQ4_0; of float8 queries also kFloat8E5M2.
  DType kv_dtype = DType::kSame;
  // Of out; or kFloat32. Of float8 queries kBFloat16 (kSame), kFloat16 or kFloat32.
  DType out_dtype = DType::kSame;

  // Keys and values in a cache, forward only: strobe.h has the rules, examples/paged_cache.cpp and
  // examples/generate.cpp show how an engine uses it.
  Cache cache = Cache::kNone;      // where k and v are
  Append append = Append::kNone;   // whether k_new and v_new are; needs has_seqused_k
  int64_t cache_batch = 0;         // contiguous: entries of the cache; 0: batch
  int64_t pages = 0;               // paged: pages of the pool
  int64_t page_size = 0;           // paged: rows of a page
  int64_t pages_per_sequence = 0;  // paged: columns of block_table
  int64_t block_table_stride = 0;  // paged: int32s from row to row of it; 0: pages_per_sequence
  int64_t seqlen_new = 0;          // dense: rows that each sequence appends; packed: the longest
  int64_t total_new = 0;           // append packed: rows of k_new and v_new
  // Append: strides of the tensor of the same name; all zero: contiguous.
  Strides k_new = {}, v_new = {};
  int64_t rotary_dim = 0;           // elements that are rotated; even; 0: none
  int64_t rotary_rows = 0;          // positions that rotary_cos and rotary_sin have
  bool rotary_interleaved = false;  // pairs are neighbours, not elements of the two halves
  // Whether the arguments carry the array of that name. Without it they must not.
  bool has_cache_batch_idx = false, has_leftpad = false, has_rotary_position = false;

  bool window_signed = false;  // the window's limits may be negative; STROBE_NO_LIMIT alone is none

  DType grad_dtype = DType::kSame;  // backward: of dq, dk and dv; or kFloat32
  bool accumulate = false;          // backward: gradients are added to what dq, dk and dv hold
  bool has_delta = false;  // backward: the arguments carry delta, out is not read; no has_dlse

  bool has_sinks = false;          // the arguments carry an attention sink for each query head
  bool sinks_outside_lse = false;  // lse is that of the keys alone
  bool has_dsinks = false;         // backward: the arguments carry dsinks; with has_sinks

  MaskShape mask = {};  // a mask as data (pack_mask): blocks, for whom it is, capacities

  // Additive bias [bias_batch, bias_heads, bias_seqlen_q, seqlen_k]: added to the scores after
  // softcap; -inf hides a pair. Each of the first three extents is 1 (shared) or the full one; 0:
  // the full one.
  bool has_bias = false;             // the arguments carry bias
  bool has_dbias = false;            // backward: the arguments carry dbias, its gradient
  DType bias_dtype = DType::kSame;   // of bias; kSame: dtype
  DType dbias_dtype = DType::kSame;  // of dbias; kSame: that of bias; or kFloat32
  int64_t bias_batch = 0;            // 1: one for all sequences; 0: as many as batch
  int64_t bias_heads = 0;            // 1: one for all query heads; 0: as many as heads
  int64_t bias_seqlen_q = 0;         // 1: one for all queries; 0: as many as seqlen_q
  Strides bias = {}, dbias = {};     // dim: from a key to the next; any; all zero: contiguous

  // A quantised cache: strides of k and v count bytes. dim of the scales' strides is not used.
  KvScale kv_scale = KvScale::kNone;       // kInt8 and float8 need one
  DType kv_scale_dtype = DType::kFloat32;  // of k_scale and v_scale; or kFloat16
  Strides k_scale = {}, v_scale = {};      // all zero: contiguous
  // Where this problem lies in a larger one, whose random bits dropout then has.
  int64_t dropout_first_query = 0;  // of the larger one: query 0 of each sequence
  int64_t dropout_first_key = 0;    // of the larger one: key 0 of each; on GPUs a multiple of 8
  int64_t dropout_first_head = 0;   // head 0 of sequence 0: sequence * dropout_heads + head
  int64_t dropout_heads = 0;        // heads of the larger one; 0: as many as heads

  // Float8 attention, forward only: dtype kFloat8E4M3, kv_scale kBatchHead or kNone (scales of 1).
  // With append k_new and v_new are codes of kv_dtype, which are copied to the cache.
  bool has_q_scale = false;  // the arguments carry q_scale; else the scales of q are 1
  Strides q_scale = {};      // batch and head; all zero: contiguous

  // With a cache: of v, where it is not that of k: what kv_dtype may be, or dtype. k and v are then
  // stored, read and appended to each as its own says; kv_scale is that of those that have scales.
  DType v_dtype = DType::kSame;  // kSame: kv_dtype

  // The backward pass of this problem, all else being equal: one description of a layer gives both
  // of its plans.
  //   const strobe::Problem problem = {.seqlen_q = 1024, .seqlen_k = 1024, .heads = 8, ...};
  //   const strobe::Plan forward(problem), backward(problem.backward());
  [[nodiscard]] Problem backward() const noexcept {
    Problem problem = *this;
    problem.direction = Direction::kBackward;
    return problem;
  }

  // The forward pass of this problem, all else being equal but what forward has not: has_dlse,
  // grad_dtype, accumulate, has_delta, has_dsinks, has_dbias and dbias_dtype.
  [[nodiscard]] Problem forward() const noexcept {
    Problem problem = *this;
    problem.direction = Direction::kForward;
    problem.has_dlse = problem.accumulate = problem.has_delta = false;
    problem.has_dsinks = problem.has_dbias = false;
    problem.grad_dtype = problem.dbias_dtype = DType::kSame;
    return problem;
  }

  // The same problem for the C interface.
  [[nodiscard]] strobe_problem c() const noexcept {
    strobe_problem p;
    strobe_problem_init(&p, sizeof p);
    p.direction = static_cast<int32_t>(direction);
    p.dtype = static_cast<int32_t>(dtype);
    p.device = static_cast<int32_t>(device);
    p.device_index = device_index;
    p.batch = batch;
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.heads = heads;
    p.heads_kv = heads_kv;
    p.head_dim = head_dim;
    p.head_dim_v = head_dim_v;
    p.varlen = varlen;
    p.causal = causal;
    p.total_q = total_q;
    p.total_k = total_k;
    p.window_left = window_left;
    p.window_right = window_right;
    p.window_signed = window_signed;
    p.scale = scale;
    p.softcap = softcap;
    p.dropout_p = dropout_p;
    p.alibi = static_cast<int32_t>(alibi);
    p.deterministic = deterministic;
    p.batch_invariant = batch_invariant;
    p.has_dlse = has_dlse;
    p.threads = threads;
    p.q = q;
    p.k = k;
    p.v = v;
    p.out = out;
    p.dout = dout;
    p.dq = dq;
    p.dk = dk;
    p.dv = dv;
    p.attention_chunk = attention_chunk;
    p.has_seqused_q = has_seqused_q;
    p.has_seqused_k = has_seqused_k;
    p.has_q_position = has_q_position;
    p.has_prefix = has_prefix;
    p.kv_dtype = static_cast<int32_t>(kv_dtype);
    p.out_dtype = static_cast<int32_t>(out_dtype);
    p.cache = static_cast<int32_t>(cache);
    p.append = static_cast<int32_t>(append);
    p.cache_batch = cache_batch;
    p.pages = pages;
    p.page_size = page_size;
    p.pages_per_sequence = pages_per_sequence;
    p.block_table_stride = block_table_stride;
    p.seqlen_new = seqlen_new;
    p.total_new = total_new;
    p.k_new = k_new;
    p.v_new = v_new;
    p.rotary_dim = rotary_dim;
    p.rotary_rows = rotary_rows;
    p.rotary_interleaved = rotary_interleaved;
    p.has_cache_batch_idx = has_cache_batch_idx;
    p.has_leftpad = has_leftpad;
    p.has_rotary_position = has_rotary_position;
    p.grad_dtype = static_cast<int32_t>(grad_dtype);
    p.accumulate = accumulate;
    p.has_delta = has_delta;
    p.has_sinks = has_sinks;
    p.sinks_outside_lse = sinks_outside_lse;
    p.has_dsinks = has_dsinks;
    p.mask = mask.c();
    p.has_bias = has_bias;
    p.has_dbias = has_dbias;
    p.bias_dtype = static_cast<int32_t>(bias_dtype);
    p.dbias_dtype = static_cast<int32_t>(dbias_dtype);
    p.bias_batch = bias_batch;
    p.bias_heads = bias_heads;
    p.bias_seqlen_q = bias_seqlen_q;
    p.bias = bias;
    p.dbias = dbias;
    p.kv_scale = static_cast<int32_t>(kv_scale);
    p.kv_scale_dtype = static_cast<int32_t>(kv_scale_dtype);
    p.k_scale = k_scale;
    p.v_scale = v_scale;
    p.dropout_first_query = dropout_first_query;
    p.dropout_first_key = dropout_first_key;
    p.dropout_first_head = dropout_first_head;
    p.dropout_heads = dropout_heads;
    p.has_q_scale = has_q_scale;
    p.q_scale = q_scale;
    p.v_dtype = static_cast<int32_t>(v_dtype);
    return p;
  }
};

namespace internal {

// What the arguments of both directions have, for the C interface.
template <typename C, typename Args>
[[nodiscard]] C c_args(const Args& args) noexcept {
  C a = {};
  a.struct_size = sizeof a;
  a.q = args.q;
  a.k = args.k;
  a.v = args.v;
  a.out = args.out;
  a.lse = args.lse;
  a.cu_seqlens_q = args.cu_seqlens_q;
  a.cu_seqlens_k = args.cu_seqlens_k;
  a.alibi_slopes = args.alibi_slopes;
  a.dropout_seed = args.dropout_seed;
  a.dropout_offset = args.dropout_offset;
  a.workspace = args.workspace.data();
  a.workspace_bytes = args.workspace.size();
  a.stream = args.stream;
  a.interrupt = args.interrupt;
  a.interrupt_data = args.interrupt_data;
  a.seqused_q = args.seqused_q;
  a.seqused_k = args.seqused_k;
  a.q_position = args.q_position;
  a.prefix = args.prefix;
  a.sinks = args.sinks;
  a.mask = args.mask;
  a.bias = args.bias;
  return a;
}

}  // namespace internal

// Tensors of a forward launch: host pointers for Device::kCpu, device pointers for Device::kCuda.
// The shapes are those without varlen; with it, [batch, seqlen] becomes [total].
struct ForwardArgs {
  const void* q = nullptr;  // [batch, seqlen_q, heads, head_dim]
  const void* k = nullptr;  // [batch, seqlen_k, heads_kv, head_dim], or the cache
  const void* v = nullptr;  // [batch, seqlen_k, heads_kv, head_dim_v], or the cache
  void* out = nullptr;      // [batch, seqlen_q, heads, head_dim_v]
  float* lse = nullptr;     // [batch, heads, seqlen_q], varlen [heads, total_q]; null: not wanted
  const int32_t* cu_seqlens_q = nullptr;          // varlen: [batch + 1]
  const int32_t* cu_seqlens_k = nullptr;          // varlen: [batch + 1]
  const float* alibi_slopes = nullptr;            // with alibi: [heads] or [batch, heads]
  uint64_t dropout_seed = 0, dropout_offset = 0;  // of the Philox generator
  // plan.workspace_bytes(), 64-byte aligned (strobe::Workspace); empty: the library's own
  std::span<std::byte> workspace = {};
  void* stream = nullptr;  // CUDA: cudaStream_t
  // CPU: asked about every 0.1 s; other than 0 ends the launch with kInterrupted. Must not throw.
  int32_t (*interrupt)(void* interrupt_data) = nullptr;
  void* interrupt_data = nullptr;  // what interrupt is called with
  // Arrays that the problem says it has (has_seqused_q, ...): null without. strobe.h says what they
  // may hold.
  const int32_t* seqused_q = nullptr;   // [batch] rows of q in use, the first ones of each sequence
  const int32_t* seqused_k = nullptr;   // [batch] rows of k and v in use, without those of k_new
  const int32_t* q_position = nullptr;  // [batch] key position of each sequence's first query
  const int32_t* prefix = nullptr;      // [batch] keys that all queries of the sequence see

  // With a cache, k and v are the cache, and with append they are written. What the problem does
  // not ask for is null.
  const int32_t* block_table = nullptr;       // paged: [batch, pages_per_sequence]
  const int32_t* cache_batch_idx = nullptr;   // [batch] the cache's entry of each sequence
  const int32_t* leftpad = nullptr;           // [batch] rows that a sequence skips
  const void* k_new = nullptr;                // append: [batch, seqlen_new, heads_kv, head_dim]
  const void* v_new = nullptr;                // append: [batch, seqlen_new, heads_kv, head_dim_v]
  const int32_t* cu_seqlens_k_new = nullptr;  // append packed: [batch + 1]
  const void *rotary_cos = nullptr, *rotary_sin = nullptr;  // [rotary_rows, rotary_dim / 2]
  const int32_t* rotary_position = nullptr;  // [batch] position of the first query and new key
  const float* sinks = nullptr;              // with has_sinks: [heads]
  const void* mask = nullptr;                // what pack_mask wrote, with a problem that has a mask

  const void* bias =
      nullptr;  // [bias_batch, bias_heads, bias_seqlen_q, seqlen_k], when it has_bias
  // With a kv_scale: what keys and values are multiplied by; written with append, of rows.
  const void *k_scale = nullptr, *v_scale = nullptr;
  const float* q_scale = nullptr;  // with has_q_scale: [batch, heads_kv]

  // The same arguments for the C interface.
  [[nodiscard]] strobe_forward_args c() const noexcept {
    auto a = internal::c_args<strobe_forward_args>(*this);
    a.block_table = block_table;
    a.cache_batch_idx = cache_batch_idx;
    a.leftpad = leftpad;
    a.k_new = k_new;
    a.v_new = v_new;
    a.cu_seqlens_k_new = cu_seqlens_k_new;
    a.rotary_cos = rotary_cos;
    a.rotary_sin = rotary_sin;
    a.rotary_position = rotary_position;
    a.k_scale = k_scale;
    a.v_scale = v_scale;
    a.q_scale = q_scale;
    return a;
  }
};

// Tensors of a backward launch.
struct BackwardArgs {
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // as in forward
  const void* out = nullptr;    // what forward gave; not read where the problem has_delta
  const float* lse = nullptr;   // what forward gave
  const void* dout = nullptr;   // gradient of out, its shape
  const float* dlse = nullptr;  // gradient of lse, its shape, when the problem has_dlse
  void* dq = nullptr;           // [batch, seqlen_q, heads, head_dim]
  void* dk = nullptr;  // [batch, seqlen_k, heads_kv, head_dim], summed over the group of heads
  void* dv = nullptr;  // [batch, seqlen_k, heads_kv, head_dim_v]
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // as in forward
  const float* alibi_slopes = nullptr;                             // as in forward
  uint64_t dropout_seed = 0, dropout_offset = 0;                   // those of the forward launch
  std::span<std::byte> workspace = {};                             // as in forward
  void* stream = nullptr;                                          // as in forward
  int32_t (*interrupt)(void* interrupt_data) = nullptr;            // as in forward
  void* interrupt_data = nullptr;                                  // as in forward
  const int32_t *seqused_q = nullptr, *seqused_k = nullptr;        // as in forward
  const int32_t *q_position = nullptr, *prefix = nullptr;          // as in forward
  const float* delta = nullptr;  // rowsum(dout * out) - dlse, lse's shape, when it has_delta
  const float* sinks = nullptr;  // as in forward
  float* dsinks = nullptr;       // [heads], when the problem has_dsinks
  const void* mask = nullptr;    // as in forward
  const void* bias = nullptr;    // as in forward
  void* dbias = nullptr;         // gradient of bias, its shape, when the problem has_dbias

  // The same arguments for the C interface.
  [[nodiscard]] strobe_backward_args c() const noexcept {
    auto a = internal::c_args<strobe_backward_args>(*this);
    a.dout = dout;
    a.dlse = dlse;
    a.dq = dq;
    a.dk = dk;
    a.dv = dv;
    a.delta = delta;
    a.dsinks = dsinks;
    a.dbias = dbias;
    return a;
  }
};

namespace internal {

inline void throw_unless_ok(Status status) {
  if (status != Status::kOk) throw Error(status, last_error());
}

// Calls a function of the C interface that fills text and returns its length, as often as it takes
// to get all of it.
template <typename Fill>
[[nodiscard]] std::string all_text(Fill fill) {
  std::string text(1024, '\0');
  for (;;) {
    const size_t length = fill(text.data(), text.size());
    const bool complete = length < text.size();
    text.resize(length + (complete ? 0 : 1));
    if (complete) return text;
  }
}

}  // namespace internal

// How a problem will be done: back end, kernel, tiles, threads or grid, workspace. Plain data: copy
// it, keep it, use it from several threads at once.
class Plan {
 public:
  // An empty plan, for try_make to fill. Launching it fails with kInvalidArgument.
  Plan() noexcept : plan_() { plan_.struct_size = sizeof plan_; }

  // Plans the problem. Throws Error: kInvalidArgument names the argument, kUnsupported lists why
  // each kernel declines.
  explicit Plan(const Problem& problem) : Plan() {
    internal::throw_unless_ok(try_make(problem, *this));
  }

  // Plans the problem, without throwing. On failure plan is left as it was.
  [[nodiscard]] static Status try_make(const Problem& problem, Plan& plan) noexcept {
    const strobe_problem p = problem.c();
    return static_cast<Status>(strobe_plan_make(&p, &plan.plan_));
  }

  // Plans the problem with one of the choices that there are for it: choices(). Throws Error.
  Plan(const Problem& problem, const strobe_choice& choice) : Plan() {
    const strobe_problem p = problem.c();
    internal::throw_unless_ok(static_cast<Status>(strobe_plan_make_chosen(&p, &choice, &plan_)));
  }

  // Runs the plan. Returns when the result is there (CPU) or enqueued (CUDA). Bad arguments are
  // refused before anything is written.
  void forward(const ForwardArgs& args) const { internal::throw_unless_ok(try_forward(args)); }
  // Runs a plan of the backward direction, as forward() does one of the forward direction.
  void backward(const BackwardArgs& args) const { internal::throw_unless_ok(try_backward(args)); }

  // As forward(), without throwing.
  [[nodiscard]] Status try_forward(const ForwardArgs& args) const noexcept {
    const strobe_forward_args a = args.c();
    return static_cast<Status>(strobe_forward(&plan_, &a));
  }
  // As backward(), without throwing.
  [[nodiscard]] Status try_backward(const BackwardArgs& args) const noexcept {
    const strobe_backward_args a = args.c();
    return static_cast<Status>(strobe_backward(&plan_, &a));
  }

  // The plan in words: kernel, tile, threads or grid, workspace, and why each kernel before it
  // declined.
  [[nodiscard]] std::string text() const {
    return internal::all_text(
        [this](char* text, size_t capacity) { return strobe_plan_text(&plan_, text, capacity); });
  }

  // Name of the kernel: "cpu_avx512".
  [[nodiscard]] const char* kernel() const noexcept { return plan_.kernel ? plan_.kernel : ""; }
  // What a launch needs.
  [[nodiscard]] size_t workspace_bytes() const noexcept { return plan_.workspace_bytes; }
  // CPU: threads that a launch will use.
  [[nodiscard]] int threads() const noexcept { return plan_.threads; }
  // Every field, defaults resolved.
  [[nodiscard]] const strobe_plan& c() const noexcept { return plan_; }

 private:
  strobe_plan plan_;
};

// Memory for launches on the CPU, kept from one to the next, so that they need not allocate. One
// launch at a time may use it.
class Workspace {
 public:
  // As much as the plan needs, for args.workspace. An earlier plan's may be gone then. Throws
  // std::bad_alloc.
  [[nodiscard]] std::span<std::byte> of(const Plan& plan) {
    const size_t bytes = plan.workspace_bytes();
    if (memory_.size() < bytes + kAlignment - 1) {
      memory_ = std::vector<std::byte>(bytes + kAlignment - 1);
    }
    // Aligned here, not by std::vector, which leaves alignments above that of max_align_t to the
    // compiler: GCC's -fno-aligned-new has none, and Clang 14 loses them in C++23.
    const size_t past = reinterpret_cast<uintptr_t>(memory_.data()) % kAlignment;
    return std::span(memory_).subspan(past == 0 ? 0 : kAlignment - past, bytes);
  }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<std::byte> memory_;
};

// Whether some kernel takes the problem.
[[nodiscard]] inline bool supports(const Problem& problem) noexcept {
  const strobe_problem p = problem.c();
  return strobe_supports(&p) == STROBE_OK;
}

// All choices that there are for the problem, that of the rules first. Throws Error.
[[nodiscard]] inline std::vector<strobe_choice> choices(const Problem& problem) {
  const strobe_problem p = problem.c();
  std::vector<strobe_choice> found;
  strobe_choice choice = {};
  choice.struct_size = sizeof choice;
  Status status = static_cast<Status>(strobe_plan_choice(&p, 0, &choice));
  internal::throw_unless_ok(status);
  while (status == Status::kOk) {
    found.push_back(choice);
    status =
        static_cast<Status>(strobe_plan_choice(&p, static_cast<int32_t>(found.size()), &choice));
  }
  return found;
}

// One line a kernel: that it takes the problem, or why it declines and a hint; or what is invalid.
[[nodiscard]] inline std::string why(const Problem& problem) {
  const strobe_problem p = problem.c();
  return internal::all_text(
      [&p](char* text, size_t capacity) { return strobe_why(&p, text, capacity); });
}

// The keep (1) or drop (0) decision of dropout for each weight, as forward and backward draw it;
// each is one byte of [batch, heads, seqlen_q, seqlen_k]. For tests and for frameworks that show
// it. Throws Error, and std::bad_alloc where there is no memory for the mask.
[[nodiscard]] inline std::vector<uint8_t> dropout_mask(int64_t batch, int64_t heads,
                                                       int64_t seqlen_q, int64_t seqlen_k,
                                                       float dropout_p, uint64_t seed,
                                                       uint64_t offset = 0) {
  // What cannot be counted is refused below, before anything is written.
  constexpr int64_t kMost = int64_t{1} << 58;
  int64_t bytes = 1;
  for (const int64_t extent : {batch, heads, seqlen_q, seqlen_k}) {
    bytes = extent <= 0 || bytes > kMost / extent ? 0 : bytes * extent;
  }
  std::vector<uint8_t> mask(static_cast<size_t>(bytes));
  internal::throw_unless_ok(static_cast<Status>(
      strobe_dropout_mask(batch, heads, seqlen_q, seqlen_k, dropout_p, seed, offset, mask.data())));
  return mask;
}
}  // namespace v0
}  // namespace strobe

#include <strobe/machine.hpp>
#include <strobe/mask.hpp>
#include <strobe/merge.hpp>
#include <strobe/quantize.hpp>

#endif  // C++20
#endif  // STROBE_STROBE_HPP_
