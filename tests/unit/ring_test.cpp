// strobe::Ring over ranks that are threads, against float64 of the whole sequences and the call of
// one device: split over ranks, a result's error is at most 1.05 of the single call's (root mean
// square). In float32, where errors are single roundings, a merge adds some: kMergeRoundings.
//
// STROBE_TEST_RING_GPU=1: on a GPU, which all ranks share; the threads carry messages through the
// host, and NCCL is not needed. STROBE_TEST_RING_PROBLEMS: so many of each kind, for sanitizers.
#include "strobe/ring.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "compare.h"
#include "environment.h"
#include "gtest/gtest.h"
#include "numeric.h"
#include "oracle.h"
#include "ring_threads.h"
#include "strobe/ulysses.hpp"

namespace strobe_test {
namespace {

using oracle::Rng;
using strobe::DType;

constexpr double kMergeRoundings = 4e-7;
constexpr uint64_t kSeed = 0x123456789ABCDEF0, kOffset = 7;  // of dropout

// On a GPU that is emulated (tests/emulator), whose one width and dtype are 64 and bfloat16: but
// for these, a seed draws what it draws for a GPU.
#ifdef STROBE_TEST_EMULATED
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif
uint64_t AtMost(uint64_t count) {
  const char* const wanted = std::getenv("STROBE_TEST_RING_PROBLEMS");
  return wanted ? std::min<uint64_t>(count, std::strtoull(wanted, nullptr, 10)) : count;
}
const uint64_t kProblems = AtMost(kEmulated ? 24 : kSanitized ? 60 : 300);
const uint64_t kRepeated = AtMost(kEmulated ? 2 : kSanitized ? 6 : 20);

// The GPU that is tested; null: the CPU is.
const strobe::Gpu* TestedGpu() {
  static const std::unique_ptr<strobe::Gpu> gpu =
      std::getenv("STROBE_TEST_RING_GPU") ? std::make_unique<strobe::Gpu>(0) : nullptr;
  return gpu.get();
}

// How much larger than the single call's an error may be. On GPUs a block of another size rounds
// weights at other places: errors of problems of three and five rows were 1.4 times the single
// call's, while those of 2,048 rows are the same (bench/ring.py).
double MostOverSingle() { return TestedGpu() ? 2 : 1.05; }

// Where a launch finds the host's tensors: where they are, or copies on the GPU.
class Copies {
 public:
  Copies() {
    if (TestedGpu()) stream_ = TestedGpu()->make_stream();
  }
  ~Copies() {
    if (TestedGpu()) TestedGpu()->destroy_stream(stream_);
  }
  void* stream() const { return stream_; }
  template <typename T>
  T* In(T* host, size_t bytes) {
    if (!TestedGpu() || !host) return host;
    copies_.emplace_back(*TestedGpu(), bytes);
    TestedGpu()->upload(copies_.back().data(), host, bytes, stream_);
    return static_cast<T*>(copies_.back().data());
  }
  template <typename Vector>
  auto* In(Vector& host) {
    return In(host.empty() ? nullptr : host.data(), host.size() * sizeof(host[0]));
  }
  // The same, and Fetch() brings it back.
  template <typename Vector>
  auto* Out(Vector& host) {
    auto* const copy = In(host);
    outs_.push_back({host.data(), copy, host.size() * sizeof(host[0])});
    return copy;
  }
  void Fetch() const {
    if (!TestedGpu()) return;
    for (const auto& out : outs_) TestedGpu()->download(out.host, out.copy, out.bytes, stream_);
  }

 private:
  struct Copied {
    void* host;
    const void* copy;
    size_t bytes;
  };
  void* stream_ = nullptr;
  std::vector<strobe::GpuMemory> copies_;
  std::vector<Copied> outs_;
};

oracle::DType Of(DType dtype) { return static_cast<oracle::DType>(dtype); }

// [batch, rows, heads, dim] of some dtype, in some strides.
struct Array {
  DType dtype = DType::kFloat32;
  int64_t batch = 0, rows = 0, heads = 0, dim = 0;
  strobe::Strides strides = {};
  std::vector<uint8_t> bytes;

  // layout: 0: contiguous; 1: heads before rows; 2: with room between heads and rows.
  static Array Make(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim,
                    int layout = 0) {
    Array a{dtype, batch, rows, heads, dim, {}, {}};
    a.strides = {rows * heads * dim, heads * dim, dim, 1};
    if (layout == 1) a.strides = {rows * heads * dim, dim, rows * dim, 1};
    if (layout == 2) a.strides = {(rows + 1) * heads * (dim + 8), heads * (dim + 8), dim + 8, 1};
    const int64_t elements = batch * std::max(a.strides.batch, rows * heads * dim) + 64;
    a.bytes.assign(static_cast<size_t>(elements * oracle::ElementSize(Of(dtype))), 0xFF);
    return a;
  }
  void* data() { return bytes.data(); }
  int64_t At(int64_t b, int64_t row, int64_t head, int64_t d) const {
    return b * strides.batch + row * strides.seqlen + head * strides.head + d;
  }
  float Get(int64_t b, int64_t row, int64_t head, int64_t d) const {
    return oracle::Load(Of(dtype), bytes.data(), At(b, row, head, d));
  }
  void Set(int64_t b, int64_t row, int64_t head, int64_t d, float x) {
    oracle::Store(Of(dtype), bytes.data(), At(b, row, head, d), x);
  }
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < dim; ++d) visit(b, i, h, d);
  }
  void Fill(Rng& rng) {
    ForEach([&](int64_t b, int64_t i, int64_t h, int64_t d) {
      Set(b, i, h, d, static_cast<float>(rng.Normal()));
    });
  }
  oracle::Tensor Exact() const {
    oracle::Tensor t(batch * rows, heads, dim);
    ForEach([&](int64_t b, int64_t i, int64_t h, int64_t d) {
      t.at(b * rows + i, h)[d] = static_cast<double>(Get(b, i, h, d));
    });
    return t;
  }
};

// A problem, its tensors as a whole, and what options it has.
struct Case {
  strobe::RingProblem problem;  // of rank 0
  Array q, k, v, dout, lse_like;
  std::vector<float> dlse, sinks, slopes;
  int layout = 0;
  // What problem.mask is made of, as it says, of all rows: one of them; all_rows: whether a rank is
  // given all of it.
  std::vector<int32_t> intervals;
  std::vector<uint8_t> bytes;
  bool all_rows = false;

  void DropMask() {
    problem.mask = {};
    intervals.clear();
    bytes.clear();
  }
  bool masked() const { return !intervals.empty() || !bytes.empty(); }
  bool of_blocks() const { return problem.mask.block > 0; }
  int64_t longest() const {
    const std::vector<int64_t> all = lengths();
    return *std::max_element(all.begin(), all.end());
  }
  // Whether the mask as data lets a row, of all of a sequence of the batch, see a key of its own
  // sequence.
  bool Sees(int64_t b, int64_t head, int64_t row, int64_t key) const {
    if (!masked()) return true;
    if (problem.mask.batch == 1) b = 0;
    if (!intervals.empty()) {
      const int32_t* const ends = &intervals[static_cast<size_t>(4 * (b * rows() + row))];
      return (ends[0] <= key && key < ends[1]) || (ends[2] <= key && key < ends[3]);
    }
    if (problem.mask.heads == 1) head = 0;
    const int64_t side = std::max<int64_t>(1, problem.mask.block);
    const int64_t lines = (rows() + side - 1) / side;
    const int64_t columns = of_blocks() ? lines : problem.lengths.empty() ? rows() : longest();
    const int64_t plane = b * problem.mask.heads + head;
    return bytes[static_cast<size_t>((plane * lines + row / side) * columns + key / side)] != 0;
  }
  // The mask as a rank with these rows is given it; `own` has the rows where they are cut.
  strobe::RingMaskData MaskOf(const std::vector<strobe::RingChunk>& chunks, Case& own) const {
    strobe::RingMaskData data = problem.mask;
    own.intervals = intervals;
    own.bytes = bytes;
    data.all_rows = all_rows;
    if (!all_rows) {
      const int64_t columns = problem.lengths.empty() ? rows() : longest();
      const auto cut = [&](const auto& whole, int64_t width, auto& found) {
        found.clear();
        const int64_t planes = data.batch * data.heads;
        for (int64_t plane = 0; plane < planes && !whole.empty(); ++plane)
          for (const strobe::RingChunk& chunk : chunks)
            found.insert(found.end(), whole.begin() + (plane * rows() + chunk.begin) * width,
                         whole.begin() + (plane * rows() + chunk.end) * width);
        found.reserve(1);  // a rank without rows has a mask too
      };
      cut(intervals, 4, own.intervals);
      cut(bytes, columns, own.bytes);
    }
    if (!intervals.empty()) data.intervals = own.intervals;
    if (!bytes.empty()) (of_blocks() ? data.blocks : data.pairs) = own.bytes;
    return data;
  }
  // Of a row of all of the batch's sequence b: its sequence, and whether it is in use.
  bool Used(int64_t b, int64_t row) const {
    if (problem.seqused.empty()) return true;
    if (problem.lengths.empty()) return row < problem.seqused[static_cast<size_t>(b)];
    size_t sequence = 0;
    for (; row >= problem.lengths[sequence]; ++sequence) row -= problem.lengths[sequence];
    return row < problem.seqused[sequence];
  }

  int64_t batch() const { return problem.lengths.empty() ? problem.layer.batch : 1; }
  std::vector<int64_t> lengths() const {
    return problem.lengths.empty() ? std::vector<int64_t>{problem.layer.seqlen_q} : problem.lengths;
  }
  int64_t rows() const {
    const std::vector<int64_t> all = lengths();
    return std::accumulate(all.begin(), all.end(), int64_t{0});
  }
  // Gives the rows of q, k, v and dout that are not in use this value.
  void FillUnused(float value) {
    for (Array* a : {&q, &k, &v, &dout}) {
      a->ForEach([&](int64_t b, int64_t i, int64_t h, int64_t d) {
        if (!Used(b, i)) a->Set(b, i, h, d, value);
      });
    }
  }
  // Fills in the tensors.
  void Draw(Rng& rng) {
    const strobe::Problem& p = problem.layer;
    q = Array::Make(p.dtype, batch(), rows(), p.heads, p.head_dim);
    k = Array::Make(p.dtype, batch(), rows(), p.heads_kv, p.head_dim);
    v = Array::Make(p.dtype, batch(), rows(), p.heads_kv, p.head_dim_v);
    dout = Array::Make(p.dtype, batch(), rows(), p.heads, p.head_dim_v);
    for (Array* a : {&q, &k, &v, &dout}) a->Fill(rng);
    FillUnused(std::numeric_limits<float>::quiet_NaN());  // it makes no difference
    const auto draw = [&](std::vector<float>& some, int64_t count, double low, double high) {
      some.resize(static_cast<size_t>(count));
      for (float& x : some) x = static_cast<float>(rng.Uniform(low, high));
    };
    if (p.has_dlse) draw(dlse, batch() * p.heads * rows(), -1, 1);
    if (p.has_sinks) {
      draw(sinks, p.heads, -3, 3);
      if (rng.Chance(0.2)) sinks[0] = -std::numeric_limits<float>::infinity();
    }
    if (p.alibi == strobe::Alibi::kPerHead) draw(slopes, p.heads, 0, 1);
    if (p.alibi == strobe::Alibi::kPerBatchHead) draw(slopes, batch() * p.heads, 0, 1);
  }
  std::string Text() const {
    const strobe::Problem& p = problem.layer;
    std::ostringstream text;
    text << "ranks " << problem.ranks << " order " << static_cast<int>(problem.order)
         << " documents " << static_cast<int>(problem.documents) << " dtype "
         << static_cast<int>(p.dtype) << " batch " << batch() << " lengths";
    for (const int64_t length : lengths()) text << " " << length;
    text << (problem.lengths.empty() ? "" : " packed") << " heads " << p.heads << "/" << p.heads_kv
         << " dims " << p.head_dim << "/" << p.head_dim_v << " causal " << p.causal << " window "
         << p.window_left << "," << p.window_right << " chunk " << p.attention_chunk << " dropout "
         << p.dropout_p << " softcap " << p.softcap << " alibi " << static_cast<int>(p.alibi)
         << " sinks " << p.has_sinks << " dlse " << p.has_dlse << " layout " << layout
         << " ulysses " << problem.ulysses << " used";
    for (const int64_t used : problem.seqused) text << " " << used;
    text << " mask " << (intervals.empty() ? bytes.empty() ? "none" : "bytes" : "intervals")
         << " block " << problem.mask.block << " batch " << problem.mask.batch << " heads "
         << problem.mask.heads << " all " << all_rows;
    return text.str();
  }
};

// What forward and backward give: of the whole.
struct Results {
  Array out, dq, dk, dv;
  std::vector<float> lse, dsinks;  // lse: [batch, heads, rows]
};

std::span<std::byte> Aligned(std::vector<std::byte>& room, size_t bytes) {
  room.assign(bytes + 64, std::byte{0xFF});
  void* at = room.data();
  size_t space = room.size();
  std::align(64, bytes, at, space);
  return {static_cast<std::byte*>(at), bytes};
}

DType Wanted(DType given, DType otherwise) { return given == DType::kSame ? otherwise : given; }

Results Empty(const strobe::Problem& p, int64_t batch, int64_t rows, int layout) {
  Results r;
  const DType grad = Wanted(p.grad_dtype, p.dtype);
  r.out = Array::Make(Wanted(p.out_dtype, p.dtype), batch, rows, p.heads, p.head_dim_v, layout);
  r.dq = Array::Make(grad, batch, rows, p.heads, p.head_dim, layout);
  r.dk = Array::Make(grad, batch, rows, p.heads_kv, p.head_dim, layout);
  r.dv = Array::Make(grad, batch, rows, p.heads_kv, p.head_dim_v, layout);
  r.lse.assign(static_cast<size_t>(batch * p.heads * rows), 1e30F);
  r.dsinks.assign(static_cast<size_t>(p.heads), 1e30F);
  return r;
}

template <typename Launchable, typename... Ranks>
void Launch(const Case& c, const Launchable& forward, const Launchable& backward, Array& q,
            Array& k, Array& v, Array& dout, std::vector<float>& dlse, Results& r,
            const std::vector<int32_t>& cu, const std::vector<int32_t>& used,
            std::vector<int32_t> mask, Ranks&... ranks) {
  const strobe::Problem& p = c.problem.layer;
  Copies on;
  std::vector<std::byte> room, other_room;
  std::vector<int32_t> begins = cu, in_use = used;
  std::vector<float> slopes = c.slopes, sinks = c.sinks;
  const auto workspace = [&](std::vector<std::byte>& memory, size_t bytes) {
    const std::span<std::byte> found = Aligned(memory, bytes);
    return std::span<std::byte>(on.In(found.data(), found.size()), found.size());
  };
  strobe::ForwardArgs f = {.q = on.In(q.bytes), .k = on.In(k.bytes), .v = on.In(v.bytes)};
  f.out = on.Out(r.out.bytes);
  f.lse = on.Out(r.lse);
  f.cu_seqlens_q = f.cu_seqlens_k = on.In(begins);
  f.seqused_q = f.seqused_k = on.In(in_use);
  f.mask = on.In(mask);
  f.alibi_slopes = on.In(slopes);
  f.sinks = on.In(sinks);
  f.dropout_seed = kSeed;
  f.dropout_offset = kOffset;
  f.workspace = workspace(room, forward.workspace_bytes());
  f.stream = on.stream();
  strobe::BackwardArgs b = {.q = f.q, .k = f.k, .v = f.v, .out = f.out, .lse = f.lse};
  b.dout = on.In(dout.bytes);
  b.dlse = p.has_dlse ? on.In(dlse) : nullptr;
  b.dq = on.Out(r.dq.bytes);
  b.dk = on.Out(r.dk.bytes);
  b.dv = on.Out(r.dv.bytes);
  b.cu_seqlens_q = b.cu_seqlens_k = f.cu_seqlens_q;
  b.seqused_q = b.seqused_k = f.seqused_q;
  b.mask = f.mask;
  b.alibi_slopes = f.alibi_slopes;
  b.sinks = f.sinks;
  b.dropout_seed = f.dropout_seed;
  b.dropout_offset = f.dropout_offset;
  b.dsinks = p.has_dsinks ? on.Out(r.dsinks) : nullptr;
  b.workspace = workspace(other_room, backward.workspace_bytes());
  b.stream = on.stream();
  if constexpr (sizeof...(Ranks) == 1) {  // what a rehearsal leaves behind changes nothing
    if (c.rows() % 3 == 0) {
      strobe::Rehearsal nobody(ranks.ranks()..., ranks.rank()...);
      forward.forward(f, nobody);
      backward.backward(b, nobody);
    }
  }
  forward.forward(f, ranks...);
  backward.backward(b, ranks...);
  on.Fetch();
}

// The whole mask for one device, of all pairs; p is told of it.
std::vector<int32_t> Packed(const Case& c, strobe::Problem& p, const std::vector<int32_t>& cu) {
  const int64_t width = cu.empty() ? c.rows() : c.longest();
  std::vector<uint8_t> keep;
  p.mask.kind = STROBE_MASK_PACKED;
  p.mask.block_q = p.mask.block_k = 128;
  p.mask.batch = cu.empty() ? c.batch() : p.batch;
  p.mask.heads = p.heads;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < c.rows(); ++i)
        for (int64_t j = 0; j < width; ++j) keep.push_back(c.Sees(b, h, i, j) ? 1 : 0);
  strobe::Problem on_host = p.forward();
  on_host.device = strobe::Device::kCpu;
  std::vector<int32_t> words((strobe::mask_bytes(on_host) + 3) / 4);
  strobe::MaskArgs args = {};
  keep.reserve(1);
  args.keep = keep.data();
  if (!cu.empty()) args.cu_seqlens_q = args.cu_seqlens_k = cu.data();
  args.packed = words.data();
  args.packed_bytes = words.size() * sizeof(int32_t);
  strobe::pack_mask(on_host, args);
  return words;
}

// Its rows that are not in use are zeros. Where they hold NaN, kernels on GPUs compute what has met
// one again by its pairs, in float32: all keys of a tile of 128, here with errors of 1e-7 where
// those of weights in 16 bits are 1e-4. Ranks' calls have other tiles, and errors of the latter
// kind.
Results Single(Case c) {
  c.FillUnused(0);
  strobe::Problem p = c.problem.layer;
  std::vector<int32_t> cu;
  if (!c.problem.lengths.empty()) {
    p.varlen = true;
    p.batch = static_cast<int64_t>(c.problem.lengths.size());
    p.total_q = p.total_k = c.rows();
    cu.push_back(0);
    for (const int64_t length : c.problem.lengths) {
      cu.push_back(cu.back() + static_cast<int32_t>(length));
      p.seqlen_q = p.seqlen_k = std::max(p.seqlen_q, length);
    }
  }
  Results r = Empty(c.problem.layer, c.batch(), c.rows(), 0);
  std::vector<int32_t> used, mask;
  for (const int64_t count : c.problem.seqused) used.push_back(static_cast<int32_t>(count));
  p.has_seqused_q = p.has_seqused_k = !used.empty();
  if (c.masked()) mask = Packed(c, p, cu);
  Launch(c, strobe::Plan(p.forward()), strobe::Plan(p), c.q, c.k, c.v, c.dout, c.dlse, r, cu, used,
         mask);
  return r;
}

// A rank's rows of a tensor of the whole.
Array Shard(const Array& whole, const std::vector<strobe::RingChunk>& chunks, int64_t rows,
            int layout) {
  Array part = Array::Make(whole.dtype, whole.batch, rows, whole.heads, whole.dim, layout);
  part.ForEach([&](int64_t, int64_t, int64_t, int64_t) {});
  for (const strobe::RingChunk& chunk : chunks) {
    for (int64_t b = 0; b < whole.batch; ++b)
      for (int64_t i = chunk.begin; i < chunk.end; ++i)
        for (int64_t h = 0; h < whole.heads; ++h)
          for (int64_t d = 0; d < whole.dim; ++d)
            part.Set(b, chunk.row + i - chunk.begin, h, d, whole.Get(b, i, h, d));
  }
  return part;
}
void Gather(const Array& part, const std::vector<strobe::RingChunk>& chunks, Array& whole) {
  for (const strobe::RingChunk& chunk : chunks) {
    for (int64_t b = 0; b < whole.batch; ++b)
      for (int64_t i = chunk.begin; i < chunk.end; ++i)
        for (int64_t h = 0; h < whole.heads; ++h)
          for (int64_t d = 0; d < whole.dim; ++d)
            whole.Set(b, i, h, d, part.Get(b, chunk.row + i - chunk.begin, h, d));
  }
}

// One rank's part of a case, with its rows and strides; what it computes goes to `whole`. Method:
// strobe::Ring or strobe::Ulysses.
template <typename Method>
struct Part {
  Method forward, backward;
  std::vector<strobe::RingChunk> chunks;
  Array q, k, v, dout;
  std::vector<float> dlse;
  Results results;

  static strobe::RingProblem ProblemOf(const Case& c, int32_t rank) {
    strobe::RingProblem problem = c.problem;
    problem.rank = rank;
    strobe::Problem& p = problem.layer;
    problem.mask = {};
    problem.ulysses = 0;
    const strobe::Ring ring(problem.forward());  // for its rows
    problem.ulysses = c.problem.ulysses;
    const auto strides = [&](int64_t heads, int64_t dim) {
      if (c.layout == 0) return strobe::Strides{};
      return Array::Make(DType::kFloat32, c.batch(), ring.rows(), heads, dim, c.layout).strides;
    };
    p.q = p.dq = strides(p.heads, p.head_dim);
    p.k = p.dk = strides(p.heads_kv, p.head_dim);
    p.v = p.dv = strides(p.heads_kv, p.head_dim_v);
    p.out = p.dout = strides(p.heads, p.head_dim_v);
    return problem;
  }

  // What a mask was made of may be gone when the plans are there.
  static Method Made(const Case& c, strobe::RingProblem problem) {
    Case own;
    const std::vector<int64_t> lengths = c.lengths();
    strobe::RingOrder order = problem.order;
    if (order == strobe::RingOrder::kAuto)
      order = problem.layer.causal ? strobe::RingOrder::kZigzag : strobe::RingOrder::kPlain;
    if (c.masked()) {
      const strobe::RingLayout layout(lengths, problem.ranks, order, problem.documents);
      problem.mask = c.MaskOf(layout.chunks(problem.rank), own);
    }
    return Method(problem);
  }

  Part(const Case& c, const strobe::RingProblem& problem)
      : forward(Made(c, problem.forward())), backward(Made(c, problem)), chunks(forward.chunks()) {
    const strobe::Problem& p = problem.layer;
    const int64_t rows = forward.rows();
    q = Shard(c.q, chunks, rows, c.layout);
    k = Shard(c.k, chunks, rows, c.layout);
    v = Shard(c.v, chunks, rows, c.layout);
    dout = Shard(c.dout, chunks, rows, c.layout);
    results = Empty(p, c.batch(), rows, c.layout);
    dlse.resize(results.lse.size());
    if (p.has_dlse) EachLse(c, [&](size_t mine, size_t all) { dlse[mine] = c.dlse[all]; });
  }
  // visit(place in this rank's lse, place in the whole one).
  template <typename Visit>
  void EachLse(const Case& c, const Visit& visit) const {
    for (int64_t line = 0; line < c.batch() * c.problem.layer.heads; ++line) {
      for (const strobe::RingChunk& chunk : chunks) {
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          visit(static_cast<size_t>(line * forward.rows() + chunk.row + i - chunk.begin),
                static_cast<size_t>(line * c.rows() + i));
        }
      }
    }
  }
  void AddTo(const Case& c, Results& whole) const {
    Gather(results.out, chunks, whole.out);
    Gather(results.dq, chunks, whole.dq);
    Gather(results.dk, chunks, whole.dk);
    Gather(results.dv, chunks, whole.dv);
    EachLse(c, [&](size_t mine, size_t all) { whole.lse[all] = results.lse[mine]; });
    for (size_t h = 0; h < whole.dsinks.size(); ++h) whole.dsinks[h] += results.dsinks[h];
  }
};

template <typename Method>
Results Split(const Case& c) {
  RankThreads threads(c.problem.ranks);
  Results whole = Empty(c.problem.layer, c.batch(), c.rows(), 0);
  std::fill(whole.dsinks.begin(), whole.dsinks.end(), 0.0F);
  std::vector<std::unique_ptr<Part<Method>>> parts(static_cast<size_t>(c.problem.ranks));
  const std::vector<std::string> errors = threads.Run([&](int32_t rank) {
    auto& part = parts[static_cast<size_t>(rank)];
    part = std::make_unique<Part<Method>>(c, Part<Method>::ProblemOf(c, rank));
    ThreadCommunicator communicator(threads, rank, TestedGpu());
    Launch(c, part->forward, part->backward, part->q, part->k, part->v, part->dout, part->dlse,
           part->results, {}, {}, {}, communicator);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_TRUE(threads.AllTaken());
  if (::testing::Test::HasFailure()) return whole;
  for (const auto& part : parts) part->AddTo(c, whole);
  return whole;
}

struct Exact {
  oracle::ForwardResult forward;
  oracle::BackwardResult backward;
  oracle::Yardstick yardstick;  // of the same problem
};

Exact InDouble(const Case& c) {
  const strobe::Problem& p = c.problem.layer;
  oracle::Problem o;
  const bool packed = !c.problem.lengths.empty();
  int64_t begin = 0;
  const auto add = [&](int64_t length) {
    const int64_t used = c.problem.seqused.empty() ? length : c.problem.seqused[o.sequences.size()];
    o.sequences.push_back({begin, used, begin, used});
    begin += length;
  };
  if (packed) {
    for (const int64_t length : c.problem.lengths) add(length);
  } else {
    for (int64_t b = 0; b < p.batch; ++b) add(p.seqlen_q);
  }
  if (c.masked()) {
    o.hides = [&c, packed, o](int64_t sequence, int64_t head, int64_t i, int64_t j) {
      const int64_t row = i + (packed ? o.sequences[static_cast<size_t>(sequence)].q_begin : 0);
      return !c.Sees(packed ? 0 : sequence, head, row, j);
    };
  }
  o.heads = p.heads;
  o.heads_kv = p.heads_kv;
  o.head_dim = p.head_dim;
  o.head_dim_v = p.head_dim_v;
  o.causal = p.causal;
  o.window_left = p.window_left;
  o.window_right = p.window_right;
  o.attention_chunk = p.attention_chunk;
  o.scale = std::isnan(p.scale) ? 1 / std::sqrt(static_cast<double>(p.head_dim))
                                : static_cast<double>(p.scale);
  o.softcap = static_cast<double>(p.softcap);
  o.sinks.assign(c.sinks.begin(), c.sinks.end());
  if (p.dropout_p > 0) {
    o.dropout_p = static_cast<double>(p.dropout_p);
    for (const int64_t length : c.lengths()) o.keep_rows = std::max(o.keep_rows, length);
    o.keep_columns = o.keep_rows;
    o.keep = oracle::DropoutMask(static_cast<int64_t>(o.sequences.size()), p.heads, o.keep_rows,
                                 o.keep_columns, p.dropout_p, kSeed, kOffset);
  }
  for (size_t s = 0; s < o.sequences.size() && !c.slopes.empty(); ++s) {
    const auto heads = static_cast<size_t>(p.heads);
    for (size_t h = 0; h < heads; ++h)
      o.slopes.push_back(
          static_cast<double>(c.slopes[c.slopes.size() == heads ? h : s * heads + h]));
  }
  oracle::Tensor q = c.q.Exact(), k = c.k.Exact(), v = c.v.Exact(), dout = c.dout.Exact();
  for (oracle::Tensor* x : {&q, &k, &v, &dout})
    for (double& value : x->data) value = std::isnan(value) ? 0 : value;
  oracle::Tensor dlse(c.batch() * c.rows(), p.heads, 1);
  for (int64_t b = 0; p.has_dlse && b < c.batch(); ++b)
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < c.rows(); ++i)
        *dlse.at(b * c.rows() + i, h) =
            static_cast<double>(c.dlse[static_cast<size_t>((b * p.heads + h) * c.rows() + i)]);
  const auto plain = [o, q, k, v, dout, dlse, dtype = p.dtype, has = p.has_dlse](uint64_t seed) {
    return oracle::PlainAttention(o, Of(dtype), q, k, v, &dout, has ? &dlse : nullptr, seed);
  };
  Exact found = {oracle::Forward(o, q, k, v),
                 oracle::Backward(o, q, k, v, dout, p.has_dlse ? &dlse : nullptr),
                 oracle::Yardstick(plain, 24)};
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t i = 0; i < c.rows(); ++i)
      for (int64_t h = 0; h < p.heads && !c.Used(b, i); ++h)
        *found.forward.lse.at(b * c.rows() + i, h) = -std::numeric_limits<double>::infinity();
  return found;
}

// Root mean square of the differences.
double Error(const Array& got, const oracle::Tensor& wanted) {
  double sum = 0;
  got.ForEach([&](int64_t b, int64_t i, int64_t h, int64_t d) {
    const double x = static_cast<double>(got.Get(b, i, h, d)) - wanted.at(b * got.rows + i, h)[d];
    sum += x * x;
  });
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, wanted.data.size())));
}
double Error(const Case& c, const std::vector<float>& lse, const oracle::Tensor& wanted) {
  const int64_t heads = c.problem.layer.heads;
  double sum = 0;
  for (int64_t b = 0; b < c.batch(); ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < c.rows(); ++i) {
        const auto got =
            static_cast<double>(lse[static_cast<size_t>((b * heads + h) * c.rows() + i)]);
        const double exact = *wanted.at(b * c.rows() + i, h);
        if (got != exact) sum += std::pow(got - exact, 2);  // (not of infinities)
      }
  return std::sqrt(sum / static_cast<double>(std::max<size_t>(1, lse.size())));
}

template <typename Method>
void Check(const Case& c) {
  SCOPED_TRACE(c.Text());
  const Results got = Split<Method>(c);
  if (::testing::Test::HasFailure()) return;
  const Results single = Single(c);
  Exact exact = InDouble(c);
  const auto within = [](const char* name, double error, double of_single) {
    EXPECT_LE(error, MostOverSingle() * of_single + kMergeRoundings)
        << name << ", of one device " << of_single;
    EXPECT_FALSE(std::isnan(error)) << name;
  };
  // Of few rows the single call's error is luck: a dozen roundings. What decides there is what
  // plain steps in the dtype are wrong by, in several draws.
  constexpr int64_t kFewRows = 16;
  const bool few = c.batch() * c.rows() <= kFewRows;
  const auto compare = [&](const char* name, const Array& a, const Array& b,
                           const oracle::Tensor& wanted, oracle::Tensor oracle::Plain::*plain,
                           double factor) {
    const double error = Error(a, wanted), of_single = Error(b, wanted);
    if (few && error > MostOverSingle() * of_single + kMergeRoundings) {
      const oracle::Worst worst =
          exact.yardstick.Check(name, a.Exact(), wanted, plain, Of(c.problem.layer.dtype), factor);
      EXPECT_TRUE(worst.ok) << worst.text;
    } else {
      within(name, error, of_single);
    }
  };
  using oracle::Plain;
  constexpr double kOut = oracle::kOutFactor, kGradient = oracle::kGradientFactor;
  compare("out", got.out, single.out, exact.forward.out, &Plain::out, kOut);
  within("lse", Error(c, got.lse, exact.forward.lse), Error(c, single.lse, exact.forward.lse));
  compare("dq", got.dq, single.dq, exact.backward.dq, &Plain::dq, kGradient);
  compare("dk", got.dk, single.dk, exact.backward.dk, &Plain::dk, kGradient);
  compare("dv", got.dv, single.dv, exact.backward.dv, &Plain::dv, kGradient);
  if (!c.problem.layer.has_dsinks) return;
  // A sum over all rows, which may cancel: its error goes with the terms' size, and the single
  // call's is luck. So what decides is what plain steps in the dtype are wrong by, in several
  // draws.
  oracle::Tensor of_heads(1, c.problem.layer.heads, 1);
  for (size_t h = 0; h < got.dsinks.size(); ++h)
    of_heads.data[h] = static_cast<double>(got.dsinks[h]);
  const oracle::Worst worst =
      exact.yardstick.Check("dsinks", of_heads, exact.backward.dsinks, &oracle::Plain::dsinks,
                            oracle::DType::kFloat32, oracle::kSinkGradientFactor);
  EXPECT_TRUE(worst.ok) << worst.text;
}

// A mask as data, of every kind that is taken.
void DrawMask(Case& c, Rng& rng) {
  const bool packed = !c.problem.lengths.empty();
  strobe::RingMaskData& mask = c.problem.mask;
  c.all_rows = rng.Chance(0.6);
  mask.batch = rng.Chance(0.5) ? 1 : c.batch();
  const int64_t kind = rng.Integer(0, packed ? 1 : 2);
  const int64_t keys = packed ? c.longest() : c.rows();
  const bool narrow = rng.Chance(0.5);  // so that there is what nobody sees
  if (kind == 0) {
    for (int64_t n = 0; n < 2 * mask.batch * c.rows(); ++n) {
      const int64_t begin = rng.Integer(-3, keys + 4);
      c.intervals.push_back(static_cast<int32_t>(begin));
      c.intervals.push_back(static_cast<int32_t>(begin + rng.Integer(-2, narrow ? 4 : keys + 4)));
    }
    return;
  }
  mask.heads = rng.Chance(0.5) ? 1 : c.problem.layer.heads;
  int64_t lines = c.rows(), columns = keys;
  if (kind == 2) {
    const int64_t sides[] = {1, 16, 64, 128};
    mask.block = rng.Pick(sides);
    c.all_rows = true;
    lines = columns = (c.rows() + mask.block - 1) / mask.block;
  }
  if (rng.Chance(0.4)) {
    // Regions of queries that see regions of keys: whole steps are hidden then, and of two
    // neighbours one may see the other alone.
    const int64_t regions = rng.Integer(2, 9);
    std::vector<bool> seen;
    for (int64_t n = 0; n < regions * regions; ++n) seen.push_back(rng.Chance(0.4));
    for (int64_t n = 0; n < mask.batch * mask.heads * lines * columns; ++n) {
      const int64_t line = n / columns % lines * regions / lines;
      const int64_t column = n % columns * regions / columns;
      c.bytes.push_back(seen[static_cast<size_t>(line * regions + column)] ? 1 : 0);
    }
    return;
  }
  for (int64_t n = 0; n < mask.batch * mask.heads * lines * columns; ++n)
    c.bytes.push_back(rng.Chance(narrow ? 0.03 : 0.5) ? 3 : 0);
}

// by_heads: ranks, or those of a group, divide the heads.
Case Random(uint64_t seed, bool packed, bool by_heads = false) {
  Rng rng(seed * 2 + packed);
  Case c;
  strobe::Problem& p = c.problem.layer;
  c.problem.ranks = static_cast<int32_t>(rng.Integer(1, 8));
  c.problem.order = static_cast<strobe::RingOrder>(rng.Integer(0, 2));
  p.direction = strobe::Direction::kBackward;
  p.dtype = static_cast<DType>(rng.Integer(TestedGpu() ? 1 : 0, 2));
  if (kEmulated) p.dtype = DType::kBFloat16;
  if (TestedGpu()) p.device = strobe::Device::kCuda;
  if (packed) {
    const int64_t choices[] = {0, 1, 2, c.problem.ranks, 17, 40, 90};
    for (int64_t n = rng.Integer(1, 6); n > 0; --n) c.problem.lengths.push_back(rng.Pick(choices));
    c.problem.documents = static_cast<strobe::RingDocuments>(rng.Integer(0, 2));
  } else {
    const int64_t choices[] = {0, 1, 3, 64, 150, rng.Integer(1, 200)};
    p.batch = rng.Integer(1, 2);
    p.seqlen_q = p.seqlen_k = rng.Pick(choices);
  }
  if (by_heads) {
    do {
      c.problem.ulysses = static_cast<int32_t>(rng.Integer(0, c.problem.ranks));
    } while (c.problem.ulysses > 0 && c.problem.ranks % c.problem.ulysses != 0);
  }
  const int32_t inside = c.problem.ulysses == 0 ? c.problem.ranks : c.problem.ulysses;
  p.heads_kv = rng.Integer(1, 2) * (by_heads ? inside : 1);
  p.heads = p.heads_kv * rng.Integer(1, 2);
  const int64_t dims[] = {8, 32, 64, 80, 128, 256};
  p.head_dim = std::min<int64_t>(rng.Pick(dims), kEmulated ? 64 : 256);
  if (p.head_dim > 80) {  // the oracle's time
    p.seqlen_q = p.seqlen_k = p.seqlen_q / 2;
    for (int64_t& length : c.problem.lengths) length /= 2;
  }
  p.head_dim_v = rng.Chance(0.3) ? 24 : p.head_dim;
  p.causal = rng.Chance(0.6);
  const int64_t windows[][2] = {{-1, -1}, {-1, STROBE_NO_LIMIT}, {5, 5}, {50, 0}, {-1, 7},
                                {40, -1}};
  const auto& window = windows[rng.Integer(0, 5)];
  p.window_left = window[0];
  p.window_right = window[1];
  if (rng.Chance(0.3)) p.softcap = 10;
  // Scores, and with them the roundings of lse, no larger where rows are longer.
  if (rng.Chance(0.3)) p.scale = p.head_dim > 80 ? 0.15F : 0.3F;
  if (rng.Chance(0.3))
    p.alibi = packed || rng.Chance(0.5) ? strobe::Alibi::kPerHead : strobe::Alibi::kPerBatchHead;
  p.has_sinks = rng.Chance(0.4);
  p.has_dsinks = p.has_sinks && rng.Chance(0.8);
  p.has_dlse = rng.Chance(0.4);
  p.deterministic = rng.Chance(0.5);
  if (rng.Chance(0.2)) p.out_dtype = DType::kFloat32;
  if (rng.Chance(0.2)) p.grad_dtype = DType::kFloat32;
  p.threads = 1;
  c.layout = static_cast<int>(rng.Integer(0, 2));
  if (rng.Chance(0.25)) {
    std::vector<int64_t> most = c.problem.lengths;
    if (!packed) most.assign(static_cast<size_t>(p.batch), p.seqlen_q);
    for (const int64_t length : most)
      c.problem.seqused.push_back(rng.Chance(0.3) ? length : rng.Integer(0, length));
  }
  c.Draw(rng);
  const int64_t chunks[] = {1, 7, 32, 1000};
  if (rng.Chance(0.25)) p.attention_chunk = rng.Pick(chunks);
  if (rng.Chance(0.25) && !TestedGpu()) p.dropout_p = rng.Chance(0.5) ? 0.1F : 0.5F;
  if (c.rows() > 0 && rng.Chance(0.3)) {
    DrawMask(c, rng);
    if (inside > 1 && by_heads) c.all_rows = true;
  }
  return c;
}

TEST(Ring, RandomProblemsOverOneToEightRanks) {
  for (uint64_t seed = 1; seed <= kProblems && !HasFailure(); ++seed)
    Check<strobe::Ring>(Random(seed, false));
}

TEST(Ring, RandomPackedSequencesOverOneToEightRanks) {
  for (uint64_t seed = 1; seed <= kProblems && !HasFailure(); ++seed)
    Check<strobe::Ring>(Random(seed, true));
}

// Windows of all sizes against shares, to beyond them: most rows of a long chunk are then final,
// and at its ends are sums.
Case Windowed(uint64_t seed) {
  const bool packed = seed % 3 == 0;
  Case c = Random(seed, packed);
  Rng rng(seed + 1000);
  strobe::Problem& p = c.problem.layer;
  int64_t rows = rng.Integer(40, 500);
  c.problem.ranks = static_cast<int32_t>(rng.Integer(2, 5));
  if (p.head_dim > 80) rows /= 2;
  if (packed) {
    for (int64_t& length : c.problem.lengths) length = 0;
    for (size_t n = 0; n < c.problem.lengths.size(); ++n, rows /= 2)
      c.problem.lengths[rng.Chance(0.5) ? n : 0] += rows / 2;
    // Short ones, which a rank has whole, between long ones too.
    for (size_t n = c.problem.lengths.size(); n > 1 && rng.Chance(0.8); --n)
      std::swap(c.problem.lengths[n - 1],
                c.problem.lengths[static_cast<size_t>(rng.Integer(0, static_cast<int>(n) - 1))]);
  } else {
    p.seqlen_q = p.seqlen_k = rows;
  }
  const int64_t share = std::max<int64_t>(1, rows / c.problem.ranks);
  const auto width = [&] {
    const int64_t most[] = {2, share / 8, share / 4, share, 3 * share};
    return rng.Integer(0, std::max<int64_t>(1, rng.Pick(most)));
  };
  p.window_left = width();
  p.window_right = p.causal ? 0 : width();
  if (rng.Chance(0.8)) p.attention_chunk = 0;
  if (rng.Chance(0.8)) p.alibi = strobe::Alibi::kNone;
  if (!c.problem.seqused.empty()) {
    std::vector<int64_t> most = c.problem.lengths;
    if (!packed) most.assign(static_cast<size_t>(p.batch), p.seqlen_q);
    for (size_t n = 0; n < most.size(); ++n) c.problem.seqused[n] = rng.Integer(0, most[n]);
  }
  c.slopes.clear();
  c.Draw(rng);
  c.DropMask();
  if (rng.Chance(0.3)) DrawMask(c, rng);
  return c;
}

TEST(Ring, WindowsOfAllSizesAgainstShares) {
  const uint64_t kWindows = kEmulated ? 80 : kProblems;
  size_t edges = 0, cut = 0;
  for (uint64_t seed = 1; seed <= kWindows && !HasFailure(); ++seed) {
    const Case c = Windowed(seed);
    Check<strobe::Ring>(c);
    if (c.masked()) continue;
    for (int32_t rank = 0; rank < c.problem.ranks; ++rank) {
      strobe::RingProblem problem = c.problem;
      problem.rank = rank;
      const strobe::RingSchedule plan = strobe::Ring(problem).schedule();
      edges += plan.edges.empty() ? 0 : 1;
      cut += plan.final.empty() || plan.own.empty() ? 0 : 1;
    }
  }
  EXPECT_GE(edges, kWindows / 6);
  EXPECT_GE(cut, kWindows / 6);
}

// Causal, 4 ranks, 64 rows each.
Case Plain(int32_t ranks = 4) {
  Case c;
  strobe::Problem& p = c.problem.layer;
  c.problem.ranks = ranks;
  p = {.direction = strobe::Direction::kBackward, .heads = 2, .heads_kv = 1, .head_dim = 32};
  p.head_dim_v = 32;
  p.dtype = DType::kBFloat16;
  if (TestedGpu()) p.device = strobe::Device::kCuda;
  p.seqlen_q = p.seqlen_k = 64 * ranks;
  p.causal = true;
  p.threads = 1;
  Rng rng(5);
  c.Draw(rng);
  return c;
}

// An attention chunk that a rank has whole lies between those at the rank's ends, of which others
// have a part, and one call has the gradients of all three.
TEST(Ring, WhatIsWholeBetweenPartsKeepsItsGradients) {
  Case c = Plain(3);
  c.problem.order = strobe::RingOrder::kPlain;
  strobe::Problem& p = c.problem.layer;
  p.seqlen_q = p.seqlen_k = 1200;
  p.window_left = 1;
  p.attention_chunk = 250;
  Rng rng(13);
  c.Draw(rng);
  Check<strobe::Ring>(c);
  c.problem.rank = 1;
  const strobe::RingSchedule plan = strobe::Ring(c.problem).schedule();
  std::vector<int64_t> sizes;
  for (const strobe::RingBlock& block : plan.final_last) sizes.push_back(block.q.size());
  EXPECT_EQ(sizes, (std::vector<int64_t>{100, 250, 50}));
}

// Each sequence has rows of which others have a part: of so many all rows are summed up, and of a
// few behind them, which a rank has whole, none.
TEST(Ring, ManySequencesUnderAWindowHaveSumsOfAllRows) {
  if (kEmulated) GTEST_SKIP() << "too many rows";
  Case c;
  c.problem.ranks = 3;
  c.problem.order = strobe::RingOrder::kPlain;
  c.problem.documents = strobe::RingDocuments::kSplit;
  c.problem.lengths.assign(60, 240);
  c.problem.lengths.insert(c.problem.lengths.end(), 6, 1);
  strobe::Problem& p = c.problem.layer;
  p.direction = strobe::Direction::kBackward;
  p.heads = p.heads_kv = 1;
  p.head_dim = p.head_dim_v = 16;
  p.dtype = DType::kBFloat16;
  if (TestedGpu()) p.device = strobe::Device::kCuda;
  p.window_left = 1, p.window_right = 0;
  p.has_sinks = p.has_dsinks = true;
  p.threads = 1;
  Rng rng(11);
  c.Draw(rng);
  Check<strobe::Ring>(c);
  for (c.problem.rank = 0; c.problem.rank < 3; ++c.problem.rank) {
    const strobe::RingSchedule plan = strobe::Ring(c.problem).schedule();
    int64_t rows = 0;
    for (const strobe::RingBlock& block : plan.final) rows += block.q.size();
    EXPECT_EQ(rows, plan.rows - 60 * 80);
    EXPECT_EQ(plan.summed_q(), (std::vector<strobe::RingRows>{{0, 60 * 80}}));
  }
}

// Kernels of GPUs draw dropout's bits for eight keys at a time, from the first on.
TEST(Ring, KeysBeginAtMultiplesOf8WhereRowsAndWindowsAreSuch) {
  size_t cut = 0, edges = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    Rng rng(seed);
    const auto ranks = static_cast<int32_t>(rng.Integer(2, 5));
    const bool zigzag = rng.Chance(0.5);
    std::vector<int64_t> lengths;
    for (int64_t n = rng.Integer(1, 3); n > 0; --n)
      lengths.push_back(int64_t{8} * ranks * (zigzag ? 2 : 1) * rng.Integer(0, 20));
    const strobe::RingLayout layout(lengths, ranks,
                                    zigzag ? strobe::RingOrder::kZigzag : strobe::RingOrder::kPlain,
                                    static_cast<strobe::RingDocuments>(rng.Integer(0, 2)));
    const int64_t chunks[] = {0, 0, 8, 48, 200};
    const strobe::RingMask mask = {.left = 8 * rng.Integer(0, 4),
                                   .right = rng.Chance(0.5) ? 0 : rng.Integer(0, 40),
                                   .by_distance = true,
                                   .attention_chunk = rng.Pick(chunks)};
    // A mask as data, which leaves a part of the queries that others' keys are for.
    strobe::RingSeen seen;
    if (rng.Chance(0.5)) {
      seen = [](strobe::RingRows& q, strobe::RingRows&) {
        const int64_t before = std::min((q.begin / 8 + q.end) % 11, q.size() - 1);
        q.begin += before;
        q.end -= std::min(q.end % 7, q.size() - 1);
        return true;
      };
    }
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const strobe::RingSchedule plan = strobe::ring_schedule(layout, rank, mask, 1, seen);
      const std::vector<strobe::RingChunk> held = layout.chunks(rank);
      const auto check = [&](const std::vector<strobe::RingBlock>& blocks) {
        for (const strobe::RingBlock& block : blocks) {
          const int64_t row = strobe::internal::ring_place(layout, held, block.q.begin).row;
          EXPECT_EQ((row - block.position) % 8, 0) << "seed " << seed << ", rank " << rank;
          EXPECT_GT(block.q.size(), 0);
        }
      };
      for (const auto* blocks : plan.of_own_keys()) check(*blocks);
      for (const strobe::RingStep& step : plan.steps) check(step.blocks);
      cut += plan.final.empty() || plan.own.empty() ? 0 : 1;
      edges += plan.edges.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(cut, 100U);
  EXPECT_GT(edges, 100U);
}

// What making a ring, or what `use` does with one, says.
std::string Refusal(const std::function<void()>& use, strobe::Status* status = nullptr) {
  try {
    use();
  } catch (const strobe::Error& error) {
    if (status) *status = error.status();
    return error.what();
  }
  return "nothing was refused";
}

// So dropout over ranks is the same on a GPU too.
TEST(Ring, DropoutWhereKeysBeginAtMultiplesOf8) {
  for (uint64_t seed = 1; seed <= (kEmulated ? 4 : kProblems / 10) && !HasFailure(); ++seed) {
    Case c = Windowed(seed);
    Rng rng(seed + 2000);
    strobe::Problem& p = c.problem.layer;
    const int64_t whole = int64_t{16} * c.problem.ranks;
    const auto rounded = [&](int64_t rows) { return (rows + whole - 1) / whole * whole; };
    for (int64_t& length : c.problem.lengths) length = rounded(length);
    if (c.problem.lengths.empty()) p.seqlen_q = p.seqlen_k = rounded(p.seqlen_q);
    p.window_left = (p.window_left + 7) / 8 * 8;
    p.attention_chunk = 0;
    p.dropout_p = 0.2F;
    c.problem.seqused.clear();
    c.DropMask();
    c.Draw(rng);
    Check<strobe::Ring>(c);
  }
}

TEST(Ring, DropoutOnAGpuWhereKeysBeginElsewhereIsRefused) {
  if (!TestedGpu()) GTEST_SKIP() << "STROBE_TEST_RING_GPU is not set";
  const auto refused = [](const std::function<void(strobe::RingProblem&)>& change) {
    strobe::RingProblem problem = Plain(2).problem;
    problem.layer.dropout_p = 0.5F;
    problem.layer.head_dim = problem.layer.head_dim_v = 64;
    change(problem);
    return Refusal([&] { (void)strobe::Ring(problem); });
  };
  using P = strobe::RingProblem;
  const auto expected = [](int rank, int key, int whole) {
    return "layer.dropout_p over ranks, where rank " + std::to_string(rank) +
           " has a call with keys from " + std::to_string(key) +
           " on, expected a multiple of 8 on GPUs: sequences of multiples of " +
           std::to_string(whole) +
           " rows and windows of multiples of 8 have it, and packed ones that are whole "
           "(documents) without attention chunks do not need it";
  };
  EXPECT_EQ(refused([](P&) {}), "nothing was refused");
  EXPECT_EQ(refused([](P& p) { p.layer.window_left = 16; }), "nothing was refused");
  // Of its own keys alone, and of what another rank receives alone.
  EXPECT_EQ(refused([](P& p) {
              p.layer.seqlen_q = p.layer.seqlen_k = 0;
              p.lengths = {200, 200};
              p.documents = strobe::RingDocuments::kWhole;
              p.layer.attention_chunk = 100;
            }),
            expected(0, 100, 32));
  EXPECT_EQ(refused([](P& p) {
              p.order = strobe::RingOrder::kPlain;
              p.layer.window_left = 12;
            }),
            expected(1, 52, 16));
}

TEST(Ring, WindowsGiveTheSameBitsAtEveryRun) {
  for (uint64_t seed = 1; seed <= kRepeated && !HasFailure(); ++seed) {
    Case c = Windowed(seed);
    c.problem.layer.deterministic = true;
    SCOPED_TRACE(c.Text());
    const Results a = Split<strobe::Ring>(c), b = Split<strobe::Ring>(c);
    for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv})
      EXPECT_EQ((a.*member).bytes, (b.*member).bytes);
    EXPECT_EQ(a.lse, b.lse);
  }
}

TEST(Ulysses, RandomProblemsOverOneToEightRanks) {
  for (uint64_t seed = 1; seed <= kProblems / 2 && !HasFailure(); ++seed)
    Check<strobe::Ulysses>(Random(seed, seed % 3 == 0, true));
}

TEST(Ring, TheSameBitsAtEveryRun) {
  for (uint64_t seed = 1; seed <= kRepeated && !HasFailure(); ++seed) {
    Case c = Random(seed, seed % 2 == 0);
    c.problem.layer.deterministic = true;
    SCOPED_TRACE(c.Text());
    const Results a = Split<strobe::Ring>(c), b = Split<strobe::Ring>(c);
    for (const auto member : {&Results::out, &Results::dq, &Results::dk, &Results::dv})
      EXPECT_EQ((a.*member).bytes, (b.*member).bytes);
    EXPECT_EQ(a.lse, b.lse);
    if (c.problem.layer.has_dsinks) {
      EXPECT_EQ(a.dsinks, b.dsinks);
    }
  }
}

// Single() says what such problems are about.
TEST(Ring, RowsThatAreNotInUseAndGradientsInFloat32) {
  for (const bool packed : {false, true}) {
    Case c = Plain(packed ? 8 : 5);
    strobe::Problem& p = c.problem.layer;
    p.out_dtype = p.grad_dtype = DType::kFloat32;
    p.has_dlse = packed;
    if (packed) {
      p.seqlen_q = p.seqlen_k = 0;
      c.problem.lengths = {90, 2};
      c.problem.seqused = {21, 1};
    } else {
      p.causal = false;
      p.batch = 2;
      p.seqlen_q = p.seqlen_k = 150;
      p.window_left = p.window_right = 5;
      c.problem.seqused = {110, 112};
    }
    Rng rng(7);
    c.Draw(rng);
    Check<strobe::Ring>(c);
  }
}

TEST(Ring, BytesAreThoseOfTheSchedule) {
  const Case c = Plain();
  RankThreads threads(4);
  int64_t rows = 0;
  for (int32_t rank = 0; rank < 4; ++rank) {
    strobe::RingProblem problem = c.problem;
    problem.rank = rank;
    const strobe::Ring ring(problem);
    for (const strobe::RingStep& step : ring.schedule().steps)
      rows += strobe::internal::ring_count(step.receives);
  }
  const auto errors = threads.Run([&](int32_t rank) {
    Part<strobe::Ring> part(c, Part<strobe::Ring>::ProblemOf(c, rank));
    ThreadCommunicator communicator(threads, rank, TestedGpu());
    Launch(c, part.forward, part.backward, part.q, part.k, part.v, part.dout, part.dlse,
           part.results, {}, {}, {}, communicator);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  // K and V forward, the same backward, and their float32 gradients home.
  EXPECT_EQ(threads.bytes(), static_cast<size_t>(rows * 2 * 32 * (2 + 2 + 4)));
  // Of the drawing in docs/distributed.md: a chunk of 32 rows in six of the twelve messages.
  EXPECT_EQ(rows, 6 * 64 + 6 * 32);
}

// Bytes that all ranks send for a case, forward and backward.
template <typename Method>
size_t BytesSent(const Case& c) {
  RankThreads threads(c.problem.ranks);
  const auto errors = threads.Run([&](int32_t rank) {
    Part<Method> part(c, Part<Method>::ProblemOf(c, rank));
    ThreadCommunicator communicator(threads, rank, TestedGpu());
    Launch(c, part.forward, part.backward, part.q, part.k, part.v, part.dout, part.dlse,
           part.results, {}, {}, {}, communicator);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return threads.bytes();
}

// Of a window's rows float32 results are kept for those near the ends of chunks alone.
TEST(Ring, FloatRoomUnderAWindowIsThatOfAChunksEnds) {
  strobe::RingProblem problem = Plain(2).problem;
  strobe::Problem& p = problem.layer;
  p.seqlen_q = p.seqlen_k = 1 << 16;
  p.window_left = 511;
  for (problem.rank = 0; problem.rank < 2; ++problem.rank) {
    // K and V on their way, twice what comes and what goes; and the lse of all rows, twice.
    const size_t kv = size_t{511} * 2 * 32 * 2, lse = size_t{2} * (1 << 15) * 2 * 4;
    // Forward two halves of 511 rows of two heads. Backward dq, dk and dv of a square at each end;
    // dk and dv of 511 keys that are computed, on their way, and that come.
    const size_t forward = size_t{2} * 511 * 2 * 32 * 4 + 3 * kv + lse;
    const size_t backward = size_t{4} * (511 + 512) * 32 * (2 + 1 + 1) + 3 * 2 * kv + 3 * kv;
    const auto near = [&](const strobe::RingProblem& of, size_t wanted) {
      size_t kernels = 0;  // of calls for a chunk, or for two that are neighbours
      for (const int64_t rows : {1 << 14, 1 << 15}) {
        strobe::Problem alone = of.layer;
        alone.seqlen_q = alone.seqlen_k = rows;
        kernels = std::max(kernels, strobe::Plan(alone).workspace_bytes());
      }
      const size_t room = strobe::Ring(of).workspace_bytes();
      EXPECT_LT(room, wanted + kernels + (size_t{1} << 20)) << of.rank;
    };
    near(problem.forward(), forward);
    near(problem, backward);
    problem.layer.window_left = -1;
    const size_t sums = size_t{4} * (1 << 15) * 32 * (2 + 1 + 1);
    EXPECT_GT(strobe::Ring(problem).workspace_bytes(), sums);
    problem.layer.window_left = 511;
  }
}

// The longest of some documents is cut, and others fill up what is left: of these alone K and V
// travel, and partial results are kept.
TEST(Ring, DocumentsThatArePackedTravelAsFarAsTheyAreCut) {
  Case c = Plain();
  strobe::Problem& p = c.problem.layer;
  p.seqlen_q = p.seqlen_k = 0;
  c.problem.lengths = {100, 30, 260, 50, 0, 20, 90, 40, 10, 25, 35, 60};
  p.has_sinks = p.has_dsinks = p.has_dlse = true;
  Rng rng(9);
  c.Draw(rng);
  size_t bytes[3] = {}, room[3] = {};
  for (const int documents : {0, 1, 2}) {
    c.problem.documents = static_cast<strobe::RingDocuments>(documents);
    Check<strobe::Ring>(c);
    bytes[documents] = BytesSent<strobe::Ring>(c);
    int64_t rows = 0;
    for (int32_t rank = 0; rank < c.problem.ranks; ++rank) {
      strobe::RingProblem problem = c.problem;
      problem.rank = rank;
      const strobe::Ring ring(problem);
      room[documents] = std::max(room[documents], ring.workspace_bytes());
      for (const strobe::RingStep& step : ring.schedule().steps)
        rows += strobe::internal::ring_count(step.receives);
      if (documents == 0) {
        EXPECT_EQ(ring.rows(), 180);
      }
    }
    EXPECT_EQ(bytes[documents], static_cast<size_t>(rows * 2 * 32 * (2 + 2 + 4)));
  }
  EXPECT_EQ(bytes[1], 0U);
  EXPECT_LT(bytes[0], bytes[2]);
  EXPECT_LT(room[0], room[2]);
}

TEST(Ulysses, ARingOfGroupsSendsWhatItsScheduleSays) {
  Case c = Plain();
  c.problem.layer.heads = 4;
  c.problem.layer.heads_kv = 2;
  c.problem.ulysses = 2;
  Rng rng(6);
  c.Draw(rng);
  // K and V of 128 rows of the other group each way, one head of keys each, by two ranks; and K and
  // V again, and their float32 gradients home. A group has the chunks that a rank of two has: in
  // the drawing group 1's lower half of queries sees group 0's first chunk, and group 0's second
  // all that group 1 has.
  const size_t row = 2 * 32, ring = 2 * (64 + 128) * row * (2 + 2 + 4);
  // Half of each row goes to the other rank of the group: q, k, v, out and lse forward, and
  // backward all these again, dout, dq, dk and dv.
  const size_t rows = 256, elements = 32 * (4 + 2 + 2 + 4);
  const size_t all_to_all = rows * (elements * 2 + 4 * 4 + 2 * elements * 2 + 4 * 4) / 2;
  EXPECT_EQ(BytesSent<strobe::Ulysses>(c), ring + all_to_all);
  strobe::RingProblem problem = c.problem.forward();
  problem.rank = 3;
  const std::string text = strobe::Ulysses(problem).text();
  EXPECT_NE(
      text.find("\nby all-to-all 2 of 4 heads, 1 of 2 of keys in groups of 2 ranks: 128 rows, "
                "and a ring of groups\nstep 0, the group's own keys\n"),
      std::string::npos)
      << text;
  EXPECT_NE(text.find("\nstep 1, sends 128 rows to group 0, receives 64 from group 0\n"),
            std::string::npos)
      << text;
}

TEST(Ulysses, HowManyRanksShareOutTheHeadsFollowsFromShapes) {
  // docs/distributed.md: within a node sequences go by all-to-all, but by a ring where ranks divide
  // no heads; between nodes by a ring of groups, or a ring alone where key heads are few.
  const auto chosen = [](int64_t tokens, int32_t ranks, int64_t heads, int64_t heads_kv) {
    strobe::RingProblem problem;
    problem.layer = {.heads = heads, .heads_kv = heads_kv, .head_dim = 128, .causal = true};
    problem.layer.dtype = DType::kBFloat16;
    problem.layer.seqlen_q = problem.layer.seqlen_k = tokens;
    problem.ranks = ranks;
    return strobe::ulysses_ranks(problem);
  };
  EXPECT_EQ(chosen(1 << 17, 1, 16, 16), 1);
  EXPECT_EQ(chosen(1 << 17, 2, 16, 16), 2);
  EXPECT_EQ(chosen(1 << 14, 2, 16, 16), 2);
  EXPECT_EQ(chosen(1 << 17, 3, 16, 16), 1);
  EXPECT_EQ(chosen(1 << 20, 64, 32, 8), 1);
  EXPECT_EQ(chosen(1 << 20, 64, 16, 16), 4);  // groups of 4 hide all, and send less than of 8
}

TEST(Ulysses, TheReasonOfAChoiceIsThatOfPythonsPlan) {
  strobe::RingProblem problem;
  problem.layer = {.heads = 16, .head_dim = 128, .causal = true};
  problem.layer.dtype = DType::kBFloat16;
  const auto reason = [&](int64_t tokens, int32_t ranks) {
    problem.layer.seqlen_q = problem.layer.seqlen_k = tokens;
    problem.ranks = ranks;
    return strobe::ulysses_reason(problem);
  };
  // test_the_plan_in_words
  EXPECT_EQ(reason(1 << 17, 2),
            "ulysses, because a rank loses the time of 5.76 GB in a ring, whose parts take 5 % "
            "longer and are summed, and of 1.61 GB by all-to-all, packed and unpacked, where 2000 "
            "FLOP hide a byte");
  EXPECT_EQ(reason(1 << 20, 64).substr(0, 66),
            "ring of 16 groups, each of which is 4 ranks by all-to-all, because");
  EXPECT_EQ(reason(1 << 17, 3), "ring, because 3 ranks do not divide heads = 16");
  EXPECT_EQ(reason(1 << 17, 1), "ring, because one rank sends nothing");
  const std::vector<uint8_t> own(4 * 8, 1);
  problem.mask.pairs = own;
  EXPECT_EQ(reason(8, 2), "ring, because a rank has its own rows of the mask alone");
}

TEST(Ring, WhatAMaskOfAllRowsHidesIsNeitherSentNorComputed) {
  for (const bool all_rows : {true, false}) {
    Case c = Plain();
    c.problem.layer.causal = false;
    c.problem.mask.block = all_rows ? 64 : 0;
    c.all_rows = all_rows;
    // Each rank's rows see themselves, and the last one's the first one's as well.
    const int64_t side = all_rows ? 4 : 256;
    for (int64_t i = 0; i < side; ++i)
      for (int64_t j = 0; j < side; ++j) {
        const int64_t rank = 4 * i / side, other = 4 * j / side;
        c.bytes.push_back(rank == other || (rank == 3 && other == 0) ? 1 : 0);
      }
    Check<strobe::Ring>(c);
    // K and V of 64 rows forward and backward, and their float32 gradients home.
    const size_t step = 64 * 2 * 32 * (2 + 2 + 4);
    EXPECT_EQ(BytesSent<strobe::Ring>(c), all_rows ? step : 12 * step);
  }
}

// Rows that see a rank's other chunk, and nothing of other ranks: they have two results all the
// same.
TEST(Ring, ARanksChunksThatSeeEachOtherAlone) {
  Case c = Plain(2);
  strobe::Problem& p = c.problem.layer;
  p.alibi = strobe::Alibi::kPerHead;  // by which a rank's chunks are not one block
  c.problem.order = strobe::RingOrder::kZigzag;
  c.problem.mask.block = 32;
  c.all_rows = true;
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 4; ++j) c.bytes.push_back(i == j || (i == 3 && j == 0) ? 1 : 0);
  Rng rng(3);
  c.Draw(rng);
  Check<strobe::Ring>(c);
}

// Rank 1's first row sees a key of rank 0, and rank 0's last rows none of rank 1: what is summed is
// dq alone, of a row that sees six later keys; or, the other way round, dk and dv alone.
TEST(Ring, SquaresHoldAllPairsOfARowWhereAMaskLeavesOneSide) {
  for (const bool of_queries : {true, false}) {
    Case c = Plain(2);
    strobe::Problem& p = c.problem.layer;
    p.causal = false;
    p.window_left = of_queries ? 1 : 6;
    p.window_right = of_queries ? 6 : 1;
    p.seqlen_q = p.seqlen_k = 512;
    c.problem.order = strobe::RingOrder::kPlain;
    c.problem.mask.block = 256;
    c.all_rows = true;
    c.bytes = {1, uint8_t{!of_queries}, uint8_t{of_queries}, 1};
    Rng rng(4);
    c.Draw(rng);
    Check<strobe::Ring>(c);
  }
}

TEST(Ring, PartsOfAMaskHoldWhatIsSeen) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Rng rng(seed);
    Case c = Random(seed, seed % 2 == 0);
    if (c.masked()) continue;  // one of all rows is drawn here
    const int64_t rows = c.rows();
    if (rows == 0) continue;
    DrawMask(c, rng);
    c.all_rows = true;
    Case own;
    const strobe::internal::RingCut cut(c.MaskOf({}, own), c.lengths(), c.batch(),
                                        c.problem.layer.heads, 0, !c.problem.lengths.empty());
    int64_t start = 0;
    for (const int64_t length : c.lengths()) {
      if (length == 0) continue;
      const auto drawn = [&] {
        const int64_t begin = rng.Integer(0, length - 1);
        return strobe::RingRows{begin, rng.Integer(begin + 1, length)};
      };
      strobe::RingRows q = drawn(), k = drawn();
      k.begin = k.begin / 8 * 8;
      strobe::RingRows of_q = {q.end, q.begin}, of_k = {k.end, k.begin};
      for (int64_t i = q.begin; i < q.end; ++i)
        for (int64_t j = k.begin; j < k.end; ++j) {
          bool seen = false;
          for (int64_t b = 0; b < c.batch(); ++b)
            for (int64_t h = 0; h < c.problem.layer.heads; ++h)
              seen = seen || c.Sees(b, h, start + i, j);
          if (!seen) continue;
          of_q = {std::min(of_q.begin, i), std::max(of_q.end, i + 1)};
          of_k = {std::min(of_k.begin, j), std::max(of_k.end, j + 1)};
        }
      q = {start + q.begin, start + q.end};
      k = {start + k.begin, start + k.end};
      ASSERT_EQ(cut.narrow(q, k), of_q.size() > 0) << seed;
      if (of_q.size() > 0) {
        EXPECT_EQ(q, (strobe::RingRows{start + of_q.begin, start + of_q.end})) << seed;
        EXPECT_EQ(k, (strobe::RingRows{start + of_k.begin / 8 * 8, start + of_k.end})) << seed;
      }
      start += length;
    }
  }
}

TEST(Ring, ARankThatFailsEndsTheOthersInTime) {
  const Case c = Plain();
  RankThreads threads(4, 0.5);
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = threads.Run([&](int32_t rank) {
    Part<strobe::Ring> part(c, Part<strobe::Ring>::ProblemOf(c, rank));
    ThreadCommunicator communicator(threads, rank, TestedGpu());
    if (rank == 2) throw std::runtime_error("gone");
    Launch(c, part.forward, part.backward, part.q, part.k, part.v, part.dout, part.dlse,
           part.results, {}, {}, {}, communicator);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(seconds.count(), 20);
  for (int32_t rank = 0; rank < 4; ++rank) {
    const std::string& error = errors[static_cast<size_t>(rank)];
    EXPECT_EQ(error.find(rank == 2 ? "gone" : "no message of rank "), 0U) << rank << ": " << error;
  }
}

TEST(Ring, TextTellsTheSteps) {
  strobe::RingProblem problem = Plain().problem.forward();
  problem.rank = 1;
  const strobe::Ring ring(problem);
  const std::string text = ring.text();
  EXPECT_EQ(text.find("rank 1 of 4: 64 of 256 rows in zigzag order, workspace "), 0U) << text;
  EXPECT_NE(text.find("\nstep 1, sends 32 rows to rank 2, receives 32 from rank 0\n"
                      "  rows 0-63 x 32 keys by c"),
            std::string::npos)
      << text;
}

TEST(Ulysses, HeadsThatRanksDoNotDivideAreRefused) {
  strobe::RingProblem problem = Plain(3).problem;
  problem.layer.heads = problem.layer.heads_kv = 4;
  EXPECT_EQ(Refusal([&] { (void)strobe::Ulysses(problem); }),
            "layer.heads = 4 by all-to-all, expected a multiple of 3, the number of ranks: a ring "
            "needs none");
  problem.layer.heads = 6;
  problem.layer.heads_kv = 2;
  EXPECT_EQ(Refusal([&] { (void)strobe::Ulysses(problem); }),
            "layer.heads_kv = 2 by all-to-all, expected a multiple of 3, the number of ranks: a "
            "ring needs none");
}

TEST(Ulysses, BadGroupsAreRefused) {
  strobe::RingProblem problem = Plain(4).problem;
  problem.ulysses = 3;
  EXPECT_EQ(Refusal([&] { (void)strobe::Ulysses(problem); }),
            "ulysses = 3, expected a divisor of 4, the number of ranks");
  problem.ulysses = 2;
  EXPECT_EQ(Refusal([&] { (void)strobe::Ulysses(problem); }),
            "layer.heads_kv = 1 by all-to-all, expected a multiple of 2, the number of ranks that "
            "share them out: a ring needs none");
  EXPECT_EQ(Refusal([&] { (void)strobe::Ring(problem); }),
            "ulysses = 2 of a Ring, expected 0 or 1: strobe::Ulysses (ulysses.hpp) has groups");
  problem.layer.heads_kv = 2;
  const std::vector<uint8_t> pairs(64 * 256, 1);
  problem.mask.pairs = pairs;
  EXPECT_EQ(Refusal([&] { (void)strobe::Ulysses(problem); }),
            "mask.all_rows = 0 by all-to-all, expected 1: a rank computes rows of others, and has "
            "the mask of its own");
}

TEST(Ring, BadProblemsAreRefusedByName) {
  const auto refused = [](const std::function<void(strobe::RingProblem&)>& change) {
    strobe::RingProblem problem = Plain().problem;
    change(problem);
    return Refusal([&] { (void)strobe::Ring(problem); });
  };
  using P = strobe::RingProblem;
  EXPECT_EQ(refused([](P& p) { p.ranks = 0; }), "ranks = 0, expected at least 1");
  EXPECT_EQ(refused([](P& p) { p.rank = 4; }), "rank = 4, expected 0 to 3: a rank of 4");
  EXPECT_EQ(refused([](P& p) { p.layer.seqlen_k = 8; }),
            "layer.seqlen_k = 8, expected layer.seqlen_q = 256: the rows that all ranks have "
            "together");
  EXPECT_EQ(refused([](P& p) { p.layer.seqlen_k = p.layer.seqlen_q = -1; }),
            "layer.seqlen_q = -1, expected at least 0");
  EXPECT_EQ(refused([](P& p) { p.documents = strobe::RingDocuments::kWhole; }),
            "documents = 1 without lengths, expected 0 (kAuto): there is one sequence, which is "
            "split");
  EXPECT_EQ(refused([](P& p) {
              p.lengths = {3, 4};
              p.layer.seqlen_q = p.layer.seqlen_k = 0;
              p.documents = static_cast<strobe::RingDocuments>(3);
            }),
            "documents = 3, expected 0, 1 or 2: kAuto, kWhole or kSplit");
  EXPECT_EQ(refused([](P& p) {
              p.lengths = {3, 4};
            }),
            "layer.batch = 1, layer.seqlen_q = 256, layer.seqlen_k = 256 with lengths, expected 1, "
            "0 and 0: lengths say it");
  const auto packed = [&](std::vector<int64_t> lengths) {
    return refused([&](P& p) {
      p.layer.seqlen_q = p.layer.seqlen_k = 0;
      p.lengths = std::move(lengths);
      p.layer.alibi = strobe::Alibi::kPerBatchHead;
    });
  };
  EXPECT_EQ(packed({3, -4}), "lengths has -4, expected 0 to 2^30");
  EXPECT_EQ(packed({1 << 30, 1}), "1073741825 rows over all ranks, expected at most 2^30");
  EXPECT_EQ(packed({3}),
            "layer.alibi = 2 (a batch's) with lengths, expected 0 or 1: slopes of all sequences");
  EXPECT_EQ(refused([](P& p) {
              p.layer.v = {0, 0, 32, 1};
            }),
            "layer.v.seqlen = 0 elements, expected at least 32: rows that are sent lie apart from "
            "each other");
  EXPECT_EQ(refused([](P& p) {
              p.seqused = {1, 2};
            }),
            "seqused has 2 numbers, expected 1: one of each sequence");
  EXPECT_EQ(refused([](P& p) { p.seqused = {257}; }),
            "seqused has 257, expected 0 to 256: the sequence's");
  const std::vector<int32_t> intervals(64 * 4);
  const std::vector<uint8_t> bytes(16, 1);
  EXPECT_EQ(refused([&](P& p) {
              p.mask.intervals = intervals;
              p.mask.pairs = bytes;
            }),
            "mask has several of intervals, pairs and blocks, expected one");
  EXPECT_EQ(refused([&](P& p) { p.mask.pairs = bytes; }),
            "mask.pairs has 16 elements, expected 16384");
  EXPECT_EQ(refused([&](P& p) { p.mask.intervals = intervals, p.mask.heads = 2; }),
            "mask.heads = 2, expected 1");
  EXPECT_EQ(refused([&](P& p) { p.mask.intervals = intervals, p.mask.batch = 2; }),
            "mask.batch = 2, expected 1");
  EXPECT_EQ(refused([&](P& p) { p.mask.intervals = intervals, p.mask.block = 64; }),
            "mask.block = 64, expected 0 without blocks");
  EXPECT_EQ(refused([&](P& p) { p.mask.blocks = bytes; }),
            "mask.block = 0, expected at least 1: rows of a block");
  EXPECT_EQ(refused([&](P& p) { p.mask.blocks = bytes, p.mask.block = 64; }),
            "mask.all_rows = 0 with mask.blocks, expected 1: blocks are those of all rows");
  EXPECT_EQ(
      refused([&](P& p) {
        p.mask.blocks = bytes, p.mask.block = 64, p.mask.all_rows = true;
        p.layer.seqlen_q = p.layer.seqlen_k = 0;
        p.lengths = {256};
      }),
      "mask.blocks with lengths is not supported over ranks: blocks are those of one sequence");
  EXPECT_EQ(refused([](P& p) { p.layer.head_dim = 300; }), "head_dim = 300, expected 1 to 256");
  EXPECT_EQ(refused([](P& p) { p.layer.attention_chunk = -8; }).find("attention_chunk = -8"), 0U);
  EXPECT_EQ(refused([](P& p) { p.layer.window_left = -4; }).find("window_left = -4, expected"), 0U);
  const std::string reason =
      " over ranks, expected its default: a call there has a part of the keys, and this is meant "
      "for all of them together";
  EXPECT_EQ(refused([](P& p) { p.layer.dropout_p = 0.1F, p.layer.dropout_heads = 8; }),
            "layer.dropout_heads" + reason);
  const std::string elsewhere =
      " over ranks, expected its default: seqused and mask of the RingProblem say it";
  EXPECT_EQ(refused([](P& p) { p.layer.has_seqused_q = true; }), "layer.has_seqused_q" + elsewhere);
  EXPECT_EQ(refused([](P& p) { p.layer.mask.kind = STROBE_MASK_PACKED; }),
            "layer.mask" + elsewhere);
  EXPECT_EQ(refused([](P& p) { p.layer.has_prefix = true; }), "layer.has_prefix" + reason);
  EXPECT_EQ(refused([](P& p) { p.layer.has_bias = true; }), "layer.has_bias" + reason);
  EXPECT_EQ(refused([](P& p) { p.layer.window_signed = true; }), "layer.window_signed" + reason);
  EXPECT_EQ(refused([](P& p) { p.layer.varlen = true; }), "layer.varlen" + reason);
}

TEST(Ring, BadArgumentsAreRefusedBeforeAnythingIsSent) {
  const Case c = Plain(2);
  RankThreads threads(2);
  ThreadCommunicator communicator(threads, 0);
  Part<strobe::Ring> part(c, Part<strobe::Ring>::ProblemOf(c, 0));
  std::vector<std::byte> room;
  const std::span<std::byte> workspace = Aligned(room, part.forward.workspace_bytes());
  const auto refused = [&](const std::function<void(strobe::ForwardArgs&)>& change) {
    strobe::ForwardArgs args = {.q = part.q.data(), .k = part.k.data(), .v = part.v.data()};
    args.out = part.results.out.data();
    args.workspace = workspace;
    change(args);
    return Refusal([&] { part.forward.forward(args, communicator); });
  };
  using A = strobe::ForwardArgs;
  const float number = 0;
  const int32_t integer = 0;
  EXPECT_EQ(refused([](A& a) { a.q = nullptr; }), "q = NULL, expected a pointer");
  EXPECT_EQ(refused([](A& a) { a.out = nullptr; }), "out = NULL, expected a pointer");
  const std::string reason = " of a ring, expected null: its problem does not have it";
  EXPECT_EQ(refused([&](A& a) { a.sinks = &number; }), "sinks" + reason);
  EXPECT_EQ(refused([&](A& a) { a.alibi_slopes = &number; }), "alibi_slopes" + reason);
  EXPECT_EQ(refused([&](A& a) { a.cu_seqlens_q = &integer; }), "cu_seqlens_q" + reason);
  EXPECT_EQ(refused([&](A& a) { a.k_new = &number; }), "k_new" + reason);
  EXPECT_EQ(refused([](A& a) {
              a.workspace = a.workspace.subspan(64);
            }).find("workspace has " + std::to_string(workspace.size() - 64) + " bytes at "),
            0U);
  EXPECT_EQ(Refusal([&] { part.backward.forward({}, communicator); }),
            "layer.direction = 1, expected 0: a ring of the backward pass is made from "
            "problem.backward()");
  ThreadCommunicator other(threads, 1);
  EXPECT_EQ(Refusal([&] { part.forward.forward({}, other); }),
            "the communicator's rank 1 of 2, expected the problem's 0 of 2");
  EXPECT_EQ(threads.bytes(), 0U);
}

// The same bits as on the CPU, where merge_test.cpp looks at them.
TEST(Add, OnTheGpu) {
  if (!TestedGpu()) GTEST_SKIP() << "STROBE_TEST_RING_GPU is not set";
  Rng rng(9);
  for (int n = 0; n < 60; ++n) {
    const auto dtype = static_cast<DType>(n % 3);
    const int64_t batch = rng.Integer(1, 3), rows = rng.Integer(1, 300), heads = rng.Integer(1, 4);
    const int64_t dim = rng.Integer(1, rng.Chance(0.3) ? 512 : 130);
    Array x = Array::Make(DType::kFloat32, batch, rows, heads, dim, n % 2);
    Array out = Array::Make(dtype, batch, rows, heads, dim, static_cast<int>(rng.Integer(0, 2)));
    x.Fill(rng);
    out.Fill(rng);
    Array wanted = out;
    strobe::AddArgs a = {.out_dtype = dtype, .accumulate = rng.Chance(0.5), .batch = batch};
    a.seqlen = rows;
    a.heads = heads;
    a.head_dim = dim;
    a.x_strides = x.strides;
    a.out_strides = out.strides;
    a.x = static_cast<const float*>(x.data());
    a.out = wanted.data();
    strobe::add(a);
    Copies on;
    a.device = strobe::Device::kCuda;
    a.x = reinterpret_cast<const float*>(on.In(x.bytes));
    a.out = on.Out(out.bytes);
    a.stream = on.stream();
    strobe::add(a);
    on.Fetch();
    ASSERT_EQ(out.bytes, wanted.bytes) << n;
  }
}

TEST(Ring, WhereThereIsNoNcclOrNoGpuItSaysSo) {
  strobe::Status status = strobe::Status::kOk;
  EXPECT_EQ(Refusal([] { (void)strobe::Nccl("libnot-there.so.7"); }, &status)
                .find("no NCCL, which carries messages between GPUs: libnot-there.so.7: "),
            0U);
  EXPECT_EQ(status, strobe::Status::kDeviceError);
  // A library that is there, and is none.
  EXPECT_NE(Refusal([] {
              (void)strobe::Nccl("libm.so.6");
            }).find("libm.so.6: it has no ncclGetErrorString"),
            std::string::npos);
  if (strobe::Gpu::count() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_NE(strobe::Gpu::unavailable(), "");
  EXPECT_EQ(Refusal([] { (void)strobe::Gpu(0); }, &status).find("no GPU: NVIDIA's driver"), 0U);
  EXPECT_EQ(status, strobe::Status::kDeviceError);
}

}  // namespace
}  // namespace strobe_test
